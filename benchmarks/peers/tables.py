"""A script of this repository, unchanged but for attention by length, which takes all its tables for however few tokens:
SCRIPT FLAGS."""

import runpy
import sys

from samestep.data import ragged

if __name__ == "__main__":
    ragged.TABLE_COST = 0
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
