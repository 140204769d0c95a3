"""Chooses the fastest of several kernels that compute the same model, all of them the same step.

`--speed auto` measures forward and backward of the same few samples with every candidate, in turns, before anything is
prepared, and remembers the fastest (`capacity`). `--speed safe` takes the first, so that a run can be repeated bit by bit.
Candidates differ by rounding only: a candidate whose gradient is not the same as the first one's is refused, and the log says
so. The processes measure together, and their mean counts, so that all choose the same.
"""

import math
import time
import traceback
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import nn

from samestep.data.steps import MicroBatch, SampleSource, to_device
from samestep.recipe.recipe import Recipe
from samestep.recipe.run_settings import RunSettings
from samestep.training.capacity import has_memory, is_out_of_memory, preserved_model, recall
from samestep.training.launch import is_sharded

Candidates = Mapping[str, Callable[[], None]]
"""Name -> function that makes the model take these kernels. The first is the safe one."""

Key = TypeVar("Key", bound=Hashable)

ROUNDS, SECONDS = 10, 20.0
"""Most measurements of each candidate, and seconds after which no round begins, but for the first two."""
MAX_SECONDS = 5.0
"""Seconds that the first computation may take: beyond that nothing is compared."""
MAX_SLOWDOWN = 1.1
"""Ratio of a candidate's time to the fastest time, in two measurements or more, above which it is measured no longer."""
GAIN = 1.03
"""Ratio of the first candidate's time to the fastest time above which the fastest is chosen: less may be noise."""
SAMPLES, UNITS = 32, 4096
"""Most samples, and most tokens, that candidates are compared on."""
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bf16": 0.05, "fp16": 0.05}
"""Largest |g - g_first| / |g_first| of a candidate's gradient, by the type of the computation."""


def choose_kernel(
    accelerator: Accelerator,
    recipe: Recipe,
    settings: RunSettings,
    model: nn.Module,
    source: SampleSource,
    candidates: Candidates,
) -> None:
    """Make the model take the fastest kernels. Called by all processes, before `launch.prepare`.

    Args:
        accelerator, recipe, settings: the run's.
        model: returns a micro-batch's summed losses [terms] first; not yet wrapped.
        source: gives the model's samples.
        candidates: at least one.
    """
    name, *alternatives = candidates
    if settings.speed == "auto" and alternatives and not is_sharded(accelerator):
        capacity = recall(accelerator, recipe, settings)
        if capacity.way not in candidates:
            capacity.way = _measure_fastest(accelerator, model, source, candidates)
            capacity.write(accelerator)
        name = capacity.way
    candidates[name]()
    if alternatives:
        accelerator.print(f"kernels: {name} (--speed {settings.speed})")


def measure(accelerator: Accelerator, computations: Mapping[Key, Callable[[], object]]) -> dict[Key, float]:
    """Measure the seconds of each computation, the minimum of some rounds in turns: other programs only add to the time.

    The first round warms up and counts for nothing else; where its first computation takes more than `MAX_SECONDS`, the others
    are not tried. A computation that is slower than the fastest by `MAX_SLOWDOWN`, after two more rounds or later, is measured
    no longer, so that the time is spent on those among which the fastest is not clear yet.

    Called by all processes; their measurements are averaged.

    Returns:
        Seconds of each computation; infinite where memory runs out, and where it is not tried.
    """
    start, (first, *_) = time.perf_counter(), computations
    minima, candidates = dict.fromkeys(computations, math.inf), dict(computations)

    def has_run(seconds: float) -> bool:
        is_over = torch.tensor(float(time.perf_counter() - start > seconds), device=accelerator.device)
        return bool(accelerator.reduce(is_over, reduction="sum").item())

    for number in range(1 + ROUNDS):
        for name, compute in candidates.items():
            seconds = _time(accelerator, compute)
            if number > 0:
                minima[name] = min(minima[name], seconds)
            elif name == first and has_run(MAX_SECONDS):
                return minima | {first: seconds}
        if number > 0:
            values = accelerator.reduce(
                torch.tensor(list(minima.values()), device=accelerator.device), reduction="mean"
            )
            means = dict(zip(minima, values.tolist(), strict=True))
            if number > 1:
                candidates = {
                    name: compute
                    for name, compute in candidates.items()
                    if means[name] <= MAX_SLOWDOWN * min(means.values())
                }
            if len(candidates) == 1 or has_run(SECONDS):
                break
    return means


