"""Judges programs that decide by numbers of their model: which micro-batches are skipped, when to stop, what to weigh.

Parameters are put back after every step, so that such numbers stay what they were at the beginning (a KL from the old policy is
0), and no decision comes up. Where a program reads numbers, and its layouts are exact, both are recorded once more while
parameters move.
"""

import dataclasses
from collections.abc import Callable, Sequence

from stepaudit.judge import INPUTS, Comparison, compare
from stepaudit.recording import Recording
from stepaudit.rounding import settle

# Relative error of a gradient at parameters that have moved, where rounding has grown for some steps; and how many times the
# error of the steps before it is a decision, and no rounding.
MOVED_TOLERANCE, JUMP = 1e-3, 100
# Causes beside other inputs that say what a decision has changed, whatever the gradients are.
DECIDED = INPUTS | {"last_window", "learning_rate", "parameters"}


def judge(
    reference: list[Recording],
    other: list[Recording],
    tolerance: float,
    record_again: Callable[[bool, str], list[Recording]],
) -> Comparison:
    """Compare two layouts of a program, and record them again where that tells more.

    Args:
        reference, other: recordings of all processes of the two layouts.
        tolerance: relative error of a gradient that is rounding.
        record_again: (whether of the reference, mode as of `stepaudit.script.record`) -> recordings: with `full`, what is
            computed in 16 bits; with `train`, what is decided by numbers.

    Returns:
        The comparison.
    """
    comparison = settle(
        compare(reference, other, tolerance),
        reference,
        other,
        tolerance,
        lambda is_reference: record_again(is_reference, "full"),
    )
    recordings = [*reference, *other]
    is_decided = any(r.reads_numbers for r in recordings) and not any(r.has_moved or r.short_dtypes for r in recordings)
    if not comparison.is_exact or not is_decided:
        return comparison
    return follow(comparison, record_again(True, "train"), record_again(False, "train"))


def follow(comparison: Comparison, reference: list[Recording], other: list[Recording]) -> Comparison:
    """Add to an exact comparison what two layouts have decided differently, recorded while parameters move."""
    moved = compare(reference, other, MOVED_TOLERANCE)
    if moved.is_exact or not (_has_jumped(moved.errors) or {f.cause for f in moved.findings} & DECIDED):
        return comparison
    findings = [
        dataclasses.replace(
            finding, evidence=f"{finding.evidence}; the program decides by numbers of its micro-batches"
        )
        for finding in moved.findings
        if not finding.is_harmless
    ]
    return dataclasses.replace(moved, findings=[*comparison.findings, *findings])


def _has_jumped(errors: Sequence[float]) -> bool:
    """Tell whether the first error that is no rounding comes at once, and has not grown from step to step."""
    wrong = [t for t, error in enumerate(errors) if not error <= MOVED_TOLERANCE]
    return bool(wrong) and not errors[wrong[0]] <= JUMP * max(errors[: wrong[0]], default=0.0)
