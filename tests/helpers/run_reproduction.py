"""Runs a reproduction of studies/ as it stands, changed, or with a proposal of studies/upstream; see `forked.Server`."""

import contextlib
import importlib
import io
import json
import os
import sys
from pathlib import Path

STUDIES = Path(__file__).resolve().parents[2] / "studies"


def main(folder: str, name: str, proposal: str, changes: str) -> None:
    """Run a program in a folder; leave its last line and its exit code in RANK.json.

    Args:
        folder: where it runs.
        name: of the reproduction.
        proposal: of studies/upstream; empty: none.
        changes: text to replace and what by, as JSON of a dictionary.
    """
    os.chdir(folder)
    rank = os.environ.get("RANK", "0")
    text = (STUDIES / "reproductions" / f"{name}.py").read_text(encoding="utf-8")
    for old, new in json.loads(changes).items():
        assert old in text, old
        text = text.replace(old, new)
    program = Path(f"{name}-{rank}.py")
    program.write_text(text, encoding="utf-8")
    sys.path.insert(0, str(STUDIES / "upstream"))
    printed, code = io.StringIO(), 0
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(printed):
        if proposal:
            stack.enter_context(importlib.import_module(proposal).mended())
        try:
            exec(compile(text, str(program), "exec"), {"__name__": "__main__", "__file__": str(program)})
        except SystemExit as end:
            code = int(end.code or 0)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith(("wrong:", "right:"))]
    Path(f"{rank}.json").write_text(json.dumps({"line": lines[-1], "code": code}), encoding="utf-8")
    os._exit(0)
