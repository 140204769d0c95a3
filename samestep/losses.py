"""Losses as sums over targets, and what they are divided by: for `step.loss`, `ExactTrainer(loss=)`, `evaluate`, `audit_step`.

Each returns (sum, divisor), scalars of a micro-batch. Over the whole step the loss is  sum of the sums / sum of the divisors,
which is the loss of one large batch, however it is cut. Sums are in float32 or wider, and 0, with a gradient of zeros, where
nothing is to be predicted. Logits are [samples, classes, ...] and labels int64 [samples, ...], as in
`torch.nn.functional.cross_entropy`; labels of -100 are left out. Losses that are no sums: docs/losses.md.
"""

import torch
import torch.nn.functional as F

from samestep.step.losses import IGNORED


def _widen(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the cross-entropy, as `torch.nn.CrossEntropyLoss(weight, label_smoothing)` with its mean has it.

    Args:
        weight: of the classes, [classes]; of the whole data set, for one that is computed from a batch depends on the cut.
        label_smoothing: share of a target that all classes divide between them (Szegedy et al., 2016, arXiv:1512.00567).

    Returns:
        the sum; the number of targets, or float64, the sum of the weights of their classes.

    >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]]), torch.tensor([0, 1, -100])
    >>> total, divisor = cross_entropy(logits, labels, weight=torch.tensor([1.0, 3.0]), label_smoothing=0.1)
    >>> mean = torch.nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]), label_smoothing=0.1)(logits, labels)
    >>> divisor.item(), torch.allclose(total / divisor, mean.double())
    (4.0, True)
    """
    wide = _widen(logits)
    total = F.cross_entropy(
        wide,
        labels,
        None if weight is None else weight.to(wide),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return total, (labels != IGNORED).sum() if weight is None else _sum_weights(weight, labels)


def _sum_weights(weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Add up the weights of the labels that count, in float64, so that no cut rounds them differently."""
    numbers = torch.bincount(labels[labels != IGNORED].flatten(), minlength=len(weight))
    return (numbers.double().cpu() * weight.double().cpu()).sum()


def focal_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, gamma: float = 2.0, alpha: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the focal loss  -alpha_y (1 - p_y)^gamma log p_y,  p = softmax(logits) (Lin et al., 2017, arXiv:1708.02002, eq. 5).

    Args:
        gamma: how much easy targets count less; 0 is the cross-entropy.
        alpha: of the classes, [classes]; None: 1.

    Returns:
        the sum; the number of targets. Detectors divide by the targets of the foreground alone: `(labels > 0).sum()`.

    >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]]), torch.tensor([0, 1, -100])
    >>> total, divisor = focal_loss(logits, labels, gamma=0.0)
    >>> torch.allclose(total, cross_entropy(logits, labels)[0]), divisor.item()
    (True, 2)
    >>> bool(focal_loss(logits, labels)[0] < total)
    True
    """
    log_p = F.log_softmax(_widen(logits), 1)
    is_counted, classes = labels != IGNORED, labels.clamp(min=0)
    own = log_p.gather(1, classes[:, None]).squeeze(1)
    losses = -((-torch.expm1(own)).clamp(min=0) ** gamma) * own
    if alpha is not None:
        losses = losses * alpha.to(losses)[classes]
    return torch.where(is_counted, losses, 0).sum(), is_counted.sum()


def dice_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, smoothing: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the Dice loss of each picture,  1 - mean over classes of (2 sum p y + e) / (sum p + sum y + e),  p = softmax(logits).

    Milletari et al., 2016, arXiv:1606.04797. The Dice of a whole batch is no sum; docs/losses.md has it of a whole step.

    Args:
        smoothing: e.

    Returns:
        the sum; the number of pictures.

    >>> labels = torch.tensor([[[0, 1], [1, -100]]])
    >>> total, divisor = dice_loss(30.0 * F.one_hot(labels.clamp(min=0), 2).movedim(-1, 1).float(), labels)
    >>> round(total.item(), 6), divisor.item()
    (0.0, 1)
    """
    is_counted = (labels != IGNORED)[:, None]
    p = _widen(logits).softmax(1) * is_counted
    y = F.one_hot(labels.clamp(min=0), logits.shape[1]).movedim(-1, 1) * is_counted
    overlaps, sizes = (p * y).flatten(2).sum(2), (p + y).flatten(2).sum(2)
    scores = ((2 * overlaps + smoothing) / (sizes + smoothing)).mean(1)
    return (1 - scores).sum(), torch.tensor(len(logits), device=logits.device)
