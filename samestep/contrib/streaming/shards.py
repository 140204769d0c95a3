"""Shards of a stream: files on a disk, in a bucket or on the hub, of which parts are read, and again where a read fails.

A row of a shard has an offset, an integer from which the rows after it can be read: bytes of lines, a row's number elsewhere.
"""

import io
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol

import fsspec
from fsspec.compression import compr
from fsspec.utils import infer_compression

from samestep.errors import UsageError, reason
from samestep.recipe.extras import optional

NUM_TRIES, LONGEST_WAIT = 10, 30.0
"""Reads of one part of a file, and seconds between two of them at most: 51 seconds in all."""
BUFFER_SIZE = 2**17
"""Bytes that are read at once; each stream has one file open."""
MIN_PIECE = 2**20
"""Bytes of a part of a file of lines, where files are fewer than streams."""
MAX_LINE = 2**26
"""Bytes of a line: without line ends a file would fill the memory."""
GIVEN_UP = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError)
"""Errors that the next try meets, too."""
KINDS = (".jsonl", ".json", ".parquet", ".txt", ".tar")
"""Suffixes of shards, perhaps with that of a compression behind (`.jsonl.gz`)."""

parquet = optional("pyarrow.parquet")
Row = tuple[int, str, Any]
"""Offset behind the row, its place for people, and its columns or a `BadRow`."""


class BadRow(str):
    """Says why a shard has no row here; it comes in the place of the row."""


class DamagedShard(UsageError):
    """Raised where the rest of a shard cannot be read, however often one tries; names the shard and the place."""


class Shard(NamedTuple):
    """A shard, or a part of one.

    Attributes:
        name: path or URL.
        size: bytes of the file; of drawn shards their rows.
        start, stop: offsets between which rows begin; None: to the end.
    """

    name: str
    size: int
    start: int = 0
    stop: int | None = None


class Reader(Protocol):
    """Reads rows of a shard whose offset is `offset` or more."""

    def __call__(self, shard: Shard, offset: int) -> Iterator[Row]:
        """Iterate over the rows."""


class Retries(NamedTuple):
    """The rule by which a request that failed is made again.

    Attributes:
        num_tries: of each request.
        first_wait: seconds before the second try; each further one waits twice as long.
    """

    num_tries: int = NUM_TRIES
    first_wait: float = 0.1

    def ask(self, request: Callable[[], Any], name: str) -> Any:
        """Return what a request returns, which may fail a few times.

        Raises:
            UsageError: it fails for good. Nothing is left out then: the samples of a run never depend on a network.
        """
        for number in itertools.count(1):
            try:
                return request()
            except UsageError:
                raise
            except GIVEN_UP as error:
                raise UsageError(
                    f"shard {name} cannot be read: {reason(error)}. Check the name and its rights"
                ) from None
            except Exception as error:  # of any kind: each file system has its own
                if number >= self.num_tries:
                    raise UsageError(
                        f"shard {name} cannot be read after {number} tries: {reason(error)}. Check the network, then go on "
                        "with --resume_from_checkpoint latest"
                    ) from error
                time.sleep(min(LONGEST_WAIT, self.first_wait * 2 ** (number - 1)))


class RangeFile(io.RawIOBase):
    """A file that is read by ranges of bytes, each of which is asked for again where that fails.

    No connection stays open between two reads, so nothing breaks when a training pauses.

    Args:
        name: path or URL.
        size: bytes of the file.
        retries: how often a range is asked for.
    """

    def __init__(self, name: str, size: int, retries: Retries):
        self.files, self.path = fsspec.core.url_to_fs(name)
        self.label, self.size, self.retries, self.place = name, size, retries, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence] + offset
        return self.place

    def tell(self) -> int:
        return self.place

    def readinto(self, buffer: Any) -> int:
        start, stop = self.place, min(self.size, self.place + len(buffer))
        if start >= stop:
            return 0
        data = self.retries.ask(lambda: self._ask(start, stop), self.label)
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)

    def _ask(self, start: int, stop: int) -> bytes:
        data: bytes = self.files.cat_file(self.path, start=start, end=stop)
        if len(data) != stop - start:  # an answer that broke off, or a file that changed
            raise OSError(f"{len(data)} of {stop - start} bytes came")
        return data


