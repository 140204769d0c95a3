"""Finds layouts that a program computed as it computed the first one, so that a comparison could not fail."""

import re
from collections.abc import Mapping, Sequence

from stepaudit.recording import Recording
from stepaudit.samples import is_copied

CUTS = re.compile(r"batch_?size|(^|[._])batch$|accum|micro_?batch", re.IGNORECASE)
OTHERS = re.compile(r"eval|valid|test|pred|infer", re.IGNORECASE)
SHORT = {"b", "k", "bs", "ga", "gas", "mbs", "gbs"}
"""Names of flags that say how a step is cut: what is in them, what is not (of evaluations), and whole ones."""


def is_cut(name: str) -> bool:
    """Tell whether a flag says how a step is cut, as its name has it.

    >>> is_cut("--train_batch_size"), is_cut("env:ACCUM"), is_cut("-b"), is_cut("num_workers"), is_cut("backend")
    (True, True, True, False, False)
    >>> is_cut("eval_batch_size"), is_cut("batch_norm_momentum"), is_cut("key:data.batch")
    (False, False, True)
    """
    name = name.removeprefix("env:").removeprefix("key:").lstrip("-")
    return name.lower() in SHORT or (CUTS.search(name) is not None and OTHERS.search(name) is None)


def find_shape(recordings: Sequence[Recording]) -> list[list[list[int | None]]]:
    """List the samples of each micro-batch of each step of each process: the same of two layouts that cut alike."""
    return [[[micro.num_rows for micro in step.micro_steps] for step in one.steps] for one in recordings]


def explain_unvaried(
    reference_flags: Mapping[str, str],
    reference: Sequence[Recording],
    flags: Mapping[str, str],
    recordings: Sequence[Recording],
) -> str | None:
    """Say why a layout tests nothing: flags that cut a step differ, and all micro-batches are the same; None: it tests.

    Args:
        reference_flags, flags: name -> value of the first layout, and of this one.
        reference, recordings: of their processes.
    """
    changed = [name for name, value in flags.items() if is_cut(name) and reference_flags.get(name) != value]
    shape = find_shape(recordings)
    sizes = [size for steps in shape for step in steps for size in step]
    if not changed or shape != find_shape(reference) or not sizes or None in sizes:
        return None
    first = next(step for steps in shape for step in steps if step)
    seen = f"the first step has {len(first)}, of {first[0]} samples"
    return (
        f"{', '.join(f'{name} {flags[name]}' for name in changed)}: all micro-batches are as in the first layout ({seen}), "
        f"so that nothing is tested. The program does not read {' and '.join(changed)}, or its data are too few: vary what it "
        "reads, for example an environment variable, env:BATCH"
    )


def explain_copies(label: object, num_processes: int, recordings: Sequence[Recording]) -> str | None:
    """Say why several processes that took the reference's steps test nothing: each computed all samples; None: they test.

    Args:
        label: of the layout.
        num_processes: of the reference.
        recordings: of the layout's processes.
    """
    if len(recordings) <= num_processes or not recordings[0].steps:
        return None
    if not all(is_copied(list(recordings), t) for t in range(len(recordings[0].steps))):
        return None
    return (
        f"{label}: all processes compute the same samples, so that their sharing is not tested. The program starts no process "
        "group (accelerate, DistributedDataParallel), or its loader is not shared out: leave --processes out, or share it"
    )
