"""Says what went wrong in a run: `samestep doctor`."""

import dataclasses
import json
from typing import Any

import numpy as np

from samestep.cli.flags import read_folders
from samestep.contrib.doctor.findings import Finding, choose
from samestep.contrib.doctor.history import History, read_history
from samestep.contrib.doctor.rules import MIN_STEPS, judge
from samestep.printing import fold, format_count
from samestep.recipe.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Choose what is printed"""

    json: bool = setting("print one JSON object", default=False)


def doctor(argv: list[str]) -> int:
    """Say what went wrong in a run; return 1 if something did, else 0."""
    folders, settings = read_folders("doctor", "RUN [--FLAG VALUE ...]", argv, DoctorSettings, (1,))
    history = read_history(folders[0])
    found = choose(judge(history))
    if settings.json:
        print(json.dumps(describe(folders[0], history, found), allow_nan=False))
    else:
        print(fold("\n".join(write(folders[0], history, found))))
    return 1 if found else 0


def describe(folder: str, history: History, found: list[Finding]) -> dict[str, Any]:
    """Describe a run and its findings as plain values."""
    return {
        "run": folder,
        "num_steps": len(history.steps),
        "num_evaluations": len(history.eval_steps),
        "num_layers": len(history.layer_names),
        "unknown": find_missing(history),
        "findings": [finding.to_json() for finding in found],
    }


def write(folder: str, history: History, found: list[Finding]) -> list[str]:
    """Write the lines that people read."""
    known = history.loss[np.isfinite(history.loss)]
    head = f"{folder}: {format_count(len(history.steps), 'step')}"
    if len(known):
        head += f", loss {known[0]:.4g} to {known[-1]:.4g}"
    lines = [head]
    for number, finding in enumerate(found, 1):
        first, *others = finding.write()
        lines += [f"{number}. {first}", *(f"   {line.strip()}" for line in others)]
    if not found and len(known) >= MIN_STEPS:
        lines.append("nothing was found")
    return lines + [f"not judged: {text}" for text in find_missing(history)]


def find_missing(history: History) -> list[str]:
    """Say what a run does not have that rules look at."""
    if np.isfinite(history.loss).sum() < MIN_STEPS:
        return [f"all, as fewer than {MIN_STEPS} steps have a loss"]
    missing = []
    if not history.layers:
        missing.append("layers and the size of updates, which --watch_layers 10 measures")
    if len(history.eval_losses) < 3:
        missing.append("overfitting, for which three evaluations are needed (--eval_steps)")
    return missing
