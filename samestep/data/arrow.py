"""Arrow columns as numpy views: memory-mapped, nothing copied, any row at once; tables that are made once, and their hashes."""

import hashlib
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep._internals.datasets_rows import rows_fingerprint
from samestep.recipe.extras import optional

# Modules of data take these from here: only an extra brings the package
datasets = optional("datasets")
if TYPE_CHECKING:
    from datasets import ClassLabel, Dataset, Features, List, Value
else:
    ClassLabel, Dataset, Features, List, Value = (
        getattr(datasets, name) for name in ("ClassLabel", "Dataset", "Features", "List", "Value")
    )


class ListColumn:
    """A list<integer> column of a dataset, read row by row without copying.

    `datasets` builds a row's Python objects on every access, which costs more than collating it; this reads the Arrow
    buffers, which stay memory-mapped on disk, directly.

    Args:
        dataset: without an indices mapping (see `Dataset.flatten_indices`).
        column: name of a list column of integers.
    """

    def __init__(self, dataset: Dataset, column: str):
        chunks = dataset.data.column(column).chunks
        self.offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self.values = [chunk.values.to_numpy() for chunk in chunks]
        self.first_rows = _ends(len(chunk) for chunk in chunks)
        self.first_values = _ends(int(offsets[-1]) - int(offsets[0]) for offsets in self.offsets)
        self.first_gaps = [values - rows for values, rows in zip(self.first_values, self.first_rows, strict=True)]

    def __len__(self) -> int:
        return self.first_rows[-1]

    @property
    def num_values(self) -> int:
        """Number of values in all rows."""
        return self.first_values[-1]

    def __getitem__(self, row: int) -> np.ndarray:
        """Return the values of a row, [length of the row], as a view."""
        chunk = bisect_right(self.first_rows, row) - 1
        offsets, place = self.offsets[chunk], row - self.first_rows[chunk]
        return self.values[chunk][offsets[place] : offsets[place + 1]]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return values `start` to `stop` - 1 of all rows laid end to end, [stop - start]: a view unless they span chunks."""
        chunk, parts = bisect_right(self.first_values, start) - 1, []
        while start < stop:
            # From a place in all rows laid end to end to one in this chunk's buffer, which need not begin with its first row
            shift = int(self.offsets[chunk][0]) - self.first_values[chunk]
            end = min(stop, self.first_values[chunk + 1])
            parts.append(self.values[chunk][start + shift : end + shift])
            start, chunk = end, chunk + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def find_gap(self, number: int) -> tuple[int, int]:
        """Find the row of a gap between two neighbouring values of one row, and the gap's place in that row.

        A row of n values has n - 1 gaps. The offsets are searched, so that no table of rows is kept in memory.

        Args:
            number: of the gap, counted over all rows; every row has one value or more.
        """
        chunk = bisect_right(self.first_gaps, number) - 1
        offsets, number = self.offsets[chunk], number - self.first_gaps[chunk]
        first = int(offsets[0])
        # Before row i of the chunk lie offsets[i] - first values, and i fewer gaps
        row = bisect_right(range(len(offsets) - 1), number, key=lambda row: int(offsets[row]) - first - row) - 1
        return self.first_rows[chunk] + row, number - (int(offsets[row]) - first - row)

    def lengths(self) -> np.ndarray:
        """Return the length of every row, int64 [rows]."""
        return np.concatenate([np.diff(offsets) for offsets in self.offsets] or [[]]).astype(np.int64)

    def digest(self) -> str:
        """Return 16 hex digits of a SHA-256 of all rows' lengths and about 1,000 rows' values."""
        digest = hashlib.sha256()
        for offsets in self.offsets:
            digest.update(np.diff(offsets).astype(np.int64).tobytes())
        for row in range(0, len(self), max(1, len(self) // 1000)):
            digest.update(self[row].tobytes())
        return digest.hexdigest()[:16]


def _ends(sizes: Iterable[int]) -> list[int]:
    """Return the place at which each part of these sizes begins, and the end of the last one."""
    return [0, *accumulate(sizes)]


def hash_parts(*parts: object) -> str:
    """Return 16 hex digits of a SHA-256 of how the parts are written."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def hash_modules(*names: str) -> str:
    """Return 16 hex digits of a SHA-256 of modules' files, so that what they have cached is made anew when they change."""
    return hash_parts(*(Path(str(sys.modules[name].__file__)).read_bytes() for name in names))


def map_once(
    rows: Dataset,
    make: Callable[..., dict[str, list]],
    key: tuple,
    description: str,
    num_proc: int | None,
    **options: Any,
) -> Dataset:
    """Make a table of rows, batch by batch, unless the cache of `datasets` has it.

    Args:
        make: makes columns of a batch's columns; it gets `fn_kwargs`.
        key: all beside the rows that decides the result.
        description: names the rows to people.
        num_proc: processes that make it.
        options: further ones of `Dataset.map`.
    """
    return rows.map(
        make,
        batched=True,
        remove_columns=rows.column_names,
        num_proc=num_proc,
        desc=f"Tokenizing {description}",
        new_fingerprint=hash_parts(rows_fingerprint(rows), *key),
        **options,
    )
