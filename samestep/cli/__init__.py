"""Answers `samestep COMMAND`, or `python -m recipes COMMAND`: list, plan, scale, launch, show-data, chat, compare and others.

All but `show-data`, `chat`, `audit-script` and `plan --trace` work without torch. A command's module is imported when it is
called.

Exit code 0 fine, 1 a check failed, 2 bad usage.
"""

import re
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
        case ["list", *argv]:
            from samestep.cli.catalog import list_recipes

            list_recipes(argv)
        case ["plan", *argv] if any(re.match("--what[_-]fits(=|$)", word) for word in argv):
            from samestep.cli.what_fits import what_fits

            what_fits([word.replace("--what-fits", "--what_fits", 1) for word in argv])
        case ["plan", name, *words] if not name.startswith("-"):
            from samestep.cli.plan import plan

            plan([name, *words])
        case ["plan", *argv]:
            from samestep.cli.plan_model import plan_model

            plan_model(argv)
        case ["scale", name, *words] if not name.startswith("-"):
            from samestep.cli.scale import scale

            scale([name, *words])
        case ["scale", *argv]:
            from samestep.cli.scale import scale_model

            scale_model(argv)
        case ["launch", *argv]:
            from samestep.cli.launch import launch

            launch(argv)
        case ["show-data", *argv]:
            from samestep.cli.catalog import show_data

            show_data(argv)
        case ["chat", *argv]:
            from samestep.cli.chat import chat

            return chat(argv)
        case ["compare", *argv]:
            from samestep.cli.runs import compare

            return compare(argv)
        case ["watch", *argv]:
            from samestep.cli.runs import watch

            watch(argv)
        case ["advise", *argv]:
            from samestep.cli.runs import advise

            return advise(argv)
        case ["audit-script", *argv]:
            from stepaudit.script import audit_script

            return audit_script(argv, prog=f"{program_name()} audit-script")
        case [] | ["-h" | "--help", *_]:
            make_overview().print_help()
        case [word, *_]:
            raise UsageError(f"{program_name()} {format_name(word)}: {nearest(word, COMMANDS)}")
    return None
