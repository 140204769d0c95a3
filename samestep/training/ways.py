"""The one list of ways in which gradients become a step's; all but the first two are of `samestep.contrib`."""

import importlib
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from samestep.recipe.recipe import Recipe
from samestep.recipe.run_settings import RunSettings
from samestep.training.reduction import Reduction

WAYS: list[tuple[str, Callable[[Any, Any], bool]]] = [
    ("samestep.contrib.replication.reduction:Replicated", lambda recipe, settings: settings.fault_tolerance == "step"),
    (
        "samestep.contrib.communication.reductions:LocalSteps",
        lambda recipe, settings: recipe.exchange is not None and recipe.exchange.is_local,
    ),
    ("samestep.contrib.communication.reductions:Exchanging", lambda recipe, settings: recipe.exchange is not None),
    ("samestep.contrib.folding:Folding", lambda recipe, settings: recipe.accumulation == "optimizer"),
    ("samestep.training.reduction:ExactSums", lambda recipe, settings: settings.reproducible is not None),
    ("samestep.training.reduction:Reduction", lambda recipe, settings: True),
]
"""MODULE:CLASS, and whether a recipe and its settings ask for it; the first that is asked for is taken."""


def choose_reduction(accelerator: Accelerator, recipe: Recipe, settings: RunSettings) -> Reduction:
    """Make the reduction of a run."""
    module, name = next(way for way, is_wanted in WAYS if is_wanted(recipe, settings)).split(":")
    reduction: Reduction = getattr(importlib.import_module(module), name)(accelerator, recipe, settings)
    return reduction
