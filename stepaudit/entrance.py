"""Where a step stops being a sum over its samples: the first module whose output for a sample depends on more than the sample.

Every module's inputs and outputs are watched while the same samples are computed twice. Where the inputs agree and the outputs
do not, the difference enters: a module that only passes it on has other inputs already, and what happens between the modules
inside a module is seen at the module itself. Numbers that nobody uses (a gradient of 0) are not compared: the last state of an
LSTM over padding does no harm as long as nothing is made of it.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from stepaudit._internals import BatchNorm, tree_leaves, tree_map
from stepaudit.causes import Finding
from stepaudit.judge import listed

MOST_SAMPLES = 8  # are enough
DIFFERENT = 1e-6  # relative
Tensors = list[torch.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """Of one module: what went in, what came out, and which numbers of that are used (None: all, for all that is known)."""

    module: nn.Module
    where: str
    inputs: Tensors
    outputs: Tensors
    used: list[torch.Tensor | None]


def entrances(
    model: nn.Module,
    samples: Sequence[Any],
    collate: Callable[[list], Any],
    call: Callable[[nn.Module, Any], torch.Tensor | None],
    different: float = DIFFERENT,
) -> list[Finding]:
    """Why `call(model, batch)` is no function of one sample at a time.

    Args:
        model: in the mode in which it is trained; a copy, whose modules are put into evaluation on the way.
        samples: a few, two at least.
        collate: samples to a batch, on the model's device and of its dtype.
        call: computes the model, once or more, and returns a scalar that follows from all that is used; None: it has computed
            the gradient itself, or that is unknown.
        different: relative difference that is no rounding.

    Returns:
        Findings with the causes `random_collate`, `state`, `dropout`, `batch_norm`, `mixed_samples`, `padding`; none if there
        are none.
    """
    findings = []
    with same_noise(1):
        first = collate(samples)
    with same_noise(2):
        again = collate(samples)
    if not _equal(tree_leaves(first), tree_leaves(again)):
        return [Finding("random_collate", "collate", f"{len(samples)} samples, collated twice")]

    def calls(batch: Any, seed: int = 1) -> list[Call]:
        with same_noise(seed):
            return _calls(model, lambda: call(model, batch))

    def all_of(probe: Callable[[], Call | None]) -> list[Call]:
        """What a probe finds when what it found before is kept from doing it again, by being put into evaluation."""
        found: dict[nn.Module, Call] = {}
        while (one := probe()) is not None and one.module not in found:
            found[one.module] = one
            one.module.eval()
        return list(found.values())

    def mixed() -> Call | None:
        """The first sample's rows, when another one takes the place of a third, in a batch of the same lengths.

        One more beside it tells rows from what is as many by chance (experts).
        """
        for place in range(len(samples) - 1, 0, -1):
            others = [*samples[:place], samples[place - 1], *samples[place + 1 :]]
            if _shapes(collate(others)) == _shapes(first):
                rows = (0, 0, len(samples), len(samples) + 1)
                return _first_difference(calls(first), calls(collate([*others, others[0]])), different, *rows)
        return None

    def padded() -> Call | None:
        whole = calls(first)
        for row, sample in enumerate(samples):
            if found := _first_difference(whole, calls(collate([sample])), different, row, 0, len(samples), 1):
                return found
        return None

    def noisy() -> Call | None:
        return _first_difference(calls(first, 1), calls(first, 2), different)

    changing = all_of(lambda: _first_difference(calls(first), calls(first), different))
    findings += _named("state", changing, "its output differs when the same samples come again, with the same noise")
    drawing = all_of(noisy)
    findings += _named("dropout", drawing, "its output differs for the same samples")
    has_noise = bool(drawing) and noisy() is not None  # evaluation does not end it, and it depends on shapes
    mixing = all_of(mixed)
    changes = "its output for a sample changes with another sample of the batch"
    findings += _named("batch_norm", [one for one in mixing if isinstance(one.module, BatchNorm)], changes)
    findings += _named("mixed_samples", [one for one in mixing if not isinstance(one.module, BatchNorm)], changes)
    if not mixing and not has_noise and (found := padded()) is not None:
        findings += _named("padding", [found], "its output for a sample alone differs from that in a batch")
    return findings


@contextlib.contextmanager
def same_noise(seed: int) -> Iterator[None]:
    """Seeds torch, numpy and random inside, and puts them back as they were."""
    kept = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])


def _named(cause: str, found: list[Call], evidence: str) -> list[Finding]:
    if not found:
        return []
    return [Finding(cause, listed([one.where for one in found]), evidence)]


def _calls(model: nn.Module, compute: Callable[[], torch.Tensor | None]) -> list[Call]:
    """Of all modules, in the order in which they end: a module after those inside it."""
    calls: list[Call] = []
    hooks = []
    for name, module in model.named_modules():
        where = f"{name} ({type(module).__name__})" if name else type(module).__name__

        def note(module: nn.Module, args: tuple, kwargs: dict, output: Any, where: str = where) -> None:
            outputs = _leaves(output)
            call = Call(module, where, _copies((args, kwargs)), [of.detach().clone() for of in outputs], [])
            for place, leaf in enumerate(outputs):
                call.used.append(torch.zeros(leaf.shape, dtype=torch.bool) if leaf.requires_grad else None)
                if leaf.requires_grad:
                    leaf.register_hook(lambda gradient, call=call, place=place: _use(call, place, gradient))
            calls.append(call)

        hooks.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.enable_grad():
            objective = compute()
            if objective is not None and objective.requires_grad:
                objective.backward()
    finally:
        for hook in hooks:
            hook.remove()
    if not any(used is not None and used.any() for call in calls for used in call.used):
        return [dataclasses.replace(call, used=[None] * len(call.used)) for call in calls]  # no gradient was computed
    return calls


def _use(call: Call, place: int, gradient: torch.Tensor) -> None:
    call.used[place] = call.used[place] | (gradient.detach() != 0).to(call.used[place].device)


def _first_difference(
    one: list[Call],
    other: list[Call],
    different: float,
    row: int = 0,
    other_row: int = 0,
    num_rows: int = 0,
    num_other_rows: int = 0,
) -> Call | None:
    """The first call whose inputs agree and whose outputs do not: in one sample's rows, or (num_rows 0) as a whole."""

    def agree(some: Tensors, others: Tensors, used: list[torch.Tensor | None]) -> bool:
        if not num_rows:
            kept = [
                a if of is None or of.shape != a.shape else a * of.to(a.device)
                for a, of in zip(some, used, strict=True)
            ]
            kept_others = [
                b if of is None or of.shape != b.shape else b * of.to(b.device)
                for b, of in zip(others, used, strict=False)
            ]
            return _equal(kept, kept_others, different)
        return len(some) == len(others) and all(
            _rows_agree(a, b, of, different, row, other_row, num_rows, num_other_rows)
            for a, b, of in zip(some, others, used, strict=True)
        )

    for a, b in zip(one, other, strict=False):
        if a.where != b.where:
            return None
        everything = [None] * len(a.inputs)
        if agree(a.inputs, b.inputs, everything) and not agree(a.outputs, b.outputs, a.used):
            return a
    return None


