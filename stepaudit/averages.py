"""Watches what follows the weights: averages of them, teachers, target networks, whose parameters no optimizer has."""

import gc
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from stepaudit._internals import count_changes, find_objects
from stepaudit.random_projection import sketch

COLUMNS = 16  # numbers that are kept of each module


class Averages:
    """Finds modules beside a model, or beside parts of it, that have parameters of the same shapes and share none with it.

    Attributes:
        modules: parameters of each.
        have_ever_changed: whether any of them was seen to change.
    """

    def __init__(self) -> None:
        self.have_ever_changed = False
        self.modules: list[list[nn.Parameter]] = []
        self.versions: list[int] = []

    def find(self, model: nn.Module) -> None:
        """Find those of a model."""
        shapes, model_ids = Counter(tuple(p.shape) for p in model.parameters()), {id(p) for p in model.parameters()}
        known_ids = {id(p) for parameters in self.modules for p in parameters}
        gc.collect()  # models that are gone follow nothing
        modules = find_objects(nn.Module)
        # The largest first: a module inside another one is known with it
        for parameters in sorted(([*module.parameters()] for module in modules), key=len, reverse=True):
            if not parameters or any(id(p) in model_ids | known_ids for p in parameters):
                continue
            if not Counter(tuple(p.shape) for p in parameters) - shapes:
                self.modules.append(parameters)
                self.versions.append(sum(map(count_changes, parameters)))
                known_ids |= {id(p) for p in parameters}

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave out modules of which an optimizer has a parameter."""
        ids = {id(p) for p in parameters}
        kept = [number for number, module in enumerate(self.modules) if not any(id(p) in ids for p in module)]
        self.modules = [self.modules[number] for number in kept]
        self.versions = [self.versions[number] for number in kept]

    def have_changed(self) -> bool:
        """Tell whether any of them has changed since the last call."""
        versions = [sum(map(count_changes, parameters)) for parameters in self.modules]
        has_changed, self.versions = versions != self.versions, versions
        self.have_ever_changed |= has_changed
        return has_changed

    def sketch(self) -> np.ndarray:
        """Return float64 [modules * COLUMNS]: random sums of the parameters of each module."""
        rows = []
        for parameters in self.modules:
            numbers = sketch(parameters, parameters)
            signs = torch.randint(2, (COLUMNS, len(numbers)), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
            rows.append((signs.double() @ numbers).numpy())
        return np.concatenate(rows) if rows else np.zeros(0)
