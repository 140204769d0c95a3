"""Pairs the steps of two layouts by their samples, where one of them has taken a step more, or one fewer, in between."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from stepaudit.causes import Finding
from stepaudit.samples import list_tallies
from stepaudit.windows import Processes

Tallies = Sequence[Counter | None]


@dataclasses.dataclass(frozen=True)
class Shift:
    """Steps without a counterpart of their own: `count` from `first` on of the reference, and `other_count` from `other_first`.

    Attributes:
        cause: see `stepaudit.causes.KINDS`.
        evidence: what has become of these steps.
    """

    first: int
    count: int
    other_first: int
    other_count: int
    cause: str
    evidence: str


def align(reference: Processes, other: Processes) -> tuple[Processes, Processes, list[Finding], int]:
    """Leave out the steps that have no counterpart, so that those behind them are compared with their own.

    A step is known by its samples. From the first one for which nothing is found, steps are paired by their number. What is
    said of later steps numbers them without those that are left out.

    Args:
        reference: recordings of one optimizer on all processes.
        other: of another layout.

    Returns:
        Both layouts with paired steps, what is found of the others, and the number of steps before the first of these: learning
        rates follow the number of a step, and agree no longer than that.
    """
    num_steps = min(len(reference[0].steps), len(other[0].steps))
    for name in ("digests", "samples"):
        tallies = list_tallies(reference, name), list_tallies(other, name)
        if None in tallies[0] or None in tallies[1] or not num_steps or tallies[0][0] != tallies[1][0]:
            continue
        shifts = _find_shifts(*tallies)
        if not shifts:
            return reference, other, [], num_steps
        before, has_moved = shifts[0].first, reference[0].has_moved or other[0].has_moved
        left_out = {t for shift in shifts for t in range(shift.first, shift.first + shift.count)}
        others_left_out = {t for s in shifts for t in range(s.other_first, s.other_first + s.other_count)}
        if has_moved:  # later steps are taken from other parameters
            left_out, others_left_out = set(range(before, len(tallies[0]))), set(range(before, len(tallies[1])))
            shifts = shifts[:1]
        findings = [Finding(shift.cause, f"step {shift.other_first + 1}", shift.evidence) for shift in shifts]
        return _leave_out(reference, left_out), _leave_out(other, others_left_out), findings, before
    return reference, other, [], num_steps


def _leave_out(processes: Processes, left_out: set[int]) -> Processes:
    return [
        dataclasses.replace(recording, steps=[step for t, step in enumerate(recording.steps) if t not in left_out])
        for recording in processes
    ]


def _find_shifts(truth: Tallies, own: Tallies) -> list[Shift]:
    i = j = 0
    shifts: list[Shift] = []
    while i < len(truth) and j < len(own):
        if truth[i] == own[j]:
            i, j = i + 1, j + 1
            continue
        shift = _find_shift(truth, own, i, j)
        if shift is None:
            break
        shifts.append(shift)
        i, j = i + shift.count, j + shift.other_count
    return shifts


def _find_shift(truth: Tallies, own: Tallies, i: int, j: int) -> Shift | None:
    """Find out what has become of step i + 1 of the reference, where step j + 1 has other samples."""
    if count := _count_parts(truth[i], own[j:]):
        sizes = " and ".join(str(tally.total()) for tally in own[j : j + count])
        return Shift(
            i, 1, j, count, "num_steps", f"a window of {truth[i].total()} samples is {count} steps, of {sizes}"
        )
    count = _count_parts(own[j], truth[i:])
    # Windows of one size: a smaller one in front is a rest that waited for the next window
    if count and len({tally.total() for tally in truth[i : i + count]}) == 1:
        return Shift(i, count, j, 1, "num_steps", f"{count} windows of the reference are one step")
    if own[j] in truth[i:]:
        count = list(truth[i:]).index(own[j])
        size = sum(tally.total() for tally in truth[i : i + count])
        return Shift(
            i, count, j, 0, "dropped", f"{_name_steps(i, count)} of the reference, of {size} samples, is not there"
        )
    if truth[i] in own[j:]:
        count = list(own[j:]).index(truth[i])
        extra, size = sum(own[j : j + count], Counter()), sum(tally.total() for tally in own[j : j + count])
        if not extra & sum(truth, Counter()):
            return Shift(i, 0, j, count, "dropped", f"in the reference: {size} samples that no step of it has")
        cause = "duplicated" if extra & sum(own[:j], Counter()) else "num_steps"
        return Shift(i, 0, j, count, cause, f"{_name_steps(j, count)}, of {size} samples, is not in the reference")
    return None


def _count_parts(whole: Counter, parts: Tallies) -> int:
    """Count the first of some tallies, two or more, that are a whole one together; 0: they are not."""
    total: Counter = Counter()
    for count, part in enumerate(parts, 1):
        total = total + part
        if not total <= whole:
            return 0
        if total == whole:
            return count
    return 0


def _name_steps(first: int, count: int) -> str:
    return f"step {first + 1}" if count == 1 else f"each of the steps {first + 1} to {first + count}"
