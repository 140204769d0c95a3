"""Compares the steps of a run that was killed and resumed with those of a run that went on undisturbed."""

import dataclasses

import numpy as np

from stepaudit.causes import Finding
from stepaudit.judge import Comparison, compare
from stepaudit.recording import Recording

NEAR = 0.01  # of the length of a step: parameters that are so near to those after a step are the same, but for rounding
# Causes that a comparison of layouts names, and what they mean for a run that is resumed.
MEANINGS = {
    "other_samples": "resume_samples",
    "other_inputs": "resume_samples",
    "duplicated": "resume_samples",
    "dropped": "resume_samples",
    "update": "resume_state",
    "learning_rate": "resume_state",
    "ticks_per_micro_step": "resume_state",
    "ticks_per_process": "resume_state",
}


def compare_resumed(
    undisturbed: list[Recording], resumed: list[Recording], stop: int, num_steps: int, tolerance: float
) -> Comparison:
    """Find the step at which a run was resumed, by its parameters, and compare the steps after it.

    Args:
        undisturbed: recordings of all processes of the run that went on, whose parameters moved.
        resumed: of the run that was resumed, from its first step.
        stop: steps after which the run was killed.
        num_steps: steps for which the resumed run was recorded; 0: to its end.
        tolerance: as of `compare`.

    Returns:
        The comparison of the resumed run's steps with those of the other one that follow, up to the first one that differs:
        what differs later follows from it. Where the parameters are those of no step, `resume_weights` is found, and samples
        and rates are compared from the step whose samples the resumed run begins with; gradients differ for that reason then.
    """
    step, finding = _find_step(undisturbed[0], resumed[0], stop)
    if finding:
        first_samples = _list_samples(resumed, 0)
        going_on = [t for t in range(stop, 0, -1) if _list_samples(undisturbed, t) == first_samples is not None]
        step = going_on[0] if going_on else step
    length = len(undisturbed[0].steps) - step
    length = min(length, num_steps) if num_steps else length
    for count in range(1, length + 1):
        rest = [_cut(recording, step, step + count) for recording in undisturbed]
        comparison = compare(rest, [_cut(recording, 0, count) for recording in resumed], tolerance)
        if not comparison.is_exact:
            break
    findings = [finding] if finding else []
    for other in comparison.findings:
        cause, evidence = MEANINGS.get(other.cause, other.cause), other.evidence
        if finding and other.cause not in MEANINGS:
            continue
        if (
            cause == "resume_samples"
            and step
            and _list_samples(resumed, 0) == _list_samples(undisturbed, 0) is not None
        ):
            evidence = "the samples of step 1: the order begins anew"
        if cause not in {known.cause for known in findings}:
            where = ", ".join(part for part in (other.where, f"resumed after step {step}") if part)
            findings.append(Finding(cause, where, evidence))
    comparison.findings = findings
    return comparison


def _find_step(undisturbed: Recording, resumed: Recording, stop: int) -> tuple[int, Finding | None]:
    """Find the number of steps that were taken before the resumed run's first parameters."""
    if undisturbed.names != resumed.names or undisturbed.sizes != resumed.sizes:
        return stop, None  # `compare` says so
    changes = [step.change for step in undisturbed.steps[:stop]]
    distances = [
        float(np.linalg.norm(undisturbed.weights + sum(changes[:count], np.zeros(1)) - resumed.weights))
        for count in range(len(changes) + 1)
    ]
    step, length = int(np.argmin(distances)), min(float(np.linalg.norm(change)) for change in changes)
    if not step:
        return step, Finding(
            "resume_weights", "", "its first parameters are those of the first step: nothing was loaded"
        )
    if distances[step] > NEAR * length:
        ratio = distances[step] / length
        return step, Finding("resume_weights", "", f"{ratio:.2g} steps from those after step {step}, the nearest")
    return step, None


def _cut(recording: Recording, begin: int, end: int) -> Recording:
    """Keep the steps from `begin` to `end` of a recording, and of those of further optimizers."""
    return dataclasses.replace(
        recording,
        steps=recording.steps[begin:end],
        unfinished_micro_steps=recording.unfinished_micro_steps if end >= len(recording.steps) else [],
        other_recordings=[_cut(other, begin, end) for other in recording.other_recordings],
    )


def _list_samples(processes: list[Recording], t: int) -> list | None:
    """List the samples of step t + 1 of all processes, in order; None if some are unknown."""
    micro_steps = [m for process in processes if t < len(process.steps) for m in process.steps[t].micro_steps]
    for name in ("digests", "samples"):
        values = [getattr(m, name) for m in micro_steps]
        if values and None not in values:
            return sorted(sample for value in values for sample in value)
    return None
