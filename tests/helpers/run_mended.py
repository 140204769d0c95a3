"""Runs a program with a proposal of studies/upstream applied: run_mended.py PROPOSAL PROGRAM, and the program's own words."""

import importlib
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    proposal, program = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    sys.path[:0] = [str(Path(program).parent), str(Path(__file__).resolve().parents[2] / "studies" / "upstream")]
    with importlib.import_module(proposal).mended():
        runpy.run_path(program, run_name="__main__")
