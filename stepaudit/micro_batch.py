"""Describes the micro-batch that a model is given: its rows, its labels, and the numbers that a mean may be divided by."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepaudit._internals import tree_leaves
from stepaudit.batches import describe_row, sum_hashes, to_plain
from stepaudit.masks import count_tokens, find_shift, read_media_ids, read_stop_ids
from stepaudit.recording import MicroStep
from stepaudit.shifts import START, shifts_labels

MAX_TENSORS, MAX_NUMBERS = 4, 10**6  # that are described beside the first one, and their largest size
WRAPPERS: list[Any] = [DistributedDataParallel]
"""Classes of modules that hold the program's model as `module`; libraries that are watched add theirs."""
Call = tuple[nn.Module, tuple, dict]
"""A call of a module: the module, its arguments, and those that are given by name."""


def describe_call(micro_step: MicroStep, calls: list[Call], batch: Any) -> Call | None:
    """Note in a micro-step what the first call with tensors was given; return that call, None if there is none.

    Args:
        micro_step: is filled in.
        calls: of modules, in their order.
        batch: the value that the program got from its DataLoader; None if unknown.
    """
    for call in calls:
        named_inputs, tensors = find_tensors(call)
        if tensors:
            _describe_inputs(micro_step, call[0], named_inputs, tensors, batch)
            if samples := _find_ragged(call):
                micro_step.num_rows, micro_step.other_rows, micro_step.shared = len(samples), [], []
                micro_step.rows = [describe_row(sample) for sample in samples]
                micro_step.num_numbers, micro_step.values = sum(map(torch.numel, samples)), None
            return call
    return None


def _describe_inputs(
    micro_step: MicroStep, module: nn.Module, named_inputs: dict, tensors: list[torch.Tensor], batch: Any
) -> None:
    first_tensor = tensors[0]
    micro_step.num_rows, micro_step.num_numbers = len(first_tensor), first_tensor.numel()
    micro_step.rows = [describe_row(row) for row in first_tensor]
    micro_step.values = sum_hashes(first_tensor)
    _describe_others(micro_step, tensors, batch)
    labels = named_inputs.get("labels", batch.get("labels") if hasattr(batch, "get") else None)
    if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
        micro_step.num_labels = int((labels != -100).sum())
        other_labels = [
            targets
            for name, targets in named_inputs.items()
            if name.endswith("_label") and isinstance(targets, torch.Tensor)
        ]
        if other_labels:  # BERT's next_sentence_label: another term, with another count
            micro_step.counts = [int((targets != -100).sum()) for targets in (labels, *other_labels)]
        micro_step.num_shifted = int((labels[..., 1:] != -100).sum()) if labels.ndim > 1 else None
        config = getattr(unwrap(module), "config", None)
        micro_step.num_media = count_tokens(labels[..., 1:], read_media_ids(config))
        if "labels" in named_inputs and shifts_labels(unwrap(module)):
            micro_step.shift = _find_shift(named_inputs, config)
        stop_ids = read_stop_ids(config)
        inputs = named_inputs.get("input_ids")
        if stop_ids and isinstance(inputs, torch.Tensor):
            micro_step.num_stops = [
                sum(int((tokens == stop).sum()) for stop in stop_ids) for tokens in (labels[..., 1:], inputs)
            ]
    micro_step.denominators = _find_denominators(first_tensor, batch)
    if named_inputs.get("num_items_in_batch") is not None:
        micro_step.num_items = float(named_inputs["num_items_in_batch"])


def _find_shift(named_inputs: dict, config: Any) -> str:
    """Say how labels that a model is given are shifted against what its decoder reads; empty: rightly, or it is unknown."""
    labels, inputs = named_inputs["labels"], named_inputs.get("decoder_input_ids")
    if getattr(config, "is_encoder_decoder", False):
        start = getattr(config, "decoder_start_token_id", None)
        if inputs is not None:
            return find_shift(inputs, labels, is_shifted=True)
        is_start = labels.ndim == 2 and start is not None and bool((labels[:, 0] == start).all())
        return START if is_start else ""
    inputs = named_inputs.get("input_ids")
    return find_shift(inputs, labels) if isinstance(inputs, torch.Tensor) else ""


