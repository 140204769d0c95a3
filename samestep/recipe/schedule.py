"""The learning rate as a pure function of the step: nothing to save, nothing to restore, any step reachable at once.

`step` counts the optimizer steps already taken, so the first update asks for step 0:

    step < num_warmup_steps     learning rate = peak * (step + 1) / num_warmup_steps
    afterwards                  learning rate = peak * (min_ratio + (1 - min_ratio) * shape(progress)),
                                progress = (step - num_warmup_steps) / (num_steps - num_warmup_steps), at most 1

The first update is not wasted on a rate of 0. The peak is reached at step num_warmup_steps - 1, and progress 0 holds it
for one step more; progress 1 belongs to step num_steps, the one after the last.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from numbers import Integral, Real
from typing import Any, Protocol

from samestep.errors import UsageError, nearest


def constant(progress: float) -> float:
    """Stay at the peak: shape = 1.

    >>> constant(0.0), constant(1.0)
    (1.0, 1.0)
    """
    return 1.0


def linear(progress: float) -> float:
    """Fall on a straight line: shape = 1 - progress.

    >>> linear(0.0), linear(0.25), linear(1.0)
    (1.0, 0.75, 0.0)
    """
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Fall on half a cosine wave: shape = (1 + cos(pi progress)) / 2.

    >>> cosine(0.0), round(cosine(0.5), 15), cosine(1.0)
    (1.0, 0.5, 0.0)

    Reference: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017, arXiv:1608.03983.
    """
    return (1.0 + math.cos(math.pi * progress)) / 2.0


def polynomial(progress: float, power: float) -> float:
    """Fall on a power of the straight line: shape = (1 - progress) ** power.

    >>> polynomial(0.0, 2.0), polynomial(0.5, 2.0), polynomial(1.0, 2.0)
    (1.0, 0.25, 0.0)
    """
    return float((1.0 - progress) ** power)


def warmup_stable_decay(progress: float, decay_share: float) -> float:
    """Stay at the peak, then fall on a straight line over the last `decay_share`.

        shape = min(1, (1 - progress) / decay_share)

    >>> [warmup_stable_decay(progress, 0.5) for progress in (0.0, 0.5, 0.75, 1.0)]
    [1.0, 1.0, 0.5, 0.0]

    Reference: Hu et al., MiniCPM: Unveiling the Potential of Small Language Models with Scalable Training Strategies,
    2024, arXiv:2404.06395.
    """
    return min(1.0, (1.0 - progress) / decay_share)


def warmup_stable_sqrt_decay(progress: float, decay_share: float) -> float:
    """Stay at the peak, then fall by the square root of what is done of the last `decay_share`: fast at first, then slowly.

        shape = 1 - sqrt(max(0, 1 - (1 - progress) / decay_share))

    >>> [warmup_stable_sqrt_decay(progress, 0.5) for progress in (0.0, 0.5, 0.625, 1.0)]
    [1.0, 1.0, 0.5, 0.0]

    Reference: Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, 2024,
    arXiv:2405.18392.
    """
    return 1.0 - math.sqrt(max(0.0, 1.0 - (1.0 - progress) / decay_share))


SHAPES: dict[str, Callable[[float, "Schedule"], float]] = {
    "constant": lambda progress, _: constant(progress),
    "linear": lambda progress, _: linear(progress),
    "cosine": lambda progress, _: cosine(progress),
    "polynomial": lambda progress, schedule: polynomial(progress, schedule.power),
    "warmup_stable_decay": lambda progress, schedule: warmup_stable_decay(progress, schedule.decay_share),
    "warmup_stable_sqrt_decay": lambda progress, schedule: warmup_stable_sqrt_decay(progress, schedule.decay_share),
}
"""lr_scheduler_type -> its shape, a function of progress: 1 at the peak, 0 at the final learning rate."""
STABLE = ("warmup_stable_decay", "warmup_stable_sqrt_decay")
"""Types that stay at the peak before a final fall."""


