"""The steps of a training: the samples of each, how many they are, the learning rate of each, how many are taken now."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from samestep.cut.layout import Layout
from samestep.cut.order import Order
from samestep.cut.spans import Spans
from samestep.data.steps import Steps
from samestep.printing import describe_sizes
from samestep.recipe import rehearsal
from samestep.recipe.recipe import Recipe
from samestep.recipe.run_settings import RunSettings
from samestep.recipe.schedule import LearningRates
from samestep.training import ways
from samestep.training.launch import waits_in_forward

if TYPE_CHECKING:
    from samestep.training.run import Run


def plan_training(
    recipe: Recipe, num_samples: int, mixture: Any, decided: Sequence[Any]
) -> tuple[Order, int, LearningRates]:
    """Plan the steps of a recipe.

    Args:
        recipe: what is trained.
        num_samples: samples of an epoch.
        mixture: of the sources that the samples come from, see `Order`; empty: there is one.
        decided: stages of a batch that grows, where they were decided while it trained.

    Returns:
        The samples of each step, the number of steps, the learning rate of each.
    """
    order = ways.choose_order(recipe)(num_samples, recipe.global_batch_size, recipe.seed, recipe.epoch_end, mixture)
    if recipe.batch_schedule is not None:
        plan = recipe.batch_schedule.plan_steps(recipe, num_samples, decided)
        assert plan is not None, "the number of samples is known"
        assert plan.schedule is not None, "so is the warm-up, then"
        return dataclasses.replace(order, stages=plan.stages), plan.num_steps, plan.schedule
    num_steps = recipe.max_train_steps or order.num_steps(recipe.num_train_epochs)
    return order, num_steps, recipe.schedule(num_steps, float(order.steps_per_epoch))


class Plan:
    """The steps of a run.

    Args:
        recipe, settings: the run's.
        layout: how the hardware cuts a step, before anything is tried.

    Attributes:
        order: decides which samples each step holds.
        num_steps: steps of the whole training.
        schedule: learning rate of each step.
        last_step: steps after which this session ends.
    """

    order: Order
    num_steps: int
    schedule: LearningRates
    last_step: int

    def __init__(self, recipe: Recipe, settings: RunSettings, layout: Layout):
        self.recipe, self.settings, self.layout = recipe, settings, layout

    def lay_out(self, num_samples: int, mixture: Any, decided: Sequence[Any]) -> None:
        """Lay out the steps; see `plan_training`."""
        self.order, self.num_steps, self.schedule = plan_training(self.recipe, num_samples, mixture, decided)
        self.limit()

    def limit(self) -> None:
        """Find the step at which the session ends."""
        self.last_step = min(self.num_steps, self.settings.stop_after_step or self.num_steps)

    def shorten(self) -> None:
        """Leave as many steps as a rehearsal takes."""
        self.num_steps = min(self.num_steps, rehearsal.NUM_STEPS)
        self.limit()

    @property
    def spans(self) -> Spans | None:
        """Parts of the stream of samples that the steps hold, where the batch grows; None: it stays."""
        return self.order.spans if self.order.stages else None

    def describe_growth(self) -> str:
        """Say how the batch grows, after the layout in the first line of a run; nothing where it stays."""
        if self.spans is None:
            return ""
        return f"; {describe_sizes(self.spans.list_sizes(self.num_steps))}"


def cut_steps(run: "Run", train: Any) -> Steps:
    """Make what cuts the steps of a run, whose plan is laid out and whose model is prepared.

    Args:
        run: the run.
        train: the training data.
    """
    steps = ways.choose_steps(run.recipe)(
        train,
        run.plan.order,
        run.plan.layout,
        process_index=run.accelerator.process_index,
        max_tokens=getattr(run.settings, "per_device_train_tokens", None),
        same_num_micro_batches=waits_in_forward(run.accelerator, run.network.model),
        deals_whole=run.reduction.is_exact,
        random_steps=run.settings.noise_scale_steps,
    )
    steps.own_parts = run.reduction.own_parts
    return steps
