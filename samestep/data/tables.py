"""Reads lines of text files, and tables of cells between delimiters, in the reading that the file itself shows.

Files of one suffix are written in several ways: cells in quotation marks or not, between commas, semicolons, tabs or bars. So
the delimiter is found in the header, and quotation marks in the cells: a reading is taken where the whole file fits it.
"""

import contextlib
import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import UsageError
from samestep.recipe.reading import open_without_waiting

MAX_LINE = 1 << 27  # bytes of a line, and characters of a cell of a table
BLOCK = 1 << 20  # bytes that are read at once
SAMPLE = 1 << 20  # characters from which the reading of a .csv file is found
MAX_NAMES, MAX_CHARACTERS = 20, 60  # names in a message, and characters of a text in it
DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
DOUBLE, SINGLE = '"', "'"
ENCODINGS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
"""Byte order mark -> the encoding that it is of."""


class BadRow(str):
    """Says why a reader of files has no row here; it comes in the place of the row."""


class Reading(NamedTuple):
    """A way to tell the cells of a table apart.

    Attributes:
        delimiter: character between cells.
        mark: quotation mark around cells, which is doubled inside them; None: such marks are characters as others.
        skips_spaces: whether spaces behind a delimiter are left out.
        first_line: place of the header: 1 where the first line names the delimiter, as Excel writes it (`sep=;`), else 0.
    """

    delimiter: str
    mark: str | None = DOUBLE
    skips_spaces: bool = False
    first_line: int = 0

    def __str__(self) -> str:
        """Say how cells are told apart.

        >>> str(Reading("\\t", None)), str(Reading(";"))
        ('cells between tabs, quotation marks are characters', 'cells between semicolons, some in quotation marks (")')
        """
        delimiter = DELIMITERS.get(self.delimiter, repr(self.delimiter))
        spaces = " and spaces" if self.skips_spaces else ""
        rule = f"some in quotation marks ({self.mark})" if self.mark else "quotation marks are characters"
        return f"cells between {delimiter}{spaces}, {rule}"

    def parse(self, lines: Iterable[str]) -> Any:
        """Return a reader of rows, as `csv.reader` does, which raises `csv.Error` at a quotation mark that is not closed."""
        csv.field_size_limit(MAX_LINE)  # 131,072 characters unless told
        quoting: Any = csv.QUOTE_MINIMAL if self.mark else csv.QUOTE_NONE
        options: dict[str, Any] = {"delimiter": self.delimiter, "skipinitialspace": self.skips_spaces}
        return csv.reader(lines, quotechar=self.mark or DOUBLE, quoting=quoting, strict=True, **options)

    def fits(self, lines: Iterable[str], is_whole: bool) -> bool:
        """Tell whether all rows have as many cells as the first, and all quotation marks are closed.

        Args:
            is_whole: False: the lines are the beginning of a file, and the last row may be cut off.
        """
        sizes: set[int] = set()
        try:
            for row in filter(None, self.parse(lines)):
                sizes.add(len(row))
        except csv.Error as error:
            return not is_whole and "end of data" in str(error) and len(sizes) == 1
        return len(sizes) <= 1


USUAL = {".csv": Reading(","), ".tsv": Reading("\t", None)}
"""Suffix -> the usual reading of such tables."""


