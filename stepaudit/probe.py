"""Asks a model, while its own program trains it, why a step may be no sum over its samples.

- The loss: l is a sum over samples only if its gradient with respect to the activations of one sample does not depend on other
  samples. So d2 l / da_i da_j is 0 for the activations a of two samples i and j. Where it is not 0, samples are mixed after a:
  by the loss, when a is the output of the model.
- The model: a copy of it is computed again, on rows of the micro-batch that the model was given (`entrance.py`).
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.batchnorm import SyncBatchNorm

from stepaudit._internals import BatchNorm, Dropout, tree_leaves, tree_map
from stepaudit.causes import DRAWS
from stepaudit.copies import copy_model, refuse_calls
from stepaudit.entrance import (
    MAX_SAMPLES,
    find_entrances,
    find_generator,
    fix_noise,
    is_close,
    number_calls,
    record_calls,
)
from stepaudit.graph import list_nodes
from stepaudit.micro_batch import has_restarts, names_owners

TOLERANCE = 1e-4  # relative: models compute in float32 inside, whatever they are converted to
MAX_NUMBERS = 10_000  # of a parameter's gradient that are looked at
MIN_MIXING = 1e-8  # of the second derivative; it is 0 otherwise
MAX_PARAMETERS = 10**9  # parameters of a model that is copied
EXPERT_NAME = re.compile(r"rout|gat(e|ing)\b|expert|moe|switch", re.IGNORECASE)

Fact = list[str]  # cause, where
Activation = tuple[str, nn.Module, torch.Tensor]
Grad = Callable[..., Sequence[torch.Tensor | None]]


class _Padding(NamedTuple):
    """Padding of a tensor's rows.

    Attributes:
        dimension: in which it is.
        width: size of that dimension.
        lengths: int64 [rows], entries of each row that are no padding.
        is_left: whether the padding is in front of them.
        may_cut: whether all dimensions of this size are of it, as far as is known.
    """

    dimension: int
    width: int
    lengths: torch.Tensor
    is_left: bool
    may_cut: bool

    def is_outside(self) -> torch.Tensor:
        """Tell which positions are padding: bool [rows, width]."""
        positions = torch.arange(self.width)
        return (positions.flip(0) if self.is_left else positions) >= self.lengths[:, None]


def is_shared(module: nn.Module) -> bool:
    """Tell whether only all processes together can compute a module: FSDP, tensor parallelism, SyncBatchNorm."""
    return any(isinstance(part, SyncBatchNorm) for part in module.modules()) or any(
        hasattr(parameter, "full_tensor") for parameter in module.parameters()
    )


def allows_single_backward(loss: torch.Tensor) -> bool:
    """Tell whether a custom autograd function of the graph holds tensors by itself, not by `save_for_backward`.

    Its backward may use them up, and the backward of the program would then fail.
    """
    variables = [vars(node) for node in list_nodes([loss.grad_fn]) if isinstance(node, BackwardCFunction)]
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(variables))


def ask_loss(loss: Any, activations: list[Activation], own_rows: torch.Tensor, grad: Grad) -> list[Fact] | None:
    """Tell whether the loss mixes samples after the activations, and where. The graph is left as it is.

    Args:
        loss: the value that a backward starts from.
        activations: name, module and output [rows * any, ...] of each module that was called, in the order of their ends.
        own_rows: bool [rows of the micro-batch], those that may be of the first sample (`find_own_rows`).
        grad: `torch.autograd.grad`.

    Returns:
        At most one fact, `batch_norm`, `expert_balance`, `mixed_samples` or `mixed_loss`; None where nothing can be said.
    """
    num_rows = len(own_rows)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or num_rows < 2 or not loss.requires_grad:
        return None
    activations = [
        activation for activation in activations if len(activation[2]) and len(activation[2]) % num_rows == 0
    ]
    if not activations or allows_single_backward(loss):
        return None
    try:
        gradients = grad(loss, [output for *_, output in activations], retain_graph=True, allow_unused=True)
    except RuntimeError:  # reentrant checkpointing has no gradient of activations
        return None
    activations = [
        activation for activation, gradient in zip(activations, gradients, strict=True) if gradient is not None
    ]
    states: dict[int, bool | None] = {}

    def mixes(number: int) -> bool | None:
        if number not in states:
            try:
                states[number] = _is_mixing(loss, activations[number][2], own_rows, grad)
            except (RuntimeError, NotImplementedError):  # attention kernels have no second derivative
                states[number] = None
        return states[number]

    if not activations:
        return None
    last = len(activations) - 1
    # Samples that are mixed after an activation are mixed after each earlier one: find the last such activation by halves.
    # Activations [0, low) mix, or cannot be asked; activations [high, last] do not mix.
    low, high = 0, last + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if mixes(middle) is not False else (low, middle)
    if low == 0:
        return []
    if not mixes(low - 1):
        return None
    return [_name_mixing(activations, low, own_rows, grad)]


def _name_mixing(activations: list[Activation], low: int, own_rows: torch.Tensor, grad: Grad) -> Fact:
    """Name where samples are mixed: behind activation `low` - 1, and in front of the next one."""
    name, module, mixed = activations[low - 1]
    before = _name_module(name, module)
    if EXPERT_NAME.search(f"{name} {type(module).__name__}"):
        return ["expert_balance", before]
    if low == len(activations):
        return ["mixed_loss", f"the loss, after {before}"]
    name, module, _ = activations[low]
    place = _name_module(name, module)
    if EXPERT_NAME.search(f"{name} {type(module).__name__}"):
        return ["expert_balance", place]
    if isinstance(module, BatchNorm):
        return ["batch_norm", place]
    # The loss may be given the activation itself, beside what is computed from it
    if not any(_reaches(output, mixed, own_rows, grad) for *_, output in activations[low:]):
        return ["mixed_loss", f"the loss, after {before}"]
    return ["mixed_samples", f"{place}, or between {before} and it"]


def find_own_rows(num_rows: int, num_samples: int | None, owners: torch.Tensor | None) -> torch.Tensor:
    """Find the rows that may be the first sample's: row 0; of pairs also row 1 and the second half's first.

    Args:
        num_rows: rows of the micro-batch.
        num_samples: samples that the rows were collated from; None if unknown. A sample may have several rows (a pair).
        owners: int [rows], the number of each row's sample (a graph's nodes); None if the program names none.

    Returns:
        bool [rows].
    """
    if owners is not None and len(owners) == num_rows:
        return (owners == owners[0]).cpu()
    is_own, rows = torch.zeros(num_rows, dtype=torch.bool), 1
    if num_samples and num_rows > num_samples > 1 and num_rows % num_samples == 0:
        rows = num_rows // num_samples
        is_own[::num_samples] = True
    is_own[:rows] = True
    return is_own


def _is_mixing(loss: torch.Tensor, activation: torch.Tensor, own_rows: torch.Tensor, grad: Grad) -> bool:
    """Tell whether the first row's gradient depends on activations of other samples.

    Args:
        activation: [rows * any, ...].
        own_rows: bool [rows], those that may be of the same sample.
    """
    (gradient,) = grad(loss, activation, create_graph=True, retain_graph=True, allow_unused=True)
    if gradient is None or not gradient.requires_grad:
        return False
    # The first sample's activations are the first rows: differentiate a random sum of their gradient once more. The second
    # derivative with respect to all other samples' rows is 0 if samples are not mixed.
    num_sample_rows = len(activation) // len(own_rows)
    generator = torch.Generator().manual_seed(1)
    sample_gradient = gradient[:num_sample_rows]
    if sample_gradient.is_complex():
        sample_gradient = torch.view_as_real(sample_gradient)
    direction = torch.randn(sample_gradient.shape, generator=generator, dtype=torch.float64).to(sample_gradient)
    (second_gradient,) = grad((sample_gradient * direction).sum(), activation, retain_graph=True, allow_unused=True)
    if second_gradient is None:
        return False
    other_rows = ~own_rows.repeat_interleave(num_sample_rows).to(second_gradient.device)
    if not other_rows.any():
        return False
    self_effect, cross_effect = (
        second_gradient[:num_sample_rows].abs().max(),
        second_gradient[other_rows].abs().max(),
    )
    return bool(cross_effect > MIN_MIXING * torch.maximum(self_effect, cross_effect))


def _reaches(output: torch.Tensor, activation: torch.Tensor, own_rows: torch.Tensor, grad: Grad) -> bool:
    """Tell whether the first sample's rows of an output depend on other samples' rows of an earlier activation."""
    rows = output[: len(output) // len(own_rows)]
    rows = torch.view_as_real(rows) if rows.is_complex() else rows
    direction = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(rows)
    (gradient,) = grad((rows * direction).sum(), activation, retain_graph=True, allow_unused=True)
    if gradient is None:
        return False
    effects = gradient.detach().abs().reshape(len(own_rows), -1).amax(1)
    return bool(effects[~own_rows.to(effects.device)].max() > MIN_MIXING * effects.max())


def ask_packing(
    module: nn.Module, args: tuple, kwargs: dict, output_numbers: set[int]
) -> tuple[list[Fact] | None, str] | None:
    """Tell whether samples that are laid end to end see each other, where a tensor of the call shows where they begin.

    The first sample becomes its first row, again and again: what is computed of the samples behind it must stay.

    Args:
        module: the model.
        args, kwargs: of a call with rows [length, ...] or [1, length, ...] of all samples, with their positions, which begin
            anew with each sample, or with the number of each row's sample.
        output_numbers: places of those returned tensors on which the loss depends.

    Returns:
        As of `ask_model`; None where no tensor shows where samples begin. Labels in a row, 0, 0, 1, look like numbers of
        samples: those are taken for such only if the model returns something for each sample, and not for each row.
    """
    selection = _RowSelection(args, kwargs, 1, torch.float64)
    leaves = [leaf for leaf in tree_leaves(selection.call) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    marks = next((leaf for leaf in leaves if has_restarts(leaf) or names_owners(leaf)), None)
    if marks is None:
        return None
    is_position, flat = has_restarts(marks), marks.flatten()
    is_first = flat == 0 if is_position else torch.cat([flat[:1] == 0, flat.diff() == 1])
    second, sizes = int(is_first.nonzero()[1]), (len(flat), int(is_first.sum()))
    if second < 2:
        return None  # it is its first row
    order = torch.arange(len(flat))
    order[:second] = 0

    def repeat(leaf: Any) -> Any:
        is_row = isinstance(leaf, torch.Tensor) and leaf is not marks and len(flat) in leaf.shape[:2]
        return leaf.index_select(list(leaf.shape[:2]).index(len(flat)), order) if is_row else leaf

    def is_changed(whole: torch.Tensor, other: torch.Tensor) -> bool:
        for size, start in zip(sizes, (second, 1), strict=True):
            if whole.shape == other.shape and size in whole.shape[:3]:
                dimension = list(whole.shape[:3]).index(size)
                rest, other_rest = (tensor.narrow(dimension, start, size - start) for tensor in (whole, other))
                return not is_close(rest, other_rest, TOLERANCE)
        return False

    results: list[list[torch.Tensor]] = []

    def compute(call: tuple[tuple, dict]) -> None:
        results.append(find_outputs(model(*call[0], **call[1])))

    try:
        model = _cast(copy_model(module), torch.float64).eval()
        with refuse_calls(module), fix_noise(1):
            first = record_calls(model, lambda: compute(selection.call))
        with refuse_calls(module), fix_noise(1):
            second_calls = number_calls(record_calls(model, lambda: compute(tree_map(repeat, selection.call))))
    except Exception as error:  # of any kind, as in `ask_model`
        return None, f"its samples are laid end to end; {type(error).__name__}: {str(error).strip()[:120]}"
    lengths = {output.shape[0] for output in results[0] if output.ndim}
    if not is_position and (sizes[1] not in lengths or sizes[0] in lengths):
        return None
    if not any(is_changed(*pair) for n, pair in enumerate(zip(*results, strict=False)) if n in output_numbers):
        return [], ""
    pairs = [(call, second_calls.get(key)) for key, call in number_calls(first).items()]
    places = [a.module_name for a, b in pairs if b and any(map(is_changed, a.outputs, b.outputs))]
    return [["packing" if is_position else "mixed_samples", places[0] if places else type(module).__name__]], ""


def ask_model(
    module: nn.Module, args: tuple, kwargs: dict, output_numbers: set[int], num_rows: int
) -> tuple[list[Fact] | None, str]:
    """Tell whether a call of a model is a function of one sample at a time, and where it stops being one.

    A copy of the model is computed in float64, or in float32 where the model makes numbers of that kind itself.

    Args:
        module: the model.
        args, kwargs: of the call.
        output_numbers: places of those returned tensors on which the loss depends.
        num_rows: samples of the micro-batch.

    Returns:
        Facts with the causes of `find_entrances`, None where the model cannot be asked; and why it cannot, else empty.
    """
    if (answer := ask_packing(module, args, kwargs, output_numbers)) is not None:
        return answer
    if num_rows < 2:
        return None, "a micro-batch has one row"
    if (num_numbers := sum(parameter.numel() for parameter in module.parameters())) > MAX_PARAMETERS:
        return None, f"it has {num_numbers:,} parameters"
    reason, num_paddings = "", 0
    # Numbers that are 0 may be no padding, and a model may need all of them (a picture with a black margin)
    for dtype, cuts_numbers in itertools.product((torch.float64, torch.float32), (True, False)):
        selection = _RowSelection(args, kwargs, num_rows, dtype, find_pad_id(module), cuts_numbers)
        if not cuts_numbers and len(selection.paddings) == num_paddings:
            continue
        num_paddings = len(selection.paddings)
        try:
            model = _cast(copy_model(module), dtype)
            with refuse_calls(module):
                return _ask_copy(model, selection, output_numbers, num_rows), ""
        except (
            Exception
        ) as error:  # of any kind: the model is somebody's program, and is asked what it was not written for
            message = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {message[0][:120] if message else ''}"
    return None, reason


def find_pad_id(module: nn.Module) -> int:
    """Find the token that fills a row of tokens: what the model's config says, or else 0."""
    number = getattr(getattr(module, "config", None), "pad_token_id", None)
    return number if isinstance(number, int) else 0


