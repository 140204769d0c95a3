"""Requests to stop: signals and a time limit. The run ends when the current step is finished, with a checkpoint."""

import os
import signal
import sys
import time

RESTART = 75  # exit code of a run that was asked to stop and can go on: EX_TEMPFAIL of sysexits.h, "try again later"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
REPEAT_SECONDS = 1.0  # in which a signal is the same request: launchers pass on signals that all processes got already


def ignore_stop_signals(worker: int) -> None:
    """Make a data worker ignore requests to stop, which its process handles; it is a `worker_init_fn` of `DataLoader`.

    Args:
        worker: number of the worker, not used.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Becomes true once somebody asks this process to stop. A second signal ends the process at once.

    Args:
        max_train_minutes: time limit, counted from now; None: no limit.
    """

    def __init__(self, max_train_minutes: float | None = None):
        self.deadline = None if max_train_minutes is None else time.monotonic() + 60 * max_train_minutes
        self.request_time: float | None = None
        self.previous_handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def __bool__(self) -> bool:
        return self.request_time is not None or (self.deadline is not None and time.monotonic() >= self.deadline)

    def _receive(self, number: int, frame: object) -> None:
        if self.request_time is None:
            self.request_time = time.monotonic()
            name = signal.Signals(number).name
            message = f"{name}: this step is finished and saved, then the run stops; once more to stop at once\n"
        elif time.monotonic() - self.request_time < REPEAT_SECONDS:
            return
        else:
            message = "stopping at once\n"
        os.write(sys.__stderr__.fileno(), message.encode())  # print is not safe inside a signal handler
        if message.startswith("stopping"):
            os._exit(128 + number)

    def close(self) -> None:
        """Restore the signal handlers that were set before."""
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)
