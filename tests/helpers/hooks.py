"""Watches or changes what a model computes, by torch's own hooks, and what a program asks of the system, by Python's."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode


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


_ACTS: list[tuple[str, Callable[..., Any]]] = []
"""What is done before events of Python's audit, which keeps its hooks for ever."""


def _act(event: str, arguments: tuple) -> None:
    for name, act in _ACTS:
        if name == event:
            act(*arguments)


@functools.cache
def _listen() -> None:
    sys.addaudithook(_act)


@contextlib.contextmanager
def before(event: str, act: Callable[..., Any]) -> Iterator[None]:
    """Call act(*arguments) before each event of Python's audit, in any thread; what it raises, the operation raises.

    Args:
        event: as os.rename, shutil.rmtree or open; Python's table of audit events has the arguments of each.
    """
    _listen()
    _ACTS.append((event, act))
    try:
        yield
    finally:
        _ACTS.remove((event, act))


class Watch(TorchFunctionMode):
    """Calls act(*arguments, **keywords) in the place of a function of torch, which itself is the first argument.

    Args:
        function: as torch.addmm, F.log_softmax or torch.Tensor.pin_memory.
        act: makes the result.
    """

    def __init__(self, function: Callable[..., Any], act: Callable[..., Any]):
        super().__init__()
        self.function, self.act = function, act

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        return (
            self.act(function, *arguments, **keywords)
            if function is self.function
            else function(*arguments, **keywords)
        )


@contextlib.contextmanager
def list_calls(*functions: Callable[..., Any]) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """List the calls of functions of Python in this thread, by its own profiler: the name of each, and its arguments."""
    codes = {function.__code__ for function in functions}
    calls: list[tuple[str, dict[str, Any]]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            calls.append((frame.f_code.co_name, dict(frame.f_locals)))

    earlier = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(earlier)


class StepCount:
    """Counts the steps that all optimizers of this process have taken since it was made; a context manager."""

    def __enter__(self) -> "StepCount":
        self.value = 0
        self._handle = register_optimizer_step_post_hook(self._count)
        return self

    def _count(self, *_: object) -> None:
        self.value += 1

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
