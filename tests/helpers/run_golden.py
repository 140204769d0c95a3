"""First steps of recipes, for their digests: without evaluations, which change nothing; a fork server imports this."""

import run_layouts

from samestep.training import run


def main(folder: str, calls: str) -> None:
    """Train as `run_layouts.main` does."""
    run.Run.evaluates_before = lambda self, step: False
    run_layouts.main(folder, calls)
