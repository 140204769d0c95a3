"""Asks the planner, if it is installed, what a step will need."""

import importlib
from typing import Any

from samestep.cut.layout import Layout
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
    try:
        planner = importlib.import_module("stepplan.prediction")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "stepplan":
            raise
        return None
    predicted: int | None = planner.predict_memory(recipe, layout, **options)
    return predicted
