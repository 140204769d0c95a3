"""Compute the reference log-probabilities of preference pairs once, before training, and keep them.

The reference model of `preferences.dpo` is the start model, frozen. Its log-probabilities do not change during a training, so
no second model is held, and no forward of it is computed in any step. Under LoRA the reference is the base without its adapter.

They lie in a file, with a fingerprint of all that they follow from: the model's weights and configuration, the precision, and
the tensors of all samples. A resumed run reads them; where the fingerprint is another, they are computed again.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError, safe_open
from torch import nn

from samestep.errors import UsageError
from samestep.training import evaluation
from samestep.training.digest import digest_tensor

NOT_INPUTS = ("counts", "reference")
"""Tensors of a micro-batch that a reference model does not see."""


@torch.no_grad()
def reference_logps(
    accelerator: Accelerator,
    model: nn.Module,
    source,
    seed: int,
    batch_size: int,
    path: Path,
    sequence_logps: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute the reference log-probabilities of each pair of a dataset, or read them if they are known.

    Called by all processes, which share the work, before a checkpoint is loaded: with the weights that training starts from.
    The numbers are the same to the bit for any number of processes, as in `evaluation.evaluate`.

    Args:
        accelerator: its processes share the work; the precision is its own.
        model: the start model on its device, not sharded; adapters of peft are switched off.
        source: a `SampleSource` of pairs, whose samples are the same in each epoch; drawn as in epoch 0.
        seed, batch_size: see `evaluation.evaluate`; no result depends on them beyond rounding.
        path: the file, on process 0's machine.
        sequence_logps: called with a micro-batch's tensors, returns the summed log-probability of the trained tokens of each
            sequence, floating [sequences]; None: the model's method of that name.

    Returns:
        [samples, 2] on the host, in the dataset's order, in float32 or wider: of the chosen and of the rejected sequence.

    Raises:
        UsageError: a log-probability is not finite.
    """
    fingerprint = _fingerprint(accelerator, model, source)
    known = [_read(path, fingerprint) if accelerator.is_main_process else None]
    if (values := broadcast_object_list(known)[0]) is not None:
        return torch.from_numpy(values)
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "disable_adapter"):  # peft's PeftModel
                stack.enter_context(module.disable_adapter())
        stack.enter_context(accelerator.autocast())
        values = evaluation.evaluate_pairs(
            accelerator, model, source, seed, batch_size, sequence_logps or model.sequence_logps
        )
    if len(bad := np.flatnonzero(~np.isfinite(values).all(1))):
        raise UsageError(
            f"the reference model gives sample {bad[0]} a log-probability that is not finite ({len(bad)} samples in all): "
            "look at its weights, or train with mixed_precision bf16 or no"
        )
    if accelerator.is_main_process:
        _write(path, fingerprint, values)
    return torch.from_numpy(values)


def _fingerprint(accelerator: Accelerator, model: nn.Module, source) -> str:
    """Make 16 hexadecimal digits of a model's weights and configuration, the precision, and the samples; the same on every
    process. Each process digests its share of the samples."""
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    ids = range(rank, len(source), num_processes)
    samples = dict(gather_object([(place, _digest_sample(source.collate([source.draw(0, place)]))) for place in ids]))
    configs = {str(module.config) for module in model.modules() if hasattr(module, "config")}
    state = sorted(model.state_dict().items()) if accelerator.is_main_process else []  # whose answer the others take
    weights = [f"{name} {digest_tensor(tensor)}" for name, tensor in state]
    parts = [accelerator.mixed_precision, *sorted(configs), *weights, *(samples[place] for place in range(len(source)))]
    return broadcast_object_list([xxhash.xxh3_64_hexdigest("\n".join(parts).encode())])[0]


def _digest_sample(micro_batch) -> str:
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
    """Write log-probabilities, whole or not at all. A full disk is no reason to end: they are computed again next time."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        safetensors.torch.save_file(
            {"reference": torch.from_numpy(values)}, str(partial), metadata={"fingerprint": fingerprint}
        )
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        print(f"WARNING: {path} cannot be written ({error}): the reference is computed again when the run is resumed")
