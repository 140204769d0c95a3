"""Sees whether a program reads numbers of tensors, by which it may decide what it computes."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from stepaudit._internals import find_caller

READS = ("item", "__bool__", "__float__", "tolist")


@contextlib.contextmanager
def watch_reads(is_own: Callable[[str], bool], note: Callable[[], None]) -> Iterator[None]:
    """Call `note` once if a function of the program reads a fractional number, or a truth, out of a tensor.

    Args:
        is_own: tells whether a file is of the program.
        note: is called; nothing is watched behind it.
    """
    originals = {name: getattr(torch.Tensor, name) for name in READS}
    kept = {name: vars(torch.Tensor)[name] for name in READS if name in vars(torch.Tensor)}

    def stop() -> None:
        for name in READS:
            if name in kept:
                setattr(torch.Tensor, name, kept[name])
            elif name in vars(torch.Tensor):
                delattr(torch.Tensor, name)

    def make(name: str) -> Callable:
        def read(tensor: torch.Tensor, *args: object) -> object:
            is_number = tensor.is_floating_point() or tensor.dtype == torch.bool
            if is_number and is_own(find_caller(1)):
                stop()
                note()
            return originals[name](tensor, *args)

        return read

    for name in READS:
        setattr(torch.Tensor, name, make(name))
    try:
        yield
    finally:
        stop()