class FileReader:
    """A `Reader` of files, by their suffixes.

    Args:
        columns: columns of Parquet that are read; None: all.
        txt_documents: blocks (blank lines separate the documents of a txt file) or files (it is one).
        retries: how often a part of a file is asked for.

    Rows are mappings of columns; of txt they have `text` alone, of tar the files of a sample by their suffixes.
    """

    def __init__(
        self, columns: Sequence[str] | None = None, txt_documents: str = "blocks", retries: Retries | None = None
    ):
        self.columns, self.txt_documents, self.retries = columns, txt_documents, retries or Retries()

    def __call__(self, shard: Shard, offset: int) -> Iterator[Row]:
        """Iterate over the rows; raises `DamagedShard` where the rest of the file cannot be understood."""
        kind, compression = split_suffix(shard.name)
        read = {".parquet": self._read_table, ".txt": self._read_texts, ".tar": self._read_tar}.get(
            kind, self._read_lines
        )
        raw = RangeFile(shard.name, shard.size, self.retries)
        try:
            file: Any = io.BufferedReader(raw, BUFFER_SIZE)
            if compression is not None:
                # A buffer on top would lose what stands before a fault, and how much would depend on where reading began
                file = compr[compression](file, mode="r")
                file = file if hasattr(file, "readline") else io.BufferedReader(file, BUFFER_SIZE)
            with file:
                yield from read(file, shard, offset)
        except UsageError:
            raise
        except Exception as error:  # of any kind: formats and compressions have their own
            raise DamagedShard(f"shard {shard.name} is damaged: {reason(error)}") from None

    def _read_lines(self, file: Any, shard: Shard, offset: int) -> Iterator[Row]:
        start = max(offset, shard.start)
        if start > 0:
            # A row belongs to the part in which it begins
            file.seek(start - 1)
            start = start - 1 + len(_read_line(file, shard, start))
        while (shard.stop is None or start < shard.stop) and (line := _read_line(file, shard, start)):
            place, start = f"{shard.name}, byte {start}", start + len(line)
            if text := line.removeprefix(b"\xef\xbb\xbf").strip():
                yield start, place, _parse(text)

    def _read_texts(self, file: Any, shard: Shard, offset: int) -> Iterator[Row]:
        file.seek(offset)
        begin, block, size = offset, [], 0
        while True:
            line = _read_line(file, shard, offset)
            is_blank = not line.strip()
            if self.txt_documents == "files":
                is_blank = not line
            if block and is_blank:
                yield offset, f"{shard.name}, byte {begin}", _decode(b"".join(block))
                block, size = [], 0
            if not line:
                return
            begin = begin if block else offset
            offset += len(line)
            if not is_blank:
                block.append(line)
                size += len(line)
            if size > MAX_LINE:
                raise DamagedShard(
                    f"shard {shard.name} is damaged: a document of more than {MAX_LINE:,} bytes from byte {begin} on"
                )

    def _read_table(self, file: Any, shard: Shard, offset: int) -> Iterator[Row]:
        with parquet.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER_SIZE) as table:
            names, number, first = table.schema_arrow.names, max(offset, shard.start), 0
            columns = None if self.columns is None else [name for name in self.columns if name in names]
            for group in range(table.num_row_groups):
                num_rows = table.metadata.row_group(group).num_rows
                if first + num_rows > number and (shard.stop is None or first < shard.stop):
                    place = first
                    for batch in table.iter_batches(64, row_groups=[group], columns=columns, use_threads=False):
                        if place + len(batch) > number:
                            for row in batch.slice(max(0, number - place)).to_pylist():
                                number += 1
                                yield number, f"{shard.name}, row {number}", row
                        place += len(batch)
                first += num_rows

    def _read_tar(self, file: Any, shard: Shard, offset: int) -> Iterator[Row]:
        tars = optional("webdataset.tariterators")
        members = ({**member, "__url__": shard.name} for member in tars.tar_file_iterator(file))
        for number, sample in enumerate(tars.group_by_keys(members), 1):
            if number > offset:
                yield number, f"{shard.name}, sample {sample['__key__']}", _read_sample(sample)


def _read_line(file: Any, shard: Shard, start: int) -> bytes:
    line: bytes = file.readline(MAX_LINE + 1)
    if len(line) > MAX_LINE:
        raise DamagedShard(f"shard {shard.name} is damaged: a line of more than {MAX_LINE:,} bytes at byte {start}")
    return line


def _parse(text: bytes) -> Any:
    try:
        row = json.loads(text)
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8: {error.reason}. Convert the file")
    except (ValueError, RecursionError) as error:
        return BadRow(f"not a JSON object: {reason(error)}. One object per line is read")
    return row if isinstance(row, dict) else BadRow(f"a JSON {type(row).__name__}, not an object. One per line is read")


def _decode(text: bytes) -> Any:
    try:
        return {"text": text.removeprefix(b"\xef\xbb\xbf").decode().rstrip("\n")}
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8: {error.reason}. Convert the file")


def _read_sample(sample: Mapping[str, Any]) -> Any:
    """Read the files of a sample of a tar: texts by their suffixes; of a JSON object its columns."""
    row: dict[str, Any] = {}
    for name, value in sample.items():
        if name == "json":
            parsed = _parse(value)
            if isinstance(parsed, BadRow):
                return parsed
            row |= parsed
        elif not name.startswith("__"):
            try:
                row[name] = value.decode() if isinstance(value, bytes) else value
            except UnicodeDecodeError:
                row[name] = value  # as of an image
    return row


