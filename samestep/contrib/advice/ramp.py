"""Finds how a batch may grow with the noise scale: proposed from the measurements of a run."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from samestep.contrib.growing.batch_schedule import BatchSchedule
from samestep.contrib.noise.signal_share import find_largest, find_signal_share, tokens_ratio
from samestep.recipe import catalog as recipes
from samestep.recipe.batch_size import Measurement
from samestep.recipe.recipe import Recipe

MIN_GROWTH = 1.25
"""Last batch over the first one, below which a ramp is not worth its recipe."""


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A batch that grows in stages.

    Attributes:
        stages: (share of the training's samples at which it begins, samples of a step) in order, the first at 0.
        tokens: times as many tokens (or samples) that it takes to the same loss as the run's batch.
        steps: times as many steps.
    """

    stages: tuple[tuple[float, int], ...]
    tokens: float
    steps: float


def find_ramp(
    windows: Sequence[Sequence[Measurement]],
    num_steps: int,
    batch: int,
    more_tokens: float,
    round_size: Callable[[float], int],
) -> Ramp | None:
    """Find the ramp that a run allows; None: its noise scale did not grow, or is not known well enough.

    Each part of the training gets the largest batch that takes `more_tokens` more there, by the upper end of the interval of
    the signal's share. As a batch does not shrink again, no part gets more than a later one may have.

    Args:
        windows: measurements of the parts of the training, in order.
        num_steps: of the run.
        batch: of the run's steps.
        more_tokens: share of its tokens that a larger batch may take more.
        round_size: rounds a batch to what the hardware takes well.
    """
    shares = [find_signal_share([window], batch) for window in windows]
    if len(windows) < 2 or not all(share.is_known for share in shares):
        return None
    largest = [batch * find_largest(share.high, more_tokens) for share in shares]
    sizes = [round_size(min(largest[number:])) for number in range(len(windows))]
    sizes = list(itertools.accumulate(sizes, max))
    starts = [0.0, *(round((window[0].step - 1) / num_steps, 3) for window in windows[1:])]
    parts = [
        (end - start, tokens_ratio(share.value, size / batch), size)
        for start, end, share, size in zip(starts, [*starts[1:], 1.0], shares, sizes, strict=True)
    ]
    stages = [
        pair for pair, before in zip(zip(starts, sizes, strict=True), [0, *sizes], strict=False) if pair[1] > before
    ]
    if stages[-1][1] < MIN_GROWTH * stages[0][1]:
        return None
    tokens = sum(part * ratio for part, ratio, _ in parts)
    return Ramp(tuple(stages), tokens, sum(part * ratio * batch / size for part, ratio, size in parts))


def make_recipe(recipe: Recipe, ramp: Ramp, run: str) -> tuple[Recipe, dict[str, Any]] | None:
    """Make the recipe of a ramp; the learning rate follows the batch. None: the schedule counts steps of another training.

    Args:
        recipe: as it was trained.
        ramp: the ramp.
        run: name of the run that was measured.

    Returns:
        The recipe, and the fields that changed: [old, new].
    """
    if recipe.lr_num_steps is not None or recipe.lr_first_step:
        return None
    old_batch, numbers = recipe.global_batch_size, recipe.scaled_hyperparameters()
    starts, sizes = zip(*ramp.stages, strict=True)
    rate = "linear" if recipe.optimizer_name == "sgd" else "sqrt"
    changes: dict[str, Any] = {
        "global_batch_size": sizes[-1],
        "batch_schedule": BatchSchedule(kind="stages", sizes=sizes, boundaries=starts[1:], rate=rate),
        "learning_rate": numbers.learning_rate,
        "learning_rate_batch_size": old_batch,
        "lr_scaling_rule": "none",
    }
    if recipe.optimizer_name != "sgd":
        names = ("adam_beta1", "adam_beta2", "adam_epsilon")
        changes |= {name: getattr(numbers, name) for name in names}
    if numbers.warmup_epochs is not None:
        changes["warmup_epochs"] = numbers.warmup_epochs
    if recipe.max_train_steps is not None:
        changes["max_train_steps"] = math.ceil(recipe.max_train_steps * ramp.steps)
    if recipe.num_train_epochs is not None:
        changes["num_train_epochs"] = float(f"{recipe.num_train_epochs * ramp.tokens:.4g}")
    if recipe.num_warmup_steps is not None and numbers.warmup_epochs is None:
        changes["num_warmup_steps"] = round(recipe.num_warmup_steps * old_batch / sizes[0])
    values = recipes.overlay(vars(recipe), changes) | {
        "name": f"{recipe.name}_ramp",
        "source": f"{recipe.name}, its batch of {old_batch} made to grow by the gradient noise of {run}",
        "expect": "not measured with these values",
    }
    changed = type(recipe)(**values)
    if changed.problems():
        return None
    old, new = recipe.decisive_fields(), changed.decisive_fields()
    return changed, {name: [old[name], new[name]] for name in changes if old[name] != new[name]}