def _ask_copy(model: nn.Module, selection: "_RowSelection", output_numbers: set[int], num_rows: int) -> list[Fact]:
    for part in model.modules():
        if isinstance(part, Dropout) and type(part).__module__ != Dropout.__module__:
            part.eval()  # a program's own noise may be a function of the sample, which cannot be told here
    samples = range(num_rows)[:MAX_SAMPLES]
    findings = find_entrances(model, samples, selection.select, _Objective(output_numbers), TOLERANCE)
    facts = [[finding.cause, finding.where] for finding in findings]
    experts = [title for name, part in model.named_modules() if EXPERT_NAME.search(title := _name_module(name, part))]
    # Of other models: a loss of two means is no weighted sum either, and mixes nothing
    if experts and not facts and not _is_sum(model, selection, output_numbers, samples):
        facts = [["expert_balance", experts[0]]]
    if not facts and (name := _find_mixed_gradient(model, selection, output_numbers, samples)):
        facts = [["mixed_samples", f"{name}, whose gradient for a sample changes with other samples"]]
    args, kwargs = selection.select(samples, keep_width=True)
    if generator := find_generator(lambda: model(*args, **kwargs)):
        # Of whatever number of samples, it draws other numbers: they differ for no other reason
        draws = ["dropout", f"{type(model).__name__}, {DRAWS} {generator}"]
        facts = [draws, *(fact for fact in facts if fact[0] not in ("mixed_samples", "dropout", "padding"))]
    return facts


