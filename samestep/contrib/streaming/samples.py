"""Streamed samples of the programs for texts: what `samestep.data` makes of whole files, of a stream."""

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from samestep.contrib.streaming import shards
from samestep.contrib.streaming.shards import BadRow, FileReader, Shard
from samestep.contrib.streaming.streams import ENDLESS, Source, Stream, Streams
from samestep.data import conversation_rows, conversations, documents, row_report, token_blocks
from samestep.data.arrow import Dataset, hash_parts
from samestep.data.conversations import UNTRAINED, Conversation, Conversations
from samestep.data.row_forms import RowReader
from samestep.data.row_report import Problem
from samestep.data.token_blocks import PackedBlocks, Run, SeparateDocuments, TokenBlocks
from samestep.data.tokenizer import choose_tokenizer, fingerprint
from samestep.errors import UsageError
from samestep.printing import format_count
from samestep.recipe.tasks.causal_lm_pretraining import CausalLmPretraining

NUM_FIRST = 64
"""Rows from which the form of conversations is recognised; samples on which kernels are compared."""


def build(recipe: Any, num_proc: int | None = None, on_bad_row: str = "refuse", date: str | None = None) -> Any:
    """Build the recipe's streamed training samples, and the held-out ones of validation_file, which are read whole."""
    if hasattr(recipe, "block_size"):
        return _build_blocks(recipe, num_proc, on_bad_row)
    return _build_conversations(recipe, num_proc, on_bad_row, date)


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


class _Streamed:
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

    def _describe(self) -> str:
        files = {shard.name for source in self.streams.sources for shard in source.shards}
        return f"a stream of {format_count(len(files), 'shard')} in {format_count(len(self.streams), 'virtual stream')}"


def _split_txt(recipe: Any, found: Mapping[str, list[Shard]]) -> str:
    return documents.split_txt(recipe.txt_documents, [shard.name for files in found.values() for shard in files])


# ---------------------------------------------------------------------------------------------------------------------
# pretraining


def _keep_text(column: str, values: Mapping[str, Any]) -> Any:
    """Keep the text of a row: None where nothing of it can be seen."""
    if column not in values:
        return BadRow(f"no column {column!r}, only {', '.join(map(str, values))}")
    try:
        row = documents._make_row(column, values, None)
    except UsageError as error:
        return BadRow(str(error))
    return None if row is None else row["text"]


def _take_block(size: int, stream: Stream) -> Run:
    """Take a block: `size` tokens, and the one behind them, with which the next block begins."""
    parts, missing = [], size
    while missing:
        tokens = stream.peek()[stream.used :]
        part = tokens[:missing]
        parts.append(part)
        missing -= len(part)
        if len(part) == len(tokens):
            stream.advance()
        else:
            stream.used += len(part)
    parts.append(stream.peek()[stream.used : stream.used + 1])
    return Run(np.concatenate(parts))


def _take_document(size: int, end_of_text: int, stream: Stream) -> Run:
    """Take a document, cut off after `size` tokens."""
    tokens = stream.peek()
    stream.advance()
    if len(tokens) > size:
        return Run(tokens[: size + 1])
    return Run(np.append(tokens, tokens.dtype.type(end_of_text)))


