"""Loss terms as sums over targets, and the loss of a step made of them.

For the global batch S, terms j with weights w_j, the summed loss s_j(i) and the number of targets c_j(i) of a sample i:

    L = sum_j  w_j * (sum_{i in S} s_j(i)) / n_j,     n_j = sum_{i in S} c_j(i)

A cut of S into cells leaves L and its gradient unchanged when each cell contributes its sums divided by the n_j of the
whole step. A mean over each cell, averaged over cells, does not: cells differ in their number of targets.
"""

import torch
import torch.nn.functional as F

IGNORED = -100  # label of a place where nothing is to be predicted


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy: scalar in float32 or wider; 0, with a gradient of zeros, when nothing is to be predicted.

    Args:
        logits: [targets, classes].
        labels: int64 [targets]; targets of -100 are left out.
    """
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def num_correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Targets whose largest logit is the label's: int64 scalar. Arguments as in `cross_entropy_sum`."""
    return (logits.argmax(-1) == labels).sum()


def weighted_loss(sums: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_j w_j * s_j / n_j: the loss of a whole step from whole sums, or one cell's part of it from the cell's sums.

    Args:
        sums: [terms], summed losses of a cell or of the step.
        counts: [terms], n_j: targets in the whole step. A term without targets counts 0, never NaN.
        weights: [terms], w_j.

    >>> weighted_loss(torch.tensor([6.0, 0.0]), torch.tensor([3, 0]), torch.tensor([1.0, 1.0])).item()
    2.0
    """
    return (weights * sums / counts.clamp(min=1)).sum()
