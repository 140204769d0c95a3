"""Sources of the streamed samples of all tasks: the shards that a recipe names, their first rows; held-out samples."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from samestep.contrib.streaming import shards
from samestep.contrib.streaming.shards import BadRow, DamagedShard, FileReader, Shard
from samestep.contrib.streaming.streams import ENDLESS, LeftOut, Source, Streams, describe_refusal
from samestep.data import conversation_rows, documents
from samestep.data.tokenizer import choose_tokenizer
from samestep.errors import UsageError
from samestep.printing import format_count

NUM_FIRST = 64
"""Rows from which the form of conversations is recognised; samples on which kernels are compared."""
MAX_BAD = 1000
"""First rows of a source, none of which can be used, after which it is refused."""


def find_entries(recipe: Any) -> dict[str, list[Shard]]:
    """Find the shards of each source of a recipe, by its entry."""
    entries = [recipe.dataset_name] if isinstance(recipe.dataset_name, str) else list(recipe.dataset_name or ())
    if entries:
        found = {}
        for entry in entries:
            name, config, split = conversation_rows.split_name(entry)
            is_file = shards.split_suffix(entry)[0] in shards.KINDS or "://" in entry
            config = config or recipe.dataset_config_name
            found[entry] = shards.find_shards(entry) if is_file else shards.find_hub_shards(name, config, split)
    elif getattr(recipe, "mixture_weights", None) is None:
        found = {"train_file": shards.find_shards(recipe.train_file)}
    else:
        found = {entry: shards.find_shards(entry) for entry in recipe.train_file}
    return {entry: shards.cut_shards(files, recipe.num_streams) for entry, files in found.items()}


class Streamed:
    """Properties of streamed samples of all tasks, beside the class of samples read whole.

    Attributes:
        num_samples: as the order counts them: without an end.
    """

    streams: Streams
    row_reports: Any = ()
    mixture: Any = ()
    num_samples = ENDLESS

    def __len__(self) -> int:
        """Count the first samples, which are looked at before the training."""
        return NUM_FIRST

    def open(self, recipe: Any, sources: Sequence[Source]) -> None:
        """Open the streams of sources, and draw a sample: faults that all rows have are met before the model is made."""
        self.streams = Streams(sources, recipe.seed, recipe.num_streams, recipe.shuffle_buffer_size)
        self.draw(0, 0)

    def draw(self, epoch: int, sample_id: int) -> Any:
        """Draw sample t of the run."""
        raise NotImplementedError

    def choose_samples(self, num_samples: int) -> list[int]:
        """Choose samples to be shown: the first ones of the run."""
        return [*range(num_samples)]

    def describe_left_out(self) -> list[str]:
        """Describe the rows that rules left out since the last call; those with a fault were each warned of."""
        _, counts = self.streams.take_left_out()
        return [f"left out until here: {format_count(count, 'row')}, {rule}" for rule, count in counts.items()]

    def describe_stream(self) -> str:
        """Say how many shards and streams there are."""
        files = {shard.name for source in self.streams.sources for shard in source.shards}
        return f"a stream of {format_count(len(files), 'shard')} in {format_count(len(self.streams), 'virtual stream')}"


def list_documents(recipe: Any, on_bad_row: str, **more: Any) -> list[Source]:
    """List the sources of a recipe of documents, whose rows are their texts; `more` are further fields of `Source`.

    Raises:
        UsageError: a source whose first rows cannot be used.
    """
    found = find_entries(recipe)
    patterns = [shard.name for files in found.values() for shard in files]
    reader = FileReader([recipe.text_column], documents.split_txt(recipe.txt_documents, patterns))
    sources = []
    for entry, files in found.items():
        is_txt = all(shards.split_suffix(shard.name)[0] == ".txt" for shard in files)
        keep = functools.partial(_keep_text, "text" if is_txt else recipe.text_column)
        sources.append(Source(files, reader, entry, keep=keep, on_bad_row=on_bad_row, **more))
        read_first(sources[-1])
    return sources


def _keep_text(column: str, values: Mapping[str, Any]) -> Any:
    """Keep the text of a row."""
    if column not in values:
        return BadRow(f"no column {column!r}, only {', '.join(map(str, values))}")
    try:
        row = documents._make_row(column, values, None)
    except UsageError as error:
        return BadRow(str(error))
    return LeftOut("no visible character") if row is None else row["text"]


def read_first(source: Source) -> list[tuple[str, Any]]:
    """Read the first rows of a source that can be used, and their places: by them its form is recognised.

    Raises:
        UsageError: it has none, or none among the first `MAX_BAD`.
    """
    rows: list[tuple[str, Any]] = []
    files = list(dict.fromkeys(shard.name for shard in source.shards))
    more = f" and {format_count(len(files) - 1, 'more file')}" if len(files) > 1 else ""
    problem, num_bad = f"has no row in {files[0]}{more}: give files that hold rows", 0
    for shard in source.shards:
        try:
            for _, place, values in source.read(shard, 0):
                row = values if isinstance(values, BadRow) else source.keep(values)
                if isinstance(row, BadRow):
                    problem, num_bad = f"has no row that can be used: {place}: {row}", num_bad + 1
                    if source.on_bad_row == "refuse":
                        raise UsageError(describe_refusal(place, row))
                elif not isinstance(row, LeftOut):
                    rows.append((place, row))
                if len(rows) == NUM_FIRST or (not rows and num_bad == MAX_BAD):
                    break
        except DamagedShard as error:
            problem = str(error)
            if source.on_bad_row == "refuse":
                raise
        if len(rows) == NUM_FIRST or (not rows and num_bad >= MAX_BAD):
            break
    if not rows:
        raise UsageError(f"{source.name} {problem}")
    return rows


def load_tokenizer(recipe: Any, required_tokens: Sequence[str], example: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a recipe names; arguments as of `choose_tokenizer`."""

    def refuse_training() -> Any:
        raise AssertionError("a rule asks for a tokenizer")

    return choose_tokenizer(recipe, refuse_training, required_tokens, example)


def build_held_out(recipe: Any, num_proc: int | None, on_bad_row: str) -> Any:
    """Build the held-out samples, as the task builds those of a training file; None: no file is held out.

    Their report of rows is `row_reports`.
    """
    if recipe.validation_file is None:
        return None
    changes = {"streaming": False, "train_file": recipe.validation_file, "dataset_name": None, "validation_file": None}
    whole = dataclasses.replace(recipe, **changes, validation_fraction=0.0)
    held_out, _ = recipe.parts.find("data")(whole, num_proc, on_bad_row)
    held_out.row_reports = [report._replace(source="validation_file") for report in held_out.row_reports]
    return held_out
