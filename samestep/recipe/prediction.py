"""Asks the planner, if it is installed, what a step will need."""

from typing import Any

from samestep.cut.layout import Layout
from samestep.recipe.extras import is_there, load_way
from samestep.recipe.recipe import Recipe


def predict_memory(recipe: Recipe, layout: Layout, **options: Any) -> int | None:
    """Predict the bytes that one process needs in a step.

    Args:
        recipe: what is trained.
        layout: how the step is cut.
        options: as `stepplan.prediction.predict_memory` takes them.

    Returns:
        Bytes; None: the planner is not installed, or has no formula for the recipe.
    """
    place = "stepplan.prediction:predict_memory"
    predicted: int | None = load_way(place, "a prediction")(recipe, layout, **options) if is_there(place) else None
    return predicted
