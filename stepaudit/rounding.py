"""Decides whether layouts of a program in 16 bits differ by more than rounding: `settle`. `precision.py` has the reasons."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from stepaudit.causes import Finding
from stepaudit.errors import UsageError
from stepaudit.judge import Comparison, compare, compute_error
from stepaudit.recording import Recording

# Relative error of a gradient that computing in 16 bits explains: 16 times the dtype's distance from 1 to the next number.
BOUNDS = {"bfloat16": 16 * 2**-7, "float16": 16 * 2**-10}
KEPT = {
    "low_precision"
}  # causes of a comparison in 16 bits that float32 does not show: gradients that are added up in 16 bits
Processes = Sequence[Recording]


def settle(
    comparison: Comparison,
    reference: Processes,
    other: Processes,
    tolerance: float,
    record_in_float32: Callable[[bool], list[Recording]],
) -> Comparison:
    """Find the causes of a difference between layouts of a program that computes in 16 bits, beside its rounding.

    Args:
        comparison: of the two layouts, as the program computes them.
        reference, other: recordings of all processes, as the program computes.
        tolerance: relative error of a gradient in float32 that is rounding.
        record_in_float32: (whether of the reference) -> the same recordings, of the program in float32.

    Returns:
        The comparison, unchanged where it is exact or where nothing is computed in 16 bits; else with the causes that float32
        shows, and, where it shows none, `rounding`, harmless if the dtype explains it.
    """
    dtypes = list(dict.fromkeys(dtype for recording in (*reference, *other) for dtype in recording.short_dtypes))
    if comparison.is_exact or not dtypes:
        return comparison
    bound, name = max((BOUNDS[dtype], dtype) for dtype in dtypes)
    errors = [error for error in comparison.errors if np.isfinite(error)]
    error = max(errors, default=0.0)
    kept = [finding for finding in comparison.findings if finding.cause in KEPT]
    try:
        truth, there = record_in_float32(True), record_in_float32(False)
    except UsageError as problem:
        reason = str(problem).strip().splitlines()[-1].strip()[:120]
        return _settle_by_bound(comparison, name, error, bound, f"it cannot be computed in float32 to tell ({reason})")
    full = compare(truth, there, tolerance)
    if not full.is_exact:
        causes = {finding.cause for finding in full.findings}
        return dataclasses.replace(comparison, findings=full.findings + [f for f in kept if f.cause not in causes])
    rounded = max(compute_error(truth, reference), compute_error(there, other))
    evidence = (
        f"relative difference {error:.2g}; in float32 {max(full.errors, default=0.0):.2g}, "
        f"and {name} rounds by {rounded:.2g}"
    )
    if kept:
        return dataclasses.replace(comparison, findings=full.findings + kept)
    rounding = Finding("rounding", name, evidence, is_harmless=rounded <= bound)
    return dataclasses.replace(comparison, findings=[*full.findings, rounding])


def _settle_by_bound(comparison: Comparison, name: str, error: float, bound: float, reason: str) -> Comparison:
    """Take a difference within the bound for rounding, if nothing else was found than that the gradients differ."""
    if error > bound or {finding.cause for finding in comparison.findings if not finding.is_harmless} - {"not_a_sum"}:
        return comparison
    rounding = Finding("rounding", name, f"relative difference {error:.2g}; {reason}", is_harmless=True)
    kept = [finding for finding in comparison.findings if finding.is_harmless]
    return dataclasses.replace(comparison, findings=[*kept, rounding])
