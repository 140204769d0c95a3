"""Errors for people: a clear message, an exit code, no traceback."""

import contextlib
import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable

from stepaudit.errors import UsageError, nearest

__all__ = [
    "LOST_PROCESS",
    "LostProcessError",
    "RunError",
    "UsageError",
    "exit_code",
    "is_lost_connection",
    "is_utf8",
    "nearest",
    "reason",
    "will_be_restarted",
]

PROCESS_0_SECONDS = 3
LOST_PROCESS = (
    "another process has ended or hangs: this one ends, and the launcher starts it again from the newest checkpoint"
)


class RunError(RuntimeError):
    """A run that cannot go on, through no mistake in its settings. The message names the event and the remedy in one line."""


class LostProcessError(RunError):
    """A run whose other processes have ended or hang, and whose launcher starts it again: to end at once is best."""


def will_be_restarted() -> bool:
    """Tell whether the launcher (torchrun's agent) starts this process again when it fails."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def is_lost_connection(error: BaseException) -> bool:
    """Tell whether a collective of torch failed because another process is late, or gone.

    >>> is_lost_connection(RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:3410"))
    True
    """
    text, kinds = str(error).lower(), {kind.__name__ for kind in type(error).__mro__}
    is_collective = "gloo" in text or "nccl" in text or "connection" in text
    return "DistError" in kinds or (isinstance(error, RuntimeError) and is_collective)


def reason(error: BaseException) -> str:
    r"""Write the message of a library's error in one line of at most 300 characters, without colours; its class if it has none.

    >>> reason(OSError("no such\n  file")), reason(KeyError())
    ('no such file', 'KeyError')
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return " ".join(plain.split())[:300].rstrip(".") or type(error).__name__


def is_utf8(name: str) -> bool:
    r"""Tell whether a name, for example of a file, can be written into a text.

    >>> is_utf8("é"), is_utf8(b"\xff".decode("utf-8", "surrogateescape"))
    (True, False)
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _wait_for_launcher() -> None:
    """Give the launcher, which ends all processes after one has failed, the time to end this one."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is no step to finish
    time.sleep(PROCESS_0_SECONDS)


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a program and return its exit code; write a `UsageError` or `RunError` to stderr, a line for each problem.

    Process 0 reports for all. The other processes wait until the launcher ends them, and report only if it does not, because
    then the mistake is theirs alone (a file that one machine lacks). So they do when process 0 has gone in the middle of a
    collective. Torchrun's report of the failure has the lines, too. Where the launcher starts all again, none waits.

    Args:
        main: the program; it returns its exit code, or None for 0.

    Returns:
        The exit code of `main`; 2 after a `UsageError`, 1 after a `RunError`.
    """
    try:
        try:
            code = main() or 0
        except RuntimeError as error:
            if isinstance(error, RunError) or not is_lost_connection(error):
                raise
            if will_be_restarted():
                raise LostProcessError(LOST_PROCESS) from None
            if "RANK" in os.environ:  # what has ended the other process stands in its own message
                _wait_for_launcher()
            raise
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise UsageError(f"no file can have so long a name: {str(error.filename)[:60]!r}...") from None
            raise
        except SystemExit as error:
            if error.code:
                raise
            code = 0  # argparse has printed the help
        if sys.stdout is not None:  # where it was closed before the program began
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has closed the pipe: `recipes list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UsageError, RunError) as error:
        problems, code = (error.problems, 2) if isinstance(error, UsageError) else ([str(error)], 1)
        rank = int(os.environ.get("RANK", "0"))
        if rank and not isinstance(error, LostProcessError):
            _wait_for_launcher()
        if isinstance(error, RunError):
            print(file=sys.stderr)  # a progress bar may be on the line
        lines = [f"ERROR: {f'process {rank}: ' if rank else ''}{_printable(problem)}" for problem in problems]
        print("\n".join(lines), file=sys.stderr, flush=True)
        if file := os.environ.get(
            "TORCHELASTIC_ERROR_FILE"
        ):  # of torchrun, whose own report of this failure then ends so
            with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as stream:
                json.dump({"message": "\n".join(lines), "timestamp": int(time.time())}, stream)
        if "RANK" in os.environ:
            os._exit(code)  # without the destructors of a process group that others still use, which can wait for ever
        return code
