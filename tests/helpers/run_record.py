"""Trainings and commands of `tests/record.py`, each whatever the ones before it ended with; a fork server imports this."""

import contextlib
import json
import os
import sys
from pathlib import Path

import run_layouts
from common import fresh_accelerator

from samestep.__main__ import console
from samestep.errors import UsageError
from samestep.training import run


def main(folder: str, file: str) -> None:
    """Train or answer as `file` says, [[PROGRAM, ARGUMENT, ...], ...] in JSON, and end the process.

    Each call's output goes to FOLDER/NUMBER.RANK.txt, its end behind it: its exit code, or what it raised.
    """
    run_layouts.draw_nothing()
    run_layouts.PartialState.destroy_process_group = run_layouts.end
    run.Run.evaluates_before = lambda self, step: False
    rank = os.environ.get("RANK", "0")
    for number, (program, *argv) in enumerate(json.loads(Path(file).read_text())):
        fresh_accelerator()
        with open(f"{folder}/{number}.{rank}.txt", "w") as output:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                end = call(program, argv)
            output.write(f"\nEND {end}\n")
    os._exit(0)


def call(program: str, argv: list[str]) -> str:
    """Call a script, or the command `samestep`; return how it ended."""
    script = run_layouts.SCRIPTS.get(program)
    sys.argv = [f"scripts/{program}.py" if script else "samestep", *argv]
    try:
        return str((script.main(argv) if script else console()) or 0)
    except UsageError as error:
        return f"UsageError: {error}"
    except SystemExit as end:
        return f"{end.code or 0}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
