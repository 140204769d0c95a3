"""Requests to stop: signals and a time limit. The run ends when the current step is finished, with a checkpoint.

A terminal that is closed sends SIGHUP, and refuses what is written to it from then on: the run is asked to stop, and saves all
that it would save otherwise.
"""

import contextlib
import ctypes
import errno
import io
import os
import signal
import sys
import termios
import threading
import time
from typing import Any, TextIO

RESTART = 75  # exit code of a run that was asked to stop and can go on: EX_TEMPFAIL of sysexits.h, "try again later"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
REPEAT_SECONDS = 1.0  # in which a signal is the same request: launchers pass on signals that all processes got already


def end_with_launcher() -> None:
    """Let this process get SIGTERM when torchrun's agent, which started it, dies: it would go on alone otherwise.

    Agents give each worker a session of its own, so nothing else ends it. Only Linux has this (prctl's PR_SET_PDEATHSIG).
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


def ignore_stop_signals(worker: int) -> None:
    """Make a data worker ignore requests to stop, which its process handles; it is a `worker_init_fn` of `DataLoader`.

    Args:
        worker: number of the worker, not used.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Becomes true once somebody asks this process to stop. A second signal ends the process at once.

    SIGHUP is left alone where it is ignored, as under `nohup`, unless torchrun passes it on, which then ends its workers after
    30 seconds, `nohup` or not. It never counts as a second signal: who sends it has gone.

    Args:
        max_train_minutes: time limit, counted from now; None: no limit.
    """

    def __init__(self, max_train_minutes: float | None = None):
        self.deadline = None if max_train_minutes is None else time.monotonic() + 60 * max_train_minutes
        self.request_time: float | None = None
        launcher_signals = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(
            ","
        )  # torch 2.13: set by torchrun
        is_detached = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and "SIGHUP" not in launcher_signals
        numbers = [number for number in SIGNALS if not (number == signal.SIGHUP and is_detached)]
        if (
            threading.current_thread() is not threading.main_thread()
        ):  # as in a worker of Ray, which has its own ways to stop
            numbers = []
        self.previous_handlers = {number: signal.signal(number, self._receive) for number in numbers}

    def __bool__(self) -> bool:
        return self.request_time is not None or self.is_out_of_time

    @property
    def is_out_of_time(self) -> bool:
        """Whether the time limit has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _receive(self, number: int, frame: object) -> None:
        if self.request_time is None:
            self.request_time = time.monotonic()
            name = signal.Signals(number).name
            message = f"{name}: this step is finished and saved, then the run stops; once more to stop at once\n"
        elif number == signal.SIGHUP or time.monotonic() - self.request_time < REPEAT_SECONDS:
            return
        else:
            message = "stopping at once\n"
        leave_dead_terminals()
        with contextlib.suppress(OSError):
            os.write(2, message.encode())  # print is not safe inside a signal handler
        if message.startswith("stopping"):
            os._exit(128 + number)

    def close(self) -> None:
        """Restore the signal handlers that were set before."""
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)


def leave_dead_terminals() -> None:
    """Point stdout and stderr to /dev/null where they are a terminal that was closed."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:  # ENOTTY: no terminal
            if error.args[0] == errno.EIO:
                _discard_output(descriptor)


def _discard_output(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


class _LastingStream:
    """A text stream whose reader may go away: what can no longer be written is dropped, and raises nothing."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._survive(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._survive(error)

    def _survive(self, error: OSError) -> None:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise error
        _discard_output(self._stream.fileno())


def outlive_readers() -> None:
    """Let nothing that is printed end this process when the terminal, or the reader of a pipe, has gone; print lines at once,
    also to a file, where they stand between those of stderr then."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
        if stream is not None and not isinstance(stream, _LastingStream):
            setattr(sys, name, _LastingStream(stream))
