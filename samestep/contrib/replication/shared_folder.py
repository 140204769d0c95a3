"""The output folder of replicas that come and go: locks that end with their process, and lines that are written once.

Every replica keeps the lines of the run until it has seen them in the files. The first replica writes those that are missing.
When it dies, the next one does, so that no line is lost and none is there twice: what counts is what the files hold. Locks of
files (`lockf`) are the system's, which releases them when a process ends, however it ends. They work on NFS (version 4), too.

    .lock     shared by all replicas as long as they live, exclusive for any other run
    .training shared by all replicas that have the run's weights: who joins waits for one of them, if there is any
    .session  whether a run is under way or done; locked for the moments in which lines are written
    .end      locked by the replica that saves and publishes at the end
"""

import contextlib
import datetime
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from accelerate import Accelerator
from tqdm import tqdm

from samestep.errors import UsageError
from samestep.recipe.reading import format_name
from samestep.recipe.run_files import LineFile, parse_lines
from samestep.recipe.run_settings import RunSettings
from samestep.training.checkpoint import LINES
from samestep.training.output_folder import OutputFolder

SECONDS_TO_SHARE = 5.0  # in which another replica may hold the lock for a moment
MAX_SESSION = 2**16  # bytes of .session
SECONDS_TO_WRITE = 1.0  # to wait for a replica that writes; lines that are not written then are written next time
Key = tuple[Any, ...]


def find_key(record: dict[str, Any]) -> Key:
    """Find what tells a line from all others of its file.

    >>> find_key({"step": 3, "loss": 2.0}), find_key({"step": 3, "process": 1, "micro_step": 0, "samples": [5]})
    ((3, 'step', None, None), (3, 'step', 1, 0))
    """
    kind = record.get("event") or ("evaluation" if "eval_loss" in record else "step")
    return record["step"], kind, record.get("process"), record.get("micro_step")


