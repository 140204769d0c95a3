"""`python -m stepaudit --vary "FLAG=VALUE,..." ... -- PROGRAM.py ARGS` audits a program; `lint FILES` only reads programs."""

import sys

from stepaudit.errors import UsageError


def main() -> int:
    """Audit a program, or lint files: exit code 0 (exact), 1 (a fault is named), 2 (bad usage) or 3 (the audit failed)."""
    if sys.argv[1:2] == ["lint"]:
        from stepaudit.lint.command import main as lint  # here: it needs nothing of the audit

        return lint(sys.argv[2:])
    from stepaudit.script import audit_script

    try:
        return audit_script(sys.argv[1:])
    except UsageError as error:
        for problem in error.problems:
            print(f"ERROR: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
