#!/usr/bin/env python3
"""`stepaudit/lint/__main__.py FILES` lints from a bare checkout: a pre-commit hook starts it where nothing is installed."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in the place of this folder
    from stepaudit.lint.command import main

    sys.exit(main(prog="python -m stepaudit lint"))
