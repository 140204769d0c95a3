"""Trains as `run_layouts` does, in a folder in which the files lie that printed commands name."""

import os

import run_layouts


def main(folder: str, calls: str) -> None:
    """Train as `calls` says in `folder`, and end the process."""
    os.chdir(folder)
    run_layouts.main(folder, calls)
