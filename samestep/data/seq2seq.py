"""Pairs of a source and a target to samples of a model with an encoder and a decoder, from files or the hub, or drawn.

Sources are texts, or recordings (`samestep.data.speech`). Texts are tokenized once into a memory-mapped file, as
`tokenizer(source)` and `tokenizer(text_target=target)` do it, with the tokens of their languages and the one that ends a text.
Micro-batches are padded behind the tokens.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from samestep.data import documents, row_report, speech
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
from samestep.errors import UsageError, nearest, reason
from samestep.recipe.tasks.seq2seq_finetuning import POSITIONS_PER_SECOND, Seq2SeqFineTuning

PAD = "<|pad|>"
"""Token for padding of a tokenizer that is trained."""
START_OF_TEXT = "<|startoftranscript|>"
"""Token with which Whisper's tokenizer begins a target, as its shift does."""
CHECKED_ROWS = 100
"""Targets whose last tokens are looked at."""


class Sources(Protocol):
    """The sources of samples: texts, or recordings (`speech.Recordings`)."""

    notes: list[str]

    def __getitem__(self, sample_id: int) -> Any:
        """Return what a sample keeps of its source."""

    def length(self, source: Any) -> int:
        """Count the positions of the encoder that a source takes."""

    def num_values(self, num_samples: int) -> int:
        """Count the positions of all sources."""

    def digest(self) -> str:
        """Hash all sources."""

    def longest(self) -> Any:
        """Return a source of the greatest length; its content means nothing."""

    def collate(self, sources: list[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Make what the encoder takes: the sources, and a mask of what is no padding; of none those of one sample."""

    def describe(self, sample_id: int) -> str:
        """Describe a source for people."""


class Texts:
    """Texts as sources: each tokenized once.

    Args:
        rows: column `source`.
        tokenizer: with a token for padding, set to the recipe's languages.
        recipe: its prefix and length.
        num_proc: processes that tokenize.
        description: names the texts in messages.
    """

    def __init__(
        self,
        rows: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        recipe: Seq2SeqFineTuning,
        num_proc: int | None = None,
        description: str = "sources",
    ):
        self.texts, self.tokenizer, self.max_length = rows.select_columns("source"), tokenizer, recipe.max_source_length
        options = {"prefix": recipe.source_prefix, "is_target": False}
        table = tokenize(self.texts, tokenizer, recipe, self.max_length, num_proc, description, **options)
        self.tokens = ListColumn(table, "tokens")
        unknown = describe_unknown(self.tokens, self.texts, tokenizer, description)
        self.notes = describe_cut(table, description, "max_source_length", self.max_length) + (
            [unknown] if unknown else []
        )

    def __getitem__(self, sample_id: int) -> np.ndarray:
        return self.tokens[sample_id]

    def length(self, source: np.ndarray) -> int:
        return len(source)

    def num_values(self, num_samples: int) -> int:
        return self.tokens.num_values

    def digest(self) -> str:
        return self.tokens.digest()

    def longest(self) -> np.ndarray:
        return np.full(self.max_length, self.tokenizer.eos_token_id, np.int32)

    def collate(self, sources: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor | None]:
        return pad(sources or [self.longest()[:1]], self.tokenizer.pad_token_id)

    def describe(self, sample_id: int) -> str:
        return str(self.texts[sample_id]["source"])


def tokenize(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Seq2SeqFineTuning,
    max_length: int,
    num_proc: int | None,
    description: str,
    **options: Any,
) -> Dataset:
    """Tokenize the only column of rows, once: a table with columns `tokens` and `is_cut`; `options` as of `_tokenize`."""
    arguments = {"tokenizer": tokenizer, "max_length": max_length, **options}
    features = Features({"tokens": List(Value("int32")), "is_cut": Value("bool")})
    languages = recipe.source_language, recipe.target_language
    key = fingerprint(tokenizer), languages, max_length, tuple(options.values()), hash_modules(__name__)
    return map_once(rows, _tokenize, key, description, num_proc, fn_kwargs=arguments, features=features)


def _tokenize(
    batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, max_length: int, prefix: str, is_target: bool
) -> dict[str, list]:
    """Tokenize texts: as targets, in the way of their language, or as sources, with a text in front."""
    (column,) = batch.values()
    texts: Any = {"text_target" if is_target else "text": [prefix + text for text in column]}
    whole = tokenizer(**texts, verbose=False)["input_ids"]
    cut = tokenizer(**texts, truncation=True, max_length=max_length, verbose=False)["input_ids"]
    return {"tokens": [np.array(ids, np.int32) for ids in cut], "is_cut": [len(ids) > max_length for ids in whole]}


def describe_cut(table: Dataset, description: str, field: str, length: int) -> list[str]:
    """Say how many texts of a table of `tokenize` are cut, in a line; none if none are."""
    num_cut = int(np.sum(table.data.column("is_cut").to_numpy()))
    return [f"{num_cut:,} {description} are cut after {field} {length:,}"] if num_cut else []


def pad(texts: list[np.ndarray], token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad texts behind their tokens: int64 [S, T], and 1 for tokens, 0 for padding."""
    ids = torch.full((len(texts), max(map(len, texts))), token)
    mask = torch.zeros_like(ids)
    for number, tokens in enumerate(texts):
        ids[number, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        mask[number, : len(tokens)] = 1
    return ids, mask


@dataclasses.dataclass(frozen=True)
class Pair:
    """One sample.

    Attributes:
        source: what `Sources` keep of it.
        labels: int32 [T], tokens of the target, with the one that ends it.
        num_given: of the first labels, those that generation forces, so that they are no targets.
        length: positions that are computed, of encoder and decoder.
    """

    source: Any
    labels: np.ndarray
    num_given: int
    length: int


class Pairs(TokenizedTexts):
    """The samples of a dataset of sources and targets.

    Args:
        rows: columns `target` and `origin`.
        sources: of the same rows.
        tokenizer: with a token for padding, set to the recipe's languages.
        recipe: its lengths and languages.
        num_proc: processes that tokenize.
        description: names the pairs in messages.

    Attributes:
        source_names: names of the files, or of the kinds of drawn data.
        source_numbers: int64 [samples], the place of each sample's name in `source_names`.
        forced: tokens that generation puts in front of a target.
        processor: what is saved beside the tokenizer, for sources; None: nothing.
    """

    def __init__(
        self,
        rows: Dataset,
        sources: Sources,
        tokenizer: PreTrainedTokenizerBase,
        recipe: Seq2SeqFineTuning,
        *,
        num_proc: int | None = None,
        description: str = "pairs",
    ):
        texts, length = rows.select_columns("target"), recipe.max_target_length
        name, options = f"targets of {description}", {"prefix": "", "is_target": True}
        table = tokenize(texts, tokenizer, recipe, length, num_proc, name, **options)
        super().__init__(table, texts, tokenizer, recipe.max_seq_length, name)
        tokenizer.model_max_length = max(recipe.max_source_length, length)
        self.sources, self.recipe, self.targets = sources, recipe, texts
        self.forced = find_forced(recipe, tokenizer)
        self.processor = getattr(sources, "extractor", None)
        self.notes += [*describe_cut(table, name, "max_target_length", length), *sources.notes]
        names = [name or "all" for name in rows["origin"]]
        self.source_names = tuple(sorted(set(names)))
        self.source_numbers = np.searchsorted(np.array(self.source_names), np.array(names))
        self._check_ends([self.tokens[row] for row in range(min(CHECKED_ROWS, len(self)))])

    def __len__(self) -> int:
        return len(self.tokens)

    def __str__(self) -> str:
        """Say how many pairs there are, and of how many tokens."""
        num_positions, kind = self.sources.num_values(len(self)), "tokens" if self.processor is None else "positions"
        return (
            f"{len(self):,} pairs ({num_positions:,} {kind} of sources, {self.tokens.num_values:,} tokens of targets)"
        )

    @property
    def num_tokens(self) -> int:
        return self.sources.num_values(len(self)) + self.tokens.num_values

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer, sources and targets, and which tokens are none."""
        return {
            "tokenizer": fingerprint(self.tokenizer),
            "texts": hash_parts(self.sources.digest(), self.tokens.digest(), self._given),
        }

    @property
    def _given(self) -> tuple[int, ...]:
        """The tokens that are no targets where they are the first ones."""
        return () if self.recipe.count_forced_tokens else self.forced

    def _check_ends(self, targets: Sequence[np.ndarray]) -> None:
        """Check that targets end with a token by which generation ends. Raises UsageError where they do not."""
        end = self.tokenizer.eos_token_id
        if end is None or not any(end in tokens[-2:] for tokens in targets):
            name = "no eos_token" if end is None else f"{self.tokenizer.eos_token!r} at the end of no target"
            raise UsageError(
                f"the tokenizer has {name}, so that generated texts would not end: give one like T5's or BART's, which adds it"
            )

    def find_labels(self, sample_id: int) -> np.ndarray:
        """Find the tokens of a target, as a model is given them: Whisper's shift adds the first of its tokens anew."""
        return self._drop_start(self.tokens[sample_id])

    def _drop_start(self, labels: np.ndarray) -> np.ndarray:
        vocabulary = self.tokenizer.get_added_vocab()
        return labels[1:] if labels[0] == vocabulary.get(START_OF_TEXT) else labels

    def draw(self, epoch: int, sample_id: int) -> Pair:
        """Return a sample; it is the same in every epoch."""
        return self._make_pair(self.sources[sample_id], self.find_labels(sample_id))

    def _make_pair(self, source: Any, labels: np.ndarray) -> Pair:
        given = self._given
        num_given = len(given) if tuple(labels[: len(given)].tolist()) == given else 0
        return Pair(source, labels, num_given, self.sources.length(source) + len(labels))

    def longest(self) -> Pair:
        """Return a sample of the greatest lengths."""
        labels = np.full(self.recipe.max_target_length, self.tokenizer.eos_token_id, np.int32)
        return Pair(self.sources.longest(), labels, 0, self.max_length)

    def collate(self, pairs: list[Pair]) -> dict[str, torch.Tensor | None]:
        """Make a micro-batch of S samples, padded behind their tokens; no samples make one that counts nothing.

        Returns:
            source, source_mask: as `Sources.collate` makes them: tokens int64 [S, T], or spectrograms [S, bins, frames].
            labels: int64 [S, T'], padded with the token for padding, of which the model makes the decoder's inputs.
            label_index: int64 [m], place of each target in `labels`, flattened.
            counts: int64 [1], m.
        """
        source, source_mask = self.sources.collate([pair.source for pair in pairs])
        end = np.full(1, self.tokenizer.eos_token_id, np.int32)
        labels, label_mask = pad([pair.labels for pair in pairs] or [end], self.tokenizer.pad_token_id)
        for row, num_given in zip(label_mask, [pair.num_given for pair in pairs] or [1], strict=True):
            row[:num_given] = 0
        label_index = label_mask.flatten().nonzero().squeeze(1)
        return {
            "source": source,
            "source_mask": source_mask,
            "labels": labels,
            "label_index": label_index,
            "counts": torch.tensor([len(label_index)]),
        }

    def choose_samples(self, num_samples: int) -> list[int]:
        """Choose samples whose targets are generated: the first ones of each origin, in turn; sorted."""
        ranks = np.empty(len(self), np.int64)  # place of each sample among those of its origin
        for number in range(len(self.source_names)):
            ids = np.flatnonzero(self.source_numbers == number)
            ranks[ids] = np.arange(len(ids))
        return sorted(np.lexsort((self.source_numbers, ranks))[:num_samples].tolist())


def build(
    recipe: Seq2SeqFineTuning, num_proc: int | None = None, on_bad_row: str = "refuse"
) -> tuple[Pairs, Pairs | None]:
    """Build the recipe's training and held-out pairs, see `samestep.data`.

    Raises:
        UsageError: data or tokenizer that cannot be used.
    """
    if is_builtin(recipe.dataset_name) and recipe.modality == "speech":
        return _draw_recordings(recipe, num_proc)
    loaded = _load_tables(recipe, num_proc)
    rows, held_out = documents.split_tables(recipe, loaded, on_bad_row)
    tokenizer = _choose_tokenizer(recipe, rows)

    def make(rows: Dataset, description: str) -> Pairs:
        sources: Sources
        if recipe.modality == "speech":
            sources = speech.read_recordings(rows, recipe)
        else:
            sources = Texts(rows, tokenizer, recipe, num_proc, f"sources of {description}")
        return Pairs(rows, sources, tokenizer, recipe, num_proc=num_proc, description=description)

    train, rest = make(rows, "training pairs"), make(held_out, "held-out pairs") if len(held_out) else None
    is_own = recipe.modality == "text" and not is_builtin(recipe.dataset_name)
    notes = row_report.describe_repeats(rows, held_out, ("source", "target")) if is_own else []
    train.row_reports = documents.report_tables(recipe, loaded, rows, notes)
    train.row_reports = row_report.add_notes(train.row_reports, train, rest)
    return train, rest


def _load_tables(recipe: Seq2SeqFineTuning, num_proc: int | None) -> list[row_report.Table]:
    if is_builtin(recipe.dataset_name):
        draw = find_builtin("sources and targets", str(recipe.dataset_name))
        parts = [draw(recipe.seed, split, size) for split, size in _list_sizes(recipe).items()]
        return [row_report.Table(part, row_report.Notes()) for part in parts]
    columns = recipe.source_column, recipe.target_column
    if recipe.modality == "speech":
        seconds = recipe.max_source_length / POSITIONS_PER_SECOND
        return documents.load_tables(recipe, speech.load_rows, columns=columns, max_seconds=seconds, num_proc=num_proc)
    own = Columns(*columns, (recipe.source_language, recipe.target_language))
    return documents.load_tables(recipe, load_rows, columns=own, num_proc=num_proc)


def _list_sizes(recipe: Seq2SeqFineTuning) -> dict[str, int]:
    """List the splits of drawn data, and their samples."""
    assert recipe.num_train_samples is not None  # as the data are drawn
    assert recipe.num_validation_samples is not None
    return {"train": recipe.num_train_samples, "validation": recipe.num_validation_samples}


def _draw_recordings(recipe: Seq2SeqFineTuning, num_proc: int | None) -> tuple[Pairs, Pairs]:
    """Build pairs whose recordings are drawn when they are needed."""
    draw = find_builtin("recordings and texts", str(recipe.dataset_name))
    extractor, tokenizer, parts = speech.make_extractor(recipe), None, []
    for (split, size), name in zip(_list_sizes(recipe).items(), ("training pairs", "held-out pairs"), strict=True):
        rows, load, digest = draw(recipe.seed, split, size)
        tokenizer = tokenizer or _choose_tokenizer(recipe, rows)
        describe = f"{recipe.dataset_name}, {split} {{}}".format
        recordings = speech.Recordings(extractor, load, digest, recipe.max_source_length, describe)
        parts.append(Pairs(rows, recordings, tokenizer, recipe, num_proc=num_proc, description=name))
    return parts[0], parts[1]


def find_forced(recipe: Seq2SeqFineTuning, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Find the tokens that generation puts in front of a target: of its language, of Whisper's task."""
    if recipe.target_language is None:
        return ()
    if hasattr(tokenizer, "set_prefix_tokens"):
        return tuple(tokenizer.prefix_tokens[1:])  # behind the one that the shift adds
    return (int(tokenizer.convert_tokens_to_ids(recipe.target_language)),) if hasattr(tokenizer, "tgt_lang") else ()


def _choose_tokenizer(recipe: Seq2SeqFineTuning, rows: Dataset) -> PreTrainedTokenizerBase:
    """Load or train the tokenizer, set to the recipe's languages; it pads behind a text."""

    def train() -> PreTrainedTokenizerBase:
        names = [name for name in ("source", "target") if name in rows.column_names]
        columns = [rows.select_columns(name).rename_column(name, "text") for name in names]
        if recipe.source_prefix:
            columns.append(datasets.Dataset.from_dict({"text": [recipe.source_prefix]}))
        texts = datasets.concatenate_datasets(columns)
        assert recipe.vocab_size is not None  # as no weights decide it
        # Digits are tokens of their own, as in chats: a number that was not seen is spelled by those that were
        size = recipe.vocab_size - 1  # but for padding
        if recipe.tokenizer == "byte_level_bpe":
            tokenizer = train_byte_level_bpe(texts, size, splits_digits=True)
        else:
            tokenizer = train_characters(texts, size)
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
    if recipe.source_language is not None:
        _set_languages(recipe, tokenizer)
    return tokenizer


def _set_languages(recipe: Seq2SeqFineTuning, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer write the tokens of the recipe's languages. Raises UsageError where it has no such token."""
    if hasattr(tokenizer, "set_prefix_tokens"):
        is_same = recipe.source_language == recipe.target_language
        if not is_same and recipe.target_language != "english":
            raise UsageError(
                f"target_language is {recipe.target_language!r}, but Whisper writes the language that is spoken, or english: "
                f"set it to {recipe.source_language}, or to english"
            )
        try:
            task = "transcribe" if is_same else "translate"
            tokenizer.set_prefix_tokens(language=recipe.source_language, task=task, predict_timestamps=False)
            _ = tokenizer.prefix_tokens
        except ValueError as error:
            raise UsageError(f"source_language is {recipe.source_language!r}: {reason(error)}") from None
        return
    for field, attribute in (("source_language", "src_lang"), ("target_language", "tgt_lang")):
        language = getattr(recipe, field)
        if not hasattr(tokenizer, attribute):
            continue
        if language not in tokenizer.get_vocab():
            tokens = tokenizer.all_special_tokens
            raise UsageError(
                f"{field} is {language!r}, but the tokenizer has no such token: {nearest(language, tokens)}"
            )
        setattr(tokenizer, attribute, language)
