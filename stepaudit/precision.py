"""Tells rounding in 16 bits from a fault: the dtypes of a program are noted, and it can be run again in float32 throughout.

Let g be the gradient of a step in 16 bits and G the same in float32, g' and G' those of another layout. If G' = G, then

    |g' - g| <= |g' - G'| + |g - G|:

the layouts differ by no more than what 16 bits have rounded, and the cut changes nothing. If G' is not G, the cut is at fault,
and the causes are those of the comparison in float32, however small the fault is.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stepaudit._internals import get_autocast_dtype, switch_off, tree_map

SHORT_DTYPES = (torch.bfloat16, torch.float16)
Noted = Callable[[str], None]


@contextlib.contextmanager
def note_autocast(note: Noted) -> Iterator[None]:
    """Tell `note` each dtype of 16 bits in which autocast computes inside the block."""
    enter = torch.autocast.__enter__

    def enter_and_note(autocast: torch.autocast) -> Any:
        if (dtype := get_autocast_dtype(autocast)) in SHORT_DTYPES:
            note(name_dtype(dtype))
        return enter(autocast)

    torch.autocast.__enter__ = enter_and_note
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter


@contextlib.contextmanager
def compute_in_float32() -> Iterator[None]:
    """Compute in float32 inside the block what a program computes in 16 bits or TF32; float64 stays."""
    enter, set_default = torch.autocast.__enter__, torch.set_default_dtype

    def enter_disabled(autocast: torch.autocast) -> Any:
        switch_off(autocast)
        _forbid_tf32()
        return enter(autocast)

    torch.autocast.__enter__ = enter_disabled
    torch.set_default_dtype = lambda dtype: set_default(_lengthen(dtype))
    _forbid_tf32()
    try:
        with _Float32():
            yield
    finally:
        torch.autocast.__enter__, torch.set_default_dtype = enter, set_default


def _forbid_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


class _Float32(TorchFunctionMode):
    """Gives each function of torch float32 in the place of a dtype of 16 bits."""

    def __torch_function__(
        self, function: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in (torch.Tensor.half, torch.Tensor.bfloat16):
            function = torch.Tensor.float
        if any(isinstance(value, torch.dtype) for value in (*args, *(kwargs or {}).values())):
            args, kwargs = tree_map(_lengthen, (args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def _lengthen(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in SHORT_DTYPES else value


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype.

    >>> name_dtype(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
