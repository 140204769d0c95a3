"""A script of this repository, unchanged but for a stamp after every step: STAMPS SCRIPT FLAGS."""

import runpy
import sys

import torch
from clock import Clock

from samestep.training import report


def stamp(clock: Clock) -> None:
    """Let every run of this process tell the clock of its steps."""
    log_step = report.RunLog.step

    def step(log, data, sums, counts, *more):
        log_step(log, data, sums, counts, *more)
        clock.collated(data.num_samples if log.recipe.unit == "image" else data.num_tokens)
        clock.step(log.compute_losses(torch.stack(list(sums)).sum(0), counts)["loss"])

    report.RunLog.step = step


if __name__ == "__main__":
    stamp(Clock(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
