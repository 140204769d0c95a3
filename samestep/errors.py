"""Errors for people: a clear message, an exit code, no traceback."""

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable

from stepaudit.errors import UsageError, nearest

__all__ = ["RunError", "UsageError", "exit_code", "is_utf8", "nearest", "reason"]

SECONDS_FOR_PROCESS_0 = 3


class RunError(RuntimeError):
    """A run that cannot go on, through no mistake in its settings: what happened, and what to do, in one line."""


def reason(error: BaseException) -> str:
    r"""What an error of a library says, in one line of 300 characters at most, in no colour; its kind where it says nothing.

    >>> reason(OSError("no such\n  file")), reason(KeyError())
    ('no such file', 'KeyError')
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return " ".join(plain.split())[:300].rstrip(".") or type(error).__name__


def is_utf8(name: str) -> bool:
    r"""Whether a name, of a file perhaps, can be written into a text.

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


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a program: what it returns (None: 0); 2 after a `UsageError`, 1 after a `RunError`, which go to stderr line by line.

    Process 0 speaks for all. The others wait for the launcher to end them, and speak only if it does not, because the
    mistake is theirs alone (a file that one machine lacks).
    """
    try:
        try:
            code = main() or 0
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise UsageError(f"no file can have so long a name: {str(error.filename)[:60]!r}...") from None
            raise
        except SystemExit as done:
            if done.code:
                raise
            code = 0  # argparse has printed the help
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads has had enough: `recipes list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UsageError, RunError) as error:
        problems, code = (error.problems, 2) if isinstance(error, UsageError) else ([str(error)], 1)
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's: there is no step to finish
            time.sleep(SECONDS_FOR_PROCESS_0)
        if isinstance(error, RunError):
            print(file=sys.stderr)  # a progress bar may stand there
        for problem in problems:
            print(f"ERROR: {f'process {rank}: ' if rank else ''}{_printable(problem)}", file=sys.stderr, flush=True)
        if "RANK" in os.environ:
            os._exit(code)  # without the destructors of a process group that others still use, which can wait for ever
        return code
