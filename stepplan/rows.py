"""Counts the rows of a recipe's files, so that a plan of one's own data knows how long an epoch is."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from samestep.data import row_files
from samestep.errors import UsageError
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from samestep.recipe.tasks.streamed import StreamedTexts

MAX_BYTES = 2**27
"""Bytes of text that are read to count rows: about two seconds. Files of Parquet say their number of rows."""
CHARACTERS = 4
"""Characters of a token of English, about; fewer of most other languages."""


class Rows(NamedTuple):
    """Rows of the files of `train_file`.

    Attributes:
        files: what train_file names.
        num_rows: rows that can be read; 0: they were not counted.
        num_held_out: of these, rows that are evaluated and not trained on.
        why: why they were not counted; None: they were.
        mean_tokens: of a row that is trained on, about, if all of its texts are used: `CHARACTERS` to a token; None: not known.
        num_long: rows of more than max_seq_length tokens, about, where a run leaves these out.
        longest_tokens: of the longest row, about; None: not known.
    """

    files: tuple[str, ...]
    num_rows: int = 0
    num_held_out: int = 0
    why: str | None = None
    mean_tokens: int | None = None
    num_long: int = 0
    longest_tokens: int | None = None

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch, before a run leaves out those that its rules refuse; None: not counted."""
        return self.num_rows - self.num_held_out or None


def count_rows(recipe: Any, max_bytes: int = MAX_BYTES) -> Rows | None:
    """Count the rows of local files of which each is a sample; None: the recipe reads others, or needs no number.

    Args:
        recipe: of any task.
        max_bytes: bytes of text that are read, at most.
    """
    files = getattr(recipe, "train_file", None)
    if not files or not isinstance(recipe, StreamedTexts) or recipe.streaming:
        return None
    try:
        found, sizes = row_files.find_files(files, row_files.ROW_READERS)
        text_bytes = sum(size for file, size, _ in sizes if not file.lower().endswith(".parquet"))
        if text_bytes > max_bytes:
            limit = f"plan reads up to {max_bytes / 1e9:.2g} GB to count them"
            return Rows(files, why=f"its files have {text_bytes / 1e9:.2g} GB, and {limit}")
        lengths = [length for file in found for length in _measure_rows(file)]
    except UsageError as error:
        return Rows(files, why=error.problems[0].rstrip("."))
    num_rows, num_held_out = len(lengths), 0
    fraction = getattr(recipe, "validation_fraction", 0)
    if fraction and getattr(recipe, "validation_file", None) is None:
        num_held_out = max(2, round(num_rows * fraction))
    if num_rows - num_held_out < 1:
        return Rows(files, why=f"it holds {num_rows} rows, of which {num_held_out} are held out")
    known = [length for length in lengths if length is not None]
    if len(known) < num_rows or getattr(recipe, "images", False):  # whose tokens are no characters
        return Rows(files, num_rows, num_held_out)
    most = math.inf
    if isinstance(recipe, CausalLmFineTuning) and recipe.truncation != "cut" and recipe.objective == "sft":
        most = recipe.max_seq_length * CHARACTERS  # a run leaves out longer ones
    used = [length for length in known if length <= most]
    mean = round(sum(used) / len(used) / CHARACTERS) if used else None
    return Rows(files, num_rows, num_held_out, None, mean, num_rows - len(used), math.ceil(max(known) / CHARACTERS))


def _measure_rows(file: str) -> Iterator[int | None]:
    """Yield the characters of each row's texts; None for each row of a file of Parquet, whose texts are not read."""
    if Path(file).suffix.lower() == ".parquet":
        yield from itertools.repeat(None, row_files.count_parquet(file))
        return
    for _, values in row_files.read_rows(file):
        if not isinstance(values, row_files.BadRow):
            yield _count_characters(values)


def _count_characters(value: Any) -> int:
    """Count the characters of all texts in a value of JSON, without the names of its fields.

    >>> _count_characters({"messages": [{"role": "user", "content": "Hello"}], "id": 3})
    9
    """
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_count_characters, parts))
