"""What is planned: a model, its global batch, and what the optimizer keeps and moves, from a recipe."""

import dataclasses
from typing import Any

from samestep.cut import layout as plan
from samestep.cut.layout import Layout
from samestep.errors import UsageError
from samestep.planner.convnet import ConvNet
from samestep.planner.memory import MOMENTS, Memory, Model, model_of, planned_memory
from samestep.planner.transformer import Transformer
from samestep.recipe.recipe import ImageRecipe, Recipe
from samestep.recipe.schedule import Schedule

UPDATE = {"adamw": 28, "sgd": 20}
"""Bytes that an update moves per parameter: AdamW reads p, g, m, v and writes p, m, v; SGD p, g, m and p, m."""
CLIPPING = 12
"""Bytes that clipping moves per parameter: it reads the gradient twice and writes it."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """What hardware is asked to compute.

    Attributes:
        name: of the recipe, or of the model's configuration.
        model: its shape.
        global_batch_size: B.
        num_steps: optimizer steps to the end; None where that depends on data that nobody has counted yet.
        steps_per_epoch: None likewise.
        schedule: the learning rate of each step; None likewise.
        script: that trains it; None: this repository has none.
        moment_bytes: per parameter, what the optimizer remembers.
        gradient_bytes: per parameter, gradients that are kept between micro-batches.
        optimizer_bytes: per parameter, what clipping and update move.
        second_moment: how the optimizer estimates it, if it does.
        batch_normalization: statistics depend on the micro-batch.
        critical_batch_size: beyond it samples are wasted; None: unknown.
    """

    name: str
    model: Model
    global_batch_size: int
    num_steps: int | None = None
    steps_per_epoch: float | None = None
    schedule: Schedule | None = None
    script: str | None = None
    moment_bytes: int = MOMENTS["adamw"]
    gradient_bytes: int = 4
    optimizer_bytes: int = UPDATE["adamw"] + CLIPPING
    second_moment: str | None = None
    batch_normalization: bool = False
    critical_batch_size: float | None = None

    def memory(self, layout: Layout, **options: Any) -> Memory:
        """That one process is planned to need; `options` as of `memory.planned_memory`."""
        return planned_memory(
            self.model, layout, **options, moment_bytes=self.moment_bytes, gradient_bytes=self.gradient_bytes
        )


def from_model(
    model: Model,
    name: str,
    *,
    global_batch_size: int,
    optimizer: str = "adamw",
    num_steps: int | None = None,
    steps_per_epoch: float | None = None,
    attention: str = "sdpa",
    critical_batch_size: float | None = None,
) -> Workload:
    """The work that a step of any model asks for, without clipping.

    Args:
        model: of `configs.shape_of`.
        name: for messages.
        global_batch_size: B.
        optimizer: adamw or sgd, with momentum.
        num_steps, steps_per_epoch: where they are known.
        attention: sdpa or eager, of transformers.
        critical_batch_size: samples, for a warning.

    Raises:
        UsageError: eager attention without attention.
    """
    return Workload(
        name=name,
        model=_with_attention(model, attention, name),
        global_batch_size=global_batch_size,
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
        moment_bytes=MOMENTS[optimizer],
        optimizer_bytes=UPDATE[optimizer],
        batch_normalization=isinstance(model, ConvNet) and not model.grouped,
        critical_batch_size=critical_batch_size,
    )


def _with_attention(model: Model, attention: str, name: str) -> Model:
    if attention == "sdpa":
        return model
    if not isinstance(model, Transformer):
        raise UsageError(f"attn_implementation is {attention}, but {name} has no attention: leave it out")
    return dataclasses.replace(model, eager=True)


def from_recipe(
    recipe: Recipe,
    *,
    attention: str = "sdpa",
    num_train_samples: int | None = None,
    critical_batch_size: float | None = None,
) -> Workload:
    """The work that a recipe asks for.

    Args:
        recipe: of a task that `memory.model_of` knows.
        attention: sdpa or eager, of transformers.
        num_train_samples: of the data, where the recipe does not know it.
        critical_batch_size: samples, for a warning.

    Raises:
        UsageError: a task without a formula, eager attention without attention, a schedule that cannot be.
    """
    model = _with_attention(model_of(recipe), attention, recipe.name)
    is_image = isinstance(recipe, ImageRecipe)
    optimizer = recipe.optimizer_name
    num_samples = num_train_samples or (recipe.num_train_samples if is_image else None)
    num_steps, per_epoch = recipe.max_train_steps, None
    if num_samples is not None:
        exact = plan.steps_per_epoch(num_samples, recipe.global_batch_size, recipe.epoch_end)
        num_steps, per_epoch = num_steps or plan.num_steps(exact, recipe.num_train_epochs), float(exact)
    counts_epochs = (recipe.warmup_epochs, recipe.scaled_hyperparameters().warmup_epochs) != (None, None)
    has_schedule = num_steps is not None and (per_epoch is not None or not counts_epochs)
    return Workload(
        name=recipe.name,
        model=model,
        global_batch_size=recipe.global_batch_size,
        num_steps=num_steps,
        steps_per_epoch=per_epoch,
        schedule=recipe.schedule(num_steps, per_epoch or 1.0) if has_schedule else None,
        script=recipe.parts.script,
        moment_bytes=MOMENTS[optimizer],
        gradient_bytes=4 if recipe.accumulation == "gradient" else 0,
        second_moment=recipe.second_moment,
        optimizer_bytes=UPDATE[optimizer] + (0 if recipe.max_grad_norm is None else CLIPPING),
        batch_normalization=is_image and recipe.normalization == "batch" and not recipe.exact_batch_norm,
        critical_batch_size=critical_batch_size,
    )
