"""Audits whether a causal language model computes a row of packed samples as it computes the samples alone: `audit_packing`.

Let l(x) be the summed loss of predicting each token of a sample x from those before it, and l_r that of a row in which samples
stand end to end, their positions counted anew in each; no sample's first token is predicted. The row is exact where

    grad l_r = sum over its samples x of grad l(x).

A model that lets a sample see the one in front of it (attention or a recurrent state that ignores the positions, or positions
that are counted through) has another gradient.
"""

import copy
import inspect
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from stepaudit.causes import Finding
from stepaudit.entrance import Call, is_close, number_calls, record_calls
from stepaudit.errors import UsageError

TOLERANCE = 1e-5  # relative; float32, and rows are summed in another order
IGNORED = -100


def audit_packing(
    model: nn.Module, sequences: Sequence[torch.Tensor | Sequence[int]], tolerance: float = TOLERANCE
) -> list[Finding]:
    """Compare the gradient of a row of packed samples with that of the samples alone, and find where samples first mix.

    The model is copied, and left as it is. The copy computes in float32 (float64 where the model does), in evaluation, so that
    no noise is drawn, and is given no attention mask, as by collators that pack.

    Args:
        model: on any device. Its forward takes `input_ids`, int64 [rows, length], and `position_ids` of the same shape, and
            returns logits [rows, length, vocabulary], alone or as `.logits`: as causal models of transformers do.
        sequences: two or more samples, ids of two or more tokens each. A few of different lengths are enough.
        tolerance: largest relative difference of the gradient that is rounding.

    Returns:
        One finding with the cause `packing`, the first module whose output for a sample depends on another one, and the
        relative difference of the gradient; empty if the row is exact.

    Raises:
        UsageError: fewer than two sequences, or one of fewer than two tokens; a forward that takes no `input_ids`.
    """
    rows = [torch.as_tensor(sequence, dtype=torch.int64).flatten() for sequence in sequences]
    if len(rows) < 2 or min(map(len, rows)) < 2:
        lengths = ", ".join(str(len(row)) for row in rows) or "no"
        raise UsageError(
            f"sequences have {lengths} tokens: two sequences or more, of two tokens or more each, are needed"
        )
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "input_ids" not in parameters and not takes_any:
        raise UsageError(f"{type(model).__name__}.forward takes {', '.join(parameters)}: input_ids are needed")
    takes = {name for name in ("position_ids", "use_cache") if name in parameters or takes_any}

    model = copy.deepcopy(model).eval()
    if next(model.parameters()).dtype != torch.float64:
        model.float()
    device = next(model.parameters()).device

    def compute(row: torch.Tensor, positions: torch.Tensor) -> tuple[list[Call], float]:
        """Add the gradient of a row, and return the calls of all modules, and the loss."""
        row, positions = row[None].to(device), positions[None].to(device)
        losses: list[torch.Tensor] = []

        def compute_loss() -> torch.Tensor:
            inputs = {
                "position_ids": positions,
                "use_cache": False,
            }  # with a cache positions are not taken for packed ones
            output = model(input_ids=row, **{name: value for name, value in inputs.items() if name in takes})
            logits = (output if isinstance(output, torch.Tensor) else output.logits)[0, :-1]
            labels = row.masked_fill(positions == 0, IGNORED)[0, 1:]
            losses.append(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
            return losses[0]

        return record_calls(model, compute_loss), float(losses[0].detach())

    def take_gradient() -> torch.Tensor:
        """Return the gradient that was added up, and empty it."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        model.zero_grad()
        return torch.cat([gradient.double().flatten().cpu() for gradient in gradients])

    trained = [parameter.requires_grad_() for parameter in model.parameters() if parameter.is_floating_point()]
    alone = [compute(row, torch.arange(len(row))) for row in rows]
    true_gradient = take_gradient()
    packed_calls, loss = compute(torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows]))
    error = float((take_gradient() - true_gradient).norm() / true_gradient.norm())
    if error <= tolerance:
        return []
    true_loss = sum(sample_loss for _, sample_loss in alone)
    place = _find_first_mixing([calls for calls, _ in alone], packed_calls, [len(row) for row in rows], tolerance)
    evidence = f"relative difference of the gradient {error:.2g}, of the loss {abs(loss - true_loss) / true_loss:.2g}"
    return [Finding("packing", place or type(model).__name__, evidence)]


def _find_first_mixing(
    sample_calls: list[list[Call]], packed_calls: list[Call], lengths: list[int], tolerance: float
) -> str | None:
    """Find the first module whose inputs for each sample are those of the sample alone, and whose outputs are not.

    Modules that the row calls otherwise than a sample (experts that get no token of it) are passed over: they are told apart by
    their names and by the how manieth of their calls it is.
    """

    numbered_samples = [number_calls(calls) for calls in sample_calls]
    for key, call in number_calls(packed_calls).items():
        if not all(key in calls for calls in numbered_samples):
            continue
        alone = [calls[key] for calls in numbered_samples]
        inputs = [call.inputs for call in alone]
        outputs = [call.outputs for call in alone]
        if _agree(call.inputs, inputs, lengths, tolerance) and not _agree(call.outputs, outputs, lengths, tolerance):
            return call.module_name
    return None


def _agree(packed: list[torch.Tensor], alone: list[list[torch.Tensor]], lengths: list[int], tolerance: float) -> bool:
    """Tell whether tensors of the row are those of the samples, end to end.

    True as well for tensors of which nothing can be said: without a dimension of tokens, or with two (attention's weights).
    """
    packed, alone = _drop_masks(packed), [_drop_masks(tensors) for tensors in alone]
    for number, tensor in enumerate(packed):
        parts = [tensors[number] for tensors in alone if number < len(tensors)]
        if len(parts) < len(lengths) or any(part.ndim != tensor.ndim for part in parts):
            continue
        dimensions = [
            dimension
            for dimension in range(tensor.ndim)
            if tensor.shape[dimension] == sum(lengths) and [part.shape[dimension] for part in parts] == lengths
        ]
        if len(dimensions) != 1:
            continue
        if any(part.select(dimensions[0], 0).shape != tensor.select(dimensions[0], 0).shape for part in parts):
            continue
        if not is_close(torch.cat(parts, dimensions[0]), tensor, tolerance):
            return False
    return True


def _drop_masks(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Leave out masks [rows, heads, length, length]: a sample alone may need none, where a row does."""
    return [tensor for tensor in tensors if tensor.ndim < 4 or tensor.shape[-1] != tensor.shape[-2]]