def _find_mixed_gradient(
    model: nn.Module, selection: "_RowSelection", output_numbers: set[int], samples: Sequence[int]
) -> str:
    """Find a parameter whose gradient from a batch is not the sum of those from its samples; empty if there is none.

    Outputs may depend on one sample each, and gradients not: an embedding that divides by how often a row occurs.
    """

    def compute_gradients(rows: Sequence[int]) -> list[torch.Tensor | None] | None:
        args, kwargs = selection.select(rows, keep_width=True)
        with fix_noise(1):
            outputs = [o for n, o in enumerate(find_outputs(model(*args, **kwargs))) if n in output_numbers]
        outputs = [output for output in outputs if output.requires_grad]
        if not outputs or any(not output.ndim or len(output) != len(rows) for output in outputs):
            return None
        total = torch.stack([output.abs().square().sum() for output in outputs]).sum()
        return list(torch.autograd.grad(total, list(named.values()), allow_unused=True))

    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if (whole := compute_gradients(samples)) is None:
        return ""
    parts = [part for sample in samples if (part := compute_gradients([sample])) is not None]
    dense = [
        [None if gradient is None else gradient.to_dense() for gradient in gradients] for gradients in (whole, *parts)
    ]
    length = torch.stack([gradient.norm() for gradient in dense[0] if gradient is not None]).norm()
    for name, gradient, *sample_gradients in zip(named, *dense, strict=True):
        if gradient is None or gradient.norm() <= TOLERANCE * length:
            continue
        if (gradient - sum(g for g in sample_gradients if g is not None)).norm() > TOLERANCE * gradient.norm():
            return name
    return ""


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a module or a tensor to `dtype`, complex numbers to the complex dtype of that precision; leave whole numbers."""
    complex_dtype = dtype.to_complex()
    if isinstance(value, torch.Tensor):
        return value.to(dtype if value.is_floating_point() else complex_dtype if value.is_complex() else value.dtype)
    value.to(dtype)  # leaves complex numbers
    for tensor in [*value.parameters(), *value.buffers()]:
        if tensor.is_complex():
            tensor.data = tensor.data.to(complex_dtype)
    return value


def ask_padding(model: nn.Module, args: tuple, kwargs: dict, outputs: list[torch.Tensor], num_rows: int) -> bool:
    """Tell whether the loss depends on what the model returns at padded positions.

    Args:
        model: outputs of one of an encoder and a decoder have the positions of its labels.
        args, kwargs: of the call.
        outputs: tensors that it returned [rows, positions, ...], after the backward, with their gradients.
        num_rows: samples of the micro-batch.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        args, kwargs = (), {name: kwargs[name] for name in ("labels", "decoder_input_ids") if name in kwargs}
    selection = _RowSelection(args, kwargs, num_rows, torch.float32, find_pad_id(model))
    gradients = [output.grad.detach() for output in outputs if output.grad is not None and output.ndim > 1]
    return any(_has_gradient(gradient, padding) for padding in selection.paddings for gradient in gradients)


