"""Makes Python of the code cells of a notebook: what IPython reads in another way is taken out, and lines keep their places."""

import ast
import re
import textwrap

PYTHON_CELLS = {"time", "timeit", "capture", "prun", "python", "python3", "debug"}
"""Magics of a whole cell whose cell is Python; of others it is another language's, or a file's."""
SHELL = re.compile(r"^(\s*)(%|!|\?)")
BARE = re.compile(r"^\s*(pip|conda|mamba|cd|ls|pwd|mkdir|rm|cp|mv|cat)(\s+[^\s=(.\[,].*)?$")
"""Magics and commands that IPython takes without a mark in front."""
MEASURED = re.compile(r"^(\s*)%time\s+([^\s-].*)$")
HELP = re.compile(r"^\s*[\w.*%]+\?{1,2}\s*$")
ASSIGNED = re.compile(r"^(\s*[\w\s,.\[\]'\"]+=\s*)(!|%(\w+)\s*)(.*)$")


class UnreadCell(ValueError):
    """A cell that is no Python. The message says where."""


def read_cell(source: str) -> list[str]:
    """Return the lines of a cell as Python, as many as it has.

    Raises:
        UnreadCell: they are none.

    >>> read_cell("%%bash\\nls | wc")
    ['pass', 'pass']
    >>> read_cell("!pip install a \\\\\\n  b\\nx = %time f(1)\\nfiles = !ls\\nmodel?\\nif x:\\n    %matplotlib inline")
    ['pass', 'pass', 'x = f(1)', 'files = None', 'pass', 'if x:', '    pass']
    >>> read_cell("pip install a\\n%time y = g()\\nt = %timeit -o h()\\nls = 3")
    ['pass', 'y = g()', 't = None', 'ls = 3']
    >>> read_cell("animals = [\\n    cat\\n]")
    ['animals = [', '    cat', ']']
    """
    lines = textwrap.dedent(source).splitlines()  # IPython takes an indented cell
    if _find_error(lines) is None:  # a name such as cat is Python's own
        return lines
    first = next((place for place, line in enumerate(lines) if line.strip()), 0)
    if lines and lines[first].startswith("%%"):
        name = (re.findall(r"\w+", lines[first]) or [""])[0]
        if name not in PYTHON_CELLS:
            return ["pass"] * len(lines)
        lines[first] = "pass"
    written: list[str] = []
    goes_on = False  # a command of the shell, over several lines
    for line in lines:
        plain, is_shell = _read_line(line)
        if goes_on:
            plain, is_shell = "pass", True
        goes_on = is_shell and line.rstrip().endswith("\\")
        written.append(plain)
    if (error := _find_error(written)) is not None:
        raise UnreadCell(f"line {error.lineno}: {error.msg}")
    return written


def _find_error(lines: list[str]) -> SyntaxError | None:
    """Find why lines are no Python; None: they are."""
    try:
        ast.parse("\n".join(lines))
    except SyntaxError as error:
        return error
    return None


def _read_line(line: str) -> tuple[str, bool]:
    """Return a line as Python, and whether it is, or assigns, a command of the shell or a magic."""
    if match := MEASURED.match(line):
        return f"{match[1]}{match[2]}", False
    if match := SHELL.match(line):
        return f"{match[1]}pass", True
    if BARE.match(line):
        return f"{line[: len(line) - len(line.lstrip())]}pass", True
    if HELP.match(line):
        return f"{line[: len(line) - len(line.lstrip())]}pass", False
    if (match := ASSIGNED.match(line)) and "==" not in match[1]:
        is_timed = match[3] == "time" and not match[4].startswith("-")
        return (f"{match[1]}{match[4]}" if is_timed else f"{match[1].rstrip()} None"), not is_timed
    return line, False
