"""Arrow columns as numpy views: memory-mapped, nothing copied, any row at once."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

import numpy as np

from samestep.recipe.extras import optional

Dataset = optional("datasets").Dataset


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
        """Values in all rows."""
        return self.first_values[-1]

    def __getitem__(self, row: int) -> np.ndarray:
        """[length of the row]."""
        chunk = bisect_right(self.first_rows, row) - 1
        offsets, place = self.offsets[chunk], row - self.first_rows[chunk]
        return self.values[chunk][offsets[place] : offsets[place + 1]]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Values start to stop of all rows one after the other, [stop - start]: a view unless it spans Arrow chunks."""
        chunk, parts = bisect_right(self.first_values, start) - 1, []
        while start < stop:
            shift = int(self.offsets[chunk][0]) - self.first_values[chunk]
            end = min(stop, self.first_values[chunk + 1])
            parts.append(self.values[chunk][start + shift : end + shift])
            start, chunk = end, chunk + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def find_gap(self, number: int) -> tuple[int, int]:
        """Row, and place in it, of a gap between two neighbouring values of one row; a row of n values has n - 1 of them.

        Searched for in the offsets, so that no table of rows is kept in memory.

        Args:
            number: of the gap, counted over all rows; every row has one or more.
        """
        chunk = bisect_right(self.first_gaps, number) - 1
        offsets, number = self.offsets[chunk], number - self.first_gaps[chunk]
        first = int(offsets[0])
        row = bisect_right(range(len(offsets) - 1), number, key=lambda row: int(offsets[row]) - first - row) - 1
        return self.first_rows[chunk] + row, number - (int(offsets[row]) - first - row)

    def lengths(self) -> np.ndarray:
        """Length of every row, int64 [rows]."""
        return np.concatenate([np.diff(offsets) for offsets in self.offsets] or [[]]).astype(np.int64)

    def digest(self) -> str:
        """16 hex digits (SHA-256) of all rows' lengths and about 1,000 rows' values."""
        digest = hashlib.sha256()
        for offsets in self.offsets:
            digest.update(np.diff(offsets).astype(np.int64).tobytes())
        for row in range(0, len(self), max(1, len(self) // 1000)):
            digest.update(self[row].tobytes())
        return digest.hexdigest()[:16]


def _ends(sizes: Iterable[int]) -> list[int]:
    """Where each part of these sizes begins, and where the last one ends."""
    return [0, *accumulate(sizes)]
