"""Answers `lint FILES`: reads programs, prints what the rules find; exit code 0 nothing, 1 faults, 2 bad usage."""

import argparse
import sys
from collections.abc import Sequence

from stepaudit.errors import UsageError, nearest
from stepaudit.lint import formats
from stepaudit.lint.reading import PartlyReadError, find_files, lint_file
from stepaudit.lint.rules import GUIDE, RULES, Finding

FORMATS = {"text": formats.format_text, "json": formats.format_json, "sarif": formats.format_sarif}
DESCRIPTION = """Reads training programs without running them, and points at the lines that make the optimizer's step depend on
how the batch is cut. It needs no torch. What it cannot know it says: each fault comes with the command of the audit, which
runs the program, and is sure. Exit code: 0 no fault, 1 faults, 2 bad usage or a file that is no program."""
EPILOG = """examples:
  {prog} train.py
  {prog} scripts --select SA101,SA201 --format sarif"""


class _Parser(argparse.ArgumentParser):
    """Parses flags as argparse does, and says a problem in one line."""

    def error(self, message: str) -> None:
        raise UsageError(f"{self.prog}: {message}; see {self.prog} --help")


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Make the parser of the command."""
    parser = _Parser(
        prog,
        description=DESCRIPTION,
        epilog=EPILOG.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="programs, notebooks, or folders of them")
    parser.add_argument("--select", metavar="CODE,...", help="rules that are asked (default: all)")
    parser.add_argument("--ignore", metavar="CODE,...", help="rules that are left out")
    parser.add_argument(
        "--format", choices=FORMATS, default="text", help="text, json, or sarif for GitHub (default: text)"
    )
    return parser


def read_codes(text: str | None, flag: str, default: Sequence[str]) -> set[str]:
    """Read codes with commas.

    Raises:
        UsageError: a code is none.
    """
    if text is None:
        return set(default)
    codes = {code.strip() for code in text.split(",")}
    if unknown := sorted(codes - RULES.keys()):
        raise UsageError(f"{flag} {unknown[0][:40]} is no rule: {nearest(unknown[0], RULES)}; {GUIDE} lists them")
    return codes


def lint(argv: Sequence[str], prog: str = "python -m stepaudit lint") -> int:
    """Run the command.

    Args:
        argv: flags and files.
        prog: name of the command in usage and messages.

    Returns:
        The exit code: 0 no fault, 1 faults.

    Raises:
        UsageError: bad flags; a file that is no program: what was found in the others is printed before.
    """
    flags = make_parser(prog).parse_args(argv)
    codes = read_codes(flags.select, "--select", list(RULES)) - read_codes(flags.ignore, "--ignore", [])
    program = prog.removesuffix(" lint")
    is_alone = program != "samestep"
    audit, check_model = (program, "") if is_alone else (f"{program} audit-script", f"{program} check-model")
    findings: list[Finding] = []
    problems: list[str] = []
    num_read = 0
    for path in find_files(flags.files):
        try:
            findings += lint_file(path, audit, check_model)
            num_read += 1
        except UsageError as error:
            problems += error.problems
            if isinstance(error, PartlyReadError):
                findings += error.findings
                num_read += 1
        except Exception as error:  # of ours: it must not look like a finding
            problems.append(f"{path}: the lint itself has failed: {type(error).__name__}: {error}. Please report it")
    findings = [finding for finding in findings if finding.code in codes]
    if findings or not problems or flags.format != "text":  # "nothing found" is of what was read
        print(FORMATS[flags.format](findings, num_read))
    if problems:
        raise UsageError(problems)
    return 1 if any(not finding.is_harmless for finding in findings) else 0


def main(argv: Sequence[str] | None = None, prog: str = "python -m stepaudit lint") -> int:
    """Run the command, print a mistake in its usage in a line, and return the exit code."""
    try:
        return lint(sys.argv[1:] if argv is None else argv, prog)
    except UsageError as error:
        for problem in error.problems:
            print(f"ERROR: {problem}", file=sys.stderr)
        return 2
