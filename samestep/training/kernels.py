"""Chooses the fastest of several kernels that compute the same model, all of them the same step.

`--speed auto` measures forward and backward of the same few samples with every candidate, in turns, before anything is
prepared, and remembers the fastest (`capacity`). `--speed safe` takes the first, so that a run can be repeated bit by bit.
Candidates differ by rounding only: one whose gradient is not that of the first is not taken, and the log says so. The processes
measure together, and their mean counts, so that all choose the same.
"""

import math
import time
import traceback
from collections.abc import Callable, Hashable, Mapping

import torch
from accelerate import Accelerator
from torch import nn

from samestep.data.steps import MicroBatch, SampleSource, to_device
from samestep.recipe.recipe import Recipe
from samestep.recipe.run_settings import RunSettings
from samestep.training.capacity import is_out_of_memory, recall
from samestep.training.launch import is_sharded

Candidates = Mapping[str, Callable[[], None]]
"""Name -> what makes the model take these kernels. The first is the safe one."""

ROUNDS, SECONDS = 10, 20.0
"""Most measurements of each candidate, and seconds after which no round begins, but for the first two."""
TOO_LONG = 5.0
"""Seconds of one computation for which nothing is compared."""
SLOWER = 1.1
"""How much slower than the fastest a candidate is, in the first two measurements or more, that is measured no longer."""
GAIN = 1.03
"""How much faster than the first a candidate must be: less may be noise."""
SAMPLES, UNITS = 32, 4096
"""Most samples, and most tokens, that candidates are compared on."""
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bf16": 0.05, "fp16": 0.05}
"""Largest |g - g_first| / |g_first| of a candidate's gradient, by the type that is computed in."""


def choose(
    accelerator: Accelerator,
    recipe: Recipe,
    settings: RunSettings,
    model: nn.Module,
    source: SampleSource,
    candidates: Candidates,
) -> None:
    """Make the model take the fastest kernels. Called by all processes, before `launch.prepare`.

    Args:
        accelerator, recipe, settings: of this run.
        model: returns a micro-batch's summed losses [terms] first; not yet wrapped.
        source: of its samples.
        candidates: at least one.
    """
    name, *others = candidates
    if settings.speed == "auto" and others and not is_sharded(accelerator):
        capacity = recall(accelerator, recipe, settings)
        if capacity.way not in candidates:
            capacity.way = _fastest(accelerator, model, source, candidates)
            if accelerator.is_main_process:
                capacity.write()
        name = capacity.way
    candidates[name]()
    if others:
        accelerator.print(f"kernels: {name} (--speed {settings.speed})")


def measure(accelerator: Accelerator, computations: Mapping[Hashable, Callable[[], None]]) -> dict[Hashable, float]:
    """Seconds of each computation, the least of some rounds in turns: what else runs on a machine only adds to it.
    Infinite where memory runs out. The first round warms up and counts for nothing else; where its first computation takes
    `TOO_LONG`, the others are not tried, and infinite. What is `SLOWER` after two more rounds or later is left out, so that the
    time is spent on those among which it is not clear yet.

    Called by all processes; what they measure is averaged.
    """
    start, (first, *_) = time.perf_counter(), computations
    least, left = dict.fromkeys(computations, math.inf), dict(computations)

    def has_run(seconds: float) -> bool:
        is_over = torch.tensor(float(time.perf_counter() - start > seconds), device=accelerator.device)
        return bool(accelerator.reduce(is_over, reduction="sum").item())

    for number in range(1 + ROUNDS):
        for name, compute in left.items():
            _wait(accelerator)
            before, seconds = time.perf_counter(), math.inf
            try:
                compute()
                _wait(accelerator)
                seconds = time.perf_counter() - before
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)
            if number > 0:
                least[name] = min(least[name], seconds)
            elif name == first and has_run(TOO_LONG):
                return least | {first: seconds}
        if number > 0:
            values = accelerator.reduce(torch.tensor(list(least.values()), device=accelerator.device), reduction="mean")
            means = dict(zip(least, values.tolist(), strict=True))
            if number > 1:
                left = {name: of for name, of in left.items() if means[name] <= SLOWER * min(means.values())}
            if len(left) == 1 or has_run(SECONDS):
                break
    return means


