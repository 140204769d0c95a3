"""Gradients of a step, and peak memory of a process, with whole and with sharded weights (FSDP2), on N processes over gloo."""

import collections
import contextlib
import json
import os
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from common import fresh_accelerator, launch_environment
from small_models import peak, small
from torch.distributed.tensor import DTensor

from samestep.cut.layout import solve_layout
from samestep.data.ragged import make_pretraining_micro_batch
from samestep.errors import exit_code
from samestep.models import bert_pretraining, gpt2_pretraining
from samestep.step import accumulate, losses
from samestep.training import launch

ROOT = Path(__file__).parents[2]
NUM_SAMPLES, LENGTH = 12, int(os.environ.get("SHARDED_LENGTH", "64"))
SHARDED = {
    name: value
    for name, value in launch_environment(ROOT / "accelerate_configs" / "fsdp2_2xcpu.yaml").items()
    if "FSDP" in name
}


def make_recipe(kind: str, num_layers: int, vocab_size: int):
    length = {"gpt2": "block_size", "bert": "max_seq_length"}[kind]
    return small(kind, num_layers, vocab_size=vocab_size, **{length: LENGTH})


def build(kind: str, num_layers: int, vocab_size: int):
    """Build a small model, with random normalisations, too, and samples in which some words are frequent."""
    recipe = make_recipe(kind, num_layers, vocab_size)
    torch.manual_seed(0)
    model = {"gpt2": gpt2_pretraining, "bert": bert_pretraining}[kind].PretrainingSums.from_recipe(recipe, None).train()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.05 * torch.randn(parameter.shape)
    rng = np.random.default_rng(0)
    ids = (rng.random((NUM_SAMPLES, LENGTH)) ** 3 * vocab_size).astype(np.int64)
    return model, ids


def collate(kind: str, ids: np.ndarray) -> dict:
    if kind == "gpt2":
        labels = torch.from_numpy(np.roll(ids, -1, 1)).flatten()
        return {"input_ids": torch.from_numpy(ids), "position_ids": None, "labels": labels, "label_index": None}
    places = [np.arange(1, 20)] * len(ids)
    labels = [row[1:20] for row in ids]
    return make_pretraining_micro_batch(
        list(ids), [LENGTH // 2] * len(ids), places, labels, [int(row[0]) % 2 for row in ids]
    )


@contextlib.contextmanager
def record_sent():
    """Note how many numbers FSDP2 gathers and reduces, {(collective, type): numbers}, and how often, {collective: times}."""
    counts, times, saved = collections.Counter(), collections.Counter(), {}

    def note(name, call):
        def noting(*args, **kwargs):
            tensor = kwargs["input"] if "input" in kwargs else args[name != "all_reduce"]
            counts[name, str(tensor.dtype)] += tensor.numel()
            times[name] += 1
            return call(*args, **kwargs)

        return noting

    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        saved[name] = getattr(torch.distributed, name)
        setattr(torch.distributed, name, note(name, saved[name]))
    yield counts, times
    for name, call in saved.items():
        setattr(torch.distributed, name, call)


def measure(
    folder: Path,
    kind: str,
    precision: str,
    gather: str,
    k: int,
    shape: dict,
    recomputed: bool = False,
    num_shards: int | None = None,
) -> dict:
    """Compute the gradient of a step; then, with gradients there, the peak of one more micro-batch.

    Args:
        num_shards: processes of a group that divides the weights (HSDP); None: all processes divide them.
    """
    for name in [name for name in os.environ if "FSDP" in name or "PARALLELISM" in name]:
        del os.environ[name]
    os.environ.update(SHARDED if gather != "whole" else {})
    if num_shards is not None:
        os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(num_shards)
    fresh_accelerator()
    accelerator = launch.create_accelerator(mixed_precision=precision, fsdp_gather=gather)
    model, ids = build(kind, **shape)
    if recomputed:
        model.recompute_activations()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = launch.prepare(accelerator, model, optimizer)
    mine = np.array_split(ids, accelerator.num_processes)[accelerator.process_index]
    micro_batches = [collate(kind, part) for part in np.array_split(mine, k)]
    counts = torch.tensor([NUM_SAMPLES * LENGTH] if kind == "gpt2" else [NUM_SAMPLES * 19, NUM_SAMPLES])
    weights = torch.ones(len(counts))

    def run(micro_batch):
        sums, _ = model(**micro_batch)
        assert sums.dtype == torch.float32
        loss = losses.weighted_loss(sums, counts, weights) * accumulate.loss_scale(accelerator)
        accelerator.backward(loss)

    with record_sent() as (numbers, times):
        for micro_batch in accumulate.iterate_micro_batches(accelerator, micro_batches):
            with accelerator.accumulate(model):
                run(micro_batch)
    parameters = dict(model.named_parameters())
    assert {p.grad.dtype for p in parameters.values()} == {torch.float32}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in parameters.values()}
    gradients = {name.removeprefix("module."): whole(p.grad) for name, p in parameters.items()}
    norm = accumulate.clip(accelerator, list(parameters.values()), None)
    norm = whole(norm).item()
    largest = None
    if gather != "whole" and num_shards is None:
        largest = min(peak(lambda: run(micro_batches[0]), folder) for _ in range(2))
    return {"gradient": gradients, "norm": norm, "peak": largest, "sent": dict(numbers), "times": dict(times)}


def plan_more(
    num_processes: int, *, kind: str, precision: str, gather: str, k: int, shape: dict, recomputed: bool = False
) -> int:
    """Plan what `measure` calls peak: the bytes of a micro-batch, over parameters, gradients and moments."""
    from stepplan.memory import model_from_recipe, planned_memory  # here: a room that may be missing

    layout = solve_layout(num_processes=num_processes, global_batch_size=NUM_SAMPLES, gradient_accumulation_steps=k)
    planned = planned_memory(
        model_from_recipe(make_recipe(kind, **shape)),
        layout,
        mixed_precision=precision,
        gradient_checkpointing=recomputed,
        sharded=True,
        fsdp_gather=gather,
    )
    assert (planned.autocast_cache > 0) == (precision == "bf16" and gather == "fp32")
    return planned.autocast_cache + planned.gathered + planned.activations + planned.head


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def main(folder: str, cases: str) -> None:
    """Measure each of the cases, {name: arguments} in JSON, and leave the results in RANK.pt."""
    rank = os.environ.get("RANK", "0")
    PartialState.destroy_process_group = lambda *_: None
    own = Path(folder) / f"peak-{rank}"
    own.mkdir(exist_ok=True)

    def run():
        results = {name: measure(own, **case) for name, case in json.loads(cases).items()}
        torch.save(results, Path(folder) / f"{rank}.pt")

    os._exit(exit_code(run) or 0)
