"""The steps of a training whose batch grows: how many, how large, and at which learning rate, from the recipe alone."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from samestep.contrib.growing.batch_schedule import EXPONENTS, BatchSchedule, Stage, find_stages
from samestep.cut.spans import Spans
from samestep.errors import UsageError
from samestep.printing import describe_sizes
from samestep.recipe.recipe import Recipe
from samestep.recipe.schedule import Schedule, warmup_steps


@dataclasses.dataclass(frozen=True)
class GrowingSchedule:
    """The learning rate as a function of the step, where it counts samples; see `recipe.schedule`.

    Attributes:
        by_samples: the same as a function of the samples so far.
        spans: where each step begins and ends.
        reference: batch whose learning rate `by_samples` has.
        exponent: of a step's batch over `reference`, a factor of its learning rate.
    """

    by_samples: Schedule
    spans: Spans
    reference: int
    exponent: float

    def __call__(self, step: int) -> float:
        """Compute the learning rate of the update that follows `step` updates."""
        return self.by_samples.between(*self.spans.find(step)) * self._find_factor(self.spans.find_size(step))

    def _find_factor(self, size: int) -> float:
        return (size / self.reference) ** self.exponent if self.exponent else 1.0

    @property
    def num_warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return self.spans.count(self.by_samples.num_warmup_steps)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The steps of a training whose batch grows.

    Attributes:
        stages: of `cut.spans.Spans` and `cut.order.Order`.
        num_steps: optimizer steps to the end.
        num_samples: samples to the end of the schedule.
        schedule: the learning rate of each step; None: it needs the number of samples in an epoch.
        spans: where each step begins and ends.
    """

    stages: tuple[Stage, ...]
    num_steps: int
    num_samples: int
    schedule: GrowingSchedule | None
    spans: Spans

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(steps, size) of each stage that has steps."""
        return self.spans.list_sizes(self.num_steps)

    def __str__(self) -> str:
        return describe_sizes(self.sizes)


def plan_steps(recipe: Recipe, num_samples: int | None, decided: Sequence[Stage] = ()) -> StepPlan | None:
    """Plan the steps of a recipe with a `batch_schedule`.

    The training ends when the epochs are over or, for max_train_steps, after so many steps of whatever size: then the places
    that are shares are those of the longest training with no more steps.

    Args:
        recipe: with a `batch_schedule`.
        num_samples: samples of an epoch; None: nobody has counted them.
        decided: of a batch that follows the measured noise, its stages so far: the last one goes on to the end.

    Returns:
        The plan; None: the length of the training needs `num_samples`.

    Raises:
        UsageError: the warm-up and the decay are together longer than the training.
    """
    growth, steps = recipe.batch_schedule, recipe.max_train_steps
    assert isinstance(growth, BatchSchedule)
    # Without the number of samples, steps are as if no epoch ended
    n, epoch_end = (1, "carry") if num_samples is None else (num_samples, recipe.epoch_end)

    def find_spans(total: int) -> Spans:
        ratio: Callable[[int], float] = _make_schedule(recipe, growth, n, epoch_end, total).find_ratio
        length = recipe.tokens_per_sample or 1
        stages = find_stages(growth, recipe.global_batch_size, total, length, ratio, decided)
        return Spans(n, epoch_end, stages)

    if steps is None:
        if num_samples is None:
            return None
        assert recipe.num_train_epochs is not None, "a recipe has one of both"
        total = max(1, math.ceil(num_samples * Fraction(recipe.num_train_epochs).limit_denominator(10**6)))
        spans = find_spans(total)
        steps = spans.count(total)
    else:
        # Between: `low` samples take at most so many steps, `high` more; `drop` leaves out less than it uses
        low, high = 1, 2 * (steps * recipe.global_batch_size + n) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if find_spans(middle).count(middle) <= steps else (low, middle)
        total = low
        spans = find_spans(total)
    schedule = None
    if num_samples is not None or recipe.warmup_epochs is None:
        by_samples = _make_schedule(recipe, growth, n, epoch_end, total, spans)
        exponent, reference = EXPONENTS[growth.rate], recipe.learning_rate_batch_size
        if growth.kind == "seesaw":
            exponent, reference = 1.0 if recipe.optimizer_name == "sgd" else 0.5, growth.smallest
        schedule = GrowingSchedule(by_samples, spans, reference, exponent)
    return StepPlan(tuple(Stage(*stage) for stage in spans.stages), steps, total, schedule, spans)


def _make_schedule(
    recipe: Recipe, growth: BatchSchedule, n: int, epoch_end: str, total: int, spans: Spans | None = None
) -> Schedule:
    """Make the learning rate as a function of the samples so far, without the factor of the batch.

    Args:
        recipe, growth: the recipe and its `batch_schedule`.
        n, epoch_end: samples of an epoch, and the treatment of its end.
        total: samples of the training.
        spans: those of the steps; None: they are not known yet, but the first batch lasts at least as long as the warm-up where
            that matters (Seesaw, which grows when the rate falls). A warm-up that is too long is an error only with them.
    """
    warmup = {name: getattr(recipe, name) for name in ("num_warmup_steps", "warmup_epochs", "warmup_ratio")}
    if recipe.num_warmup_steps is not None:
        first = spans or Spans(n, epoch_end, (Stage(0, growth.smallest),))
        warmup["num_warmup_steps"] = first.find(recipe.num_warmup_steps)[0]
    num_warmup = warmup_steps(**warmup, num_steps=total, steps_per_epoch=n)
    names: dict[str, Any] = {"max_train_steps": total, "num_train_epochs": None, "batch_schedule": None}
    names |= {"num_warmup_steps": 0, "warmup_epochs": None, "warmup_ratio": None}
    base = dataclasses.replace(recipe, **names).schedule(total, n)
    longest = base.find_last_warmup()
    if num_warmup > longest:
        if spans is None:
            return base
        raise UsageError(
            f"the warm-up takes {num_warmup:,} samples ({spans.count(num_warmup):,} steps), more than the {longest:,} of "
            f"{total:,} that it may: give a shorter one, or train longer"
        )
    return dataclasses.replace(base, num_warmup_steps=num_warmup)
