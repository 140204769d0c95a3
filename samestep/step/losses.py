"""Compute loss terms as sums over targets, and the loss of a step from them.

For the global batch S, terms j with weights w_j, the summed loss s_j(i) and the number of targets c_j(i) of a sample i:

    L = sum_j  w_j * (sum_{i in S} s_j(i)) / n_j,     n_j = sum_{i in S} c_j(i)

A cut of S into micro-batches leaves L and its gradient unchanged when each micro-batch contributes its sums divided by the n_j
of the whole step. A mean over each micro-batch, averaged over micro-batches, does not: micro-batches differ in their number of
targets.
"""

import torch
import torch.nn.functional as F

from samestep._internals.torch_tracing import is_fake
from samestep.cut.layout import LOGITS_AT_ONCE

IGNORED = -100  # label of a place where nothing is to be predicted
CPU_LOGITS, CPU_ROWS = 2**23, 256
"""Logits that exist at once on a CPU, whose caches hold few; and rows of them at least, so that adding up the gradient of the
weights, once for every chunk, takes little time beside the products."""


def choose_max_logits(weight: torch.Tensor) -> int:
    """Choose the largest number of logits at once, for `linear_cross_entropy` and the like.

    Args:
        weight: of the head, [classes, width].

    >>> choose_max_logits(torch.empty(512, 2)), choose_max_logits(torch.empty(2**16, 2))
    (8388608, 16777216)
    """
    if weight.device.type != "cpu" or is_fake(weight):
        return LOGITS_AT_ONCE
    return min(LOGITS_AT_ONCE, max(CPU_LOGITS, CPU_ROWS * len(weight)))


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Sum the cross-entropy: scalar in float32 or wider; 0, with a gradient of zeros, when nothing is to be predicted.

    Args:
        logits: [targets, classes].
        labels: int64 [targets]; targets of -100 are left out.
        label_smoothing: share of the target that all classes divide between them (Szegedy et al. 2016, 1512.00567).
    """
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)


def squared_error_sum(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the squared error: scalar in float32 or wider; 0, with a gradient of zeros, when nothing is to be predicted.

    Args:
        predictions: [targets, 1].
        labels: floating [targets]; targets of NaN are left out.
    """
    wide = torch.promote_types(predictions.dtype, torch.float32)
    errors = predictions.squeeze(1).to(wide) - labels.nan_to_num().to(wide)
    return (errors.square() * labels.isfinite()).sum()


def num_correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Count the targets whose largest logit is the label's: int64 scalar. Arguments as in `cross_entropy_sum`."""
    return (logits.argmax(-1) == labels).sum()


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    max_logits: int = LOGITS_AT_ONCE,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `cross_entropy_sum` and `num_correct` of `hidden @ weight.T`, of which only a part exists at any time.

    The rows are cut into chunks of max_logits / classes rows. With p = softmax(logits) and y the one-hot labels, the gradient
    of the sum follows from a chunk's logits,

        d hidden = (p - y) weight,    d weight = sum over chunks (p - y)^T hidden,

    so it is computed with them, without computing any logits twice, and the backward only scales it (the idea of Liger
    Kernel, Hsu et al. 2024, arXiv 2410.10989). The forward keeps d hidden and one d weight for the backward, instead of
    three tensors [rows, classes]. Under autocast the products are computed in its dtype; the softmax, the sum and d weight in
    float32 or wider.

    Args:
        hidden: [rows, width].
        weight: [classes, width].
        labels: int64 [rows]; rows of -100 are left out.
        max_logits: the largest number of logits at once.
        scales: floating [rows], by which each row's cross-entropy is multiplied before it is summed; None: 1. It gets no
            gradient.

    Returns:
        The summed cross-entropy, scalar in float32 or wider; the number of rows whose largest logit is the label's, int64
        scalar, counted only when no gradient is recorded, else 0.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, max_logits, scales, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, max_logits, scales, needs_gradient):
        device, wide = hidden.device.type, torch.promote_types(hidden.dtype, torch.float32)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        total = torch.zeros((), dtype=wide, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        d_hidden = torch.zeros_like(hidden) if needs_gradient else None
        needs_weight = needs_gradient and ctx.needs_input_grad[1]
        d_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        size = max(1, max_logits // len(weight))
        with torch.autocast(device, enabled=False):
            narrow_weight = weight.to(dtype)
            for first in range(0, len(labels), size):
                chunk = slice(first, first + size)
                # [n, width] and [n], n rows of this chunk; an ignored row gets class 0, and its loss and gradient are masked.
                rows, targets = hidden[chunk].to(dtype), labels[chunk]
                is_counted, classes = targets != IGNORED, targets.clamp(min=0)[:, None]
                # [n]: 0 for ignored rows
                scale = is_counted if scales is None else torch.where(is_counted, scales[chunk], 0)
                log_p = F.log_softmax(F.linear(rows, narrow_weight), -1, dtype=wide)
                total -= (torch.where(is_counted, log_p.gather(1, classes).squeeze(1), 0) * scale).sum()
                if not needs_gradient:
                    correct += (log_p.argmax(-1) == targets).sum()
                    continue
                error = log_p.exp_().scatter_add_(1, classes, log_p.new_full(classes.shape, -1)).to(dtype)  # p - y
                d_hidden[chunk] = (error @ narrow_weight) * scale[:, None]
                if needs_weight:
                    rows = (rows * scale[:, None]).to(dtype)
                    if dtype == wide:
                        d_weight.addmm_(error.T, rows)
                    else:
                        d_weight += error.T @ rows
                del log_p, error  # before the next chunk's logits
        ctx.gradients, ctx.weight_dtype = (d_hidden, d_weight), weight.dtype
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_total, _):
        d_hidden, d_weight = ctx.gradients
        del ctx.gradients  # scaled in place: good for one backward
        d_weight = None if d_weight is None else d_weight.mul_(d_total).to(ctx.weight_dtype)
        return d_hidden.mul_(d_total), d_weight, None, None, None, None


def weighted_loss(sums: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute sum_j w_j * s_j / n_j: the loss of a whole step, or the part of it that a micro-batch's sums give.

    Args:
        sums: [terms], summed losses of a micro-batch or of the step.
        counts: [terms], n_j: targets in the whole step, or the sum of their weights. A term without counts 0, never NaN.
        weights: [terms], w_j.

    >>> weighted_loss(torch.tensor([6.0, 0.0]), torch.tensor([3, 0]), torch.tensor([1.0, 1.0])).item()
    2.0
    """
    return (weights * sums / nonzero(counts)).sum()


def nonzero(counts: torch.Tensor) -> torch.Tensor:
    """Replace counts of 0 by 1, so that one can divide by them.

    >>> nonzero(torch.tensor([3.0, 0.0, 0.25])).tolist()
    [3.0, 1.0, 0.25]
    """
    return counts.masked_fill(counts == 0, 1)