class LearningRates(Protocol):
    """The learning rate as a function of the step: a `Schedule`, or one that counts samples where the batch grows."""

    @property
    def num_warmup_steps(self) -> int:
        """Steps of linear warm-up."""

    def __call__(self, step: int) -> float:
        """Compute the learning rate of the update that follows `step` updates."""


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then decay, as in the equation above.

    Args:
        lr_scheduler_type: a name in `SHAPES`.
        peak: learning rate at the end of the warm-up, at least 0.
        num_steps: optimizer steps in the whole schedule.
        num_warmup_steps: steps of linear warm-up, 0 to num_steps.
        min_ratio: final learning rate / peak, in [0, 1]; `constant` does not use it.
        power: exponent of `polynomial`, above 0.
        decay_ratio: share of all num_steps in the final fall of the types in `STABLE`, in (0, 1]; rounded half up to
            whole steps, at least one, that must not reach into the warm-up.
        first_step: step of the schedule at which this run begins, added to every step; above 0 in a run that goes on with
            the schedule of another run.

    Raises:
        UsageError: values outside these ranges, or that do not go together; all of them at once.

    >>> schedule = Schedule("linear", peak=1e-4, num_steps=1_000_000, num_warmup_steps=10_000)  # BERT
    >>> [schedule(step) for step in (0, 9_999, 10_000, 505_000, 1_000_000)]
    [1e-08, 0.0001, 0.0001, 5e-05, 0.0]
    >>> Schedule("linear", 1e-4, 1_000_000, 10_000, first_step=900_000)(0) == schedule(900_000)  # its second phase
    True
    """

    lr_scheduler_type: str
    peak: float
    num_steps: int
    num_warmup_steps: int
    min_ratio: float = 0.0
    power: float = 1.0
    decay_ratio: float = 0.1
    first_step: int = 0

    def __post_init__(self) -> None:
        fields = vars(self).copy()
        kind = fields.pop("lr_scheduler_type")
        problems = [] if kind in SHAPES else [f"lr_scheduler_type {kind!r} is unknown: {nearest(str(kind), SHAPES)}"]
        problems += _find_range_problems(fields)
        lengths = ("num_steps", "num_warmup_steps", "decay_ratio", "first_step")
        if not _find_range_problems({name: fields[name] for name in lengths}):
            problems += self._find_length_problems()
        if problems:
            raise UsageError(problems)

    def __call__(self, step: int) -> float:
        """Compute the learning rate of the update that follows `step` updates; past the end, the final learning rate."""
        return self.between(step, step + 1)

    def between(self, first: int, last: int) -> float:
        """Compute the learning rate of an update that begins at `first` and ends at `last`, where a unit is not a step.

        With a batch that grows it is a sample: `num_steps` and `num_warmup_steps` count samples then.

        >>> by_samples = Schedule("linear", peak=1.0, num_steps=80, num_warmup_steps=16)
        >>> by_samples.between(0, 8) == Schedule("linear", peak=1.0, num_steps=10, num_warmup_steps=2)(0)
        True
        """
        first, last = first + self.first_step, last + self.first_step
        if first < self.num_warmup_steps:
            return self.peak * min(1.0, last / self.num_warmup_steps)
        return self.peak * self.find_ratio(first)

    def find_ratio(self, place: int) -> float:
        """Find the learning rate over its peak at a step or sample of the schedule, without warm-up: 1 until that is over.

        >>> [Schedule("linear", 0.5, num_steps=12, num_warmup_steps=2).find_ratio(step) for step in (0, 2, 7, 12)]
        [1.0, 1.0, 0.5, 0.0]
        """
        num_left = self.num_steps - self.num_warmup_steps
        progress = max(0, place - self.num_warmup_steps) / num_left if place < self.num_steps else 1.0
        return self.min_ratio + (1.0 - self.min_ratio) * SHAPES[self.lr_scheduler_type](progress, self)

    @property
    def num_decay_steps(self) -> int:
        """Steps in the final fall of the types in `STABLE`.

        >>> Schedule("warmup_stable_decay", 1.0, num_steps=250, num_warmup_steps=50, decay_ratio=0.1).num_decay_steps
        25
        """
        return max(1, _round_half_up(self.decay_ratio, self.num_steps))

    def find_last_warmup(self) -> int:
        """Find the most steps (or samples) that a warm-up may take."""
        return self.num_steps - (self.num_decay_steps if self.lr_scheduler_type in STABLE else 0)

    @property
    def decay_share(self) -> float:
        """`num_decay_steps` as a share of the steps after the warm-up, the unit of progress."""
        return self.num_decay_steps / (self.num_steps - self.num_warmup_steps)

    def _find_length_problems(self) -> list[str]:
        """List the rules that the lengths break together; each must keep its own range."""
        problems = []
        num_left = self.num_steps - self.num_warmup_steps
        if num_left < 0:
            problems.append(
                f"num_warmup_steps {self.num_warmup_steps} is more than num_steps {self.num_steps}. "
                f"Warm up for {self.num_steps} steps or less, or train longer."
            )
        elif self.lr_scheduler_type in STABLE and self.num_decay_steps > num_left:
            problems.append(
                f"decay_ratio {self.decay_ratio} asks for {self.num_decay_steps} of the {self.num_steps} num_steps, "
                f"but only {num_left} follow the warm-up. Lower decay_ratio or num_warmup_steps."
            )
        if self.first_step >= self.num_steps:
            problems.append(
                f"first_step {self.first_step} is not below num_steps {self.num_steps}: no step would be left. "
                f"num_steps counts the whole schedule, with the steps before first_step; raise it."
            )
        return problems


def warmup_steps(
    *,
    num_steps: int,
    steps_per_epoch: float,
    num_warmup_steps: int | None = None,
    warmup_epochs: float | None = None,
    warmup_ratio: float | None = None,
) -> int:
    """Compute the length of the warm-up in steps, from exactly one of three arguments.

        num_warmup_steps   or   warmup_epochs * steps_per_epoch   or   warmup_ratio * num_steps

    A product is taken on the decimals as written and rounded half up to whole steps.

    Args:
        num_steps: optimizer steps in the whole schedule.
        steps_per_epoch: optimizer steps in one pass over the samples, above 0.
        num_warmup_steps: steps.
        warmup_epochs: epochs, at least 0.
        warmup_ratio: share of all steps, in [0, 1].

    Raises:
        UsageError: none or several are given, or a value is outside its range.

    >>> warmup_steps(warmup_epochs=5, num_steps=2400, steps_per_epoch=16)
    80
    >>> warmup_steps(warmup_ratio=0.29, num_steps=50, steps_per_epoch=16)
    15
    """
    options = {"num_warmup_steps": num_warmup_steps, "warmup_epochs": warmup_epochs, "warmup_ratio": warmup_ratio}
    values = {name: value for name, value in options.items() if value is not None}
    if len(values) != 1:
        text = ", ".join(f"{name} {value!r}" for name, value in values.items()) or "none of them"
        raise UsageError(f"exactly one of {', '.join(options)} must be given, found {text}: keep one; 0 is no warm-up.")
    if problems := _find_range_problems({**values, "num_steps": num_steps, "steps_per_epoch": steps_per_epoch}):
        raise UsageError(problems)
    if num_warmup_steps is not None:
        return num_warmup_steps
    if warmup_epochs is not None:
        return _round_half_up(warmup_epochs, steps_per_epoch)
    assert warmup_ratio is not None
    return _round_half_up(warmup_ratio, num_steps)


def _round_half_up(share: float, whole: float) -> int:
    """Multiply two numbers, as people wrote them, and round to the nearest whole number.

    >>> _round_half_up(0.29, 50), math.floor(0.29 * 50 + 0.5)  # 14.5, which floats miss by one bit
    (15, 14)
    """
    return int((Decimal(str(share)) * Decimal(str(whole))).to_integral_value(ROUND_HALF_UP))


def _is_number(value: Any) -> bool:
    return issubclass(type(value), Real) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_count(value: Any, smallest: int = 0) -> bool:
    return issubclass(type(value), Integral) and not isinstance(value, bool) and value >= smallest


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "peak": (_is_number, "a finite number of at least 0"),
    "num_steps": (lambda value: _is_count(value, smallest=1), "a whole number of steps, at least 1"),
    "num_warmup_steps": (_is_count, "a whole number of steps, at least 0"),
    "warmup_epochs": (_is_number, "a finite number of at least 0"),
    "warmup_ratio": (lambda value: _is_number(value) and value <= 1, "a number in [0, 1]"),
    "steps_per_epoch": (lambda value: _is_number(value) and value > 0, "a finite number above 0"),
    "min_ratio": (lambda value: _is_number(value) and value <= 1, "a number in [0, 1]"),
    "power": (lambda value: _is_number(value) and value > 0, "a finite number above 0"),
    "decay_ratio": (lambda value: _is_number(value) and 0 < value <= 1, "a number in (0, 1]"),
    "first_step": (_is_count, "a whole number of steps, at least 0"),
}


def _find_range_problems(values: Mapping[str, object]) -> list[str]:
    """List the values that are outside their own range, a message for each."""
    return [
        f"{name} {value!r} must be {_RANGES[name][1]}: correct it."
        for name, value in values.items()
        if not _RANGES[name][0](value)
    ]
