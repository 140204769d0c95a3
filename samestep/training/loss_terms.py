"""Finds the terms of a trainer's own loss: the means it is a sum of, and what each is a mean over.

A loss with one term over pairs and one over tokens, as ORPO's, is no mean over anything: only each of its terms is. They are
found where they are computed: while the trainer computes its loss, every call of torch that averages all of a tensor is noted,
with what it averaged over. Of these, the terms are those that make the loss, with factors that are the same for all samples,

    l = sum_j c_j mean_j,        mean_j n_j of a batch = the sum of mean_j n_j of its parts.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from samestep._internals.python_frames import find_caller

Place = tuple[str, int, int]
"""File and line of a call, and how many came before it from there."""
LABELLED = (F.cross_entropy, F.nll_loss)
ELEMENTWISE = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
)
MOST_MEANS = 8
"""Means among which terms are searched."""


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean that was computed.

    Attributes:
        value: scalar.
        count: how many it averages.
    """

    value: torch.Tensor
    count: int


class Means(TorchFunctionMode):
    """Notes every mean to one number that is computed within it, by the place in the code: `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Place, Mean] = {}
        self._counter: dict[tuple[str, int], int] = {}

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and not result.ndim and (count := _count_averaged(func, args, kwargs)):
            place = find_caller("/torch/")
            nth = self._counter[place] = self._counter.get(place, -1) + 1
            self.found[*place, nth] = Mean(result, count)
        return result


def _count_averaged(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Count what a call averages; 0 if it does not, or with weights."""
    if func in (torch.mean, torch.Tensor.mean):
        return int(args[0].numel()) if args else 0
    if func not in LABELLED and func not in ELEMENTWISE:
        return 0
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    words = given.arguments
    if words.get("reduction") != "mean" or words.get("weight") is not None or words.get("pos_weight") is not None:
        return 0
    if func in ELEMENTWISE:
        return int(words["input"].numel())
    target = words["target"]
    if target.is_floating_point():
        return int(words["input"].numel() // words["input"].shape[1])
    return int((target != words["ignore_index"]).sum())


@dataclasses.dataclass(frozen=True)
class Asked:
    """Answers of a loss, and of the means within it, about some samples.

    Attributes:
        loss: float64, and its gradient.
        means: of each place its value and gradient, what it averages, and the factor with which it is in the loss.
    """

    loss: tuple[torch.Tensor, ...]
    means: Mapping[Place, tuple[tuple[torch.Tensor, ...], int, float]]


def ask_means(ask: Callable[[], torch.Tensor], watched: Sequence[torch.Tensor]) -> Asked:
    """Ask a loss for its means, their gradients, and their factors. Only means with a gradient are of interest."""
    with Means() as noted:
        loss = ask()
    means = {}
    for place, mean in noted.found.items():
        if mean.value.requires_grad:
            (factor,) = torch.autograd.grad(loss, [mean.value], retain_graph=True, allow_unused=True)
            if factor is not None and factor.item():
                means[place] = (_take_gradient(mean.value, watched), mean.count, factor.item())
    return Asked(_take_gradient(loss, watched), means)


def _take_gradient(value: torch.Tensor, watched: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    gradients = torch.autograd.grad(value, watched, retain_graph=True, allow_unused=True)
    flat = [
        (torch.zeros_like(p) if gradient is None else gradient).detach().flatten().double().cpu()
        for p, gradient in zip(watched, gradients, strict=True)
    ]
    return value.detach().double().view(-1).cpu(), torch.cat(flat)


def find_terms(
    cuts: Sequence[tuple[Asked, Sequence[Asked]]],
    remainder: Callable[[Sequence[torch.Tensor], Sequence[Sequence[torch.Tensor]]], float],
    tolerance: float,
) -> dict[Place, float]:
    """Find the means that a loss is made of, with their factors; empty: there are none.

    Args:
        cuts: of some samples together, and of each of two parts.
        remainder: (whole, parts) -> |whole - sum of parts|, relative; of values and gradients alike.
        tolerance: what is rounding.
    """
    if not cuts:
        return {}
    everywhere = set.intersection(*(set(asked.means) for whole, parts in cuts for asked in (whole, *parts)))
    answers = [asked for whole, parts in cuts for asked in (whole, *parts)]
    factors = {place: [asked.means[place][2] for asked in answers] for place in everywhere}
    usable = [
        place
        for place in sorted(everywhere)
        if max(factors[place]) - min(factors[place]) <= tolerance * abs(factors[place][0])
        and all(
            remainder(_sum(whole, place), [_sum(part, place) for part in parts]) <= tolerance for whole, parts in cuts
        )
    ]
    for size in range(1, len(usable) + 1) if len(usable) <= MOST_MEANS else ():
        for places in itertools.combinations(usable, size):
            if all(
                remainder(asked.loss, [_weigh(asked.means[place], factors[place][0]) for place in places]) <= tolerance
                for asked in answers
            ):
                return {place: factors[place][0] for place in places}
    return {}


def _sum(asked: Asked, place: Place) -> list[torch.Tensor]:
    values, count, _ = asked.means[place]
    return [value * count for value in values]


def _weigh(mean: tuple[tuple[torch.Tensor, ...], int, float], factor: float) -> list[torch.Tensor]:
    return [value * factor for value in mean[0]]
