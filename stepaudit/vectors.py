"""Arithmetic with sketches of gradients: lengths, relative errors, and the weights of micro-batches in a sum."""

from collections.abc import Sequence

import numpy as np

WEIGHT_TOLERANCE = 1e-3  # relative; weights that differ less are the same


def solve_weights(parts: Sequence[np.ndarray | None], gradient: np.ndarray) -> tuple[np.ndarray | None, float]:
    """Solve for the weights a_q for which sum_q a_q d_q comes nearest to a gradient [numbers].

    Returns:
        Weights [micro-batches], None if they are not determined, and the relative rest.
    """
    if not parts or any(part is None for part in parts) or len(parts) + 1 >= np.count_nonzero(gradient):
        return None, float("inf")
    matrix = np.stack(parts).T  # [numbers, micro-batches]
    weights, _, rank, _ = np.linalg.lstsq(matrix, gradient, rcond=1e-10)
    if rank < len(parts):
        return None, float("inf")
    return weights, relative(matrix @ weights - gradient, norm_of(gradient))


def compute_rest(parts: Sequence[np.ndarray | None], gradient: np.ndarray) -> float:
    """Return the relative rest of a gradient that no weighted sum of the parts gives; parts may be alike."""
    if not parts or any(part is None for part in parts) or len(parts) + 1 >= np.count_nonzero(gradient):
        return float("inf")
    matrix = np.stack(parts).T
    weights = np.linalg.lstsq(matrix, gradient, rcond=1e-10)[0]
    return relative(matrix @ weights - gradient, norm_of(gradient))


def are_alike(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= WEIGHT_TOLERANCE * np.abs(values).max())


def norm_of(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector))


def relative(value: np.ndarray | float, norm: float) -> float:
    size = norm_of(np.asarray(value)) if np.ndim(value) else float(value)
    return size / norm if norm else (0.0 if size == 0 else float("inf"))
