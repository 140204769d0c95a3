"""Trainings as `run_layouts` does them, float64 throughout."""

import run_layouts
from wide import Wide


def main(folder: str, calls: str) -> None:
    """Train as `run_layouts.main` does, with float64 in place of float32 in models; end the process."""
    with Wide():
        run_layouts.main(folder, calls)
