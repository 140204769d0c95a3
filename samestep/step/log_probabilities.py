"""Sum the log-probabilities of the trained tokens of sequences, without holding the logits of all of them."""

import torch
import torch.nn.functional as F

from samestep.cut.layout import LOGITS_AT_ONCE


def split_pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split values of sequences, [sequences], into those of the chosen and the rejected ones, [pairs] each.

    >>> [part.tolist() for part in split_pairs(torch.arange(5))]
    [[0, 2], [1, 3]]
    """
    num_pairs = len(values) // 2
    return values[: 2 * num_pairs].view(num_pairs, 2).unbind(1)


def count_tokens(label_sequence: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Count the trained tokens of each sequence, int64 [sequences], given the number of the sequence of each, int64 [tokens].

    >>> count_tokens(torch.tensor([0, 0, 2]), 4).tolist()
    [2, 0, 1, 0]
    """
    return label_sequence.new_zeros(num_sequences).index_add_(0, label_sequence, torch.ones_like(label_sequence))


def sequence_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    label_sequence: torch.Tensor,
    num_sequences: int,
    max_logits: int = LOGITS_AT_ONCE,
) -> torch.Tensor:
    """Compute the summed log-probability of each sequence's trained tokens; logits `hidden @ weight.T` exist in parts only.

    The rows are cut into chunks of max_logits / classes rows, as in `losses.linear_cross_entropy`. There the gradient of a row
    is known up to one factor while its logits are there; here it is multiplied by its sequence's d_q, which depends on all
    tokens of a pair and is known in the backward. So the backward computes each chunk's logits again, and from p = softmax and
    the one-hot labels y

        d hidden = d_q (y - p) weight,    d weight = sum over chunks (d_q (y - p))^T hidden

    Under autocast the products are computed in its dtype; softmax and d weight in float32 or wider; sums in float64, rounded
    once: a sequence's sum may be a thousand times the difference of two sums that matters. A weight or hidden states that need
    no gradient cost none.

    Args:
        hidden: at the places that predict the trained tokens, [tokens, width].
        weight: [classes, width].
        labels: the tokens, int64 [tokens].
        label_sequence: number of each token's sequence, int64 [tokens].
        num_sequences: number of sequences.
        max_logits: the largest number of logits at once.

    Returns:
        [sequences] in float32 or wider; 0 for a sequence without trained tokens.
    """
    return _SequenceLogps.apply(hidden, weight, labels, label_sequence, num_sequences, max_logits)


class _SequenceLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, label_sequence, num_sequences, max_logits):
        device, wide = hidden.device.type, torch.promote_types(hidden.dtype, torch.float32)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        size = max(1, max_logits // len(weight))
        logps = torch.zeros(num_sequences, dtype=torch.float64, device=hidden.device)
        with torch.autocast(device, enabled=False):
            narrow_weight = weight.to(dtype)
            for first in range(0, len(labels), size):
                chunk = slice(first, first + size)
                log_p = F.log_softmax(F.linear(hidden[chunk].to(dtype), narrow_weight), -1, dtype=wide)
                logps.index_add_(0, label_sequence[chunk], log_p.gather(1, labels[chunk, None]).squeeze(1).double())
                del log_p  # before the next chunk's logits
        ctx.save_for_backward(hidden, weight, labels, label_sequence)
        ctx.size, ctx.dtype, ctx.wide = size, dtype, wide
        return logps.to(wide)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logps):
        hidden, weight, labels, label_sequence = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=ctx.wide) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            narrow_weight = weight.to(ctx.dtype)
            for first in range(0, len(labels), ctx.size):
                # [n, width], [n, 1] and [n, 1], n rows of this chunk
                chunk = slice(first, first + ctx.size)
                rows, classes = hidden[chunk].to(ctx.dtype), labels[chunk, None]
                factors = d_logps[label_sequence[chunk], None]
                error = F.log_softmax(F.linear(rows, narrow_weight), -1, dtype=ctx.wide).exp_().neg_()
                error.scatter_add_(1, classes, error.new_ones(classes.shape))  # y - p
                error = error.mul_(factors).to(ctx.dtype)
                if d_hidden is not None:
                    d_hidden[chunk] = error @ narrow_weight
                if d_weight is not None and ctx.dtype == ctx.wide:
                    d_weight.addmm_(error.T, rows)
                elif d_weight is not None:
                    d_weight += error.T @ rows
                del error  # before the next chunk's logits
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None, None
