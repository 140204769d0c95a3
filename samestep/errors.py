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

__all__ = ["RunError", "UsageError", "exit_code", "is_utf8", "nearest", "reason"]

PROCESS_0_SECONDS = 3


class RunError(RuntimeError):
    """A run that cannot go on, through no mistake in its settings. The message names the event and the remedy in one line."""


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


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a program and return its exit code; write a `UsageError` or `RunError` to stderr, a line for each problem.

    Process 0 reports for all. The other processes wait until the launcher ends them, and report only if it does not, because
    then the mistake is theirs alone (a file that one machine lacks). Torchrun's report of the failure has the lines, too.

    Args:
        main: the program; it returns its exit code, or None for 0.

    Returns:
        The exit code of `main`; 2 after a `UsageError`, 1 after a `RunError`.
    """
    try:
        try:
            code = main() or 0
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise UsageError(f"no file can have so long a name: {str(error.filename)[:60]!r}...") from None
            raise
        except SystemExit as error:
            if error.code:
                raise
            code = 0  # argparse has printed the help
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has closed the pipe: `recipes list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UsageError, RunError) as error:
        problems, code = (error.problems, 2) if isinstance(error, UsageError) else ([str(error)], 1)
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher may end it: there is no step to finish
            time.sleep(PROCESS_0_SECONDS)
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