def list_names(names: Sequence[str]) -> str:
    """List names of columns or the like, for a message: the first 20, each shortened."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(repr(shorten(name)) for name in names[:MAX_NAMES]) + more


def shorten(text: str) -> str:
    """Shorten a text to its beginning, for a message."""
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "..."


def read_lines(file: str, block_size: int = BLOCK, max_line: int = MAX_LINE) -> Iterator[tuple[int, str]]:
    r"""Read lines with their numbers, from 1; each end of a line (\n, \r\n, \r) becomes \n, a byte order mark is dropped.

    Args:
        block_size: bytes that are read at once.
        max_line: bytes of a line, at most.

    Raises:
        UsageError: a line that is not UTF-8, or too long.
    """
    with open_without_waiting(file) as stream:
        number, offset, rest = 1, 0, b""
        is_end = False
        while not is_end:
            block = stream.read(max(min(block_size, max_line), len(rest)))
            is_end, data = not block, rest + block
            if not offset and not rest and (encoding := _find_encoding(data)):
                raise UsageError(f"{file}: {encoding}, must be UTF-8. Convert it: iconv -f {encoding} -t UTF-8")
            end = len(data) if is_end else len(data.rstrip(b"\r"))  # the \n of the last \r may follow
            end = end if is_end else max(data.rfind(b"\n", 0, end), data.rfind(b"\r", 0, end)) + 1
            lines, rest = _unify_ends(data[:end]), data[end:]
            if (is_first := lines.find(b"\n") > max_line) or len(rest) > max_line:
                number += 0 if is_first else lines.count(b"\n")
                raise UsageError(f"{file}:{number}: a line of more than {max_line:,} bytes. Cut it into several.")
            try:
                text = lines.decode()
            except UnicodeDecodeError as error:
                whole = lines[: lines.rfind(b"\n", 0, error.start) + 1].decode()
                yield from enumerate(io.StringIO(whole.removeprefix("\ufeff") if not offset else whole), start=number)
                number += whole.count("\n")
                raise UsageError(
                    f"{file}:{number}: not UTF-8 at byte offset {offset + _find_fault(data[:end])} "
                    f"(0x{lines[error.start]:02x}). Convert it: iconv -f ENCODING -t UTF-8"
                ) from error
            yield from enumerate(io.StringIO(text if offset else text.removeprefix("\ufeff")), start=number)
            number, offset = number + text.count("\n"), offset + end


def _unify_ends(lines: bytes) -> bytes:
    r"""Make \n of every end of a line; \r\r\n, of a file that was converted twice, is one, too."""
    if b"\r" not in lines:
        return lines
    lines = lines.replace(b"\r\n", b"\n")
    return re.sub(rb"\r+\n|\r", b"\n", lines) if b"\r" in lines else lines


def _find_fault(data: bytes) -> int:
    """Find the place of the first byte that is not UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(data)


def _find_encoding(line: bytes) -> str | None:
    """Find the name of an encoding of several bytes per character in which a file begins; None: it is another one."""
    for mark, name in ENCODINGS.items():
        if line.startswith(mark):
            return name
    halves = line[:1000:2], line[1:1000:2]
    zeros = [half.count(0) for half in halves]
    if len(line) >= 4 and min(zeros) == 0 and max(zeros) > 0.4 * len(halves[0]):  # Latin letters, most of them
        return "UTF-16BE" if zeros[0] else "UTF-16LE"
    return None


