"""The benchmarks, as `make help` lists them."""

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

from common import ROOT

FOLDER = ROOT / "benchmarks"


def list_benchmarks() -> list[str]:
    """List what `make bench NAME=...` measures: programs whose docstring says so."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if "    make bench" in path.read_text(encoding="utf-8"))


def main(folder: str) -> None:
    """Ask all benchmarks for help, write [exit code, output] of each by name to FOLDER/help.json, and end the process."""
    answers = {}
    sys.path.insert(0, str(FOLDER))
    for name in list_benchmarks():
        output, code, sys.argv = io.StringIO(), None, [f"{name}.py", "--help"]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
            except SystemExit as end:
                code = end.code or 0
        answers[name] = [code, output.getvalue()]
    (Path(folder) / "help.json").write_text(json.dumps(answers))
    os._exit(0)
