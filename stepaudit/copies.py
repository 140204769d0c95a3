"""Copies a model so that the copy computes itself, and nothing of the model that it was copied from.

`copy.deepcopy` copies modules and tensors, and shares functions. A program that replaces a model's `forward` by a function that
calls the old one (fused heads, casts, autocast) leaves the model in that function's closure: the copy would compute the model.
"""

import contextlib
import copy
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from stepaudit._internals import GRADIENT


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model, with the functions that were put into its modules, so that these call the copy's modules."""
    copies: dict[Any, Any] = {}
    twin = copy.deepcopy(model, copies)
    ids = {id(part) for part in twin.modules()}
    for part in twin.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, dict) and name.endswith("_hooks"):
                value.update({key: _bind(hook, copies) for key, hook in value.items()})
            elif callable(value) and id(value) not in ids:
                object.__setattr__(part, name, _bind(value, copies))
    return twin


def _bind(value: Any, copies: dict[Any, Any]) -> Any:
    """Return a function that refers to copies where this one refers to what was copied; anything else as it is, or its copy.

    Args:
        value: of an attribute, or of a closure.
        copies: id -> copy; functions that are bound are added.
    """
    if id(value) in copies and not isinstance(value, types.FunctionType | types.MethodType):
        return copies[id(value)]
    if isinstance(value, types.MethodType):
        owner = copies.get(id(value.__self__), value.__self__)
        return types.MethodType(_bind(value.__func__, copies), owner)
    if isinstance(value, functools.partial):
        words = {name: _bind(word, copies) for name, word in value.keywords.items()}
        return functools.partial(_bind(value.func, copies), *(_bind(arg, copies) for arg in value.args), **words)
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    key = ("bound", id(value))
    if key not in copies:
        cells = tuple(types.CellType() for _ in value.__closure__)
        bound = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        copies[key] = bound  # here: a function may be in its own closure
        bound.__kwdefaults__ = value.__kwdefaults__
        bound.__dict__.update({name: _bind(attribute, copies) for name, attribute in vars(value).items()})
        for cell, original in zip(cells, value.__closure__, strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                cell.cell_contents = _bind(original.cell_contents, copies)
    return copies[key]


@contextlib.contextmanager
def refuse_calls(model: nn.Module) -> Iterator[None]:
    """Raise RuntimeError where a module of a model is called inside the block: a copy of the model has not become its own."""

    def refuse(module: nn.Module, *_: Any) -> None:
        raise RuntimeError(f"a copy of it calls the {type(module).__name__} of the program itself")

    handles = [part.register_forward_pre_hook(refuse) for part in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def put_gradients_aside(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put gradients aside inside the block: a backward there reaches none of them, whatever it computes."""
    pairs = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in pairs:
        GRADIENT.__set__(parameter, None)
    try:
        yield
    finally:
        for parameter, gradient in pairs:
            GRADIENT.__set__(parameter, gradient)