def _time(accelerator: Accelerator, compute: Callable[[], object]) -> float:
    """Compute once; return the seconds, infinite where memory runs out."""
    _wait(accelerator)
    begin = time.perf_counter()

    def compute_all() -> None:
        compute()
        _wait(accelerator)

    return time.perf_counter() - begin if has_memory(compute_all) else math.inf


def find_fastest(seconds: Mapping[Key, float]) -> Key:
    """Find the fastest, or the first if that is hardly slower.

    >>> find_fastest({"eager": 1.0, "sdpa": 0.99}), find_fastest({"eager": 1.0, "sdpa": 0.9})
    ('eager', 'sdpa')
    """
    first, best = next(iter(seconds)), min(seconds, key=seconds.__getitem__)
    return best if seconds[first] > GAIN * seconds[best] else first


def _wait(accelerator: Accelerator) -> None:
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize(accelerator.device)


def _measure_fastest(accelerator: Accelerator, model: nn.Module, source: SampleSource, candidates: Candidates) -> str:
    model.to(accelerator.device)
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(), preserved_model(model):
        next(iter(candidates.values()))()
        micro_batch = _make_micro_batch(
            accelerator, source, _count_samples(accelerator, model, source, len(candidates))
        )
        names = _find_equal(accelerator, model, micro_batch, candidates)
        model.train()

        def computation(take: Callable[[], object]) -> Callable[[], None]:
            def compute() -> None:
                take()
                _compute(accelerator, model, micro_batch)

            return compute

        seconds = measure(accelerator, {name: computation(candidates[name]) for name in names})
    model.train(was_training)
    return find_fastest(seconds)


def _count_samples(accelerator: Accelerator, model: nn.Module, source: SampleSource, num_candidates: int) -> int:
    """Count the samples to compare candidates on: so few that four rounds take `SECONDS`, by the time of one sample; two at
    least, which batch normalisation needs."""
    micro_batch = _make_micro_batch(accelerator, source, 1)
    _, seconds = (_time(accelerator, lambda: _compute(accelerator, model, micro_batch)) for _ in range(2))
    seconds = seconds if math.isfinite(seconds) else 0.0
    mean = accelerator.reduce(torch.tensor(seconds, device=accelerator.device), reduction="mean").item()
    limit = min(len(source), SAMPLES, max(1, UNITS // source.max_length))
    return limit if mean == 0 else min(limit, max(2, int(SECONDS / (4 * num_candidates * mean))))


def _make_micro_batch(accelerator: Accelerator, source: SampleSource, number: int) -> MicroBatch:
    """Make a micro-batch of samples from all over the data, which may be sorted; they are sorted by length, as in a step."""
    samples = (source.draw(0, place * len(source) // number) for place in range(number))
    micro_batch = source.collate(sorted(samples, key=lambda sample: -sample.length))
    micro_batch.pop("counts")
    return to_device(micro_batch, accelerator.device)


def _find_equal(
    accelerator: Accelerator, model: nn.Module, micro_batch: MicroBatch, candidates: Candidates
) -> list[str]:
    """Find the candidates that all processes can compute, and whose gradient is the same as the first one's."""
    precision = accelerator.mixed_precision
    dtype = precision if precision != "no" else str(next(model.parameters()).dtype).removeprefix("torch.")
    first, first_gradient, problems = next(iter(candidates)), None, {}
    for name, take in candidates.items():
        take()
        try:
            gradient = _compute_gradient(accelerator, model, micro_batch)
            first_gradient = gradient if first_gradient is None else first_gradient
            distance = ((gradient - first_gradient).norm() / first_gradient.norm()).item()
            if not distance <= TOLERANCE[dtype]:
                problems[name] = f"it computes another gradient here, by {distance:.1e} of that of {first}"
        except (RuntimeError, NotImplementedError) as error:
            if name == first and not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            problems[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        if first_gradient is None:  # memory does not hold the first, with which the others are compared
            problems = dict.fromkeys(candidates, f"memory ran out computing {first}, with which it is compared")
            break
    failures = torch.tensor(
        [name in problems and name != first for name in candidates], device=accelerator.device
    ).int()
    failures = accelerator.reduce(failures, reduction="sum").tolist()
    for name, problem in problems.items():
        if name != first:
            accelerator.print(f"kernels: not {name}: {problem}")
    return [name for name, times in zip(candidates, failures, strict=True) if not times]


def _compute(accelerator: Accelerator, model: nn.Module, micro_batch: MicroBatch) -> None:
    with accelerator.autocast():
        sums, *_ = model(**micro_batch)
    sums.sum().backward()


def _compute_gradient(accelerator: Accelerator, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    _compute(accelerator, model, micro_batch)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return gradient