class SharedFolder(OutputFolder):
    """The output folder of one run, as one of its replicas sees it.

    Args:
        output_dir: on a file system that all replicas see.
        names: the files of lines.

    Attributes:
        lines: of each file, the lines that this replica knows, and has not seen in the file, in their order.
        last_steps: of each file and kind of line, the last step in the file. A step that is there is not written again, even if
            two groups of replicas that did not know of each other took it.
        date: the day on which the first replica joined, in ISO's format; known after `join`.
    """

    def __init__(self, output_dir: Path, names: tuple[str, ...] = LINES):
        super().__init__(output_dir)
        self.lines: dict[str, dict[Key, str]] = {name: {} for name in names}
        self.last_steps: dict[str, dict[str, int]] = {name: {} for name in names}
        self.read_files = {name: LineFile(output_dir / name) for name in names}
        self.files: dict[str, TextIO] = {}

    # Locks

    def is_opened_by(self, accelerator: Accelerator, settings: RunSettings) -> bool:
        return True

    def open(self, settings: RunSettings, check_alone: Callable[[], None]) -> None:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        assert settings.lighthouse is not None, "a rule of the settings"
        self.join(settings.lighthouse, check_alone)

    def begin(self, prepare: Callable[[], None]) -> None:
        """Leave that to the replica that begins the run, see `begin_session`."""

    def join(self, meeting_point: str, check_alone: Callable[[], None]) -> None:
        """Take part in the run of this folder.

        Args:
            meeting_point: where its replicas meet: the lighthouse.
            check_alone: called when no other replica is there; raises UsageError if the folder holds an earlier run.

        Raises:
            UsageError: another run uses the folder, or `check_alone` raised.
        """
        file = self._open(".lock")
        if _try_lock(file, fcntl.LOCK_EX):
            check_alone()
            file.truncate(0)
            print(f"{meeting_point}\n{datetime.date.today()}", file=file, flush=True)
            self._write_session({})
        is_shared = self._share(".lock")
        file.seek(0)
        owner, _, self.date = file.read().strip().partition("\n")
        if owner != meeting_point or not is_shared:
            raise UsageError(
                f"output_dir {self.output_dir} is in use by another run ({owner}): wait for it, end it, or choose another "
                "folder"
            )

    def begin_session(self, prepare: Callable[[bool], None]) -> bool:
        """Begin the run unless it is done, or under way on a replica that lives.

        Args:
            prepare: makes the folder ready for it; is told whether the run was begun before, by replicas that have all ended.

        Returns:
            Whether this replica began it.
        """
        with self._writing() as may_write:
            if not may_write or self.is_done or self._others_train():
                return False
            prepare(bool(self.read_session()))
            self._write_session({"is_done": False})
        return True

    def take_part(self) -> None:
        """Tell other replicas that this one has the run's weights, for as long as it lives."""
        self._share(".training")

    def _others_train(self) -> bool:
        """Tell whether a replica lives that has the run's weights, asleep or not; this one has none."""
        file = self._open(".training")
        if not _try_lock(file, fcntl.LOCK_EX):
            return True
        fcntl.lockf(file, fcntl.LOCK_UN)
        return False

    def _share(self, name: str) -> bool:
        """Take a lock with others; False: one of them holds it alone, for longer than a moment."""
        return _wait_for_lock(self._open(name), fcntl.LOCK_SH, SECONDS_TO_SHARE)

    def read_session(self) -> dict[str, Any]:
        """Read the state of the run: {} before its first step, then whether it `is_done`.

        Raises:
            UsageError: the file holds something else.
        """
        file = self._open(".session")
        file.seek(0)
        try:
            text = file.read(MAX_SESSION)
            state = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            state = None
        if type(state) is not dict or type(state.get("is_done", False)) is not bool:
            raise UsageError(
                f'{self.output_dir / ".session"} must be empty, or {{"is_done": true}} or false: delete it, where no process '
                "of this run lives"
            )
        return state

    @property
    def is_done(self) -> bool:
        """Whether a replica has ended the run."""
        return self.read_session().get("is_done", False)

    def try_to_end(self) -> bool:
        """Try to become the replica that ends the run; it is until it says `end`, or its process ends."""
        return _try_lock(self._open(".end"), fcntl.LOCK_EX)

    def end(self, is_done: bool) -> None:
        """Tell the other replicas that the run has ended, or that they may end it."""
        if is_done:
            self._write_session({"is_done": True})
        fcntl.lockf(self.files[".end"], fcntl.LOCK_UN)

    def close(self) -> None:
        """Leave the run."""
        for file in self.files.values():
            file.close()
        self.files = {}

    def _open(self, name: str) -> TextIO:
        """Open a file once: to close one of two would release the locks of both."""
        if name not in self.files:
            self.files[name] = (self.output_dir / name).open("a+", encoding="utf-8")
        return self.files[name]

    def _write_session(self, state: dict[str, Any]) -> None:
        file = self._open(".session")
        file.truncate(0)
        print(json.dumps(state) if state else "", file=file, end="", flush=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[bool]:
        """Hold the lock for writing; False: another replica holds it, perhaps one that was stopped."""
        file = self._open(".session")
        has_lock = _wait_for_lock(file, fcntl.LOCK_EX, SECONDS_TO_WRITE)
        try:
            yield has_lock
        finally:
            if has_lock:
                fcntl.lockf(file, fcntl.LOCK_UN)

    # Lines

    def count_unread(self, logging_steps: int) -> int:
        return 1  # a replica may die, and the others have to know the step's line

    def append(self, name: str, records: Sequence[dict[str, Any]], is_writer: bool) -> None:
        for record in records:
            self.add(name, record)

    def list_unwritten(self, is_writer: bool) -> list[str]:
        return [name for name, lines in self.lines.items() if lines and is_writer]

    def release(self) -> None:
        """Stay in the folder until `close`: another replica may end the run."""

    def share(self) -> dict[str, list[dict[str, Any]]]:
        """Return the lines that this replica knows, for one that joins."""
        return {name: list(map(json.loads, lines.values())) for name, lines in self.lines.items()}

    def take_over(self, lines: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        """Know the lines that another replica has shared, and no others."""
        for name, records in lines.items():
            self.lines[name].clear()
            for record in records:
                self.add(name, record)

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Add a line to those of a file, unless its step is there."""
        key = find_key(record)
        if key[0] > self.last_steps[name].get(key[1], -1):
            self.lines[name][key] = json.dumps(record, allow_nan=False) + "\n"

    def write(self, is_writer: bool) -> None:
        """Forget the lines that are in the files; write those that are not, if this replica is the one that writes."""
        if not is_writer:
            for name in self.lines:
                self._read_new(name)
            return
        with self._writing() as may_write:
            for name in self.lines if may_write else ():
                self._read_new(name)
                try:
                    self._append_missing(name)
                except OSError as error:
                    path = self.output_dir / name
                    tqdm.write(
                        f"WARNING: {path} cannot be written ({error.strerror}); trying again later", file=sys.stderr
                    )
                    return

    def _read_new(self, name: str) -> None:
        path = self.output_dir / name
        if not path.exists():
            return
        if path.stat().st_size < self.read_files[name].end:  # the folder was made ready for a new run
            self.read_files[name], self.last_steps[name] = LineFile(path), {}
        try:
            keys = [find_key(line) for line in parse_lines(path, self.read_files[name].read())]
        except OSError as error:
            raise UsageError(f"{format_name(path)} cannot be read: {error.strerror or error}") from None
        self._forget(name, keys)

    def _forget(self, name: str, keys: Iterable[Key]) -> None:
        """Forget the lines of steps that are in the file."""
        last_steps = self.last_steps[name]
        for step, kind, *_ in keys:
            last_steps[kind] = max(step, last_steps.get(kind, -1))
        lines = self.lines[name].items()
        self.lines[name] = {key: text for key, text in lines if key[0] > last_steps.get(key[1], -1)}

    def _append_missing(self, name: str) -> None:
        """Append the lines at once, so that of several lines of a step all are there or none."""
        if not self.lines[name]:
            return
        path, text = self.output_dir / name, "".join(self.lines[name].values()).encode()
        end, number = self.read_files[name].end, self.read_files[name].number
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            # A replica that was killed while it wrote left half a line behind the whole ones
            os.truncate(descriptor, end)
            os.lseek(descriptor, 0, os.SEEK_END)
            try:
                if os.write(descriptor, text) < len(text):
                    raise OSError(28, "not all of it was written")
            except OSError:
                os.truncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)
        self.read_files[name] = LineFile(path, end + len(text), number + len(self.lines[name]))
        self._forget(name, list(self.lines[name]))


def _wait_for_lock(file: TextIO, kind: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (has_lock := _try_lock(file, kind)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return has_lock


def _try_lock(file: TextIO, kind: int) -> bool:
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
