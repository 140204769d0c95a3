"""Errors for people: a clear message, an exit code, no traceback."""

import contextlib
import errno
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from difflib import get_close_matches

PROCESS_0_SECONDS = 3
CACHES = {
    "HF_DATASETS_CACHE": "$HF_HOME/datasets",
    "HF_HUB_CACHE": "$HF_HOME/hub",
    "HF_HOME": "~/.cache/huggingface",
    "TORCHINDUCTOR_CACHE_DIR": "$TMPDIR/torchinductor_$USER",
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "MPLCONFIGDIR": "~/.cache/matplotlib",
    "TMPDIR": "/tmp",
}
"""Variable of the environment that names a folder into which libraries write -> the folder where it is not set."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
UNWRITABLE = FULL | {
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EIO,
    errno.ESTALE,
    errno.ENOLCK,
    errno.ELOOP,
}
"""Numbers of errors that say that a place is full, or cannot be used, whatever the program is."""
UNWRITABLE_TEXT = re.compile(
    "No space left on device|Disk quota exceeded|Read-only file system|File too large|No usable temporary directory"
)
"""Texts of such an error where a library leaves out its number."""
LITTLE = 2**26  # free bytes of a folder that is as good as full
LOST_PROCESS = (
    "another process has ended or hangs: this one ends, and the launcher starts it again from the newest checkpoint"
)


class UsageError(ValueError):
    """A mistake in a recipe, a flag, a file or a launch. Each problem names the field, its value, the rule and the remedy.

    Problems are collected and raised once, so that a user mends them all in one go. The audit has a class of its own
    (`stepaudit.errors`), which `samestep.cli` turns into this one.
    """

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def nearest(name: str, valid: Iterable[str]) -> str:
    """Make a hint with the valid names nearest to `name`, or with all of them, up to 800 characters, when none is near.

    >>> nearest("learning_rte", ["learning_rate", "seed"])
    'did you mean learning_rate?'
    >>> nearest("qwen3_8b", ["llama3_8b_lora_3090", "qwen3_0.6b_sft_3090"])
    'did you mean qwen3_0.6b_sft_3090?'
    >>> nearest("zzz", ["learning_rate", "seed"])
    'valid names: learning_rate, seed'
    """
    valid = sorted(valid)
    begin = re.split(r"[_.-]", name)[0]
    close = (
        get_close_matches(name, valid, n=3, cutoff=0.6)
        or [other for other in valid if len(begin) > 2 and re.split(r"[_.-]", other)[0] == begin][:3]
    )
    if close:
        return f"did you mean {' or '.join(close)}?"
    names = ", ".join(valid)
    return f"valid names: {names if len(names) <= 800 else names[:800].rpartition(', ')[0] + ', ...'}"


class RunError(RuntimeError):
    """A run that cannot go on, through no mistake in its settings. The message names the event and the remedy in one line."""


class LostProcessError(RunError):
    """A run whose other processes have ended or hang, and whose launcher starts it again: to end at once is best."""


FLAGS: set[str] = set()
"""Names of the flags that this program takes, without dashes; `samestep.recipe.settings.Parser` knows them."""
REMEDY = re.compile(
    r"\b(?:set|or|and) (\w+) to (?!(?:an?|the|that|more|one|another)\b)([^\s,;()]*[^\s,;().])(?=[,;.]|$)"
)
"""A remedy of a message: the name of a field, and the value that it is to have."""


def add_flags(problem: str, flags: Iterable[str]) -> str:
    """Add to a message that says how to set fields the flags of the command that do.

    >>> add_flags("my.yaml: rank is 0, must be 1 or more: set it to 8, or alpha to null", ["rank", "alpha"])
    'my.yaml: rank is 0, must be 1 or more: set it to 8 (--rank 8), or alpha to null (--alpha none)'
    """
    names = set(flags)
    subject = next((word for word in re.findall(r"(\w+) is\b", problem) if word in names), "")

    def add(found: re.Match[str]) -> str:
        name, value = subject if found[1] in ("it", "that") else found[1], found[2]
        return f"{found[0]} (--{name} {'none' if value == 'null' else value})" if name in names else found[0]

    head, colon, remedy = problem.rpartition(": ")
    return head + colon + REMEDY.sub(add, remedy)


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


def explain_unwritable(error: BaseException) -> str | None:
    """Say in a line which folder a library could not write to, and how to give it another; None: the error is another one.

    Libraries wrap such errors in their own, and leave out the path where a disk is full. Then the folder of `CACHES` with the
    least room is named, if it is as good as full.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    folders = {name: _find_cache(name) for name in CACHES}
    for cause in causes:
        text, path, number = UNWRITABLE_TEXT.search(str(cause)), None, None
        if isinstance(cause, OSError):
            path, number = cause.filename if isinstance(cause.filename, str) else None, cause.errno
        owner = None if path is None else _find_owner(path, folders)
        is_cache = number is not None and owner not in (
            None,
            "TMPDIR",
        )  # a library's own, which it makes if it is missing
        if number not in UNWRITABLE and text is None and not is_cache:
            continue
        if path is None:
            rooms = {name: _count_free_bytes(folder) for name, folder in folders.items()}
            least = min(rooms, key=lambda name: rooms[name])
            owner = least if rooms[least] < LITTLE else None
        place = path or (folders[owner] if owner else "a file")
        problem = text[0] if text else os.strerror(number or 0)
        remedy = "give the right to write there"
        if number in FULL or text:
            free = _count_free_bytes(place) if path or owner else math.inf
            problem += f", {free / 1e6:,.1f} MB are free" if free < math.inf else ""
            remedy = "make room there" if free < LITTLE else "make room, or raise the limit of files (ulimit -f)"
        other = f"set {owner} to another folder" if owner else "give another folder"
        return f"{place[:300]} cannot be used ({problem}): {remedy}, or {other}"
    return None


