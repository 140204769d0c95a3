"""Watches or changes what a model computes, whoever makes the model, by torch's own hooks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook


@contextlib.contextmanager
def call_after_forward(module_class: type[nn.Module], act: Callable[..., Any]) -> Iterator[None]:
    """Call act(module, outputs, **inputs by name) behind each forward of a class of modules.

    What it returns takes the place of the outputs, unless it is None; what it raises is raised by the forward.
    """

    def hook(module: nn.Module, _: tuple, inputs: dict[str, Any], outputs: Any) -> Any:
        return act(module, outputs, **inputs) if isinstance(module, module_class) else None

    handle = register_module_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
