"""Asks a model, while its own program trains it, why a step may be no sum over its samples.

- The loss: l is a sum over samples only if the gradient with respect to what belongs to one sample does not depend on another
  one. So d2 l / da_i da_j is 0 for the activations a of two samples i and j. Where it is not, samples are mixed after a: by the
  loss, when a is what the model returns.
- The model: it is computed again, a copy of it, on rows of the micro-batch that it was given (`entrance.py`).
"""

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.batchnorm import SyncBatchNorm

from stepaudit._internals import BatchNorm, tree_leaves, tree_map
from stepaudit.entrance import MOST_SAMPLES, entrances, same_noise

DIFFERENT = 1e-4  # relative: models compute in float32 inside, whatever they are converted to
MOST_NUMBERS = 10_000  # of a parameter's gradient that are looked at
MIXED = 1e-8  # of the second derivative; it is 0 otherwise
LARGEST = 10**9  # parameters of a model that is copied
EXPERTS = re.compile(r"rout|gat(e|ing)\b|expert|moe|switch", re.IGNORECASE)

Fact = list[str]  # cause, where
Activation = tuple[str, nn.Module, torch.Tensor]
Grad = Callable[..., Sequence[torch.Tensor | None]]


def is_shared(module: nn.Module) -> bool:
    """Whether processes must compute it together (FSDP, tensor parallelism, SyncBatchNorm): one alone cannot ask it."""
    return any(isinstance(part, SyncBatchNorm) for part in module.modules()) or any(
        hasattr(parameter, "full_tensor") for parameter in module.parameters()
    )


def _is_good_for_one_backward(loss: torch.Tensor) -> bool:
    """Whether a custom autograd function of the graph keeps tensors by itself, not by `save_for_backward`: its backward may use
    them up, and the program's own would then fail."""
    todo, seen = [loss.grad_fn], {loss.grad_fn}
    while todo:
        node = todo.pop()
        kept = vars(node) if isinstance(node, BackwardCFunction) else {}
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(kept)):
            return True
        new = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= new
        todo += new
    return False


