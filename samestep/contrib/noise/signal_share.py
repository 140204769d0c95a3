"""Finds the batch that a measured noise of the gradient allows: the signal's share, and tokens by batch."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from samestep.recipe.batch_size import CONFIDENCE, Measurement, t_quantile

MIN_SHARE = 1e-9
"""Share of the signal that is none: the batch that it allows would be a billion times as large."""


class SignalShare(NamedTuple):
    """Share of the signal in the squared gradient, |mu|^2 / (|mu|^2 + V), of steps of one batch: B / (B + noise scale).

    Attributes:
        value, low, high: the share and its 90 % interval, at most 1.
    """

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """Whether the share is told from 0, and its interval is one."""
        return self.value > MIN_SHARE and math.isfinite(self.high)


def find_signal_share(windows: Sequence[Sequence[Measurement]], batch: int) -> SignalShare:
    """Find the share of the signal in steps of `batch` samples: the mean over windows of a training.

    Tokens that a batch takes are linear in this share (`tokens_ratio`), and so in its mean over the training, although the
    noise scale changes. Its interval is that of a ratio of means, from the residuals' variance in each window (Cochran 1977,
    Sampling Techniques, 6.4); the share is at most 1, so that the interval has two ends where that of the noise scale has one.

    >>> from samestep.recipe.batch_size import split
    >>> windows = split([Measurement(step, 1.0 + step % 2 / 10, 105.0) for step in range(32)])
    >>> [round(number, 3) for number in find_signal_share(windows, 100)]
    [0.5, 0.496, 0.504]
    """
    shares, variances = [], []
    for window in windows:
        n = len(window)
        squares = [m.signal + m.noise / batch for m in window]
        if not sum(squares):  # no gradient at all
            return SignalShare(0.0, 0.0, 0.0)
        share, mean = sum(m.signal for m in window) / sum(squares), sum(squares) / n
        # Over the mean before they are squared: squares of the smallest numbers would be 0
        residuals = [(m.signal - share * square) / mean for m, square in zip(window, squares, strict=True)]
        shares.append(share)
        variances.append(sum(residual * residual for residual in residuals) / (n * (n - 1)))
    degrees = sum(len(window) - 1 for window in windows)
    value = sum(shares) / len(windows)
    half = t_quantile(0.5 + CONFIDENCE / 2, degrees) * math.sqrt(sum(variances)) / len(windows)
    return SignalShare(*(min(share, 1.0) for share in (value, value - half, value + half)))


def tokens_ratio(share: float, kappa: float) -> float:
    """Compute how many times as many tokens (or samples) a batch takes to the same loss, as another one.

    With steps S and samples E, (S / Smin - 1) (E / Emin - 1) = 1 (McCandlish et al. 2018), a batch B takes Emin (1 + B / Bc),
    Bc being the critical batch size, for which the noise scale stands. Of two batches the ratio is  1 + share (kappa - 1).

    Args:
        share: B / (B + Bc), see `SignalShare`.
        kappa: the other batch over this one.

    >>> tokens_ratio(0.2, 2.0), tokens_ratio(0.2, 0.5)
    (1.2, 0.9)
    """
    return 1 + share * (kappa - 1)


def find_largest(share: float, more_tokens: float) -> float:
    """Find the batch over the one in use that takes so many more tokens to the same loss, as a share of them.

    >>> find_largest(0.2, 0.05), find_largest(0.5, 0.05)
    (1.25, 1.1)
    """
    return 1 + more_tokens / share
