"""Part 6: memory runs out in the middle of a run; the step comes again in smaller micro-batches, with the same gradient."""

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

import harness

from proof import tasks
from proof.tasks import FULL_FLOAT32, Task

TITLE = "Memory that runs out"
ABOUT = """\
A GPT-2 takes eight steps; before the fifth another program takes the device's memory (on a CPU: micro-batches of more
than four samples fail), and keeps it. The step comes again in smaller micro-batches. Largest relative difference of a
loss and relative distance of the parameters at the end, beside a run whose memory does not run out. Lost: seconds of
that step beyond those of the others.
"""
NUM_STEPS, FAILING = 8, 4
FLAGS = f"--global_batch_size 16 --per_device_train_batch_size 16 --max_train_steps {NUM_STEPS}"
LARGER = " --n_embd 768 --n_layer 6 --n_head 12 --block_size 512 --n_positions 512 --vocab_size 4096"


def list_tasks(is_tiny: bool, has_gpu: bool) -> list[Task]:
    return [Task("memory", ("GPT-2, fp32",), FULL_FLOAT32, is_alone=True)]


def compute(item: str, is_tiny: bool) -> dict:
    flags = FLAGS + (LARGER if tasks.has_gpu() and not is_tiny else "")
    curves, models = {}, {}
    for name in ("undisturbed", "disturbed"):
        with tasks.output_folder(name) as folder, contextlib.ExitStack() as stack:
            if name == "disturbed":
                stack.enter_context(less_memory())
            tasks.train("pretrain_gpt2", flags, folder, "no")
            curves[name], models[name] = tasks.read_curve(folder), tasks.read_tensors(folder)
            events = tasks.read_events(folder)
    ours, theirs = ([row["loss"] for row in curves[name]] for name in ("disturbed", "undisturbed"))
    seconds = [row["seconds"] for row in curves["disturbed"]]
    usual = statistics.median([*seconds[1:FAILING], *seconds[FAILING + 1 :]])
    return {
        "events": [event["event"] for event in events],
        "losses": max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)),
        "parameters": tasks.distance(models["disturbed"], models["undisturbed"]),
        "step_seconds": usual,
        "lost_seconds": seconds[FAILING] - usual,
    }


@contextlib.contextmanager
def less_memory() -> Iterator[None]:
    """Take the device's memory away before step `FAILING`."""
    import torch

    from samestep.step import accumulate

    seed_noise, taken = accumulate.seed_noise, []

    def seed_and_take(accelerator: Any, seed: int, step: int) -> None:
        if step == FAILING and not taken:
            taken.append(_take() if tasks.has_gpu() else True)
        seed_noise(accelerator, seed, step)

    accumulate.seed_noise = seed_and_take
    limit = contextlib.nullcontext() if tasks.has_gpu() else _fail_if_large(torch, taken)
    try:
        with limit:
            yield
    finally:
        accumulate.seed_noise = seed_noise
        if tasks.has_gpu():
            torch.cuda.set_per_process_memory_fraction(1.0)


def _take() -> bool:
    """Leave as much memory as is in use now, and half of what a step took beyond it."""
    import torch

    used, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((used + (peak - used) / 2) / total)
    return True


@contextlib.contextmanager
def _fail_if_large(torch: Any, taken: list) -> Iterator[None]:
    """Let the forward of more than four samples fail as CUDA does, once memory is taken."""
    from samestep.models.gpt2_pretraining import PretrainingSums as Model

    forward = Model.forward

    def limited(self: Any, **micro_batch: Any) -> Any:
        if taken and torch.is_grad_enabled() and len(micro_batch["input_ids"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, **micro_batch)

    Model.forward = limited
    try:
        yield
    finally:
        Model.forward = forward


def is_good(row: dict) -> bool:
    """Memory did run out, and the curve is the other run's up to the rounding of float32."""
    return bool(row.get("events")) and row["losses"] <= 1e-5 and row["parameters"] <= 1e-4


def markdown(rows: dict[str, dict]) -> str:
    lines = [[item, tasks.verdict(row, is_good(row)), *_cells(row)] for item, row in rows.items()]
    return harness.table("model | the same | loss | parameters | a step, s | lost, s | events", lines)


def _cells(row: dict) -> list[str]:
    if "events" not in row:
        return [""] * 5
    numbers = [f"{row[name]:.0e}" for name in ("losses", "parameters")]
    numbers += [f"{row[name]:.3g}" for name in ("step_seconds", "lost_seconds")]
    return [*numbers, "; ".join(row["events"])]
