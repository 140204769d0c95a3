"""Splits a noisy curve into its level and what is left, and measures both by medians, which single steps do not move."""

import numpy as np

CHUNK = 10_000


def fill(values: np.ndarray) -> np.ndarray:
    """Fill gaps (NaN) of a series, float64 [n], by straight lines; at the ends by the nearest value.

    >>> fill(np.array([np.nan, 1.0, np.nan, 3.0])).tolist()
    [1.0, 1.0, 2.0, 3.0]
    """
    known = np.isfinite(values)
    if known.all() or not known.any():
        return values
    places = np.arange(len(values))
    return np.interp(places, places[known], values[known])


def find_level(values: np.ndarray, width: int) -> np.ndarray:
    """Find the median of the `width` (odd) values around each value; near the ends of as many as there are on both sides.

    >>> find_level(np.array([1.0, 9.0, 2.0, 3.0, 4.0]), 3).tolist()
    [1.0, 2.0, 3.0, 3.0, 4.0]
    """
    half = min(width // 2, (len(values) - 1) // 2)
    level = values.astype(float).copy()
    for place in range(half):  # the ends
        level[place] = np.median(values[: 2 * place + 1])
        level[len(values) - 1 - place] = np.median(values[len(values) - 1 - 2 * place :])
    windows = np.lib.stride_tricks.sliding_window_view(values, 2 * half + 1)
    for begin in range(0, len(windows), CHUNK):
        part = windows[begin : begin + CHUNK]
        level[half + begin : half + begin + len(part)] = np.median(part, axis=1)
    return level


def find_scatter(values: np.ndarray) -> float:
    """Find the scatter of a series from one value to the next: 1.4826 MAD of the differences / sqrt(2).

    For independent normal noise it is the standard deviation (Rousseeuw and Croux 1993); a slow trend hardly changes it.

    >>> round(find_scatter(np.random.default_rng(0).normal(size=9999) + np.arange(9999) / 100), 1)
    1.0
    """
    differences = np.diff(values)
    if not len(differences):
        return 0.0
    return float(1.4826 * np.median(np.abs(differences - np.median(differences))) / np.sqrt(2))


def correlate(a: np.ndarray, b: np.ndarray) -> float:
    """Compute the correlation of two series; 0 where one does not change.

    >>> correlate(np.array([1.0, 2, 3]), np.array([2.0, 4, 6])), correlate(np.array([1.0, 2]), np.array([1.0, 1]))
    (1.0, 0.0)
    """
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return round(float((a * b).sum()) / size, 12) if size > 0 else 0.0
