"""Streamed samples of tasks of which each row is one sample: labelled texts, sources and targets, pairs of texts."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep.contrib.streaming.shards import BadRow, FileReader
from samestep.contrib.streaming.sources import Streamed, build_held_out, find_entries, load_tokenizer, read_first
from samestep.contrib.streaming.streams import Source
from samestep.data import labelled_texts, row_files, seq2seq, seq2seq_rows, tables, text_pairs
from samestep.data.arrow import Dataset, hash_parts
from samestep.data.labelled_texts import LabelledTexts, Text
from samestep.data.tokenizer import fingerprint
from samestep.errors import UsageError


class Keep:
    """Keeps of a row what a task reads. Columns are found by the row's own, whichever row was read first.

    Args:
        find: finds names of columns, of the name of a source and the columns that are present.
        make: makes the row of its columns and these names; both raise UsageError.
    """

    def __init__(self, find: Callable[[str, list[str]], Any], make: Callable[[Mapping[str, Any], Any], Any]):
        self.find = functools.lru_cache(1000)(lambda names: find("", list(names)))
        self.make = make

    def __call__(self, values: Mapping[str, Any]) -> Any:
        try:
            return self.make(values, self.find(tuple(values)))
        except UsageError as error:
            return BadRow(str(error).removeprefix(":").strip())


class StreamedRows(Streamed):
    """Properties of streamed samples of which each row is one.

    Attributes:
        kind: what a row is, for people.
    """

    is_even = False
    kind = "rows"
    tokenizer: Any
    num_cut = 0

    def open_rows(self, recipe: Any, on_bad_row: str, keep: Callable[[Any], Any]) -> list[Any]:
        """Open the streams of a recipe's sources, whose rows `convert` makes samples; return the first rows."""
        more: dict[str, Any] = {"convert": self.convert, "keep": keep, "on_bad_row": on_bad_row}
        sources = [Source(files, FileReader(), entry, **more) for entry, files in find_entries(recipe).items()]
        rows = [row for source in sources for _, row in read_first(source)]
        self.check_first(rows)
        self.open(recipe, sources)
        return rows

    def check_first(self, rows: list[Any]) -> None:
        """Check the first rows. Raises UsageError."""

    def convert(self, rows: list[tuple[str, Any]]) -> list[Any]:
        """Make samples of rows, each with its place."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.describe_stream()}, {self.kind}"

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer, and the names and sizes of the shards."""
        return {"tokenizer": fingerprint(self.tokenizer), "shards": self.streams.fingerprint}

    @classmethod
    def build(cls, recipe: Any, num_proc: int | None, on_bad_row: str) -> tuple[Any, Any]:
        """Build the streamed samples, and the held-out ones; these come first, as they may say what labels are."""
        held_out = build_held_out(recipe, num_proc, on_bad_row)
        train = cls(recipe, on_bad_row, held_out)  # type: ignore[call-arg]
        train.row_reports = [] if held_out is None else held_out.row_reports
        return train, held_out


