"""Pairs of a source and a target to samples of a model with an encoder and a decoder, from files or the hub, or drawn.

Both texts of a row are tokenized once into a memory-mapped file, as `tokenizer(source)` and `tokenizer(text_target=target)` do
it, with the tokens of their languages and the one that ends a text. Micro-batches are padded behind the tokens.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from samestep.data import documents, row_report
from samestep.data.arrow import Dataset, Features, List, ListColumn, Value, datasets, hash_modules, hash_parts, map_once
from samestep.data.builtin import find_builtin, is_builtin
from samestep.data.seq2seq_rows import Columns, load_rows
from samestep.data.tokenizer import (
    TokenizedTexts,
    choose_tokenizer,
    describe_unknown,
    fingerprint,
    load_tokenizer,
    train_byte_level_bpe,
    train_characters,
)
from samestep.errors import UsageError, nearest
from samestep.recipe.tasks.seq2seq_finetuning import Seq2SeqFineTuning

PAD = "<|pad|>"
"""Token for padding of a tokenizer that is trained."""
CHECKED_ROWS = 100
"""Targets whose last tokens are looked at."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """One sample.

    Attributes:
        source: int32 [S], its tokens.
        labels: int32 [T], tokens of the target, with the one that ends it.
        num_given: of the first labels, those that generation forces, so that they are no targets.
    """

    source: np.ndarray
    labels: np.ndarray
    num_given: int

    @property
    def length(self) -> int:
        """Number of tokens that are computed, of both texts."""
        return len(self.source) + len(self.labels)


class Pairs(TokenizedTexts):
    """The samples of a dataset of sources and targets.

    Args:
        rows: columns `source`, `target`, `origin`, as `load_rows` returns them.
        tokenizer: with a token for padding, set to the recipe's languages.
        recipe: its prefix and lengths.
        language_token: token of the targets' language, which generation forces where it is their first one; None: none.
        num_proc: processes that tokenize.
        description: names the texts in messages.

    Attributes:
        source_names: names of the files, or of the kinds of drawn data.
        source_numbers: int64 [samples], the place of each sample's name in `source_names`.
        num_cut_sources, num_cut_targets: texts that were cut.
    """

    def __init__(
        self,
        rows: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        recipe: Seq2SeqFineTuning,
        *,
        language_token: int | None = None,
        num_proc: int | None = None,
        description: str = "pairs",
    ):
        arguments = {
            "tokenizer": tokenizer,
            "prefix": recipe.source_prefix,
            "lengths": (recipe.max_source_length, recipe.max_target_length),
        }
        tokens, bit = List(Value("int32")), Value("bool")
        features = Features({"source_tokens": tokens, "tokens": tokens, "is_source_cut": bit, "is_cut": bit})
        languages = recipe.source_language, recipe.target_language
        key = fingerprint(tokenizer), languages, arguments["prefix"], arguments["lengths"], hash_modules(__name__)
        table = map_once(rows, _tokenize, key, description, num_proc, fn_kwargs=arguments, features=features)
        super().__init__(table, rows.select_columns("target"), tokenizer, recipe.max_seq_length, description)
        tokenizer.model_max_length = recipe.max_source_length
        self.rows, self.recipe, self.language_token = rows, recipe, language_token
        self.sources = ListColumn(table, "source_tokens")
        unknown = describe_unknown(self.sources, rows.select_columns("source"), tokenizer, f"sources of {description}")
        self.notes += [unknown] if unknown else []
        self.num_cut_sources, self.num_cut_targets = (
            int(np.sum(table.data.column(name).to_numpy())) for name in ("is_source_cut", "is_cut")
        )
        for number, name, limit in (
            (self.num_cut_sources, "sources", "max_source_length"),
            (self.num_cut_targets, "targets", "max_target_length"),
        ):
            if number:
                self.notes.append(f"{number:,} {name} of {description} are cut after {limit} {getattr(recipe, limit)}")
        names = [name or "all" for name in rows["origin"]]
        self.source_names = tuple(sorted(set(names)))
        self.source_numbers = np.searchsorted(np.array(self.source_names), np.array(names))
        self._check_ends()

    def __len__(self) -> int:
        return len(self.tokens)

    def __str__(self) -> str:
        """Say how many pairs there are, and of how many tokens."""
        return f"{len(self):,} pairs ({self.sources.num_values:,} tokens of sources, {self.tokens.num_values:,} of targets)"

    @property
    def num_tokens(self) -> int:
        return self.sources.num_values + self.tokens.num_values

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer, the texts, and which token is no target."""
        return {
            "tokenizer": fingerprint(self.tokenizer),
            "texts": hash_parts(self.sources.digest(), self.tokens.digest(), self._given),
        }

    @property
    def _given(self) -> int | None:
        """The token that is no target where it is the first one."""
        return None if self.recipe.count_forced_tokens else self.language_token

    def _check_ends(self) -> None:
        """Check that targets end with a token by which generation ends. Raises UsageError where they do not."""
        end = self.tokenizer.eos_token_id
        ends = [self.tokens[row][-2:].tolist() for row in range(min(CHECKED_ROWS, len(self)))]
        if end is None or not any(end in tokens for tokens in ends):
            name = "no eos_token" if end is None else f"{self.tokenizer.eos_token!r} at the end of no target"
            raise UsageError(
                f"the tokenizer has {name}, so that generated texts would not end: give one like T5's or BART's, which adds it"
            )

    def draw(self, epoch: int, sample_id: int) -> Pair:
        """Return a sample; it is the same in every epoch."""
        labels = self.tokens[sample_id]
        return Pair(self.sources[sample_id], labels, int(labels[0] == self._given))

    def longest(self) -> Pair:
        """Return a sample of the greatest lengths."""
        token = self.tokenizer.eos_token_id
        lengths = self.recipe.max_source_length, self.recipe.max_target_length
        source, labels = (np.full(length, token, np.int32) for length in lengths)
        return Pair(source, labels, 0)

    def collate(self, pairs: list[Pair]) -> dict[str, torch.Tensor]:
        """Make a micro-batch of S samples, padded behind their tokens; no samples make one that counts nothing.

        Returns:
            source: int64 [S, T]; source_mask: int64 [S, T], 1 for tokens.
            labels: int64 [S, T'], padded with the token for padding, of which the model makes the decoder's inputs.
            label_index: int64 [m], place of each target in `labels`, flattened.
            counts: int64 [1], m.
        """
        end = np.full(1, self.tokenizer.eos_token_id, np.int32)
        samples = pairs or [Pair(end, end, 1)]
        source, source_mask = self._pad([pair.source for pair in samples])
        labels, label_mask = self._pad([pair.labels for pair in samples])
        for row, pair in zip(label_mask, samples, strict=True):
            row[: pair.num_given] = 0
        label_index = label_mask.flatten().nonzero().squeeze(1)
        return {
            "source": source,
            "source_mask": source_mask,
            "labels": labels,
            "label_index": label_index,
            "counts": torch.tensor([len(label_index)]),
        }

    def _pad(self, texts: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.full((len(texts), max(map(len, texts))), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for number, tokens in enumerate(texts):
            ids[number, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            mask[number, : len(tokens)] = 1
        return ids, mask

    def describe_source(self, sample_id: int) -> str:
        """Describe a source for people: its text."""
        return str(self.rows[sample_id]["source"])

    def choose_samples(self, num_samples: int) -> list[int]:
        """Choose samples whose targets are generated: the first ones of each origin, in turn; sorted."""
        ranks = np.empty(len(self), np.int64)  # place of each sample among those of its origin
        for number in range(len(self.source_names)):
            ids = np.flatnonzero(self.source_numbers == number)
            ranks[ids] = np.arange(len(ids))
        return sorted(np.lexsort((self.source_numbers, ranks))[:num_samples].tolist())


def _tokenize(
    batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, prefix: str, lengths: tuple[int, int]
) -> dict[str, list]:
    sources, targets = [prefix + text for text in batch["source"]], batch["target"]
    columns: dict[str, list] = {}
    for names, length, texts in (
        (("source_tokens", "is_source_cut"), lengths[0], {"text": sources}),
        (("tokens", "is_cut"), lengths[1], {"text_target": targets}),
    ):
        whole = tokenizer(**texts, verbose=False)["input_ids"]
        cut = tokenizer(**texts, truncation=True, max_length=length, verbose=False)["input_ids"]
        columns[names[0]] = [np.array(ids, np.int32) for ids in cut]
        columns[names[1]] = [len(ids) > length for ids in whole]
    return columns


def build(
    recipe: Seq2SeqFineTuning, num_proc: int | None = None, on_bad_row: str = "refuse"
) -> tuple[Pairs, Pairs | None]:
    """Build the recipe's training and held-out pairs, see `samestep.data`.

    Raises:
        UsageError: data or tokenizer that cannot be used.
    """
    tables = _load_tables(recipe, num_proc)
    rows, *others = row_report.take_good(tables, on_bad_row)
    num_rows = len(rows)
    if others:
        held_out = others[0]
    else:
        rows, held_out = documents.split_documents(rows, recipe.validation_fraction, recipe.seed)
    tokenizer = _choose_tokenizer(recipe, rows)
    settings: dict[str, Any] = {"language_token": _find_language_token(recipe, tokenizer), "num_proc": num_proc}
    train = Pairs(rows, tokenizer, recipe, **settings, description="training pairs")
    rest = Pairs(held_out, tokenizer, recipe, **settings, description="held-out pairs") if len(held_out) else None
    files = recipe.train_file, recipe.validation_file
    for table, name, patterns in zip(tables, documents.name_tables(recipe), files, strict=False):
        notes = documents.describe_sources(patterns, documents.ROW_READERS) if patterns else []
        held = num_rows - len(rows) if table is tables[0] else 0
        train.row_reports.append(table.report(name, num_held_out=held, notes=notes))
    train.row_reports = row_report.add_notes(train.row_reports, train, rest)
    return train, rest


def _load_tables(recipe: Seq2SeqFineTuning, num_proc: int | None) -> list[row_report.Table]:
    if is_builtin(recipe.dataset_name):
        draw = find_builtin("sources and targets", str(recipe.dataset_name))
        sizes = {"train": recipe.num_train_samples, "validation": recipe.num_validation_samples}
        parts = [draw(recipe.seed, split, size) for split, size in sizes.items()]
        return [row_report.Table(part, row_report.Notes()) for part in parts]
    languages = recipe.source_language, recipe.target_language
    columns = Columns(recipe.source_column, recipe.target_column, languages)
    return documents.load_tables(recipe, load_rows, columns=columns, num_proc=num_proc)


def _find_language_token(recipe: Seq2SeqFineTuning, tokenizer: PreTrainedTokenizerBase) -> int | None:
    if recipe.target_language is None or not hasattr(tokenizer, "tgt_lang"):
        return None
    return int(tokenizer.convert_tokens_to_ids(recipe.target_language))


def _choose_tokenizer(recipe: Seq2SeqFineTuning, rows: Dataset) -> PreTrainedTokenizerBase:
    """Load or train the tokenizer, set to the recipe's languages; it pads behind a text."""

    def train() -> PreTrainedTokenizerBase:
        columns = [rows.select_columns(name).rename_column(name, "text") for name in ("source", "target")]
        texts = datasets.concatenate_datasets(columns)
        assert recipe.vocab_size is not None  # as no weights decide it
        kinds = {"byte_level_bpe": train_byte_level_bpe, "characters": train_characters}
        tokenizer = kinds[recipe.tokenizer](texts, recipe.vocab_size - 1)  # but for padding
        tokenizer.add_special_tokens({"pad_token": PAD})
        end = tokenizer.eos_token
        template = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)])
        tokenizer.backend_tokenizer.post_processor = template
        return tokenizer

    name = recipe.tokenizer_name or recipe.model_name_or_path
    if name is not None and recipe.vocab_size is None:
        tokenizer = load_tokenizer(name, 2**31, ("eos_token", "pad_token"), "T5")
    else:
        tokenizer = choose_tokenizer(recipe, train, ("eos_token", "pad_token"), "T5")
    tokenizer.padding_side = "right"
    for field, attribute in (("source_language", "src_lang"), ("target_language", "tgt_lang")):
        language = getattr(recipe, field)
        if language is None or not hasattr(tokenizer, attribute):
            continue
        if language not in tokenizer.get_vocab():
            tokens = tokenizer.all_special_tokens
            raise UsageError(
                f"{field} is {language!r}, but the tokenizer has no such token: {nearest(language, tokens)}"
            )
        setattr(tokenizer, attribute, language)
    return tokenizer