def find_reading(file: str, delimiter: str = ",") -> Reading:
    """Find how the cells of a table are told apart.

    The delimiter is the usual one, unless the header does not have it and has another one. Cells between commas or semicolons
    may stand in quotation marks. Between tabs or bars they may where all cells that begin with a mark end with one, and some
    hold it doubled or all of a column have it, or where rows have as many cells as the header in that reading alone. Spaces
    behind delimiters are left out where a quotation mark follows one, and all cells begin with one or rows fit in no other way.

    Args:
        delimiter: the usual one of the file's suffix.
    """
    lines, size = [], 0
    with contextlib.suppress(UsageError):  # who reads the file meets it again, behind the rows before it
        for _, line in read_lines(file):
            lines.append(line)
            size += len(line)
            if size > SAMPLE:
                break
    is_whole = size <= SAMPLE
    first_line = 0
    if lines and (named := re.fullmatch(r"sep=(.)", lines[0].rstrip("\n"), re.IGNORECASE)):
        delimiter, first_line = named[1], 1
        del lines[0]
    elif lines:
        delimiter = _find_delimiter(lines, delimiter)
    text, separator = "".join(lines), re.escape(delimiter)
    usual = Reading(delimiter, DOUBLE if delimiter in ",;" else None, first_line=first_line)
    if usual.mark is None:
        # Marks of single quotation are apostrophes in most files: those far behind do not count
        for mark in (DOUBLE, SINGLE):
            quoted = usual._replace(mark=mark)
            begins = re.search(rf"(?:^|{separator}){mark}", text, re.MULTILINE) is not None
            begins = begins or (mark == DOUBLE and not is_whole and _has_marked_cell(file, quoted))
            if begins and _is_quoted(file, lines if is_whole else None, quoted):
                return quoted
        return usual
    spaced = usual._replace(skips_spaces=True)
    # A text may hold what looks so, and another one begin with a space of its own
    is_possible = re.search(rf"{separator} +{DOUBLE}", text) is not None and spaced.fits(lines, is_whole)
    if is_possible and (not usual.fits(lines, is_whole) or _is_spaced(usual, lines[:-1])):
        return spaced
    single = usual._replace(mark=SINGLE)
    if re.search(rf"(?:^|{separator}){SINGLE}", text, re.MULTILINE) and _is_quoted(file, lines, single, is_whole):
        return single
    return usual


def describe_reading(file: str) -> str | None:
    """Say how the cells of a table are told apart; None: in the usual way of its suffix, or the file is no table."""
    usual = USUAL.get(Path(file).suffix.lower())
    if usual is None:
        return None
    reading = find_reading(file, usual.delimiter)
    return str(reading) if reading != usual or (not reading.mark and _has_marked_cell(file, reading)) else None


def _find_delimiter(lines: list[str], usual: str) -> str:
    """Find the delimiter of the header; another one than the usual one only if a row has as many cells by it."""
    header, *rows = [line for line in islice(lines, 50) if line.strip()] or [""]

    def count(line: str, delimiter: str) -> set[int]:
        return {len(next(csv.reader([line], delimiter=delimiter), [])), line.count(delimiter) + 1}

    if max(count(header, usual)) > 1:
        return usual
    sizes = {other: max(count(header, other)) for other in DELIMITERS}
    fitting = [other for other in sizes if sizes[other] > 1 and any(sizes[other] in count(row, other) for row in rows)]
    return max(fitting, key=lambda other: sizes[other], default=usual)


def _is_spaced(reading: Reading, lines: list[str]) -> bool:
    """Tell whether all cells behind a delimiter begin with a space."""
    with contextlib.suppress(csv.Error):  # the last row is cut off
        for row in reading.parse(lines):
            if not all(cell.startswith(" ") for cell in row[1:]):
                return False
    return True


def _is_closed(cell: str, mark: str) -> bool:
    """Tell whether a cell begins and ends with a mark, and marks inside are doubled."""
    is_between = len(cell) > 1 and cell[0] == cell[-1] == mark
    return is_between and mark not in cell[1:-1].replace(mark * 2, "")


def _has_marked_cell(file: str, reading: Reading) -> bool:
    """Tell whether a cell of a file may begin with a mark, quickly."""
    starts = [f"{before}{reading.mark or DOUBLE}".encode() for before in (reading.delimiter, "\n", "\r")]
    with open_without_waiting(file) as stream:
        data = b"\n"
        while len(data := data[-1:] + stream.read(BLOCK)) > 1:
            if starts[0][-1] in data and any(start in data for start in starts):
                return True
    return False


