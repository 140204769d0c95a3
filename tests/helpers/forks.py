"""Calls functions in forked processes, which may end or change as they like."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable

FAILED = 70


def call_in_fork(function: Callable[[], object]) -> tuple[int, str]:
    """Call a function in a process of its own; return the exit code, which is what it returns or ends with, and its stderr."""
    with tempfile.TemporaryFile("w+") as said:
        if not (pid := os.fork()):
            code = FAILED
            try:
                os.dup2(said.fileno(), 2)
                sys.stderr = os.fdopen(2, "w", closefd=False)
                code = int(function() or 0)
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        return code, said.read()