class StreamedBlocks(_Streamed, TokenBlocks):
    """Blocks of block_size tokens of each stream's documents, one after the other, or a sample of each document.

    Args:
        recipe: of pretraining by next tokens.
        on_bad_row: refuse or skip.

    Attributes:
        is_even: whether all samples are as long.
    """

    def __init__(self, recipe: Any, on_bad_row: str):
        def refuse_training() -> Any:
            raise AssertionError("a rule asks for a tokenizer")

        tokenizer = choose_tokenizer(recipe, refuse_training, ["eos_token"], "GPT-2")
        tokenizer.model_max_length = recipe.block_size  # saved with it: a pipeline truncates to that
        self.tokenizer, self.max_length, self.notes = tokenizer, recipe.block_size, []
        self.end_of_text, self.document_mask = tokenizer.eos_token_id, recipe.document_mask
        self.is_row, self.is_even = isinstance(recipe, CausalLmPretraining), recipe.packing
        self.dtype = "uint16" if len(tokenizer) <= 2**16 else "int32"
        found = find_entries(recipe)
        assemble: Any = functools.partial(_take_block, recipe.block_size)
        if not recipe.packing:
            assemble = functools.partial(_take_document, recipe.block_size, self.end_of_text)
        reader = FileReader([recipe.text_column], _split_txt(recipe, found))
        sources = [
            Source(
                files,
                reader,
                entry,
                convert=self._tokenize,
                assemble=assemble,
                keep=functools.partial(_keep_text, _find_column(files, recipe.text_column)),
                on_bad_row=on_bad_row,
            )
            for entry, files in found.items()
        ]
        self.streams = Streams(sources, recipe.seed, recipe.num_streams, recipe.shuffle_buffer_size)
        self.draw(0, 0)  # faults that all rows have are met before the model is made

    def __str__(self) -> str:
        return f"{self._describe()}, samples of {self.max_length} tokens"

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer, and the names and sizes of the shards."""
        return {"tokenizer": fingerprint(self.tokenizer), "shards": self.streams.fingerprint}

    def _tokenize(self, rows: list[tuple[str, Any]]) -> list[np.ndarray]:
        texts = {"text": [text for _, text in rows]}
        return token_blocks._tokenize(texts, self.tokenizer, self.dtype)["tokens"]

    def draw(self, epoch: int, sample_id: int) -> Run:
        """Draw sample t of the run."""
        run: Run = self.streams.draw(sample_id).value
        return run


def _find_column(files: list[Shard], text_column: str) -> str:
    """Find the column of documents: txt has `text` alone."""
    return "text" if all(shards.split_suffix(shard.name)[0] == ".txt" for shard in files) else text_column


def _build_blocks(recipe: Any, num_proc: int | None, on_bad_row: str) -> tuple[StreamedBlocks, TokenBlocks | None]:
    train = StreamedBlocks(recipe, on_bad_row)
    if recipe.validation_file is None:
        return train, None
    options: dict[str, Any] = {"text_column": recipe.text_column, "txt_documents": recipe.txt_documents}
    table = documents.load_rows(train_file=recipe.validation_file, num_proc=num_proc, **options)
    (held_out,) = row_report.take_good([table], on_bad_row)
    kind = PackedBlocks if recipe.packing else SeparateDocuments
    settings: dict[str, Any] = {"block_size": recipe.block_size, "document_mask": recipe.document_mask}
    settings |= {"num_proc": num_proc, "is_row": train.is_row}
    rest = kind(held_out, train.tokenizer, **settings, description="held-out documents")
    train.row_reports = row_report.add_notes([table.report("validation_file")], train, rest)
    return train, rest


# ---------------------------------------------------------------------------------------------------------------------
# conversations


def _make_keep(recipe: Any) -> Any:
    """Make what reads a row of conversations in the form of its first one."""
    options: dict[str, Any] = {"wants_pairs": recipe.objective != "sft", "train_on": recipe.train_on}
    reader = RowReader(**options, columns=recipe.column_names)

    def keep(values: Mapping[str, Any]) -> Any:
        try:
            return reader.read(conversation_rows._without_none(values))
        except UsageError as error:
            return BadRow(str(error))

    return keep


class StreamedConversations(_Streamed, Conversations):
    """Conversations of a stream, or pairs, tokenized as they come; rows that are too long, or train nothing, are left out.

    Args:
        recipe: of the task causal_lm_finetuning.
        on_bad_row: refuse or skip.
        date: what a template reads from the clock.
    """

    is_even = False

    def __init__(self, recipe: Any, on_bad_row: str, date: str | None):
        self.recipe = recipe
        self.reference = np.zeros((0, 2), np.float32)
        self.left_out: Counter[str] = Counter()
        found = find_entries(recipe)
        weights = recipe.mixture_weights or [1.0] * len(found)
        sources = []
        for (entry, files), weight in zip(found.items(), weights, strict=True):
            more: dict[str, Any] = {"convert": self._tokenize, "keep": _make_keep(recipe), "on_bad_row": on_bad_row}
            sources.append(Source(files, FileReader(), entry, weight, **more))
        self.source_names = tuple(conversation_rows.name_sources([*found]))
        firsts = zip(self.source_names, map(_read_first, sources), strict=True)
        rows = Dataset.from_list([row | {"source": name} for name, part in firsts for row in part])
        self.rows, self.is_pairs = rows, conversations._has_pairs(rows)
        self.renderer = conversations._make_renderer(recipe, rows, date)
        self.tokenizer.model_max_length = recipe.max_seq_length  # saved with it: a pipeline truncates to that
        self.max_length = recipe.max_seq_length * (1 + self.is_pairs)
        self.streams = Streams(sources, recipe.seed, recipe.num_streams, recipe.shuffle_buffer_size)
        self.draw(0, 0)  # faults that all rows have are met before the model is made

    def __str__(self) -> str:
        return f"{self._describe()}, {'pairs of answers' if self.is_pairs else 'conversations'} ({self.renderer.rule})"

    mask_report = None  # of numbers that a stream does not know

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer, the template, and the names and sizes of the shards."""
        template = hash_parts(self.renderer.template, self.tokenizer.special_tokens_map)
        parts = {"tokenizer": fingerprint(self.tokenizer), "template": template, "shards": self.streams.fingerprint}
        return parts | ({"date": self.renderer.date} if self.renderer.date else {})

    def _tokenize(self, rows: list[tuple[str, Any]]) -> list[Any]:
        batch = {"row": [row["row"] for _, row in rows], "place": [place for place, _ in rows]}
        recipe = self.recipe
        table = conversations._tokenize(batch, self.renderer, recipe.max_seq_length, recipe.truncation == "cut")
        samples: list[Any] = []
        for number, state in enumerate(table["state"]):
            if state > conversations.CUT:
                problem = table["problem"][number]
                if problem is None:
                    self.left_out[conversations.NOTHING if state == UNTRAINED else "too long"] += 1
                samples.append(None if problem is None else BadRow(problem))
                continue
            tokens, border = np.asarray(table["tokens"][number], np.int32), table["border"][number]
            lengths = (border, len(tokens) - border) if self.is_pairs else (len(tokens),)
            samples.append((tokens, np.asarray(table["trained"][number]).astype(bool), lengths))
        return samples

    def draw(self, epoch: int, sample_id: int) -> Conversation:
        """Draw sample t of the run."""
        return Conversation(int(sample_id), *self.streams.draw(sample_id).value)


