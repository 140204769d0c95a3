"""Answers `python -m samestep`, which is the command `samestep`; see `samestep.cli`."""

from samestep.cli import console

console()
