"""The output folder of a run: who may write into it, and the lines of its files, of steps, evaluations and events."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from accelerate import Accelerator
from tqdm import tqdm

from samestep.errors import LostProcessError, UsageError, will_be_restarted
from samestep.recipe import run_files
from samestep.recipe.recipe import Recipe
from samestep.recipe.run_settings import RunSettings
from samestep.training import checkpoint
from samestep.training.checkpoint import LINES

SECONDS_TO_UNLOCK = 10.0
"""Seconds for workers of an earlier generation to end, which hold the lock of the output folder."""


class OutputFolder:
    """The output folder of a run that has it alone. Other kinds enter by `samestep.training.ways`.

    Args:
        output_dir: the folder.

    Attributes:
        date: the day on which those who share the folder began, in ISO's format; empty: nobody shares it.
    """

    date = ""

    def __init__(self, output_dir: Path):
        self.output_dir = output_dir
        self.unwritten_lines = dict.fromkeys(LINES, "")

    def is_opened_by(self, accelerator: Accelerator, settings: RunSettings) -> bool:
        """Tell whether this process opens the folder: one does, on each machine that has a folder of its own."""
        has_own = settings.replicate_checkpoints and accelerator.is_local_main_process
        return accelerator.is_main_process or has_own

    def open(self, settings: RunSettings, check_alone: Callable[[], None]) -> None:
        """Make the folder, and lock it.

        Args:
            settings: the run's.
            check_alone: raises UsageError if the folder holds an earlier run.
        """
        check_alone()
        self.output_dir.mkdir(parents=True, exist_ok=True)
        _lock(self.output_dir)

    def begin(self, prepare: Callable[[], None]) -> None:
        """Let process 0 make the folder ready for the lines of a session, once nobody else writes there."""
        prepare()

    def count_unread(self, logging_steps: int) -> int:
        """Count the steps whose losses may stay on the device."""
        return logging_steps

    def append(self, name: str, records: Sequence[dict[str, Any]], is_writer: bool) -> None:
        """Append lines to a file; lines that cannot be written (the disk is full) are tried again next time.

        Args:
            name: one of `LINES`.
            records: the lines.
            is_writer: whether this process is the one that writes.
        """
        if not is_writer:
            return
        self.unwritten_lines[name] += "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        check_lock(self.output_dir)
        path = self.output_dir / name
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(self.unwritten_lines[name])
            self.unwritten_lines[name] = ""
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            tqdm.write(f"WARNING: {path} cannot be written ({error.strerror}); trying again later", file=sys.stderr)

    def write(self, is_writer: bool) -> None:
        """Write the lines that are to be in the files now; here each is written when it comes."""

    def list_unwritten(self, is_writer: bool) -> list[str]:
        """List the files of which lines are not written yet."""
        return [name for name, lines in self.unwritten_lines.items() if lines]

    def release(self) -> None:
        """Let others write into the folder."""
        if lock := _locks.pop(self.output_dir.resolve(), None):
            lock.close()


def open_output_dir(accelerator: Accelerator, settings: RunSettings, folder: OutputFolder) -> None:
    """Make the output folder and lock it.

    An earlier run in it is resumed or overwritten, when asked for, never mixed with a new one. Called by all processes, before
    anything costly. Nothing is deleted before `begin_lines`.

    Raises:
        UsageError: the folder holds a run, another process is running one in it, or it cannot be made.
    """
    output_dir = folder.output_dir

    def check_alone() -> None:
        if find_earlier_run(output_dir) and not settings.resume_from_checkpoint and not settings.overwrite_output_dir:
            raise UsageError(
                f"output_dir {output_dir} holds an earlier run: continue it with --resume_from_checkpoint latest, delete it "
                "with --overwrite_output_dir, or choose another folder"
            )

    if folder.is_opened_by(accelerator, settings):
        try:
            folder.open(settings, check_alone)
        except OSError as error:
            raise UsageError(
                f"output_dir {output_dir} cannot be made ({error.strerror}): choose another folder"
            ) from None
    accelerator.wait_for_everyone()


_locks: dict[Path, TextIO] = {}  # kept open: the system unlocks them when this process ends, however it ends


def _lock(output_dir: Path) -> None:
    """Lock the output folder; take it from a dead generation of the same launch, which may be frozen with the lock in hand."""
    path, deadline = output_dir / ".lock", time.monotonic() + SECONDS_TO_UNLOCK
    launch = f", launch {os.environ['TORCHELASTIC_RUN_ID']}" if will_be_restarted() else ""
    file = path.open("a+", encoding="utf-8")
    while not _try_lock(file, output_dir):
        file.seek(0)
        owner = file.read().strip()
        if not launch or not owner.endswith(launch):
            raise UsageError(
                f"output_dir {output_dir} is in use by another run ({owner}): wait for it, end it, or choose another folder"
            ) from None
        if time.monotonic() < deadline:
            time.sleep(0.1)
            continue
        print(f"WARNING: {output_dir} is taken from {owner}, which does not end", file=sys.stderr)
        path.unlink(missing_ok=True)  # who has lost the file may write no more: `check_lock`
        file = path.open("a+", encoding="utf-8")
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}{launch}", file=file, flush=True)
    _locks[output_dir.resolve()] = file


def _try_lock(file: TextIO, output_dir: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        print(f"WARNING: {output_dir} cannot be locked ({error.strerror}): start no second run in it", file=sys.stderr)
    return True


def check_lock(output_dir: Path) -> None:
    """Raise RunError if a newer generation of this launch, which took this process for dead, has taken the output folder."""
    if file := _locks.get(output_dir.resolve()):
        path = output_dir / ".lock"
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise LostProcessError(f"{output_dir} was taken by another process, which took this one for dead")


def find_earlier_run(output_dir: Path) -> list[Path]:
    """Find what a run has left in a folder: its lines and its checkpoints."""
    files = [path for name in LINES if (path := output_dir / name).exists()]
    return files + checkpoint.checkpoints(output_dir)


def begin_lines(output_dir: Path, recipe: Recipe, settings: RunSettings, first_step: int, num_steps: int) -> None:
    """Delete an earlier run where that was asked for, and lines of steps that are done again; write the recipe.

    Args:
        output_dir: the run's.
        recipe, settings: the run's.
        first_step: steps before the first one of the session.
        num_steps: of the whole training.
    """
    if settings.overwrite_output_dir:
        for path in find_earlier_run(output_dir):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    prepare_lines(output_dir, first_step, num_steps)
    (output_dir / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")


def prepare_lines(output_dir: Path, first_step: int, num_steps: int) -> None:
    """Keep the lines of the first steps; the others are written again by a resumed run.

    A line that was cut off when the run was killed is removed, too.

    Args:
        output_dir: the run's.
        first_step: steps before the first one that is written anew.
        num_steps: of the whole training.

    Raises:
        UsageError: a line breaks a rule of `run_files.FIELDS`; all files are as they were.
    """
    copies = {}
    for path in (path for name in LINES if (path := output_dir / name).exists()):
        copies[path] = path.with_suffix(".partial")
        with copies[path].open("wb") as kept:
            for text, line in run_files.read_texts(path):
                if is_earlier(line, first_step, num_steps):
                    kept.write(text + b"\n")
    for path, copy in copies.items():
        copy.replace(path)


def is_earlier(line: dict[str, Any], first_step: int, num_steps: int) -> bool:
    """Tell whether a line is of the first steps of a training of `num_steps`.

    The evaluation at the very end is not: it is made again when a finished run is resumed.
    """
    return line["step"] <= first_step and ("eval_loss" not in line or line["step"] < num_steps)


def read_metrics(output_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read the step lines and the evaluation lines of metrics.jsonl.

    Raises:
        UsageError: a line breaks a rule of `run_files.FIELDS`.
    """
    lines = list(run_files.read_lines(output_dir / "metrics.jsonl"))
    return [line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line]
