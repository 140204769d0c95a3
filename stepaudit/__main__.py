"""`python -m stepaudit --vary "FLAG=VALUE,..." ... -- PROGRAM.py ARGS` audits a program under several layouts."""

import sys

from stepaudit.errors import UsageError
from stepaudit.script import audit_script


def main() -> int:
    """Audit the program; the exit code is 0 (exact), 1 (a fault is named), 2 (bad usage) or 3 (the audit itself failed)."""
    try:
        return audit_script(sys.argv[1:])
    except UsageError as error:
        for problem in error.problems:
            print(f"ERROR: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
