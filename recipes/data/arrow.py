"""Arrow columns as numpy views: memory-mapped, nothing copied, any row at once."""

import numpy as np
from datasets import Dataset


class ListColumn:
    """A list<int32> column of a dataset, read row by row without copying.

    `datasets` builds a row's Python objects on every access, which costs more than collating it; this reads the Arrow
    buffers, which stay memory-mapped on disk, directly.

    Args:
        dataset: without an indices mapping (see `Dataset.flatten_indices`).
        column: name of a list<int32> column.
    """

    def __init__(self, dataset: Dataset, column: str):
        chunks = dataset.data.column(column).chunks
        self.offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self.values = [chunk.values.to_numpy() for chunk in chunks]
        self.first_rows = np.cumsum([0] + [len(chunk) for chunk in chunks])

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def __getitem__(self, row: int) -> np.ndarray:
        """int32 [length of the row]."""
        chunk = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        offsets, place = self.offsets[chunk], row - self.first_rows[chunk]
        return self.values[chunk][offsets[place] : offsets[place + 1]]

    def lengths(self) -> np.ndarray:
        """Length of every row, int64 [rows]."""
        return np.concatenate([np.diff(offsets) for offsets in self.offsets] or [[]]).astype(np.int64)
