"""Pairs of texts to samples of embeddings: a query, the text that belongs to it, and hard negatives, from files or the hub.

Rows are read once with `datasets`, and their texts are tokenized once into a memory-mapped file, a row for each text: those of
sample i are rows i W to i W + W - 1, of which the first is the query. A text is tokenized as `tokenizer(text, truncation=True)`
does it, so that programs that load the saved model see the same tokens.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from samestep.data import documents, row_files, row_report, tables
from samestep.data.arrow import Dataset, Features, List, Value, datasets, hash_modules, hash_parts, map_once
from samestep.data.builtin import is_builtin
from samestep.data.tokenizer import (
    TokenizedTexts,
    choose_tokenizer,
    fingerprint,
    load_tokenizer,
    train_byte_level_bpe,
    train_wordpiece,
)
from samestep.errors import UsageError, nearest
from samestep.recipe.tasks.embedding_training import EmbeddingTraining

FEATURES = (
    Features(
        {
            "query": Value("string"),
            "positive": Value("string"),
            "negatives": List(Value("string")),
            "source": Value("string"),
        }
    )
    if datasets
    else None
)
PAIRS = {
    "query": "positive",
    "anchor": "positive",
    "question": "answer",
    "query_text": "passage",
    "sentence1": "sentence2",
    "premise": "hypothesis",
}
"""Usual names of the columns of a pair; `FOUND` has more for the second one."""
FOUND = ("positive", "pos", "answer", "passage", "document", "response", "context", "sentence2", "hypothesis")
NEGATIVES = ("negative", "negatives", "neg", "hard_negative", "hard_negatives")
"""Usual names of the columns of negatives; those that follow them with a number, as negative_1, too."""
MISSING = -1
"""Key of a negative that a row does not have."""


SCORED = {"score", "scores", "similarity", "similarity_score", "label", "labels", "is_duplicate", "gold_label"}
"""Names of columns that say how alike the texts of a pair are, or whether they are."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """The names of a file's columns. None: they are found by their usual names; `has_negatives`: whether they are read."""

    query: str | None = None
    positive: str | None = None
    negatives: tuple[str, ...] | None = None
    has_negatives: bool = False

    def find(self, place: str, present: Sequence[str]) -> tuple[str, ...]:
        """Find the columns of query, positive and negatives. Raises UsageError, with the columns that are present."""
        names, query, positive = tables.list_names(present), self.query, self.positive
        if query is None:
            query = next((name for name in PAIRS if name in present), None)
            others = [name for name in (PAIRS.get(query or ""), *FOUND) if name in present and name != query]
            positive = next(iter(others), None)
        negatives = self.negatives or [name for name in present if name.rstrip("_0123456789") in NEGATIVES]
        fields = {"query_column": query, "positive_column": positive}
        fields |= {f"negative_columns ({name})": name for name in negatives if self.has_negatives}
        problems = []
        for field, name in fields.items():
            if name is None:
                usual = PAIRS if field == "query_column" else FOUND
                problems.append(
                    f"{place}: none of its columns {names} is called {', '.join(usual)}: name them with --query_column and "
                    "--positive_column"
                )
            elif name not in present:
                hint = nearest(name, map(tables.shorten, present))
                problems.append(f"{place} has no column {name!r}, only {names}. Set {field}: {hint}")
        scored = [name for name in present if name.lower() in SCORED]
        if scored and self.query is None and None not in fields.values():
            problems.append(
                f"{place}: column {tables.shorten(scored[0])!r} says how alike the two texts are, but each pair is trained as "
                f"alike. Keep the pairs that are, and name their columns: --query_column {query} --positive_column {positive}"
            )
        if self.has_negatives and not negatives:
            problems.append(
                f"{place}: none of its columns {names} is called {', '.join(NEGATIVES)}, but num_negatives is not 0: name them "
                "with --negative_columns, or set num_negatives to 0"
            )
        if problems:
            raise UsageError(problems[:1] if None in fields.values() else problems)
        return (query, positive, *(negatives if self.has_negatives else ()))


