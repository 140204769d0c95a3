"""Reads the files that a run leaves in its output folder: lines that grow, and settings; each value as `run_fields` has it.

What a reader is given here is in bounded memory, whatever the file holds.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from samestep.errors import UsageError
from samestep.recipe.reading import format_name, read_json, read_yaml
from samestep.recipe.run_fields import (
    FIELDS,
    MAX_NAME,
    NEEDED,
    PLAIN,
    SETTINGS,
    SINGLE,
    FieldRule,
    find_metric_rule,
    find_problems,
)

MAX_LINE, MAX_WIDE_LINE = 2**20, 2**24
"""Bytes of a line of metrics.jsonl, and of a line of the other files, which name every tensor or sample. A step of a run has
500 in metrics.jsonl, and 200 for each tensor of the model in digests.jsonl."""
MAX_PASSED = 2**28
"""Bytes of a line after which a reader that passes over it gives the file up."""
PIECE = 2**20
"""Bytes that are read at a time."""
REMEDY = "mend the line, or take it out"

# ---------------------------------------------------------------------------------------------------------------------
# Lines


def parse_line(text: bytes | None, file: str) -> dict[str, Any]:
    """Parse a line of a run's file.

    Args:
        text: the line; None: it is longer than `LineFile` keeps.
        file: name of the file, one of `FIELDS`.

    Raises:
        ValueError: the line breaks a rule, which the message says: "step is '1', must be a whole number from 0 to 2^53 - 1".

    >>> parse_line(b'{"step": 1, "loss": 2.5}', "metrics.jsonl")
    {'step': 1, 'loss': 2.5}
    """
    if text is None:
        raise ValueError(f"it has more than {max_bytes(file):,} bytes")
    line = _load(text)
    if line is None:
        raise ValueError("it is no JSON object")
    if missing := [name for name in NEEDED[file] if name not in line]:
        raise ValueError(f"{missing[0]} is missing")
    if (longest := max(map(len, line))) > MAX_NAME:
        raise ValueError(f"the name of a field has {longest:,} characters, more than {MAX_NAME:,}")
    if file == "metrics.jsonl":
        is_event = "event" in line
        if all(find_metric_rule(name, is_event).allows(value) for name, value in line.items()):
            return line
        rules: Mapping[str, FieldRule] = {name: find_metric_rule(name, is_event) for name in line}
    else:
        rules = FIELDS[file]
    if problems := find_problems(line, rules, SINGLE):
        raise ValueError(next(iter(problems.values())))
    return line


def _load(text: bytes) -> dict[str, Any] | None:
    """Load a JSON object; None: it is none."""
    try:
        line = json.loads(text.decode())
    except (ValueError, RecursionError):  # UTF-16, a number of 5,000 digits, nesting
        return None
    return line if type(line) is dict else None


def max_bytes(file: str) -> int:
    """Return the most bytes that a line of a run's file has."""
    return MAX_LINE if file == "metrics.jsonl" else MAX_WIDE_LINE


class LineFile:
    """A file of lines that grows: reads what is new, in pieces, and keeps no more than a line of it.

    Args:
        path: of the file, whose name is one of `FIELDS`.
        offset: byte at which the first line begins that is read.
        number: of the lines before it.

    Attributes:
        number: of the last line that was read to its end; 1 is the first.
    """

    piece, max_passed = PIECE, MAX_PASSED

    def __init__(self, path: Path, offset: int = 0, number: int = 0):
        self.path, self.number, self.max_bytes = path, number, max_bytes(path.name)
        self._offset, self._size = offset, 0
        self._parts: list[bytes] = []

    @property
    def end(self) -> int:
        """Byte behind the last line that was read to its end."""
        return self._offset - self._size

    @property
    def rest(self) -> bytes | None:
        """The bytes that were read of the line that has no end yet; None: it is too long."""
        return b"".join(self._parts) if self._size <= self.max_bytes else None

    @property
    def is_given_up(self) -> bool:
        """Whether a line is so long that nothing more is read."""
        return self._size > self.max_passed

    def read(self) -> Iterator[tuple[int, bytes | None]]:
        """Read the lines that have ended since: number and text, None instead of one that is too long.

        What stands behind the last end of a line is read anew the next time, as a writer may have cut it off since, unless it
        is too long already. Who stops in the middle loses lines.

        Raises:
            OSError: the file cannot be read, or is none: a folder, a pipe, a device.
        """
        if self._size <= self.max_bytes:
            self._offset, self._size, self._parts = self.end, 0, []
        with open_regular(self.path) as file:
            file.seek(self._offset)
            while not self.is_given_up and (piece := file.read(self.piece)):
                self._offset += len(piece)
                first, *others = piece.split(b"\n")
                self._add(first)
                for part in others:
                    text, self._size, self._parts = self.rest, 0, []
                    self.number += 1
                    yield self.number, text
                    self._add(part)

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self.max_bytes:
            self._parts.clear()
        else:
            self._parts.append(part)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: it cannot be read, or is none: a folder, a pipe, a device.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - returned
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(None, "it is no regular file", str(path))
    return file


def read_texts(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Read the lines of a run's file, as bytes without their ends and as values; none if there is no file.

    A line that a kill cut off, the last, is left out.

    Raises:
        UsageError: the file cannot be read, or a line breaks a rule of `FIELDS`; it names the line, the field and the rule.
    """
    lines = LineFile(path)
    try:
        for number, text in lines.read():
            yield text or b"", _parse(path, number, text)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{format_name(path)} cannot be read: {error.strerror or error}") from None
    rest = lines.rest
    if rest is None or _load(rest) is not None:  # too long, or whole but for its end
        yield rest or b"", _parse(path, lines.number + 1, rest)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a run's file as values; see `read_texts`."""
    return (line for _, line in read_texts(path))


def parse_lines(path: Path, lines: Iterator[tuple[int, bytes | None]]) -> Iterator[dict[str, Any]]:
    """Parse what `LineFile.read` gives.

    Raises:
        UsageError: a line breaks a rule of `FIELDS`.
    """
    return (_parse(path, number, text) for number, text in lines)


def _parse(path: Path, number: int, text: bytes | None) -> dict[str, Any]:
    try:
        return parse_line(text, path.name)
    except ValueError as error:
        raise UsageError(f"{format_name(path)}, line {number:,}: {error}: {REMEDY}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Settings


def read_settings(path: Path) -> dict[str, Any]:
    """Read a settings.json; {} if there is none.

    Raises:
        UsageError: it cannot be read, or a value breaks a rule of `SETTINGS`.
    """
    values = read_json(path, format_name(path)) if path.exists() else {}
    return _check(values, path, SETTINGS)


def read_plain(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML file of a run whose values are shown, and nothing computes with them.

    Raises:
        UsageError: it cannot be read, or a value is not `PLAIN`.
    """
    return _check((read_json if path.suffix == ".json" else read_yaml)(path, format_name(path)), path, {})


def _check(values: dict[str, Any], path: Path, rules: Mapping[str, FieldRule]) -> dict[str, Any]:
    if problems := find_problems(values, rules, PLAIN):
        raise UsageError([f"{format_name(path)}: {problem}" for problem in list(problems.values())[:5]])
    return values