def _rows_agree(
    a: torch.Tensor,
    b: torch.Tensor,
    used: torch.Tensor | None,
    different: float,
    row: int,
    other_row: int,
    num_rows: int,
    num_other_rows: int,
) -> bool:
    """True as well where a tensor has no rows of samples: nothing can be said of it."""
    places = [at for at in range(min(2, a.ndim)) if (a.shape[at], b.shape[at]) == (num_rows, num_other_rows)]
    if a.ndim != b.ndim or not places:
        return True
    a, b = a.select(places[0], row), b.select(places[0], other_row)
    used = torch.ones_like(a, dtype=torch.bool) if used is None else used.select(places[0], row).to(a.device)
    shape = tuple(map(min, zip(a.shape, b.shape, strict=True)))
    # Padded on the right or on the left.
    right = tuple(slice(0, size) for size in shape)
    left_a, left_b = (tuple(slice(of - size, of) for of, size in zip(x.shape, shape, strict=True)) for x in (a, b))
    return _close(a[right] * used[right], b[right] * used[right], different) or _close(
        a[left_a] * used[left_a], b[left_b] * used[left_a], different
    )


def _close(a: torch.Tensor, b: torch.Tensor, different: float = DIFFERENT) -> bool:
    if not a.is_floating_point():
        return bool((a == b).all())
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())  # infinities, too
    return bool(torch.where(same, 0, a - b).norm() <= different * torch.where(a.isfinite(), a, 0).norm())


def _equal(some: list, others: list, different: float = DIFFERENT) -> bool:
    """Leaves of two batches or outputs: tensors to rounding."""
    if len(some) != len(others):
        return False
    for a, b in zip(some, others, strict=True):
        if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
            return False
        if isinstance(a, torch.Tensor) and (a.shape != b.shape or not _close(a, b, different)):
            return False
    return True


def _leaves(value: Any) -> Tensors:
    value = dict(value) if hasattr(value, "to_tuple") else value  # ModelOutput
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.ndim]


def _copies(value: Any) -> Tensors:
    """What is changed in place later must not change them."""
    return [leaf.detach().clone() for leaf in _leaves(value)]


def _shapes(batch: Any) -> list:
    return tree_leaves(tree_map(lambda leaf: str(leaf.shape) if isinstance(leaf, torch.Tensor) else "", batch))
