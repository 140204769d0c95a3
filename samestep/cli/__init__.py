"""Answers `samestep COMMAND`, or `python -m recipes COMMAND`: list, plan, scale, launch, show-data, chat, compare and others.

All but `show-data`, `chat`, `audit-script` and `plan --trace` work without torch. A command's module is imported when it is
called.

Exit code 0 fine, 1 a check failed, 2 bad usage.
"""

import importlib
import sys

from samestep.cli.commands import COMMANDS, make_overview
from samestep.errors import UsageError, nearest
from samestep.recipe.reading import format_name
from samestep.recipe.settings import program_name


def main() -> int | None:
    """Answer the command line.

    Returns:
        The exit code of a comparison or an audit; None: 0.

    Raises:
        UsageError: bad usage.
        SystemExit: after `--help`.
    """
    match sys.argv[1:]:
        case [] | ["-h" | "--help", *_]:
            make_overview().print_help()
            return None
        case [name, *argv] if name in COMMANDS:
            return answer(name, argv)
        case _:
            raise UsageError(f"{program_name()} {format_name(sys.argv[1])}: {nearest(sys.argv[1], COMMANDS)}")


def answer(name: str, argv: list[str]) -> int | None:
    """Answer one command; return its exit code. Raises UsageError, also where the package that answers it is not installed."""
    module, function = COMMANDS[name].answered_by.split(":")
    package = ".".join(module.split(".")[: 2 if ".contrib." in module else 1])  # what may be missing
    try:
        answers = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if not f"{error.name}.".startswith(f"{package}."):
            raise
        needed = "samestep.contrib" if package == "samestep" else package
        rule = f"{program_name()} {name} needs the package {needed}, which is not installed: pip install samestep"
        raise UsageError(rule) from error
    if package != "stepaudit":
        return answers(argv)
    try:
        return answers(
            argv, prog=f"{program_name()} {name}"
        )  # it has a command of its own, and says by which it was called
    except ValueError as error:
        if not hasattr(error, "problems"):
            raise
        raise UsageError(error.problems) from error  # its own class for people's mistakes