def load_rows(*, columns: Columns = Columns(), **source: Any) -> row_report.Table:
    """Load pairs of texts; `source` as of `documents.load_source`.

    Returns:
        A memory-mapped dataset with columns `query`, `positive`, `negatives` (a list, which may be empty) and `source` (the
        module of built-in pairs, else None), and what is known of rows that cannot be used.
    """
    return documents.load_source(_read, FEATURES, "query", kind="pairs of texts", columns=columns, **source)


def _read(rows: Iterable[tuple[str, Any]], _: str | None, columns: Columns) -> Iterator[dict[str, Any]]:
    notes = row_report.Notes()
    yield from row_report.read_noted(rows, lambda place, present, _: columns.find(place, present), _make_row, notes)
    yield from notes.write(FEATURES, "query")


def _make_row(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Make a row of `FEATURES`. Raises UsageError where query or positive cannot be used; a negative may be missing."""
    query, positive = (_check_text(values[name], name) for name in names[:2])
    negatives = []
    for name in names[2:]:
        value = values[name]
        for text in value if isinstance(value, list | tuple) else [value]:
            if text is not None and text == text and text != "":
                negatives.append(_check_text(text, name))
    return {"query": query, "positive": positive, "negatives": negatives, "source": None}


def _check_text(value: Any, name: str) -> str:
    if isinstance(value, list | tuple) and len(value) == 1:  # as many sets of passages have their only positive
        value = value[0]
    return row_files.check_text(value, name)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One sample.

    Attributes:
        number: its epoch and number in the dataset, as one integer: the place of its rows among those of a step.
        tokens: int32 [length] of each of its texts, the query first.
        keys: int64 [texts - 1], equal for equal texts; `MISSING` where there is none.
    """

    number: int
    tokens: list[np.ndarray]
    keys: np.ndarray

    @property
    def length(self) -> int:
        """Number of tokens of all its texts."""
        return sum(map(len, self.tokens))


class TextPairs(TokenizedTexts):
    """The samples of a dataset of pairs.

    Args:
        rows: as `load_rows` returns them.
        tokenizer: with a token for padding.
        max_seq_length: tokens per text at most.
        num_negatives: of each sample.
        prefixes: texts in front of each query, and of each other text.
        num_proc: processes that tokenize.
        description: names the texts in messages.
    """

    def __init__(
        self,
        rows: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_seq_length: int,
        num_negatives: int = 0,
        prefixes: tuple[str, str] = ("", ""),
        num_proc: int | None = None,
        description: str = "pairs",
    ):
        self.num_texts = 2 + num_negatives
        features = Features({"tokens": List(Value("int32")), "key": Value("int64"), "is_cut": Value("bool")})
        arguments = {
            "tokenizer": tokenizer,
            "max_seq_length": max_seq_length,
            "num_negatives": num_negatives,
            "prefixes": prefixes,
        }
        key = fingerprint(tokenizer), max_seq_length, num_negatives, prefixes, hash_modules(__name__)
        table = map_once(rows, _tokenize, key, description, num_proc, fn_kwargs=arguments, features=features)
        super().__init__(table, rows.select_columns(["query", "positive"]), tokenizer, max_seq_length, description)
        self.keys = table.data.column("key").to_numpy().reshape(-1, self.num_texts)[:, 1:]
        self.num_cut = int(np.sum(table.data.column("is_cut").to_numpy()))
        # Of a sample, as its length is that of all its texts
        self.max_text_length, self.max_length = max_seq_length, self.num_texts * max_seq_length
        self.num_missing = int((self.keys == MISSING).sum())

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        """Say how many pairs there are, with how many negatives, and how many texts were cut."""
        negatives = f", {self.keys[:, 1:].size - self.num_missing:,} negatives" if self.num_texts > 2 else ""
        cut = f", {self.num_cut:,} texts cut off after {self.max_text_length}" if self.num_cut else ""
        return f"{len(self):,} pairs{negatives} ({self.num_tokens:,} tokens{cut})"

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer, and the texts."""
        return {
            "tokenizer": fingerprint(self.tokenizer),
            "texts": hash_parts(self.tokens.digest(), self.num_texts, hashlib.sha256(self.keys.tobytes()).hexdigest()),
        }

    def draw(self, epoch: int, sample_id: int) -> Pair:
        """Return a sample; it is the same in every epoch."""
        first = int(sample_id) * self.num_texts
        tokens = [self.tokens[row] for row in range(first, first + self.num_texts)]
        return Pair(int(epoch) * len(self) + int(sample_id), tokens, self.keys[sample_id])

    def longest(self) -> Pair:
        """Return a sample of texts of max_seq_length tokens."""
        tokens = np.full(self.max_text_length, self.tokenizer.pad_token_id, np.int32)
        return Pair(0, [tokens] * self.num_texts, np.zeros(self.num_texts - 1, np.int64))

    def collate(self, pairs: list[Pair]) -> dict[str, torch.Tensor]:
        """Make a micro-batch of S samples; queries and other texts are padded apart, behind their tokens.

        No samples make one that counts nothing, of texts of one token.

        Returns:
            query_ids: int64 [S, T]; query_lengths: int64 [S].
            text_ids: int64 [S (1 + negatives), T'], of each sample its own text, then its negatives; text_lengths.
            keys: int64 [S, 1 + negatives], see `Pair`; numbers: int64 [S].
            counts: int64 [1], the number of samples.
        """
        counts, nothing = torch.tensor([len(pairs)]), np.full(1, self.tokenizer.pad_token_id, np.int32)
        pairs = pairs or [Pair(0, [nothing] * self.num_texts, np.full(self.num_texts - 1, MISSING))]
        query_ids, query_lengths = self._pad([pair.tokens[0] for pair in pairs])
        text_ids, text_lengths = self._pad([tokens for pair in pairs for tokens in pair.tokens[1:]])
        return {
            "query_ids": query_ids,
            "query_lengths": query_lengths,
            "text_ids": text_ids,
            "text_lengths": text_lengths,
            "keys": torch.from_numpy(np.stack([pair.keys for pair in pairs]).astype(np.int64)),
            "numbers": torch.tensor([pair.number for pair in pairs]),
            "counts": counts,
        }

    def _pad(self, texts: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = np.array([len(tokens) for tokens in texts])
        ids = np.full((len(texts), lengths.max()), self.tokenizer.pad_token_id, np.int64)
        for row, tokens in zip(ids, texts, strict=True):
            row[: len(tokens)] = tokens
        return torch.from_numpy(ids), torch.from_numpy(lengths)


def _tokenize(
    batch: dict[str, list],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    num_negatives: int,
    prefixes: tuple[str, str],
) -> dict[str, list]:
    texts: list[str | None] = []
    for query, positive, negatives in zip(batch["query"], batch["positive"], batch["negatives"], strict=True):
        negatives = (negatives or [])[:num_negatives]
        texts += [query, positive, *negatives, *[None] * (num_negatives - len(negatives))]
    width = 2 + num_negatives
    written = [(prefixes[place % width > 0] + text) if text else "" for place, text in enumerate(texts)]
    whole = tokenizer(written, verbose=False)["input_ids"]
    tokens = tokenizer(written, truncation=True, max_length=max_seq_length, verbose=False)["input_ids"]
    lengths = [0 if text is None else len(ids) for text, ids in zip(texts, whole, strict=True)]
    return {
        "tokens": [
            np.array(ids if text is not None and ids else [tokenizer.pad_token_id], np.int32)
            for text, ids in zip(texts, tokens, strict=True)
        ],
        "key": [MISSING if text is None else _hash(text) for text in texts],
        "is_cut": [length > max_seq_length for length in lengths],
    }


def _hash(text: str) -> int:
    """Hash a text to a number that is not negative, so never `MISSING`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def split_by_source(rows: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    """Split rows into those to train on and held-out ones, whole sources at a time, in an order that a hash of names decides.

    Sources are held out until `fraction` of the rows are.
    """
    sources = np.array(rows["source"])
    names, counts = np.unique(sources, return_counts=True)
    order = sorted(range(len(names)), key=lambda place: hashlib.sha256(str(names[place]).encode()).hexdigest())
    num_before = np.cumsum(counts[order]) - counts[order]
    held_out = names[order][num_before < fraction * len(rows)]
    is_held_out = np.isin(sources, held_out)
    return rows.select(np.flatnonzero(~is_held_out)), rows.select(np.flatnonzero(is_held_out))


def build(
    recipe: EmbeddingTraining, num_proc: int | None = None, on_bad_row: str = "refuse"
) -> tuple[TextPairs, TextPairs | None]:
    """Build the recipe's training and held-out pairs, see `samestep.data`.

    Raises:
        UsageError: data or tokenizer that cannot be used.
    """
    columns = Columns(
        recipe.query_column, recipe.positive_column, recipe.negative_columns, has_negatives=recipe.num_negatives > 0
    )
    if is_builtin(recipe.dataset_name) and recipe.num_negatives:
        raise UsageError(
            f"num_negatives is {recipe.num_negatives}, but {recipe.dataset_name} has no negatives: set it to 0"
        )
    loaded = documents.load_tables(recipe, load_rows, columns=columns, num_proc=num_proc)
    if is_builtin(recipe.dataset_name) and recipe.validation_fraction and len(loaded) == 1:
        rows, held_out = split_by_source(loaded[0].rows, recipe.validation_fraction)
    else:
        rows, held_out = documents.split_tables(recipe, loaded, on_bad_row)
    tokenizer = _choose_tokenizer(recipe, rows)
    settings: dict[str, Any] = {"max_seq_length": recipe.max_seq_length, "num_negatives": recipe.num_negatives}
    settings |= {"prefixes": (recipe.query_prefix, recipe.document_prefix), "num_proc": num_proc}
    train = TextPairs(rows, tokenizer, **settings, description="training texts")
    rest = TextPairs(held_out, tokenizer, **settings, description="held-out texts") if len(held_out) else None
    is_own = not is_builtin(recipe.dataset_name)
    notes = row_report.describe_repeats(rows, held_out, ("query", "positive")) if is_own else []
    train.row_reports = documents.report_tables(recipe, loaded, rows, notes)
    train.row_reports = row_report.add_notes(train.row_reports, train, rest)
    return train, rest


def _choose_tokenizer(recipe: EmbeddingTraining, rows: Dataset) -> PreTrainedTokenizerBase:
    """Load or train the tokenizer, which has a token for padding, and pads behind a text."""

    def train() -> PreTrainedTokenizerBase:
        columns = [rows.select_columns(name).rename_column(name, "text") for name in ("query", "positive")]
        texts = datasets.concatenate_datasets(columns)
        assert recipe.vocab_size is not None  # as no weights decide it
        if recipe.pooling != "last_token":
            return train_wordpiece(texts, recipe.vocab_size, do_lower_case=True)
        tokenizer = train_byte_level_bpe(texts, recipe.vocab_size)
        end = tokenizer.eos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
        )
        return tokenizer

    name = recipe.tokenizer_name or recipe.model_name_or_path
    if name is not None and recipe.vocab_size is None:
        tokenizer = load_tokenizer(name, 2**31, (), "BERT")
    else:
        tokenizer = choose_tokenizer(recipe, train, (), "BERT")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UsageError(f"tokenizer {name} has no pad_token and no eos_token: give one like BERT's or Qwen3's")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer
