"""Finds the files that people name, and reads their rows: JSON lines, tables of cells, Parquet, plain text.

A fault of a row is data: it comes as a `BadRow` in the row's place. Nothing here needs `datasets` or torch.
"""

import glob
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from samestep.data.tables import MAX_NAMES, BadRow, describe_reading, read_delimited, read_lines, shorten
from samestep.errors import UsageError, is_utf8, nearest, reason
from samestep.printing import format_count
from samestep.recipe.extras import optional
from samestep.recipe.reading import describe_missing, find_fault, open_without_waiting

pa, parquet = optional("pyarrow"), optional("pyarrow.parquet")

MAX_BLOCK = 1 << 28  # characters of one block of a txt file: without blank lines a large file would fill the memory
MAX_TABLES = 100  # tables of which it is said how their cells are told apart
MAX_ARRAY = 1 << 30  # bytes of a JSON array, which is read whole


def find_files(patterns: str | Sequence[str], kinds: Iterable[str]) -> tuple[list[str], list[tuple[str, int, int]]]:
    """Find the files that paths, globs and folders name, in order, each once.

    Args:
        patterns: each glob is sorted by path, and so are the files of a folder and of those inside it.
        kinds: suffixes (`.csv`) that can be read; of a folder's files the others are left out.

    Returns:
        The files; and the key for the cache: their paths, sizes and times.

    Raises:
        UsageError: a file that is missing or of unknown kind, a folder that holds none; all of them at once.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    files, problems = [], []
    for pattern in map(os.path.expanduser, patterns):
        matches = [pattern]
        if os.path.isdir(pattern):
            matches = _list_folder(pattern, kinds)
            if not matches:
                problems.append(
                    f"data folder {pattern} holds no file of {', '.join(kinds)}. Name the folder of the data."
                )
        elif not os.path.exists(pattern):  # so that a bracket or a star in an existing file's name is no pattern
            matches = sorted(file for file in glob.glob(pattern, recursive=True) if not os.path.isdir(file))
            if not matches:
                rule = "no file matches it" if glob.has_magic(pattern) else "no such file"
                problems.append(describe_missing(pattern, rule))
        for file in matches:
            kind = Path(file).suffix.lower()
            if kind not in kinds:
                problems.append(f"data file {file}: unknown kind {kind!r}. {nearest(kind, kinds)}")
            elif problem := find_fault(file):
                problems.append(f"data file {file} {problem}")
        files += matches
    if problems:
        raise UsageError(problems)
    files = list(dict.fromkeys(files))
    return files, [(os.path.abspath(file), (status := os.stat(file)).st_size, status.st_mtime_ns) for file in files]


def describe_sources(patterns: str | Sequence[str], kinds: Iterable[str]) -> list[str]:
    """Say of folders which files are not read, and of tables how their cells are told apart where that is not the usual way.

    Args:
        patterns: as of `find_files`.
        kinds: suffixes that are read.
    """
    lines = []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for folder in filter(os.path.isdir, map(os.path.expanduser, patterns)):
        read = set(_list_folder(folder, kinds))
        others = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
        others = [file for file in others if file not in read]
        if others:
            counts = Counter(_name_kind(file, folder) for file in others)
            kinds_of_others = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common(MAX_NAMES))
            lines.append(f"{folder}: {format_count(len(read), 'file')} read, NOT read: {kinds_of_others}")
    places: dict[str, list[str]] = {}
    for file in find_files(patterns, kinds)[0][:MAX_TABLES]:
        if text := describe_reading(file):
            places.setdefault(text, []).append(file)
    for text, files in places.items():
        more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
        lines.append(f"{files[0]}{more}: {text}")
    return lines


def _name_kind(file: str, folder: str) -> str:
    """Name the kind of a file that is not read: hidden, or its suffix."""
    if any(part.startswith(".") for part in Path(os.path.relpath(file, folder)).parts):
        return "hidden"
    return Path(file).suffix.lower() or "without a suffix"


def _list_folder(folder: str, kinds: Iterable[str]) -> list[str]:
    """List the files of these kinds in a folder and in those inside it, sorted by path; hidden ones are left out."""
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = [name for name in names if not name.startswith(".") and Path(name).suffix.lower() in kinds]
        files += [os.path.join(place, name) for name in visible]
    return sorted(files)


def read_rows(
    file: str, readers: Mapping[str, Any] | None = None, empty: str = "holds no row: leave it out"
) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
    """Read places (FILE:LINE, or a row's number) and columns of the rows of a file, one at a time; a fault is a `BadRow`.

    Args:
        readers: suffix -> what reads such files; None: `ROW_READERS`.
        empty: what is said of a file without rows.

    Raises:
        UsageError: a file that cannot be read, or that holds no row; it names the file.
    """
    number = 0
    try:
        for number, values in (readers or ROW_READERS)[Path(file).suffix.lower()](file):
            yield f"{file}:{number}", values
    except UsageError:
        raise
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:  # ValueError: cells of a damaged table
        raise UsageError(_describe_damaged(file, error)) from error
    if not number:
        raise UsageError(f"data file {file} {empty}")


def is_visible(text: str | None) -> bool:
    """Tell whether a text has a visible character."""
    if text is not None and "\0" in text:
        text = text.replace("\0", " ")
    return text is not None and text != "" and not text.isspace()


def _describe_damaged(file: str, error: Exception) -> str:
    return f"data file {file} cannot be read: {reason(error)}. Write it anew, or leave it out."


def _read_blocks(file: str) -> Iterator[tuple[int, dict[str, str]]]:
    rule = "a blank line ends a document in .txt. Put one after each document"
    for blank, lines in groupby(read_lines(file), key=lambda line: not is_visible(line[1])):
        if not blank:
            number, text = _join(file, lines, "no blank line", rule)
            yield number, {"text": text.removesuffix("\n")}


def read_whole(file: str) -> Iterator[tuple[int, dict[str, str]]]:
    rule = "with txt_documents files it is one document. Cut it into several files"
    number, text = _join(file, read_lines(file), "no end", rule)
    yield number, {"text": text}


def _join(file: str, lines: Iterable[tuple[int, str]], lack: str, rule: str) -> tuple[int, str]:
    """Join all lines, unless they are too long for the memory; return the number of the last line, and the text."""
    block, size, number = [], 0, 0
    for number, line in lines:
        block.append(line)
        size += len(line)
        if size > MAX_BLOCK:
            raise UsageError(f"{file}:{number}: {lack} in {MAX_BLOCK:,} characters, but {rule}, or use .jsonl.")
    return number, "".join(block)


def read_json_lines(file: str) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Read line numbers and objects, one per line, or the elements of a JSON array, with the lines on which they begin.

    What is no object comes as a `BadRow`.

    Raises:
        UsageError: lines that are not UTF-8 or too long; an array that is too large, or no JSON.
    """
    is_first = True
    for number, line in read_lines(file):
        if not is_visible(line):
            continue
        text = line.rstrip("\n")
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            if is_first and text.lstrip().startswith("["):  # an array over several lines
                yield from _read_array(file)
                return
            if is_first and text.strip() == "{":
                raise UsageError(
                    f"{file}:{number}: an object over several lines. Write one object per line, or an array of objects: "
                    "jq -c . FILE"
                ) from None
            yield (
                number,
                BadRow(f"not a JSON object, column {error.colno}: {error.msg}. One object per line is read."),
            )
        except ValueError:
            yield number, _describe_long_number()
        except RecursionError:
            yield number, TOO_DEEP
        else:
            if is_first and isinstance(row, list) and (not row or isinstance(row[0], dict)):  # an array on one line
                yield from _read_array(file)
                return
            yield number, row if isinstance(row, dict) else _describe_no_object(row)
        is_first = False


def _describe_no_object(row: object) -> BadRow:
    return BadRow(f"a JSON {type(row).__name__}, not an object. One per line is read, or an array of objects.")


def _describe_long_number() -> BadRow:
    limit = sys.get_int_max_str_digits()
    return BadRow(f"a number of more than {limit:,} digits. Shorten it, or put it into quotation marks.")


TOO_DEEP = BadRow("lists or objects nested too deep. Flatten or remove them.")


def _read_array(file: str) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Read the elements of a JSON array, one at a time; its text is in memory. Of an array on one line they are numbered."""
    with open_without_waiting(file) as stream:
        data = stream.read(MAX_ARRAY + 1)
    if len(data) > MAX_ARRAY:
        raise UsageError(
            f"{file}: a JSON array of more than {MAX_ARRAY:,} bytes. Write one object per line: jq -c '.[]' FILE"
        )
    try:
        text = data.decode().removeprefix("\ufeff").rstrip()
    except UnicodeDecodeError as error:  # behind what `read_lines` has met
        where = f"byte offset {error.start} (0x{data[error.start]:02x})"
        raise UsageError(f"{file}: not UTF-8 at {where}. Convert it: iconv -f ENCODING -t UTF-8") from None
    del data
    is_one_line = "\n" not in text
    decoder, space = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")

    def skip(place: int) -> int:
        return space.match(text, place).end()  # it matches nothing, too

    place, line, counted, number = skip(text.index("[") + 1), 1, 0, 0
    while text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        try:
            row, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{file}:{error.lineno}: the JSON array is damaged, column {error.colno}: {error.msg}. Mend it, or write one "
                "object per line."
            ) from None
        except (ValueError, RecursionError) as error:  # its end is not known
            fault = TOO_DEEP if isinstance(error, RecursionError) else _describe_long_number()
            raise UsageError(f"{file}:{line}: {fault}") from None
        number += 1
        yield number if is_one_line else line, row if isinstance(row, dict) else _describe_no_object(row)
        place = skip(place)
        separator = text[place : place + 1]
        after = skip(place + 1)
        if separator == "," and text[after : after + 1] != "]":
            place = after
        elif separator != "]":
            ending = "ends" if not separator else "has no comma between two objects, or one too many,"
            line += text.count("\n", counted, place)
            raise UsageError(f"{file}:{line}: the JSON array {ending} here. Mend it, or write one object per line.")
    end = skip(place + 1)
    if end != len(text):
        line += text.count("\n", counted, end)
        raise UsageError(f"{file}:{line}: text follows the JSON array. Write one array, or one object per line.")


def check_text(value: Any, name: str) -> str:
    """Return the value of a column that is a text with a visible character.

    Raises:
        UsageError: it is none, or no file of UTF-8 can hold it.
    """
    if value is None or (isinstance(value, float) and value != value):  # NaN
        value = ""
    if not isinstance(value, str):
        raise UsageError(f"{name!r} holds {type(value).__name__}, not text")
    if not value.strip():
        raise UsageError(f"{name!r} is empty: fill it in, or remove the row")
    if problem := find_fault_of_text(value):
        raise UsageError(problem)
    return value


def find_fault_of_text(text: str) -> str | None:
    """Say why no file of UTF-8 can hold a text; None: one can."""
    if text.isascii() or is_utf8(text):
        return None
    return f"half of a surrogate pair in {shorten(text)!r}. Remove it."


def read_parquet(file: str, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read numbers, from 1, and rows of a table; of columns that are not in `columns` only the names."""
    with parquet.ParquetFile(file) as table:
        others = {} if columns is None else dict.fromkeys(table.schema_arrow.names)
        batches = table.iter_batches(batch_size=1000, columns=columns)
        for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1):
            yield number, others | row


def count_parquet(file: str) -> int:
    """Return the number of rows that a file of Parquet says it has. Raises UsageError where it cannot be read."""
    try:
        with parquet.ParquetFile(file) as table:
            return table.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise UsageError(_describe_damaged(file, error)) from None


ROW_READERS: dict[str, Any] = {
    ".jsonl": read_json_lines,
    ".json": read_json_lines,
    ".csv": read_delimited,
    ".tsv": partial(read_delimited, delimiter="\t"),
    ".parquet": read_parquet,
}
READERS = {".txt": _read_blocks} | ROW_READERS
