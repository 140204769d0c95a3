"""Reads recordings: the micro-batches of a step on all processes, and their numbers of targets."""

from collections.abc import Sequence

import numpy as np

from stepaudit.recording import MicroStep, Recording, Step

Processes = list[Recording]
"""Recordings of all processes of one layout."""


def is_causal(recording: Recording) -> bool:
    """Tell whether a model predicts the next token, by the name of its class."""
    return "CausalLM" in recording.model or "LMHead" in recording.model


def list_micro_steps(processes: Processes, t: int) -> list[MicroStep]:
    """List the micro-batches of step t + 1 on all processes.

    What the program has computed and thrown away is of no step: the rest of the epoch before, and rows that come from no
    loader, with which it tries its model.
    """
    return [m for process in processes if t < len(process.steps) for m in _leave_out_rest(process.steps[t])]


def _leave_out_rest(step: Step) -> list[MicroStep]:
    window = get_window(step)
    rest = step.micro_steps[: -len(window)] if window else []
    is_earlier = all(m.epoch is not None and window[0].epoch is not None and m.epoch < window[0].epoch for m in rest)
    is_trial = all(m.samples is m.digests is None for m in rest) and not any(
        m.samples is m.digests is None for m in window
    )
    if rest and window and is_trial:
        return window
    # Where nothing was touched, the gradient of a micro-batch was 0
    return window if is_earlier and window and window[0].is_touched else step.micro_steps


def list_all_micro_steps(processes: Processes) -> list[MicroStep]:
    return [m for process in processes for step in process.steps for m in step.micro_steps]


def compute_loss(processes: Processes, t: int) -> float:
    """Compute the loss of step t + 1: the sum over the micro-batches, the mean over the processes; NaN if one is unknown."""
    losses = [[m.loss for m in get_window(process.steps[t])] for process in processes if t < len(process.steps)]
    if any(None in rank_losses for rank_losses in losses):
        return float("nan")
    return float(np.mean([sum(rank_losses) for rank_losses in losses]))


def get_window(step: Step) -> list[MicroStep]:
    """Return the micro-batches that the step is made of: all since its gradient was empty."""
    start = max((q for q, micro_step in enumerate(step.micro_steps) if micro_step.is_fresh), default=0)
    return step.micro_steps[start:]


def get_counts(recording: Recording, micro_step: MicroStep) -> tuple[int, ...] | None:
    """Return the numbers of targets of a micro-batch, one per loss term, as far as they can be seen; None if they cannot."""
    if micro_step.counts is not None:
        return tuple(micro_step.counts)
    for count in (
        micro_step.num_shifted if is_causal(recording) else None,
        micro_step.num_labels,
        micro_step.num_rows,
    ):
        if count is not None:
            return (count,)
    return None


def format_counts(counts: Sequence[tuple[int, ...]]) -> str:
    return ", ".join("+".join(map(str, terms)) for terms in counts[:8])
