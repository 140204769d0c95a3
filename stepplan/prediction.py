"""The questions of a run to the planner; see `samestep.recipe.prediction`."""

import dataclasses
from typing import Any

from samestep.cut.layout import Layout
from samestep.recipe.recipe import Recipe
from stepplan.base_models import UnknownShapeError
from stepplan.memory import has_formula
from stepplan.workload import from_recipe


def predict_memory(
    recipe: Recipe, layout: Layout, *, attention: str, more_gradient_bytes: int, **options: Any
) -> int | None:
    """Predict the bytes that one process needs in a step; None: there is no formula for the recipe's model.

    Args:
        recipe, layout: what is trained, and how the step is cut.
        attention: sdpa or eager.
        more_gradient_bytes: of each parameter, beside its gradient's own.
        options: of the launch, as of `memory.planned_memory`.
    """
    if not has_formula(recipe):
        return None
    try:
        workload = from_recipe(recipe, attention=attention)
    except UnknownShapeError:  # which is nothing that the recipe has to mend
        return None
    if more_gradient_bytes:
        workload = dataclasses.replace(workload, gradient_bytes=more_gradient_bytes + workload.gradient_bytes)
    return int(workload.memory(layout, **options).total)