def _has_gradient(gradient: torch.Tensor, padding: _Padding) -> bool:
    """Tell whether the gradient of an output [rows, positions, ...] is other than 0 at positions of padding."""
    is_outside = padding.is_outside()
    if gradient.shape[:2] == is_outside.T.shape != is_outside.shape:
        gradient = gradient.transpose(0, 1)  # [positions, rows, ...]
    elif padding.dimension < gradient.ndim:
        gradient = gradient.movedim(padding.dimension, 1)
    if gradient.shape[:2] != is_outside.shape:
        return False
    return bool((gradient.reshape(*is_outside.shape, -1).cpu() != 0).any(2)[is_outside].any())


def _is_sum(model: nn.Module, selection: "_RowSelection", output_numbers: set[int], samples: Sequence[int]) -> bool:
    """Tell whether the gradient of a loss that a model computes itself is a weighted sum of gradients of single samples.

    The numbers of tokens of each expert pass no gradient and have no second derivative: they are seen here only.
    """

    def compute_gradients(rows: Sequence[int]) -> list[list[torch.Tensor]]:
        """Compute the gradient of each loss."""
        args, kwargs = selection.select(rows)
        with fix_noise(1):
            outputs = find_outputs(model(*args, **kwargs))
        losses = [
            output
            for number, output in enumerate(outputs)
            if number in output_numbers and not output.ndim and output.requires_grad
        ]
        return [
            [
                torch.zeros(1) if gradient is None else gradient.flatten()[:MAX_NUMBERS].cpu()
                for gradient in torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
            ]
            for loss in losses
        ]

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not (batch_gradients := compute_gradients(samples)):
        return True
    of_samples = [compute_gradients([sample]) for sample in samples]
    return all(
        _is_weighted_sum(gradient, [gradients[number] for gradients in of_samples])
        for number, gradient in enumerate(batch_gradients)
    )


