"""The questions of a run to the planner; see `samestep.recipe.prediction`."""

import dataclasses

from samestep.cut.layout import Layout
from samestep.recipe.recipe import Recipe
from stepplan.memory import has_formula
from stepplan.workload import from_recipe


def predict_memory(
    recipe: Recipe,
    layout: Layout,
    *,
    attention: str,
    more_gradient_bytes: int,
    mixed_precision: str,
    gradient_checkpointing: bool,
    sharded: bool,
    num_shards: int | None,
) -> int | None:
    """Predict the bytes that one process needs in a step; None: there is no formula for the recipe.

    Args:
        recipe, layout: what is trained, and how the step is cut.
        attention: sdpa or eager.
        more_gradient_bytes: of each parameter, beside its gradient's own.
        mixed_precision: of the launch: no, bf16 or fp16.
        gradient_checkpointing: whether activations are recomputed.
        sharded, num_shards: whether weights are divided, and among how many processes; None: all.
    """
    if not has_formula(recipe):
        return None
    workload = from_recipe(recipe, attention=attention)
    if more_gradient_bytes:
        workload = dataclasses.replace(workload, gradient_bytes=more_gradient_bytes + workload.gradient_bytes)
    memory = workload.memory(
        layout,
        mixed_precision=mixed_precision,
        gradient_checkpointing=gradient_checkpointing,
        sharded=sharded,
        num_shards=num_shards,
    )
    return int(memory.total)
