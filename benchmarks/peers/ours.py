"""A script of this repository, unchanged but for a stamp after every step: STAMPS SCRIPT FLAGS."""

import runpy
import sys
from collections.abc import Callable

import torch
from clock import Clock

from samestep.data.steps import StepData
from samestep.training import report


def count_real(data: StepData, unit: str) -> int:
    """Count the tokens without padding, or the images, of a step."""
    return data.num_samples if unit == "image" else data.num_tokens


def stamp(clock: Clock, count: Callable[[StepData, str], int] = count_real) -> None:
    """Let every run of this process tell the clock of its steps.

    Args:
        count: counts the units of a step; takes it, and the unit of its recipe.
    """
    log_step = report.RunLog.end_step

    def end_step(log, step):
        log_step(log, step)
        clock.collated(count(step.data, log.recipe.unit))
        clock.step(log.compute_losses(torch.stack(step.attempt.sums).sum(0), step.attempt.counts)["loss"])

    report.RunLog.end_step = end_step


if __name__ == "__main__":
    stamp(Clock(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