def _is_weighted_sum(batch_gradient: list[torch.Tensor], sample_gradients: list[list[torch.Tensor]]) -> bool:
    """Tell whether a gradient, in parts of the parameters, is a weighted sum of those of single samples."""
    # Least squares: weights [samples] of the gradients of single samples, the columns of [numbers, samples].
    flat = torch.cat(batch_gradient)
    matrix = torch.stack([torch.cat(gradients) for gradients in sample_gradients], 1)
    weights = torch.linalg.lstsq(matrix, flat[:, None], driver="gelsd").solution
    rests = (matrix @ weights)[:, 0].sub(flat).split([len(part) for part in batch_gradient])
    large_parts = [
        (rest, part) for rest, part in zip(rests, batch_gradient, strict=True) if part.norm() > TOLERANCE * flat.norm()
    ]
    return all(rest.norm() <= TOLERANCE * part.norm() for rest, part in large_parts)


class _Objective:
    """Sums the squares of the returned tensors on which the loss depends."""

    def __init__(self, output_numbers: set[int]):
        self.output_numbers = output_numbers

    def __call__(self, model: nn.Module, batch: tuple[tuple, dict]) -> torch.Tensor | None:
        args, kwargs = batch
        outputs = find_outputs(model(*args, **kwargs))
        values = [
            output.abs().square().sum()
            for number, output in enumerate(outputs)
            if number in self.output_numbers and output.requires_grad
        ]
        return torch.stack(values).sum() if values else None


