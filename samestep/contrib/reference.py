"""Compute the reference log-probabilities of preference pairs once, before training, and keep them.

The reference model of dpo (`contrib.preferences`) is the start model, frozen. Its log-probabilities do not change during a
training, so no second model is held while training, and no forward of one is computed in any step. Under LoRA the reference is
the base without its adapter, or with the one that the training goes on with.

They lie in a file, with a fingerprint of all that they follow from: the model's weights and configuration, the precision, and
the tensors of all samples. A resumed run reads them; where the fingerprint is another, they are computed again.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from samestep.data.steps import MicroBatch
from samestep.errors import UsageError
from samestep.models import adapters
from samestep.models.summed_losses import SummedLosses
from samestep.step.log_probabilities import split_pairs
from samestep.training import checkpoint, evaluation, launch, sharding
from samestep.training.digest import digest_tensor
from samestep.training.run import Run

NOT_INPUTS = ("counts", "reference")
"""Tensors of a micro-batch that a reference model does not see."""


def add_reference(run: Run, model_class: type[SummedLosses], *sources: Any) -> None:
    """Give sources of pairs the log-probabilities of their sequences under the model with which the training begins.

    Called by all processes, between `run.load_data` and `run.prepare`. Each process holds the whole model meanwhile, or its
    rows of it if the launch file shards weights. Numbers of the n-th source are kept in .reference-n.safetensors of the output
    folder.

    Args:
        run: the training.
        model_class: class of its model; see `reference_logps`.
        sources: get the numbers as `reference`, float32 [samples, 2]. None: no source.

    Raises:
        UsageError: a log-probability is not finite.
    """
    recipe, settings, accelerator = run.recipe, run.settings, run.accelerator
    torch.manual_seed(recipe.seed)  # as in `run.prepare`: the same weights
    model = model_class.from_recipe(recipe, run.data[0]).to(getattr(torch, settings.dtype))
    if not launch.is_sharded(accelerator):
        model.to(accelerator.device)
    candidates = model.kernel_candidates(accelerator.device, accelerator.mixed_precision, settings)
    next(iter(candidates.values()))()  # the safe kernels
    for number, source in enumerate(sources):
        if source is not None:
            path = run.output_dir / f".reference-{number}.safetensors"
            batch_size = settings.per_device_eval_batch_size
            goes_on = adapters.find_start(recipe)[1] is not None
            values = reference_logps(accelerator, model, source, recipe.seed, batch_size, path, goes_on)
            source.reference = values.astype(np.float32)


def reference_logps(
    accelerator: Accelerator,
    model: nn.Module,
    source: Any,
    seed: int,
    batch_size: int,
    path: Path,
    has_adapter: bool = False,
) -> np.ndarray:
    """Compute the reference log-probabilities of each pair of a dataset, or read them if they are known.

    Called by all processes, which share the work. The numbers are the same to the bit for any number of processes, as in
    `evaluation.evaluate`.

    Args:
        accelerator: its processes share the work; the precision is its own.
        model: with the weights of the start, whole, on its device; if the launch file shards weights, it is sharded here, after
            it was digested, and may be on the host. Its `sequence_log_probabilities`, called with a
            micro-batch's tensors, in evaluation mode, returns the summed log-probability of each
            sequence's trained tokens, [sequences].
        source: a `SampleSource` of pairs, whose samples are the same in each epoch.
        seed, batch_size: see `evaluation.evaluate`; no result depends on them beyond rounding.
        path: the file, on process 0's machine.
        has_adapter: whether its adapters belong to the reference; else they do nothing yet, and are left out.

    Returns:
        float64 [samples, 2], in the dataset's order: of the chosen and of the rejected sequence.

    Raises:
        UsageError: a log-probability is not finite.
    """
    fingerprint = _fingerprint(accelerator, model, source)
    known = [_read(path, fingerprint) if accelerator.is_main_process else None]
    if (values := broadcast_object_list(known)[0]) is not None:
        return values
    if launch.is_sharded(accelerator) and not isinstance(model, FSDPModule):
        _shard_frozen(accelerator, model, "sequence_log_probabilities")
    num_terms = len(source.collate([])["counts"])
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "disable_adapter") and not has_adapter:  # peft's PeftModel
                stack.enter_context(module.disable_adapter())
        stack.enter_context(accelerator.autocast())
        pairs = _Pairs(model, num_terms)
        _, values = evaluation.evaluate_logits(accelerator, pairs, source, seed, batch_size)
    if len(places := np.flatnonzero(~np.isfinite(values).all(1))):
        raise UsageError(
            f"the reference model gives sample {places[0]} a log-probability that is not finite, {len(places)} samples in all. "
            "Look at its weights, or set mixed_precision to bf16 or no"
        )
    if accelerator.is_main_process:
        _write(path, fingerprint, values)
    return values


def _shard_frozen(accelerator: Accelerator, model: nn.Module, method: str) -> None:
    """Shard a whole model that is not trained, in place, as `sharding.prepare` shards one that is.

    Args:
        accelerator: its plugin's policy decides in which type weights are gathered.
        model: sharded by the classes in its `_no_split_modules`.
        method: name of the method that is called in place of its forward.
    """
    policy, mesh = accelerator.state.fsdp_plugin.mixed_precision_policy, sharding.find_mesh(accelerator)
    model.requires_grad_(False)
    if policy is sharding.HALF_PRECISION:
        if norms := sharding.find_norms(model):
            fully_shard(norms, mesh=mesh, mp_policy=sharding.WHOLE_PRECISION, reshard_after_forward=False)
        sharding.widen_embeddings(model)
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, method)


class _Pairs(nn.Module):
    """Returns log-probabilities as `evaluation.evaluate_logits` takes logits, [pairs, 2]; the sums of losses are 0."""

    def __init__(self, model: nn.Module, num_terms: int):
        super().__init__()
        self.model, self.num_terms = model, num_terms

    def forward(self, **micro_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logps = self.model.sequence_log_probabilities(**micro_batch)
        return logps.new_zeros(self.num_terms), torch.stack(split_pairs(logps), 1)


def _fingerprint(accelerator: Accelerator, model: nn.Module, source: Any) -> str:
    """Make 16 hexadecimal digits of a model's weights and configuration, the precision, and the samples; the same on every
    process. Each process digests its share of the samples."""
    ids = range(accelerator.process_index, len(source), accelerator.num_processes)
    samples = dict(gather_object([(place, _digest_sample(source.collate([source.draw(0, place)]))) for place in ids]))
    configs = {str(module.config) for module in model.modules() if hasattr(module, "config")}
    is_sharded = isinstance(model, FSDPModule)
    state = get_model_state_dict(model, options=checkpoint.WHOLE) if is_sharded else model.state_dict()
    state = sorted(state.items()) if accelerator.is_main_process else []  # whose answer the others take
    weights = [f"{name} {digest_tensor(tensor)}" for name, tensor in state]
    parts = [accelerator.mixed_precision, *sorted(configs), *weights, *(samples[place] for place in range(len(source)))]
    return broadcast_object_list([xxhash.xxh3_64_hexdigest("\n".join(parts).encode())])[0]


def _digest_sample(micro_batch: MicroBatch) -> str:
    return " ".join(
        f"{name} {digest_tensor(tensor)}"
        for name, tensor in sorted(micro_batch.items())
        if tensor is not None and name not in NOT_INPUTS
    )


def _read(path: Path, fingerprint: str) -> np.ndarray | None:
    """Read a file's log-probabilities; None: it does not exist, cannot be read, or has another fingerprint."""
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="numpy") as file:
        if (file.metadata() or {}).get("fingerprint") == fingerprint:
            return file.get_tensor("reference")
    return None


def _write(path: Path, fingerprint: str, values: np.ndarray) -> None:
    """Write log-probabilities, whole or not at all. A full disk does not end the run: they are computed again next time."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        safetensors.numpy.save_file({"reference": values}, str(partial), metadata={"fingerprint": fingerprint})
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        message = f"WARNING: {path} cannot be written ({error}): a resumed run will compute the reference again"
        print(message, file=sys.stderr)