def _is_quoted(file: str, lines: list[str] | None, reading: Reading, is_whole: bool = True) -> bool:
    """Tell whether cells stand in quotation marks, as against cells in which a mark is a character as others.

    Args:
        lines: those of the header and behind it; None: read them.
        reading: with the mark.
    """

    def read() -> Iterator[str]:
        return iter(lines) if lines is not None else _read_texts(file, reading.first_line)

    mark, delimiter = reading.mark or "", reading.delimiter
    num_gaps = next(read(), "").count(delimiter)
    # Rows; cells that begin with a mark, that are closed, that show a writer
    num_rows = num_marked = num_closed = num_full = 0
    closed_by_column: Counter[int] = Counter()
    fits_plain = True
    for line in islice(read(), 1, None):
        if line == "\n":
            continue
        num_rows += 1
        fits_plain = fits_plain and line.count(delimiter) == num_gaps
        if mark not in line:
            continue
        for place, cell in enumerate(line.rstrip("\n").split(delimiter)):
            if cell.startswith(mark):
                num_marked += 1
                if _is_closed(cell, mark):
                    num_closed += 1
                    closed_by_column[place] += 1
                    num_full += mark in cell[1:-1] or len(cell) == 2
    if not num_marked:
        return False
    if not fits_plain:
        return reading.fits(read(), is_whole)
    most = max(closed_by_column.values(), default=0)
    shows_writer = num_full > 0 or (num_rows > 1 and most >= 0.9 * num_rows)
    if num_closed < num_marked:  # a few that are not closed are faults, which reading meets
        return shows_writer and num_closed >= 0.9 * num_marked
    return shows_writer and reading.fits(read(), is_whole)


def read_delimited(file: str, delimiter: str = ",") -> Iterator[tuple[int, dict[str, str] | BadRow]]:
    """Read line numbers and rows of a table whose first line names the columns, in the reading of `find_reading`.

    Args:
        delimiter: the usual one of the file's suffix.

    Yields:
        The number of the row's last line, and its cells by the names of their columns; a `BadRow` where they are more or fewer
        than the header's.

    Raises:
        UsageError: the first line does not name the columns, or quotation marks are not closed.
    """
    reading = find_reading(file, delimiter)
    rows = reading.parse(_read_texts(file, reading.first_line))
    last_line = reading.first_line  # number of the last line that was read
    try:
        names = next(rows, None)
        last_line += rows.line_num
        if names is not None and (not names or len(set(names)) < len(names)):
            fault = f"names a column twice ({list_names(names)})" if names else "is blank"
            raise UsageError(
                f"{file}:{1 + reading.first_line}: the first line {fault}, must name each column once. Mend it."
            )
        for row in filter(None, rows):
            number = reading.first_line + rows.line_num
            if len(row) != len(names):
                yield number, BadRow(_explain_width(row, names, reading))
                continue
            last_line = number
            yield last_line, dict(zip(names, row, strict=True))
    except csv.Error as error:
        remedy = (
            f"Close its quotation marks. A mark inside a quoted cell is written twice: {reading.mark}{reading.mark}."
        )
        if f"\\{reading.mark}" in next(_read_texts(file, reading.first_line + rows.line_num - 1), ""):
            remedy = f"It has \\{reading.mark} inside a cell: double the mark ({reading.mark}{reading.mark}) instead."
        raise UsageError(f"{file}: the row after line {last_line} is not CSV: {error}. {remedy}") from error


def _read_texts(file: str, first: int) -> Iterator[str]:
    """Read lines without their numbers, from place `first` on."""
    return map(itemgetter(1), islice(read_lines(file), first, None))


def _explain_width(row: list[str], names: list[str], reading: Reading) -> str:
    """Say that a row has another number of cells than the header, and what to do."""
    rule = f"{len(row)} fields, but the header names {len(names)}"
    for other in DELIMITERS:
        if len(row) == 1 and row[0].count(other) == len(names) - 1:
            return (
                f"{rule}: the row has {DELIMITERS[other]}, the header {DELIMITERS[reading.delimiter]}: write both alike"
            )
    what = DELIMITERS.get(reading.delimiter, repr(reading.delimiter))
    return f"{rule}: put quotation marks around a text with {what}, or mend the row"