def facts_of_loss(loss: Any, activations: list[Activation], num_rows: int, grad: Grad) -> list[Fact] | None:
    """Whether the loss mixes samples after the activations, and where. Leaves the graph as it is.

    Args:
        loss: what a backward starts from.
        activations: name, module and output [rows * any, ...] of each module that was called, in the order of their ends.
        num_rows: samples of the micro-batch.
        grad: `torch.autograd.grad`.

    Returns:
        At most one fact, `batch_norm`, `expert_balance`, `mixed_samples` or `mixed_loss`; None where nothing can be said.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or num_rows < 2 or not loss.requires_grad:
        return None
    activations = [of for of in activations if len(of[2]) and len(of[2]) % num_rows == 0]
    if not activations or _is_good_for_one_backward(loss):
        return None
    try:
        used = grad(loss, [of for *_, of in activations], retain_graph=True, allow_unused=True)
    except RuntimeError:  # reentrant checkpointing has no gradient of activations
        return None
    activations = [of for of, first in zip(activations, used, strict=True) if first is not None]
    states: dict[int, bool | None] = {}

    def mixes(number: int) -> bool | None:
        if number not in states:
            try:
                states[number] = _mixes(loss, activations[number][2], num_rows, grad)
            except (RuntimeError, NotImplementedError):  # attention kernels have no second derivative
                states[number] = None
        return states[number]

    if not activations:
        return None
    last = len(activations) - 1
    # Samples that are mixed after an activation are mixed after each one before it: the last such one, by halves.
    low, high = 0, last + 1  # not clean before low, clean from high on
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if mixes(middle) is not False else (low, middle)
    if low == 0:
        return []
    if not mixes(low - 1):
        return None
    name, module, _ = activations[low - 1]
    if EXPERTS.search(f"{name} {type(module).__name__}"):
        return [["expert_balance", _place(name, module)]]
    if low > last:
        return [["mixed_loss", f"the loss, after {_place(name, module)}"]]
    name, module, _ = activations[low]
    if EXPERTS.search(f"{name} {type(module).__name__}"):
        return [["expert_balance", _place(name, module)]]
    return [["batch_norm" if isinstance(module, BatchNorm) else "mixed_samples", _place(name, module)]]


def _mixes(loss: torch.Tensor, activation: torch.Tensor, num_rows: int, grad: Grad) -> bool:
    (first,) = grad(loss, activation, create_graph=True, retain_graph=True, allow_unused=True)
    if first is None or not first.requires_grad:
        return False
    size = len(activation) // num_rows
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(first[:size].shape, generator=generator, dtype=torch.float64).to(first)
    (second,) = grad((first[:size] * direction).sum(), activation, retain_graph=True, allow_unused=True)
    if second is None:
        return False
    own, others = second[:size].abs().max(), second[size:].abs().max()
    return bool(others > MIXED * torch.maximum(own, others))


def facts_of_model(module: nn.Module, args: tuple, kwargs: dict, used: set[int], num_rows: int) -> list[Fact] | None:
    """Whether a call of a model is a function of one sample at a time, and where it stops being one.

    Args:
        used: which of the tensors that it returns the loss follows from, by their place.
        num_rows: samples of the micro-batch.

    Returns:
        Facts with the causes of `entrances`; None where the model cannot be asked.
    """
    if num_rows < 2 or sum(parameter.numel() for parameter in module.parameters()) > LARGEST:
        return None
    try:
        model = copy.deepcopy(module).double()
        rows, samples = _Rows(args, kwargs, num_rows), range(num_rows)[:MOST_SAMPLES]
        found = entrances(model, samples, rows.select, _Objective(used), DIFFERENT)
        facts = [[finding.cause, finding.where] for finding in found]
        experts = [_place(name, part) for name, part in model.named_modules() if EXPERTS.search(type(part).__name__)]
        if experts and not facts and not _is_sum(model, rows, used, samples):
            facts = [["expert_balance", experts[0]]]
    except Exception:  # of any kind: the model is somebody's program, and is asked what it was not written for
        return None
    return facts


def _is_sum(model: nn.Module, rows: "_Rows", used: set[int], samples: Sequence[int]) -> bool:
    """Whether the gradient of the loss that a model computes itself is a weighted sum of those of single samples.

    Numbers of the tokens of each expert pass no gradient, have no second derivative, and are seen here only.
    """

    def gradient(chosen: Sequence[int]) -> list[torch.Tensor] | None:
        args, kwargs = rows.select(chosen)
        with same_noise(1):
            returned = outputs_of(model(*args, **kwargs))
        losses = [of for number, of in enumerate(returned) if number in used and not of.ndim and of.requires_grad]
        if not losses:
            return None
        found = torch.autograd.grad(losses[0], parameters, allow_unused=True)
        return [torch.zeros(1) if of is None else of.flatten()[:MOST_NUMBERS].cpu() for of in found]

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if (whole := gradient(samples)) is None:
        return True
    singles = [gradient([sample]) for sample in samples]
    flat = torch.cat(whole)
    matrix = torch.stack([torch.cat(single) for single in singles], 1)
    weights = torch.linalg.lstsq(matrix, flat[:, None], driver="gelsd").solution
    rests = (matrix @ weights)[:, 0].sub(flat).split([len(of) for of in whole])
    large = [(rest, of) for rest, of in zip(rests, whole, strict=True) if of.norm() > DIFFERENT * flat.norm()]
    return all(rest.norm() <= DIFFERENT * of.norm() for rest, of in large)


class _Objective:
    """A function of what the loss follows from."""

    def __init__(self, used: set[int]):
        self.used = used

    def __call__(self, model: nn.Module, batch: tuple[tuple, dict]) -> torch.Tensor | None:
        args, kwargs = batch
        returned = outputs_of(model(*args, **kwargs))
        values = [of.square().sum() for number, of in enumerate(returned) if number in self.used and of.requires_grad]
        return torch.stack(values).sum() if values else None


def outputs_of(returned: Any) -> list[torch.Tensor]:
    """The tensors of floating point numbers that a module returned."""
    returned = dict(returned) if hasattr(returned, "to_tuple") else returned
    return [of for of in tree_leaves(returned) if isinstance(of, torch.Tensor) and of.is_floating_point()]


class _Rows:
    """The arguments of a call for some of its rows, without the padding that these do not need."""

    def __init__(self, args: tuple, kwargs: dict, num_rows: int):
        self.call = tree_map(_detached, (args, _mapping(kwargs)))
        self.num_rows = num_rows
        self.width, self.lengths, self.is_left = self._padding()

    def select(self, rows: Sequence[int]) -> tuple[tuple, dict]:
        chosen = torch.as_tensor(list(rows))
        longest = self.width if self.lengths is None else int(self.lengths[chosen].max())

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.ndim or len(leaf) != self.num_rows:
                return leaf
            leaf = leaf[chosen.to(leaf.device)]
            for dimension in range(1, leaf.ndim):
                if self.lengths is not None and leaf.shape[dimension] == self.width:
                    leaf = leaf.narrow(dimension, self.width - longest if self.is_left else 0, longest)
            return leaf

        return tree_map(cut, self.call)

    def _padding(self) -> tuple[int, torch.Tensor | None, bool]:
        """Width of the rows, and how many tokens of each are no padding; None if that cannot be seen."""
        leaves = [of for of in tree_leaves(self.call) if isinstance(of, torch.Tensor) and of.ndim in (2, 3)]
        rows = [of for of in leaves if len(of) == self.num_rows and of.shape[1] > 1]
        masks = [of for of in rows if of.ndim == 2 and not of.is_floating_point() and of.max() == 1 and of.min() == 0]
        tokens = [of for of in rows if of.ndim == 2 and not of.is_floating_point() and of.max() > 1]
        numbers = [of for of in rows if of.ndim == 3 and of.is_floating_point()]
        for is_real in (
            *(mask.bool() for mask in masks),
            *(of != 0 for of in tokens),
            *((of != 0).any(2) for of in numbers),
        ):
            width, places = is_real.shape[1], torch.arange(is_real.shape[1], device=is_real.device)
            ends = torch.where(is_real, places + 1, 0).max(1).values.cpu()
            begins = torch.where(is_real, places, width).min(1).values.cpu()
            if (ends == 0).any():
                continue
            if (ends < width).any():
                return width, ends, False
            if (begins > 0).any():
                return width, width - begins, True
        return 0, None, False


def _mapping(kwargs: dict) -> dict:
    return {name: dict(value) if hasattr(value, "keys") else value for name, value in kwargs.items()}


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    return leaf.double() if leaf.is_floating_point() else leaf


def _place(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__