def _find_cache(name: str) -> str:
    """Find the folder that a variable of `CACHES` names, or that stands for it."""
    folder = os.environ.get(name) or CACHES[name]
    if folder.startswith("$"):
        other, _, rest = folder[1:].partition("/")
        folder = os.path.join(_find_cache(other), os.path.expandvars(rest))
    return os.path.abspath(os.path.expanduser(folder))


def _find_owner(path: str, folders: dict[str, str]) -> str | None:
    """Find the variable of the innermost folder that holds a path; None: none of them does."""
    path = os.path.abspath(path)
    holders = [name for name, folder in folders.items() if path == folder or path.startswith(folder + os.sep)]
    holders += [name for name, folder in folders.items() if folder.startswith(path + os.sep) and name in os.environ]
    return max(holders, key=lambda name: len(folders[name]), default=None)


def _count_free_bytes(path: str) -> float:
    """Count the free bytes of the file system of a path, or of its first parent that exists."""
    while True:
        try:
            status = os.statvfs(path)
            return float(status.f_bavail * status.f_frsize)
        except (OSError, ValueError):
            if os.path.dirname(path) == path:
                return math.inf
            path = os.path.dirname(path)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _wait_for_launcher() -> None:
    """Give the launcher, which ends all processes after one has failed, the time to end this one."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is no step to finish
    time.sleep(PROCESS_0_SECONDS)


def _explain(error: Exception) -> Exception | None:
    """Find the error of one line that an error is; None: it is none, or stands in the message of another process."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError(f"no file can have so long a name: {str(error.filename)[:60]!r}...")
    if problem := explain_unwritable(error):
        return UsageError(problem)
    if not isinstance(error, RuntimeError) or not is_lost_connection(error):
        return None
    if will_be_restarted():
        return LostProcessError(LOST_PROCESS)
    if "RANK" in os.environ:  # what has ended the other process stands in its own message
        _wait_for_launcher()
    return None


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
    FLAGS.clear()
    try:
        try:
            code = main() or 0
        except (UsageError, RunError):
            raise
        except Exception as error:
            if (explained := _explain(error)) is not None:
                raise explained from None
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
        lines = [
            f"ERROR: {f'process {rank}: ' if rank else ''}{_printable(add_flags(problem, FLAGS))}"
            for problem in problems
        ]
        print("\n".join(lines), file=sys.stderr, flush=True)
        if file := os.environ.get(
            "TORCHELASTIC_ERROR_FILE"
        ):  # of torchrun, whose own report of this failure then ends so
            with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as stream:
                json.dump({"message": "\n".join(lines), "timestamp": int(time.time())}, stream)
        if "RANK" in os.environ:
            os._exit(code)  # without the destructors of a process group that others still use, which can wait for ever
        return code
