"""Finds where a step stops being a sum over its samples: the first module whose output for a sample depends on other things.

Every module's inputs and outputs are watched while the same samples are computed twice. Where the inputs agree and the outputs
do not, the difference enters: a module that only passes a difference on has other inputs already, and a difference that arises
between the modules inside a module is seen at the module itself. Numbers that nobody uses (a gradient of 0) are not compared:
the last state of an LSTM over padding does no harm as long as nothing is computed from it.
"""

import contextlib
import dataclasses
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from stepaudit._internals import BatchNorm, Dropout, tree_leaves, tree_map
from stepaudit.causes import Finding, list_names

MAX_SAMPLES = 8  # are enough
TOLERANCE = 1e-6  # relative
Tensors = list[torch.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """Holds one call of one module.

    Attributes:
        module: the module that was called.
        module_name: its name in the model and its class.
        inputs: copies of the tensors that it got.
        outputs: copies of the tensors that it returned.
        use_masks: of each output, bool of its shape: the numbers that the objective uses; None: all, as far as is known.
    """

    module: nn.Module
    module_name: str
    inputs: Tensors
    outputs: Tensors
    use_masks: list[torch.Tensor | None]


def find_entrances(
    model: nn.Module,
    samples: Sequence[Any],
    collate: Callable[[list], Any],
    call: Callable[[nn.Module, Any], torch.Tensor | None],
    tolerance: float = TOLERANCE,
) -> list[Finding]:
    """Find the modules because of which `call(model, batch)` is no function of one sample at a time.

    Args:
        model: in the mode in which it is trained; a copy, whose modules are put into evaluation on the way.
        samples: a few, at least two.
        collate: samples -> batch, on the model's device and of its dtype.
        call: computes the model, once or more, and returns a scalar that depends on every number that is used; None: the call
            has computed the gradient itself, or the scalar is unknown.
        tolerance: largest relative difference that is rounding.

    Returns:
        Findings with the causes `random_collate`, `state`, `dropout`, `batch_norm`, `mixed_samples`, `padding`; empty if every
        output depends on one sample.
    """
    with fix_noise(1):
        first = collate(list(samples))
    with fix_noise(2):
        second = collate(list(samples))
    if not _are_equal(tree_leaves(first), tree_leaves(second)):
        return [Finding("random_collate", "collate", f"{len(samples)} samples, collated twice")]
    return _Search(model, samples, collate, call, tolerance, first).find()


class _Search:
    """Asks one question after the other, each until it finds nothing new. The arguments are those of `find_entrances`.

    Args:
        first: the samples, collated.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Sequence[Any],
        collate: Callable[[list], Any],
        call: Callable[[nn.Module, Any], torch.Tensor | None],
        tolerance: float,
        first: Any,
    ):
        self.model, self.samples, self.collate, self.call = model, samples, collate, call
        self.tolerance, self.first = tolerance, first
        self.usual_calls: list[Call] | None = None
        modules = list(model.modules())
        self.buffers = [(m, name, buffer.clone()) for m in modules for name, buffer in m.named_buffers(recurse=False)]

    def find(self) -> list[Finding]:
        """Ask all questions; what a module's state explains is asked no further."""
        states = self._collect(self._find_state)
        findings = _make_findings(
            "state", states, "its output differs when the same samples come again, with the same noise"
        )
        if states and self._compare(self._record_usual(), self._record(self.first)) is not None:
            return findings  # the state is in no buffer: whatever else is asked, the output differs for this reason
        noises = self._collect(self._find_noise)
        findings += _make_findings("dropout", noises, "its output differs for the same samples")
        has_noise = (
            bool(noises) and self._find_noise() is not None
        )  # evaluation does not end it, and it depends on shapes
        mixings = self._collect(self._find_mixing)
        change = "its output for a sample changes with another sample of the batch"
        for cause in ("batch_norm", "dropout", "mixed_samples"):
            calls = [entrance for entrance in mixings if _name_cause(entrance.module, "mixed_samples") == cause]
            findings += _make_findings(cause, calls, change)
        if not mixings and not has_noise and (entrance := self._find_padding()) is not None:
            cause = _name_cause(entrance.module, "padding")
            findings += _make_findings(cause, [entrance], "its output for a sample alone differs from that in a batch")
        return findings

    def _record(self, batch: Any, seed: int = 1, is_continued: bool = False) -> list[Call]:
        """Record a call: with the buffers as they were, or, `is_continued`, as the last call left them."""
        for module, name, buffer in [] if is_continued else self.buffers:
            setattr(module, name, buffer.clone())
        with fix_noise(seed):
            return record_calls(self.model, lambda: self.call(self.model, batch))

    def _record_usual(self) -> list[Call]:
        """Record the call of the samples as they are, once for each set of modules that are in evaluation."""
        if self.usual_calls is None:
            self.usual_calls = self._record(self.first)
        return self.usual_calls

    def _compare(self, calls: list[Call], others: list[Call], *rows: int) -> Call | None:
        return _find_first_difference(calls, others, self.tolerance, *rows)

    def _collect(self, probe: Callable[[], Call | None]) -> list[Call]:
        """Repeat a probe until it finds nothing new: each module that it finds is put into evaluation, and is silent then."""
        entrances: dict[nn.Module, Call] = {}
        while (entrance := probe()) is not None and entrance.module not in entrances:
            entrances[entrance.module] = entrance
            entrance.module.eval()
            self.usual_calls = None
        return list(entrances.values())

    def _find_state(self) -> Call | None:
        return self._compare(self._record(self.first), self._record(self.first, is_continued=True))

    def _find_noise(self) -> Call | None:
        return self._compare(self._record_usual(), self._record(self.first, 2))

    def _find_mixing(self) -> Call | None:
        """Find where a sample's rows change when another sample of the batch is replaced, and all shapes stay.

        The first sample is watched while one behind it is replaced, and the last one while the first is. The second batch has
        one sample more: a dimension that grows with it holds rows, and has not the same size by chance (experts).
        """
        last = len(self.samples) - 1
        for row, places in ((0, range(last, 0, -1)), (last, (0,))):
            for place in places:
                others = [*self.samples[:place], self.samples[place - 1], *self.samples[place + 1 :]]
                if _find_shapes(self.collate(others)) != _find_shapes(self.first):
                    continue
                rows = (row, row, len(self.samples), len(self.samples) + 1)
                second = self._record(self.collate([*others, others[0]]))
                if entrance := self._compare(self._record_usual(), second, *rows):
                    return entrance
                break
        return None

    def _find_padding(self) -> Call | None:
        """Find where a sample alone gives something else than in the batch: the first sample of each length."""
        batches = [self.collate([sample]) for sample in self.samples]
        shapes = [_find_shapes(batch) for batch in batches]
        for row, batch in enumerate(batches):
            if shapes.index(shapes[row]) < row:
                continue
            if entrance := self._compare(self._record_usual(), self._record(batch), row, 0, len(self.samples), 1):
                return entrance
        return None


def _name_cause(module: nn.Module, cause: str) -> str:
    """Name the cause by a module that is known to have one; a dropout here has noise of its own that is not by sample."""
    return "batch_norm" if isinstance(module, BatchNorm) else "dropout" if isinstance(module, Dropout) else cause


@contextlib.contextmanager
def fix_noise(seed: int) -> Iterator[None]:
    """Seed torch, numpy and random inside the block, and restore their states after it."""
    states = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def find_generator(compute: Callable[[], object]) -> str:
    """Name the generator of another library from which a computation draws; empty: there is none.

    Torch's own is not asked for: it tells nothing of what is drawn by sample, or is not used.
    """
    with fix_noise(1):
        compute()
        states = random.getstate(), pickle.dumps(np.random.get_state())
    with fix_noise(1):
        if states[1] != pickle.dumps(np.random.get_state()):
            return "numpy.random"
        return "random" if states[0] != random.getstate() else ""


def _make_findings(cause: str, calls: list[Call], evidence: str) -> list[Finding]:
    if not calls:
        return []
    return [Finding(cause, list_names([call.module_name for call in calls]), evidence)]


def record_calls(model: nn.Module, compute: Callable[[], torch.Tensor | None]) -> list[Call]:
    """Record the calls of all modules, in the order in which they end: a module after the modules inside it."""
    calls: list[Call] = []
    hooks = []
    for name, module in model.named_modules():
        module_name = f"{name} ({type(module).__name__})" if name else type(module).__name__

        def note(module: nn.Module, args: tuple, kwargs: dict, output: Any, module_name: str = module_name) -> None:
            outputs = _find_leaves(output)
            call = Call(
                module, module_name, _copy_leaves((args, kwargs)), [leaf.detach().clone() for leaf in outputs], []
            )
            for number, leaf in enumerate(outputs):
                call.use_masks.append(torch.zeros(leaf.shape, dtype=torch.bool) if leaf.requires_grad else None)
                if leaf.requires_grad:
                    leaf.register_hook(lambda gradient, call=call, number=number: _note_use(call, number, gradient))
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
    if not any(mask is not None and mask.any() for call in calls for mask in call.use_masks):
        # No gradient was computed: nothing is known of use.
        return [dataclasses.replace(call, use_masks=[None] * len(call.use_masks)) for call in calls]
    return calls


def _note_use(call: Call, number: int, gradient: torch.Tensor) -> None:
    call.use_masks[number] = call.use_masks[number] | (gradient.detach() != 0).to(call.use_masks[number].device)


def _find_first_difference(
    calls: list[Call],
    other_calls: list[Call],
    tolerance: float,
    row: int = 0,
    other_row: int = 0,
    num_rows: int = 0,
    num_other_rows: int = 0,
) -> Call | None:
    """Find the first call whose inputs agree and whose outputs do not: in one sample's rows, or (num_rows 0) as a whole.

    Calls are matched by the module and by the how manieth of its calls it is: noise and routing may leave modules out. Where
    they do, the difference enters in the module around those, whose inputs agree.
    """

    def agree(tensors: Tensors, other_tensors: Tensors, masks: list[torch.Tensor | None]) -> bool:
        if not num_rows:
            values = [
                a if mask is None or mask.shape != a.shape else a * mask.to(a.device)
                for a, mask in zip(tensors, masks, strict=True)
            ]
            other_values = [
                b if mask is None or mask.shape != b.shape else b * mask.to(b.device)
                for b, mask in zip(other_tensors, masks, strict=False)
            ]
            return _are_equal(values, other_values, tolerance)
        return len(tensors) == len(other_tensors) and all(
            _rows_agree(a, b, mask, tolerance, row, other_row, num_rows, num_other_rows)
            for a, b, mask in zip(tensors, other_tensors, masks, strict=True)
        )

    others = number_calls(other_calls)
    for key, a in number_calls(calls).items():
        if (b := others.get(key)) is None:
            continue
        no_masks = [None] * len(a.inputs)
        if agree(a.inputs, b.inputs, no_masks) and not agree(a.outputs, b.outputs, a.use_masks):
            return a
    return None


def number_calls(calls: list[Call]) -> dict[tuple[str, int], Call]:
    """Number the calls of each module: (name, how many calls of it came before) -> call."""
    counts: Counter = Counter()
    numbered = {}
    for call in calls:
        numbered[call.module_name, counts[call.module_name]] = call
        counts[call.module_name] += 1
    return numbered


def _rows_agree(
    a: torch.Tensor,
    b: torch.Tensor,
    mask: torch.Tensor | None,
    tolerance: float,
    row: int,
    other_row: int,
    num_rows: int,
    num_other_rows: int,
) -> bool:
    """Tell whether a sample's rows agree; True as well for tensors without rows of samples, of which nothing can be said.

    Args:
        a, b: [num_rows, ...] and [num_other_rows, ...], or with the rows in the second dimension.
        mask: bool of the shape of `a`, the numbers that are compared; None: all.
        row, other_row: the sample's row in `a` and in `b`.
    """
    dimensions = [
        dimension
        for dimension in range(min(2, a.ndim))
        if (a.shape[dimension], b.shape[dimension]) == (num_rows, num_other_rows)
    ]
    if a.ndim != b.ndim or not dimensions:
        return True
    a, b = a.select(dimensions[0], row), b.select(dimensions[0], other_row)
    mask = torch.ones_like(a, dtype=torch.bool) if mask is None else mask.select(dimensions[0], row).to(a.device)
    shape = tuple(map(min, zip(a.shape, b.shape, strict=True)))
    # Rows are as long as the longest of their batch. Padded on the right, they agree in their first numbers; on the left, in
    # their last ones.
    first_part = tuple(slice(0, size) for size in shape)
    last_part_a, last_part_b = (
        tuple(slice(length - size, length) for length, size in zip(x.shape, shape, strict=True)) for x in (a, b)
    )
    return is_close(a[first_part] * mask[first_part], b[first_part] * mask[first_part], tolerance) or is_close(
        a[last_part_a] * mask[last_part_a], b[last_part_b] * mask[last_part_a], tolerance
    )


def is_close(a: torch.Tensor, b: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point():
        return bool((a == b).all())
    a, b = a.double(), b.double()
    is_same = (a == b) | (a.isnan() & b.isnan())  # infinities, too
    return bool(torch.where(is_same, 0, a - b).norm() <= tolerance * torch.where(a.isfinite(), a, 0).norm())


def _are_equal(leaves: list, other_leaves: list, tolerance: float = TOLERANCE) -> bool:
    """Tell whether the leaves of two batches or outputs are equal: as many, of the same shapes, tensors up to rounding."""
    if len(leaves) != len(other_leaves):
        return False
    for a, b in zip(leaves, other_leaves, strict=True):
        if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
            return False
        if isinstance(a, torch.Tensor) and (a.shape != b.shape or not is_close(a, b, tolerance)):
            return False
    return True


def _find_leaves(value: Any) -> Tensors:
    value = dict(value) if hasattr(value, "to_tuple") else value  # ModelOutput
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]


def _copy_leaves(value: Any) -> Tensors:
    """Copy the tensors of a value, so that later changes in place do not reach the copies."""
    return [leaf.detach().clone() for leaf in _find_leaves(value)]


def _find_shapes(batch: Any) -> list:
    return tree_leaves(tree_map(lambda leaf: str(leaf.shape) if isinstance(leaf, torch.Tensor) else "", batch))