def _read_first(source: Source) -> list[dict[str, str]]:
    """Read the first rows of a source, by which its form is recognised.

    Raises:
        UsageError: it has none that can be read.
    """
    rows, problem = [], "is empty"
    for shard in source.shards:
        for _, place, values in source.read(shard, 0):
            row = values if isinstance(values, BadRow) else source.keep(values)
            if isinstance(row, BadRow):
                problem = f"has no row that can be used: {place}: {row}"
                if source.on_bad_row == "refuse":
                    raise UsageError(f"{place}: {row}")
            elif row is not None:
                rows.append(row | {"place": place})
            if len(rows) == NUM_FIRST:
                return rows
    if not rows:
        raise UsageError(f"{source.name} {problem}")
    return rows


def _build_conversations(
    recipe: Any, num_workers: int | None, on_bad_row: str, date: str | None
) -> tuple[StreamedConversations, Conversations | None]:
    train = StreamedConversations(recipe, on_bad_row, date)
    if recipe.validation_file is None:
        return train, None
    options: dict[str, Any] = {"wants_pairs": recipe.objective != "sft", "train_on": recipe.train_on}
    table = conversation_rows.load_rows(recipe.validation_file, **options, columns=recipe.column_names)
    (rows,) = row_report.take_good([table], on_bad_row)
    cutting = recipe.max_seq_length, recipe.truncation == "cut", num_workers
    tokens = conversations.tokenize(rows, train.tokenizer, train.renderer, *cutting, "held-out conversations")
    if on_bad_row == "refuse":
        problems = zip(rows["place"], tokens["problem"], strict=True)
        row_report.refuse([Problem(*pair) for pair in problems if pair[1] is not None], len(rows))
    held_out = Conversations(rows, tokens, train.renderer, recipe, description="held-out conversations")
    train.row_reports = (table.report("validation_file"),)
    return train, held_out
