"""Answers `samestep COMMAND`, or `python -m recipes COMMAND`: list, plan, scale, launch, show-data, chat, compare and others.

All but `show-data`, `chat`, `audit-script` and `plan --trace` work without torch. A command's module is imported when it is
called.

Exit code 0 fine, 1 a check failed, 2 bad usage.
"""

import sys
from collections.abc import Sequence

from samestep.cli.commands import COMMANDS, make_overview
from samestep.errors import UsageError, nearest
from samestep.recipe.extras import load_way
from samestep.recipe.reading import format_name
from samestep.recipe.settings import program_name


def main(argv: Sequence[str] | None = None) -> int | None:
    """Answer the command line.

    Args:
        argv: the words behind the program; None: those that this process was started with.

    Returns:
        The exit code of a comparison or an audit; None: 0.

    Raises:
        UsageError: bad usage.
        SystemExit: after `--help`.
    """
    words = sys.argv[1:] if argv is None else argv
    match words:
        case [] | ["-h" | "--help", *_]:
            make_overview().print_help()
            return None
        case [name, *more] if name in COMMANDS:
            return answer(name, more)
        case _:
            raise UsageError(f"{program_name()} {format_name(words[0])}: {nearest(words[0], COMMANDS)}")


def answer(name: str, argv: list[str]) -> int | None:
    """Answer one command; return its exit code. Raises UsageError, also where the package that answers it is not installed."""
    place, command = COMMANDS[name].answered_by, f"{program_name()} {name}"
    answers = load_way(place, command)
    if not place.startswith("stepaudit."):
        return answers(argv)
    try:
        return answers(argv, prog=command)  # it has a command of its own, and says by which it was called
    except ValueError as error:
        if not hasattr(error, "problems"):
            raise
        raise UsageError(error.problems) from error  # its own class for people's mistakes