def find_outputs(value: Any) -> list[torch.Tensor]:
    """Find the floating point and complex tensors in the value that a module returned."""
    value = dict(value) if hasattr(value, "to_tuple") else value
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]


class _RowSelection:
    """Selects rows of the arguments of a call, without the padding that the rows do not need.

    Args:
        args, kwargs: of the call.
        num_rows: samples of the micro-batch.
        dtype: of its numbers.
        pad_id: token that fills a row.
        cuts_numbers: whether numbers that are 0 are padding.
    """

    def __init__(
        self, args: tuple, kwargs: dict, num_rows: int, dtype: torch.dtype, pad_id: int = 0, cuts_numbers: bool = True
    ):
        def detach(leaf: Any) -> Any:
            return _cast(leaf.detach(), dtype) if isinstance(leaf, torch.Tensor) else leaf

        self.call = tree_map(detach, (args, _to_dicts(kwargs)))
        self.num_rows = num_rows
        self.paddings = list(self._find_paddings(pad_id, cuts_numbers))

    def select(self, rows: Sequence[int], keep_width: bool = False) -> tuple[tuple, dict]:
        """Select rows; `keep_width`: with the padding of the whole batch."""
        indices = torch.as_tensor(list(rows))
        cuts = {
            padding.width: (int(padding.lengths[indices].max()), padding.is_left)
            for padding in reversed(self.paddings)
            if padding.may_cut and not keep_width
        }

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.ndim or len(leaf) != self.num_rows:
                return leaf
            leaf = leaf[indices.to(leaf.device)]
            for dimension, width in enumerate(leaf.shape[1:], 1):
                if width in cuts:
                    length, is_left = cuts[width]
                    leaf = leaf.narrow(dimension, width - length if is_left else 0, length)
            return leaf

        return tree_map(cut, self.call)

    def _find_paddings(self, pad_id: int, cuts_numbers: bool) -> Iterator[_Padding]:
        """Find padding by masks, by tokens that fill rows, and by positions whose numbers are all 0."""
        leaves = [leaf for leaf in tree_leaves(self.call) if isinstance(leaf, torch.Tensor) and leaf.ndim > 1]
        rows = [leaf for leaf in leaves if len(leaf) == self.num_rows and leaf.shape[1] > 1 and not leaf.is_complex()]
        whole = [leaf for leaf in rows if leaf.ndim == 2 and not leaf.is_floating_point()]
        masks = [leaf.bool() for leaf in whole if leaf.max() == 1 and leaf.min() == 0]
        tokens = [leaf for leaf in whole if leaf.max() > 1 and leaf.min() >= 0]  # labels of -100 are none
        for is_real in [*masks, *(leaf != pad_id for leaf in tokens)]:
            yield from _find_padding(is_real, 1, True)
        for leaf in (leaf for leaf in rows if leaf.ndim > 2 and leaf.is_floating_point() and cuts_numbers):
            for dimension in range(1, leaf.ndim):
                is_real = (leaf != 0).movedim(dimension, 1).flatten(2).any(2)
                # The longest row of a micro-batch has none; a side of a square picture has the other's size
                if (leaf.ndim, dimension) == (3, 1) or is_real[:, -1].any():
                    yield from _find_padding(is_real, dimension, list(leaf.shape).count(is_real.shape[1]) == 1)


def _find_padding(is_real: torch.Tensor, dimension: int, may_cut: bool) -> Iterator[_Padding]:
    """Find the padding of bool [rows, width]: no row is empty, and some end, or begin, with what is not real."""
    width, positions = is_real.shape[1], torch.arange(is_real.shape[1], device=is_real.device)
    ends = torch.where(is_real, positions + 1, 0).max(1).values.cpu()
    begins = torch.where(is_real, positions, width).min(1).values.cpu()
    if not (ends == 0).any() and (ends < width).any():
        yield _Padding(dimension, width, ends, False, may_cut)
    elif not (ends == 0).any() and (begins > 0).any():
        yield _Padding(dimension, width, width - begins, True, may_cut)


def _to_dicts(kwargs: dict) -> dict:
    return {name: dict(value) if hasattr(value, "keys") else value for name, value in kwargs.items()}


def _name_module(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__
