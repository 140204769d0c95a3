"""The one list of what is not the usual way; what `samestep.contrib` holds is imported here alone, when a run asks for it."""

import importlib
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from samestep.recipe.recipe import Recipe
from samestep.recipe.run_settings import RunSettings
from samestep.training.copies import Peers, Store
from samestep.training.reduction import Reduction

WAYS: list[tuple[str, Callable[[Any, Any], bool]]] = [
    ("samestep.contrib.replication.reduction:Replicated", lambda recipe, settings: settings.fault_tolerance == "step"),
    (
        "samestep.contrib.communication.reductions:LocalSteps",
        lambda recipe, settings: recipe.communication is not None and recipe.communication.is_local,
    ),
    ("samestep.contrib.communication.reductions:Exchanging", lambda recipe, settings: recipe.communication is not None),
    ("samestep.contrib.folding:Folding", lambda recipe, settings: recipe.accumulation == "optimizer"),
    ("samestep.training.reduction:ExactSums", lambda recipe, settings: settings.reproducible is not None),
    ("samestep.training.reduction:Reduction", lambda recipe, settings: True),
]
"""MODULE:CLASS, and whether a recipe and its settings ask for it; the first that is asked for is taken."""


def _load(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def open_store(accelerator: Accelerator, settings: RunSettings) -> Store:
    """Open the place in which a run keeps copies of its checkpoints."""
    if settings.checkpoint_store is None:
        return Store()
    store: Store = _load("samestep.contrib.copies.checkpoint_store:open_store")(accelerator, settings)
    return store


def find_peers(accelerator: Accelerator, settings: RunSettings) -> Peers:
    """Find the machines that keep copies of a run's checkpoints."""
    if not settings.replicate_checkpoints:
        return Peers()
    peers: Peers = _load("samestep.contrib.copies.peer_copies:find_peers")(accelerator, settings)
    return peers


def choose_reduction(accelerator: Accelerator, recipe: Recipe, settings: RunSettings) -> Reduction:
    """Make the reduction of a run."""
    place = next(way for way, is_wanted in WAYS if is_wanted(recipe, settings))
    reduction: Reduction = _load(place)(accelerator, recipe, settings)
    return reduction