def fastest(seconds: Mapping[Hashable, float]) -> Hashable:
    """The fastest, or the first if that is hardly slower.

    >>> fastest({"eager": 1.0, "sdpa": 0.99}), fastest({"eager": 1.0, "sdpa": 0.9})
    ('eager', 'sdpa')
    """
    first, best = next(iter(seconds)), min(seconds, key=seconds.__getitem__)
    return best if seconds[first] > GAIN * seconds[best] else first


def _wait(accelerator: Accelerator) -> None:
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize(accelerator.device)


def _fastest(accelerator: Accelerator, model: nn.Module, source: SampleSource, candidates: Candidates) -> str:
    model.to(accelerator.device)
    was_training = model.training
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.eval()
    with torch.random.fork_rng():
        next(iter(candidates.values()))()
        micro_batch = _micro_batch(accelerator, source, _number(accelerator, model, source, len(candidates)))
        good = _same(accelerator, model, micro_batch, candidates)
        model.train()

        def computation(take: Callable[[], None]) -> Callable[[], None]:
            return lambda: (take(), _compute(accelerator, model, micro_batch))

        seconds = measure(accelerator, {name: computation(candidates[name]) for name in good})
    model.train(was_training)
    model.zero_grad(set_to_none=True)
    for buffer, value in buffers:
        buffer.copy_(value)
    return fastest(seconds)


def _number(accelerator: Accelerator, model: nn.Module, source: SampleSource, num_ways: int) -> int:
    """Samples that candidates are compared on: no more than that four rounds take `SECONDS`, as one sample says that was
    computed before; two at least, as batch normalisation needs."""
    micro_batch, seconds = _micro_batch(accelerator, source, 1), 0.0
    try:
        for _ in range(2):
            before = time.perf_counter()
            _compute(accelerator, model, micro_batch)
            _wait(accelerator)
            seconds = time.perf_counter() - before
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
    mean = accelerator.reduce(torch.tensor(seconds, device=accelerator.device), reduction="mean").item()
    most = min(len(source), SAMPLES, max(1, UNITS // source.max_length))
    return most if mean == 0 else min(most, max(2, int(SECONDS / (4 * num_ways * mean))))


def _micro_batch(accelerator: Accelerator, source: SampleSource, number: int) -> MicroBatch:
    """Samples from all over the data, which may be sorted, themselves sorted as in the micro-batches of a step."""
    drawn = (source.draw(0, place * len(source) // number) for place in range(number))
    micro_batch = source.collate(sorted(drawn, key=lambda of: -of.length))
    micro_batch.pop("counts")
    return to_device(micro_batch, accelerator.device)


def _same(accelerator: Accelerator, model: nn.Module, micro_batch: MicroBatch, candidates: Candidates) -> list[str]:
    """The candidates that all processes can compute, and whose gradient is that of the first."""
    precision = accelerator.mixed_precision
    kind = precision if precision != "no" else str(next(model.parameters()).dtype).removeprefix("torch.")
    first, expected, problems = next(iter(candidates)), None, {}
    for name, take in candidates.items():
        take()
        try:
            found = _gradient(accelerator, model, micro_batch)
            expected = found if expected is None else expected
            distance = ((found - expected).norm() / expected.norm()).item()
            if not distance <= TOLERANCE[kind]:
                problems[name] = f"its gradient is {distance:.1e} of its size away from that of {first}"
        except (RuntimeError, NotImplementedError) as error:
            if name == first and not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            problems[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        if expected is None:  # memory does not hold the first, with which the others are compared
            problems = dict.fromkeys(candidates, f"memory ran out computing {first}, with which it is compared")
            break
    failed = torch.tensor([name in problems and name != first for name in candidates], device=accelerator.device).int()
    failed = accelerator.reduce(failed, reduction="sum").tolist()
    for name, problem in problems.items():
        if name != first:
            accelerator.print(f"kernels: not {name}: {problem}")
    return [name for name, times in zip(candidates, failed, strict=True) if not times]


def _compute(accelerator: Accelerator, model: nn.Module, micro_batch: MicroBatch) -> None:
    with accelerator.autocast():
        sums, *_ = model(**micro_batch)
    sums.sum().backward()


def _gradient(accelerator: Accelerator, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    _compute(accelerator, model, micro_batch)
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found
