"""Streamed samples of the programs for texts: what `samestep.data` makes of whole files, of a stream."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from samestep.contrib.streaming.rows import StreamedLabelledTexts, StreamedPairs, StreamedTextPairs
from samestep.contrib.streaming.segments import StreamedSentencePairs
from samestep.contrib.streaming.shards import BadRow, FileReader
from samestep.contrib.streaming.sources import (
    Streamed,
    find_entries,
    list_documents,
    load_tokenizer,
    read_first,
)
from samestep.contrib.streaming.streams import LeftOut, Source, Stream
from samestep.data import conversation_rows, conversations, documents, row_report, token_blocks
from samestep.data.arrow import Dataset, hash_parts
from samestep.data.conversations import UNTRAINED, Conversation, Conversations
from samestep.data.row_forms import RowReader
from samestep.data.row_report import Problem
from samestep.data.token_blocks import PackedBlocks, Run, SeparateDocuments, TokenBlocks
from samestep.data.tokenizer import fingerprint
from samestep.errors import UsageError
from samestep.recipe.tasks.causal_lm_pretraining import CausalLmPretraining

ROWS: dict[str, Any] = {
    "bert_pretraining": StreamedSentencePairs,
    "modernbert_pretraining": StreamedSentencePairs,
    "text_classification": StreamedLabelledTexts,
    "seq2seq_finetuning": StreamedPairs,
    "embedding_training": StreamedTextPairs,
}
"""Task -> class of its streamed samples, which builds them, and those that are held out."""


def build(recipe: Any, num_proc: int | None = None, on_bad_row: str = "refuse", date: str | None = None) -> Any:
    """Build the recipe's streamed training samples, and the held-out ones of validation_file, which are read whole."""
    if recipe.task in ROWS:
        return ROWS[recipe.task].build(recipe, num_proc, on_bad_row)
    if hasattr(recipe, "block_size"):
        return _build_blocks(recipe, num_proc, on_bad_row)
    return _build_conversations(recipe, num_proc, on_bad_row, date)


# ---------------------------------------------------------------------------------------------------------------------
# pretraining


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


class StreamedBlocks(Streamed, TokenBlocks):
    """Blocks of block_size tokens of each stream's documents, one after the other, or a sample of each document.

    Args:
        recipe: of pretraining by next tokens.
        on_bad_row: refuse or skip.

    Attributes:
        is_even: whether all samples are as long.
    """

    def __init__(self, recipe: Any, on_bad_row: str):
        tokenizer = load_tokenizer(recipe, ["eos_token"], "GPT-2")
        tokenizer.model_max_length = recipe.block_size  # saved with it: a pipeline truncates to that
        self.tokenizer, self.max_length, self.notes = tokenizer, recipe.block_size, []
        self.end_of_text, self.document_mask = tokenizer.eos_token_id, recipe.document_mask
        self.is_row, self.is_even = isinstance(recipe, CausalLmPretraining), recipe.packing
        self.dtype = "uint16" if len(tokenizer) <= 2**16 else "int32"
        assemble: Any = functools.partial(_take_block, recipe.block_size)
        if not recipe.packing:
            assemble = functools.partial(_take_document, recipe.block_size, self.end_of_text)
        self.open(recipe, list_documents(recipe, on_bad_row, convert=self._tokenize, assemble=assemble))

    def __str__(self) -> str:
        return f"{self.describe_stream()}, samples of {self.max_length} tokens"

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


class StreamedConversations(Streamed, Conversations):
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
        found = find_entries(recipe)
        weights = recipe.mixture_weights or [1.0] * len(found)
        sources = []
        for (entry, files), weight in zip(found.items(), weights, strict=True):
            more: dict[str, Any] = {"convert": self._tokenize, "keep": _make_keep(recipe), "on_bad_row": on_bad_row}
            sources.append(Source(files, FileReader(), entry, weight, **more))
        self.source_names = tuple(conversation_rows.name_sources([*found]))
        firsts = zip(self.source_names, map(read_first, sources), strict=True)
        rows = Dataset.from_list(
            [row | {"place": place, "source": name} for name, part in firsts for place, row in part]
        )
        self.rows, self.is_pairs = rows, conversations._has_pairs(rows)
        self.renderer = conversations._make_renderer(recipe, rows, date)
        self.tokenizer.model_max_length = recipe.max_seq_length  # saved with it: a pipeline truncates to that
        self.max_length = recipe.max_seq_length * (1 + self.is_pairs)
        self.open(recipe, sources)

    def __str__(self) -> str:
        return f"{self.describe_stream()}, {'pairs of answers' if self.is_pairs else 'conversations'} ({self.renderer.rule})"

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
                problem, rule = table["problem"][number], f"longer than max_seq_length {recipe.max_seq_length:,}"
                if state == UNTRAINED:
                    rule = conversations.NOTHING
                samples.append(LeftOut(rule) if problem is None else BadRow(problem))
                continue
            tokens, border = np.asarray(table["tokens"][number], np.int32), table["border"][number]
            lengths = (border, len(tokens) - border) if self.is_pairs else (len(tokens),)
            samples.append((tokens, np.asarray(table["trained"][number]).astype(bool), lengths))
        return samples

    def draw(self, epoch: int, sample_id: int) -> Conversation:
        """Draw sample t of the run."""
        return Conversation(int(sample_id), *self.streams.draw(sample_id).value)


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