def _transpose(rows: list[tuple[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for _, row in rows] for name in rows[0][1]}


# ---------------------------------------------------------------------------------------------------------------------
# labelled texts


class StreamedLabelledTexts(StreamedRows, LabelledTexts):
    """Labelled texts of a stream. Classes are those of the held-out texts; without these the numbers from 0 to num_labels - 1.

    Args:
        recipe: of the task text_classification.
        on_bad_row: refuse or skip.
        held_out: the held-out texts; None: there are none.
    """

    def __init__(self, recipe: Any, on_bad_row: str, held_out: LabelledTexts | None):
        self.tokenizer = load_tokenizer(recipe, labelled_texts.REQUIRED_TOKENS, "BERT")
        self.tokenizer.model_max_length = self.max_length = recipe.max_seq_length
        if held_out is not None:
            self.classes = held_out.classes
        else:
            self.classes = None if recipe.num_labels == 1 else [str(number) for number in range(recipe.num_labels)]
        self.kind = "texts of numbers" if self.classes is None else f"texts of {len(self.classes):,} classes"
        columns = labelled_texts.Columns(recipe.text_column, recipe.text_pair_column, recipe.label_column)
        is_pair = recipe.text_pair_column is not None
        self.own_example = held_out.example if held_out else labelled_texts.A_PAIR if is_pair else labelled_texts.A_TEXT
        self.open_rows(recipe, on_bad_row, Keep(columns.find, self._read))

    @property
    def example(self) -> str:
        return self.own_example

    def _read(self, values: Mapping[str, Any], names: Sequence[str | None]) -> dict[str, Any]:
        """Read a row, with the number of its label."""
        row = labelled_texts._make_row([None if name is None else values[name] for name in names], names, True)
        try:
            (row["label"],) = labelled_texts._numbers([row["label"]], self.classes, "a row").tolist()
        except UsageError:
            if self.classes is None:
                raise UsageError(f"label {row['label']!r} is no number") from None
            raise UsageError(
                f"label {row['label']!r} is none of the classes {tables.list_names(self.classes)}: give a validation_file "
                "that has all of them, or mend the row"
            ) from None
        return row

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer, names and sizes of the shards, and the classes."""
        return super().fingerprints | {"labels": hash_parts(self.classes)}

    def convert(self, rows: list[tuple[str, Any]]) -> list[Any]:
        """Tokenize texts, or pairs, which may be mixed: `tokenizer` takes one kind at once."""
        samples: list[Any] = [None] * len(rows)
        for is_pair in (False, True):
            places = [place for place, (_, row) in enumerate(rows) if (row["pair"] is not None) is is_pair]
            if places:
                batch = _transpose([rows[place] for place in places])
                table = labelled_texts._tokenize(batch, self.tokenizer, self.max_length)
                for place, tokens, first in zip(places, table["tokens"], table["first"], strict=True):
                    samples[place] = (tokens, first, rows[place][1]["label"])
        return samples

    def draw(self, epoch: int, sample_id: int) -> Text:
        """Draw sample t of the run."""
        return Text(int(sample_id), *self.streams.draw(int(sample_id)).value)


# ---------------------------------------------------------------------------------------------------------------------
# sources and targets


class StreamedTexts(seq2seq.Texts):
    """Sources of a stream, which holds none of them: what `seq2seq.Pairs` asks of them beside.

    Args:
        tokenizer: of the samples.
        recipe: its length.
        first: the first source.
    """

    def __init__(self, tokenizer: Any, recipe: Any, first: str):
        self.tokenizer, self.max_length = tokenizer, recipe.max_source_length
        self.texts, self.notes = Dataset.from_list([{"source": first}]), []


class StreamedPairs(StreamedRows, seq2seq.Pairs):
    """Sources and targets of a stream.

    Args:
        recipe: of the task seq2seq_finetuning.
        on_bad_row: refuse or skip.
        held_out: the held-out pairs; None: there are none.
    """

    kind = "sources and targets"
    processor = None

    def __init__(self, recipe: Any, on_bad_row: str, held_out: Any):
        self.tokenizer = seq2seq._choose_tokenizer(recipe, Dataset.from_list([]))
        self.tokenizer.model_max_length = max(recipe.max_source_length, recipe.max_target_length)
        self.recipe, self.max_length = recipe, recipe.max_seq_length
        self.forced = seq2seq.find_forced(recipe, self.tokenizer)
        languages = (recipe.source_language, recipe.target_language)
        columns = seq2seq_rows.Columns(recipe.source_column, recipe.target_column, languages)

        def find(place: str, names: list[str]) -> tuple[str, str]:
            return columns.find(place, names)

        keep = Keep(find, lambda row, names: [row_files.check_text(row[name], name) for name in names])
        self.open_rows(recipe, on_bad_row, lambda row: keep(seq2seq_rows.flatten(row)))

    def check_first(self, rows: list[Any]) -> None:
        """Check that targets end. Raises UsageError where they do not."""
        self.sources = StreamedTexts(self.tokenizer, self.recipe, rows[0][0])
        self._check_ends([target for _, target in self.convert([("", row) for row in rows])])

    def convert(self, rows: list[tuple[str, Any]]) -> list[Any]:
        """Tokenize sources and targets."""
        parts = []
        options = (self.recipe.max_source_length, self.recipe.source_prefix), (self.recipe.max_target_length, "")
        for place, (length, prefix) in enumerate(options):
            batch = {"text": [row[place] for _, row in rows]}
            parts.append(seq2seq._tokenize(batch, self.tokenizer, length, prefix, is_target=place == 1)["tokens"])
        return list(zip(*parts, strict=True))

    def draw(self, epoch: int, sample_id: int) -> seq2seq.Pair:
        """Draw sample t of the run."""
        source, target = self.streams.draw(int(sample_id)).value
        return self._make_pair(source, self._drop_start(target))


# ---------------------------------------------------------------------------------------------------------------------
# pairs of texts


class Texts(NamedTuple):
    """The texts of a row, tokenized: `tokens` and `keys` of `text_pairs.Pair`."""

    tokens: list[np.ndarray]
    keys: np.ndarray


class StreamedTextPairs(StreamedRows, text_pairs.TextPairs):
    """Pairs of texts of a stream, perhaps with hard negatives.

    Args:
        recipe: of the task embedding_training.
        on_bad_row: refuse or skip.
        held_out: the held-out pairs; None: there are none.
    """

    kind = "pairs of texts"

    def __init__(self, recipe: Any, on_bad_row: str, held_out: Any):
        self.tokenizer = text_pairs._choose_tokenizer(recipe, Dataset.from_list([]))
        self.num_texts, self.prefixes = 2 + recipe.num_negatives, (recipe.query_prefix, recipe.document_prefix)
        self.tokenizer.model_max_length = self.max_text_length = recipe.max_seq_length
        self.max_length = self.num_texts * recipe.max_seq_length
        names = recipe.query_column, recipe.positive_column, recipe.negative_columns
        columns = text_pairs.Columns(*names, has_negatives=recipe.num_negatives > 0)
        self.open_rows(recipe, on_bad_row, Keep(columns.find, text_pairs._make_row))

    def convert(self, rows: list[tuple[str, Any]]) -> list[Any]:
        """Tokenize the texts of each row."""
        options = self.max_text_length, self.num_texts - 2, self.prefixes
        table = text_pairs._tokenize(_transpose(rows), self.tokenizer, *options)
        size = self.num_texts
        parts = [slice(place * size, (place + 1) * size) for place in range(len(rows))]
        return [Texts(table["tokens"][part], np.array(table["key"][part][1:], np.int64)) for part in parts]

    def draw(self, epoch: int, sample_id: int) -> text_pairs.Pair:
        """Draw sample t of the run."""
        return text_pairs.Pair(int(sample_id), *self.streams.draw(int(sample_id)).value)
