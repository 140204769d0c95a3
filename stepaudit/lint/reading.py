"""Reads files, folders and notebooks, and finds what the rules say of them."""

import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepaudit.errors import UsageError
from stepaudit.lint import checks, programs
from stepaudit.lint.notebooks import UnreadCell, read_cell
from stepaudit.lint.rules import CUTS, HEAD, NOTHING, PROCESSES, RULES, Finding
from stepaudit.lint.syntax import Node, Source
from stepaudit.lint.windows import WINDOW_NAME, find_windows

IGNORE = re.compile(r"#\s*stepaudit:\s*ignore(?:\[([\w\s,]*)\])?")
MOST_BYTES = 2_000_000
"""Largest file that is read: larger ones are written by no one."""
LEFT_OUT = {"node_modules", "site-packages", "__pycache__", "build", "dist"}


def find_files(names: Sequence[str]) -> list[Path]:
    """List the programs that files and folders name: of folders those that end in .py or .ipynb, hidden ones left out.

    Raises:
        UsageError: a name is neither a file nor a folder.
    """
    problems, found = [], {}
    for name in names:
        path = Path(name)
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                parts = file.relative_to(path).parts
                is_hidden = any(part.startswith(".") or part in LEFT_OUT for part in parts)
                if file.suffix in (".py", ".ipynb") and not is_hidden and file.is_file():
                    found[file] = None
        elif path.is_file():
            found[path] = None
        else:
            problems.append(f"{name[:200]} is neither a file nor a folder")
    if problems:
        raise UsageError(problems)
    return list(found)


class PartlyReadError(UsageError):
    """A notebook with cells that cannot be read; `findings` are those of the others."""

    def __init__(self, problems: list[str], findings: list[Finding]):
        super().__init__(problems)
        self.findings = findings


def lint_file(path: Path, audit: str, check_model: str) -> list[Finding]:
    """Find what the rules say of a file.

    Args:
        path: a program or a notebook.
        audit: the command of the audit, as it is printed.
        check_model: the command that checks a head; empty where there is none.

    Raises:
        UsageError: it cannot be read, or is no Python program.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path} has more than {MOST_BYTES:,} bytes, and is not read")
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".ipynb":
            return _lint_notebook(text, path, audit, check_model)
        return list(lint_text(text, str(path), audit, check_model))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except SyntaxError as error:
        raise UsageError(f"{path} is no Python program: line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is no Python program: {str(error)[:100]}") from None


def lint_text(text: str, path: str, audit: str = "", check_model: str = "") -> Iterator[Finding]:
    """Find what the rules say of a program, in the order of its lines, those that a comment ignores left out."""
    source = Source(text, path)
    windows = find_windows(source)
    found = [each for window in windows for each in checks.check_window(source, window)]
    found += checks.check_reductions(source, windows)
    found += programs.check_schedules(source, windows)
    found += programs.check_own_schedules(source, windows)
    found += programs.check_loaders(source)
    found += programs.check_trainers(source)
    found += programs.check_losses(source)
    found += programs.check_step_losses(source)
    found += programs.check_reports(source)
    lines = text.splitlines()
    findings: dict[tuple[str, int], Finding] = {}
    for code, node, detail, condition in found:
        if not _is_ignored(code, source, node, lines):
            confirm = make_command(code, source, detail, audit, check_model)
            finding = Finding(path, node.lineno, node.col_offset + 1, code, detail, condition, confirm=confirm)
            findings.setdefault((code, node.lineno), finding)
    yield from sorted(findings.values())


def _is_ignored(code: str, source: Source, node: Node, lines: list[str]) -> bool:
    """Tell whether a comment ignores a rule: on the lines of the node's statement, or on the line above it."""
    statement = source.statement(node)
    end = node.lineno if isinstance(statement, ast.If | ast.For | ast.While | ast.With) else statement.end_lineno
    for line in lines[max(0, statement.lineno - 2) : end]:
        if match := IGNORE.search(line):
            if line is lines[statement.lineno - 2] and not line.strip().startswith("#") and statement.lineno > 1:
                continue  # behind another statement: it is that one's
            codes = re.findall(r"\w+", match[1] or "")
            if match[1] is None or code in codes:
                return True
    return False


def _lint_notebook(text: str, path: Path, audit: str, check_model: str) -> list[Finding]:
    """Lint the code cells of a notebook as one program; lines are those of the cell."""
    try:
        cells = json.loads(text)["cells"]
        sources = [
            (number, "".join(cell["source"])) for number, cell in enumerate(cells, 1) if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is no notebook: no cells of a cell_type with a source") from None
    places, lines, problems = [(0, 0)], [], []
    for number, source in sources:
        try:
            cell = read_cell(source)
        except UnreadCell as error:
            problems.append(f"{path}: cell {number} is no Python, and is not read: {error}")
            continue
        lines += cell
        places += [(number, line_number) for line_number in range(1, len(cell) + 1)]
    findings = [
        dataclasses.replace(finding, cell=places[finding.line][0], line=places[finding.line][1])
        for finding in lint_text("\n".join(lines), str(path), audit, check_model)
    ]
    if problems:
        raise PartlyReadError(problems, findings)
    return findings


def make_command(code: str, source: Source, detail: str, audit: str, check_model: str) -> str:
    """Write the command that confirms a finding for a program; empty where nothing that runs does."""
    kind = RULES[code].confirmed_by
    if kind == NOTHING or not audit or source.path.endswith(".ipynb"):
        return ""
    if kind == HEAD and check_model and not detail.startswith("Auto"):
        return f"{check_model} {detail}"
    batch, window = find_layout_flags(source)
    if not window:
        return ""
    processes = " --processes 1,2" if kind == PROCESSES else ""
    more = f' --vary "{batch}=2,{window}=4"' if kind in (CUTS, HEAD) else ""
    return f'{audit} --vary "{batch}=8,{window}=1"{more}{processes} -- {source.path}'


def find_layout_flags(source: Source) -> tuple[str, str]:
    """Find the flags of a program for the micro-batch and for k; empty where it has none."""
    flags = [flag.replace("-", "_") for flag in source.flags]
    window = next((flag for flag in flags if WINDOW_NAME.search(flag)), "")
    names = [flag for flag in flags if re.search(r"batch", flag) and not re.search(r"val|test|eval|accum|micro", flag)]
    batch = next((flag for flag in names if "train" in flag), names[0] if names else "")
    if not (batch and window) and source.has(r"HfArgumentParser|TrlParser"):
        return "per_device_train_batch_size", "gradient_accumulation_steps"
    original = {flag.replace("-", "_"): flag for flag in source.flags}
    return (original[batch], original[window]) if batch and window else ("", "")
