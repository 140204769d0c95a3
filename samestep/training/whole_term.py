"""The place in an exact trainer for a term of its own loss that depends on the whole step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class WholeTerm:
    """The term of a trainer's own loss that depends on the whole step: there is none. Others have the form of this class.

    Attributes:
        is_there: whether the trainer's own loss has to be asked, as it has such a term.
    """

    is_there = False

    def ask(self, own_loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Ask the trainer's own loss of a batch; return the loss, or (loss, outputs), without this term."""
        return own_loss(*args, **kwargs)

    def look(self, trainer: Any, batches: Sequence[Any]) -> None:
        """See the micro-batches of a step of this process before the first is trained. Called by all processes."""

    def part(self) -> torch.Tensor | float:
        """Return the part of the step's term of the micro-batch that was asked last: all parts add up to it."""
        return 0.0

    def show(self, sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Add this term of the batch that was asked last to its sums, [terms], in evaluation."""
        return sums
