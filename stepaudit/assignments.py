"""Sees gradients that a program assigns to `p.grad` itself, as with torch.func, where no backward is called."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from stepaudit._internals import GRADIENT


@contextlib.contextmanager
def watch_assignments(begin: Callable[[torch.Tensor], None], end: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `begin` before, and `end` after a tensor is assigned to the `grad` of another one, which both are given."""

    def assign(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is None:
            GRADIENT.__set__(tensor, value)
            return
        begin(tensor)
        GRADIENT.__set__(tensor, value)
        end(tensor)

    torch.Tensor.grad = property(GRADIENT.__get__, assign, GRADIENT.__delete__)
    try:
        yield
    finally:
        del torch.Tensor.grad
