"""Watches that a trainer takes the gradient of the loss that was computed, of the micro-batch that was read."""

from collections.abc import Mapping
from typing import Any

import torch

from samestep.errors import UsageError


class MicroBatchWatch:
    """Watches a trainer's micro-batch, from when it is read until its gradient is there.

    Attributes:
        num_losses: how many losses were computed, in training and in evaluation.
    """

    def __init__(self) -> None:
        self.num_losses, self._loss = 0, torch.zeros(())
        self._read: dict[str, torch.Tensor] = {}

    def read(self, inputs: Any) -> None:
        """Keep what is read: a trainer may change the mapping."""
        named = inputs.items() if isinstance(inputs, Mapping) else ()
        self._read = {name: value for name, value in named if isinstance(value, torch.Tensor)}

    def computed(self, loss: torch.Tensor) -> None:
        """Note a loss."""
        self.num_losses, self._loss = self.num_losses + 1, loss.detach()

    def check_unchanged(self, inputs: Any, owner: str) -> None:
        """Refuse a micro-batch that is not the one that was read, and counted."""
        known = {name: value for name, value in self._read.items() if name in inputs}
        if other := [name for name, value in known.items() if not _is_same(inputs[name], value)]:
            raise UsageError(
                f"training_step of {owner} changed {', '.join(other)} of the batch that was read: what a step learns from "
                "depends on its cut. Turn off what generates there (GKD: lmbda=0.0)"
            )

    def check_number(self, before: int, owner: str) -> None:
        """Refuse a training_step that took the gradient of none of our losses, or of several."""
        if self.num_losses != before + 1:
            raise UsageError(
                f"training_step of {owner} asked compute_loss {self.num_losses - before} times for a micro-batch, must be "
                "once: its gradient is not that of one loss"
            )

    def check_scale(self, loss: torch.Tensor, owner: str) -> None:
        """Refuse a training_step that returned another loss than the one that was computed."""
        if not torch.allclose(loss, self._loss.to(loss), equal_nan=True):
            raise UsageError(
                f"training_step of {owner} made {loss.item():.6g} of a loss of {self._loss.item():.6g}, must leave it as it "
                "is: it would scale the gradient, too"
            )


def _is_same(value: Any, other: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or value is other:
        return value is other
    return value.shape == other.shape and bool((value == other.to(value.device)).all())