def _describe_others(micro_step: MicroStep, tensors: list[torch.Tensor], batch: Any) -> None:
    """Describe the further tensors that the model was given, or that came in the same batch (masks, targets, negatives)."""
    seen = {tensors[0].untyped_storage().data_ptr()}
    for tensor in [*tensors[1:], *(leaf for leaf in tree_leaves(to_plain(batch)) if isinstance(leaf, torch.Tensor))]:
        storage = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
        if storage in seen or not tensor.ndim or tensor.numel() > MAX_NUMBERS or tensor.grad_fn is not None:
            continue
        seen.add(storage)
        if len(tensor) == len(tensors[0]) and names_owners(tensor):
            continue
        if len(tensor) == len(tensors[0]) and len(micro_step.other_rows) < MAX_TENSORS:
            micro_step.other_rows.append([describe_row(row) for row in tensor])
        elif len(tensor) != len(tensors[0]) and len(micro_step.shared) < MAX_TENSORS:
            micro_step.shared.append(describe_row(tensor)[:2])


def names_owners(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor names the sample of each row, by its place in the micro-batch: 0, 0, 0, 1, 1, 2."""
    if (
        tensor.ndim != 1
        or len(tensor) < 2
        or tensor.is_floating_point()
        or tensor.is_complex()
        or tensor.dtype == torch.bool
    ):
        return False
    steps = tensor.diff()
    is_counting = bool(((steps == 0) | (steps == 1)).all())
    return is_counting and int(tensor[0]) == 0 and 0 < int(steps.sum()) < len(steps)


def _find_ragged(call: Call) -> list[torch.Tensor]:
    """Find the samples of a micro-batch that is a list of tensors [length, ...] of several lengths; else empty."""
    for value in [*call[1], *call[2].values()]:
        parts = list(value) if isinstance(value, (list, tuple)) else []
        is_list = all(isinstance(part, torch.Tensor) and part.ndim for part in parts)
        if is_list and len({part.shape[1:] for part in parts}) == 1 < len({len(part) for part in parts}):
            return parts
    return []


def find_tensors(call: Call) -> tuple[dict, list[torch.Tensor]]:
    """Find the inputs that a call is given by name, and its tensors with rows [rows, ...]."""
    _, args, kwargs = call
    named_inputs = kwargs | (dict(args[0]) if args and hasattr(args[0], "keys") else {})
    leaves = tree_leaves(to_plain([*named_inputs.values(), *args]))
    return named_inputs, [value for value in leaves if isinstance(value, torch.Tensor) and value.ndim]


def _find_denominators(first_tensor: torch.Tensor, batch: Any) -> dict[str, int]:
    """Find the numbers by which a mean over the micro-batch may have been divided: name -> number."""
    denominators = {"samples": len(first_tensor)}
    if first_tensor.ndim in (2, 3) and (first_tensor.ndim == 3 or not first_tensor.is_floating_point()):
        denominators["positions, padding included"] = first_tensor.shape[0] * first_tensor.shape[1]
    leaves = batch.items() if hasattr(batch, "items") else enumerate(batch) if isinstance(batch, (list, tuple)) else ()
    for key, leaf in leaves:
        name = key if isinstance(key, str) else f"batch[{key}]"
        is_whole = isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and not leaf.is_complex()
        if is_whole and leaf.ndim >= 1:
            padding = -100 if "label" in name or (leaf < 0).any() else 0
            denominators[f"values other than {padding} in {name}"] = int((leaf != padding).sum())
            if leaf.ndim > 1:
                denominators[f"values other than {padding} after the first in {name}"] = int(
                    (leaf[:, 1:] != padding).sum()
                )
    return denominators


def count_rows(calls: list[Call]) -> int:
    """Count the rows of the first tensor that the first call was given; 0 if there is none."""
    tensors = [tensor for call in calls[:1] for tensor in find_tensors(call)[1]]
    return len(tensors[0]) if tensors else 0


def has_restarts(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor [length] or [1, length] holds positions that begin anew with each of several samples."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not is_whole or tensor.numel() != tensor.shape[-1] or tensor.numel() < 2:
        return False
    flat = tensor.flatten()
    is_first = flat == 0
    return bool(
        is_first[0] and is_first.sum() > 1 and ((flat[1:] == flat[:-1] + 1) | is_first[1:]).all() and flat.max() > 1
    )


def find_owners(calls: list[Call]) -> torch.Tensor | None:
    """Find the tensor of the first call that names the sample of each row; None if there is none."""
    return next((tensor for call in calls[:1] for tensor in find_tensors(call)[1] if names_owners(tensor)), None)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside one of `WRAPPERS`, or the module itself."""
    wrapper: Any = module
    return wrapper.module if isinstance(module, tuple(WRAPPERS)) else module
