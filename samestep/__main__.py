"""Answers `python -m samestep`, which is the command `samestep`; see `samestep.cli`."""

import sys

from samestep.errors import exit_code
from samestep.recipe.extras import remedy_for_dependencies


def main() -> int | None:
    """Answer the command line; see `samestep.cli.main`, whose import fails where not even a plan's packages are installed."""
    with remedy_for_dependencies(" ".join(["samestep", *sys.argv[1:2]])):
        from samestep import cli

        return cli.main()


def console() -> None:
    """Run the console command `samestep`."""
    sys.exit(exit_code(main))


if __name__ == "__main__":
    console()
