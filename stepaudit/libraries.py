"""Reaches libraries that train parts of their own in the place of a program's parameters: what the recorder asks of each.

Nothing but `WATCHED` names one. Without its module the programs of a library are recorded as all others are.
"""

import contextlib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stepaudit.keeping import Keeping

WATCHED = {"deepspeed.runtime.engine": "stepaudit.zero"}
"""Module that a program imports -> ours, whose `watch(recorder)` returns a `Library`."""


class Library:
    """Answers the recorder's questions as torch alone would. A library overrides what it does otherwise."""

    def is_inner(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer steps inside of another one, which the library reports itself."""
        return False

    def find_optimizers(self) -> list[Any]:
        """Find the library's optimizers: no `torch.optim.Optimizer`, but with `param_groups`."""
        return []

    def list_parameters(self, optimizer: Any) -> list[nn.Parameter] | None:
        """List the program's parameters that an optimizer trains; None: those in its groups."""
        return None

    def make_keeping(self, parameters: Sequence[nn.Parameter]) -> Keeping | None:
        """Make what reads these parameters; None: the library does not keep them."""
        return None

    def find_refusal(self, module: nn.Module) -> str:
        """Say why a called module must not be computed again for questions; empty: it may."""
        return ""

    def scale_loss(self, loss: float | None) -> float | None:
        """Return the loss that the gradient of the present backward is of, which may begin with another multiple of it."""
        return loss


class Libraries(Library):
    """Asks every library that the program has imported by now; the first that answers is right."""

    def __init__(self) -> None:
        self.found = list[Library]()
        self.unwatched = dict(WATCHED)

    def watch(self, recorder: Any) -> None:
        """Watch those that the program has imported since the last call. They report to the recorder, until it ends."""
        for name in self.unwatched.keys() & sys.modules.keys():
            with contextlib.suppress(ModuleNotFoundError):  # it can be deleted
                self.found.append(importlib.import_module(self.unwatched[name]).watch(recorder))
            del self.unwatched[name]

    def is_inner(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(library.is_inner(optimizer) for library in self.found)

    def find_optimizers(self) -> list[Any]:
        return [optimizer for library in self.found for optimizer in library.find_optimizers()]

    def list_parameters(self, optimizer: Any) -> list[nn.Parameter]:
        own = next((p for library in self.found if (p := library.list_parameters(optimizer)) is not None), None)
        return [p for group in optimizer.param_groups for p in group["params"]] if own is None else own

    def make_keeping(self, parameters: Sequence[nn.Parameter]) -> Keeping:
        own = (library.make_keeping(parameters) for library in self.found)
        return next((keeping for keeping in own if keeping is not None), None) or Keeping(parameters)

    def find_refusal(self, module: nn.Module) -> str:
        return next(filter(None, (library.find_refusal(module) for library in self.found)), "")

    def scale_loss(self, loss: float | None) -> float | None:
        for library in self.found:
            loss = library.scale_loss(loss)
        return loss
