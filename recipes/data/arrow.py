"""Arrow columns as numpy views: memory-mapped, nothing copied, any row at once."""

import hashlib

import numpy as np
from datasets import Dataset


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
        self.first_rows = np.cumsum([0] + [len(chunk) for chunk in chunks])
        self.first_values = np.cumsum([0] + [int(offsets[-1]) - int(offsets[0]) for offsets in self.offsets])

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    @property
    def num_values(self) -> int:
        """Values in all rows."""
        return int(self.first_values[-1])

    def __getitem__(self, row: int) -> np.ndarray:
        """[length of the row]."""
        chunk = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        offsets, place = self.offsets[chunk], row - self.first_rows[chunk]
        return self.values[chunk][offsets[place] : offsets[place + 1]]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Values start to stop of all rows one after the other, [stop - start]: a view unless it spans Arrow chunks."""
        chunk, parts = int(np.searchsorted(self.first_values, start, side="right")) - 1, []
        while start < stop:
            shift = int(self.offsets[chunk][0]) - int(self.first_values[chunk])
            end = min(stop, int(self.first_values[chunk + 1]))
            parts.append(self.values[chunk][start + shift : end + shift])
            start, chunk = end, chunk + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def lengths(self) -> np.ndarray:
        """Length of every row, int64 [rows]."""
        return np.concatenate([np.diff(offsets) for offsets in self.offsets] or [[]]).astype(np.int64)

    def digest(self) -> str:
        """16 hex digits (SHA-256) of all rows' lengths and about 1,000 rows' values."""
        digest = hashlib.sha256(self.lengths().tobytes())
        for row in range(0, len(self), max(1, len(self) // 1000)):
            digest.update(self[row].tobytes())
        return digest.hexdigest()[:16]