def split_suffix(name: str) -> tuple[str, str | None]:
    """Split the end of a name into the suffix of its kind and its compression.

    >>> split_suffix("s3://b/part-1.jsonl.gz"), split_suffix("a.Parquet")
    (('.jsonl', 'gzip'), ('.parquet', None))
    """
    compression: str | None = infer_compression(name)
    path = PurePosixPath(name)
    return PurePosixPath(path.stem if compression else path.name).suffix.lower(), compression


def find_shards(patterns: str | Sequence[str], retries: Retries | None = None) -> list[Shard]:
    """Find the shards that paths, URLs of fsspec, globs and folders name, in order, each once.

    Args:
        patterns: each glob, and each folder with those inside it, is sorted by path; of a folder's files those of other kinds
            are left out.
        retries: how often each is asked for.

    Raises:
        UsageError: a pattern without a file, or a file of unknown kind; all of them at once.
    """
    shards: dict[str, Shard] = {}
    problems = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        files = _list_files(os.path.expanduser(pattern), retries or Retries())
        if not files:
            problems.append(f"shards {pattern}: no file of {', '.join(KINDS)} matches. Check the path")
        for name, size in files.items():
            kind = split_suffix(name)[0]
            if kind not in KINDS:
                problems.append(f"shard {name}: unknown kind {kind!r}. Streams read {', '.join(KINDS)}")
            shards.setdefault(name, Shard(name, size))
    if problems:
        raise UsageError(problems)
    return list(shards.values())


def _list_files(pattern: str, retries: Retries) -> dict[str, int]:
    """List the files of a pattern and their sizes, bytes, sorted by path."""

    def ask() -> dict[str, int]:
        try:
            files, path = fsspec.core.url_to_fs(pattern)
        except (ValueError, ImportError) as error:  # an unknown protocol, or one whose package is missing
            raise UsageError(f"shards {pattern} cannot be read: {reason(error)}") from None
        prefix = pattern.partition("://")[0] + "://" if "://" in pattern else ""
        if fsspec.core.has_magic(path) and not files.exists(path):
            found = files.glob(path, detail=True)
        else:
            found = files.find(path, detail=True)
            if set(found) != {path}:
                found = {name: entry for name, entry in found.items() if split_suffix(name)[0] in KINDS}
        return {
            prefix + name.removeprefix(prefix): entry["size"]
            for name, entry in sorted(found.items())
            if entry["type"] == "file" and not PurePosixPath(name).name.startswith(".")
        }

    listed: dict[str, int] = retries.ask(ask, pattern)
    return listed


def find_hub_shards(name: str, config: str | None, split: str = "train") -> list[Shard]:
    """Find the shards of a dataset of the hub, or of a local dataset folder; no code in it is run.

    Raises:
        UsageError: it cannot be reached, has no such split, or its files are of other kinds.
    """
    datasets = optional("datasets")
    if not datasets:
        raise UsageError(f"dataset_name {name!r}: the package datasets finds its shards: pip install samestep[text]")
    try:
        files = datasets.load_dataset_builder(name, config).config.data_files[split]
    except Exception as error:  # of any kind: others wrote the files that are read
        raise UsageError(
            f"dataset_name {name!r} (config {config!r}, split {split!r}): {reason(error)}. Check the names and the network, or "
            "use train_file"
        ) from error
    return find_shards([str(file) for file in files])


def cut_shards(shards: Sequence[Shard], num_parts: int, retries: Retries | None = None) -> list[Shard]:
    """Cut shards that are fewer than `num_parts`: files of lines at bytes, Parquet between row groups; the others stay whole.

    It is a function of the files alone, so that the order of the samples is one, too.
    """
    if len(shards) >= num_parts:
        return list(shards)
    share, parts = -(-num_parts // len(shards)), []
    for shard in shards:
        kind, compression = split_suffix(shard.name)
        borders = [0]
        if compression is None and kind in (".jsonl", ".json"):
            count = max(1, min(share, shard.size // MIN_PIECE))
            borders = [shard.size * number // count for number in range(count)]
        elif compression is None and kind == ".parquet":
            borders = _find_groups(shard, share, retries or Retries())
        stops = [*borders[1:], None]
        parts += [Shard(shard.name, shard.size, *pair) for pair in zip(borders, stops, strict=True)]
    return parts


def _find_groups(shard: Shard, share: int, retries: Retries) -> list[int]:
    """Find the first rows of at most `share` parts of a Parquet file."""
    file: Any = io.BufferedReader(RangeFile(shard.name, shard.size, retries), BUFFER_SIZE)
    try:
        with parquet.ParquetFile(file) as table:
            sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    except UsageError:
        raise
    except Exception:  # damaged: the rule for damaged shards says what is done when it is read
        return [0]
    firsts = [0, *itertools.accumulate(sizes)][:-1] or [0]
    count = min(share, len(firsts))
    return [firsts[len(firsts) * number // count] for number in range(count)]


def warn(text: str) -> None:
    """Print a line about the data on stderr."""
    print(f"WARNING: {text}", file=sys.stderr, flush=True)
