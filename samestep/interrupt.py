"""Requests to stop: signals and a time limit. The run ends at the next step's border, with a checkpoint."""

import os
import signal
import sys
import time

RESTART = 75  # exit code of a run that was asked to stop and can go on: EX_TEMPFAIL of sysexits.h, "try again later"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ONE_REQUEST = 1.0  # seconds: launchers pass on what the terminal or the scheduler already sent to all processes


def ignore(worker: int) -> None:
    """Let a data worker, as `DataLoader`'s `worker_init_fn`, leave requests to stop to the process that it works for."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Whether somebody asked this process to stop. A second signal ends it at once.

    Args:
        max_train_minutes: counted from now; None: no limit.
    """

    def __init__(self, max_train_minutes: float | None = None):
        self.deadline = None if max_train_minutes is None else time.monotonic() + 60 * max_train_minutes
        self.received: float | None = None
        self.earlier = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def __bool__(self) -> bool:
        return self.received is not None or (self.deadline is not None and time.monotonic() >= self.deadline)

    def _receive(self, number: int, frame: object) -> None:
        if self.received is None:
            self.received = time.monotonic()
            name = signal.Signals(number).name
            message = f"{name}: this step is finished and saved, then the run stops; once more to stop at once\n"
        elif time.monotonic() - self.received < ONE_REQUEST:
            return
        else:
            message = "stopping at once\n"
        os.write(sys.__stderr__.fileno(), message.encode())  # print is not safe inside a signal handler
        if message.startswith("stopping"):
            os._exit(128 + number)

    def close(self) -> None:
        """Handle signals as before."""
        for number, handler in self.earlier.items():
            signal.signal(number, handler)
