"""Documents to samples of pretraining by next tokens: runs of tokens in which each token predicts the next.

Documents are tokenized once with `datasets`: every document is <|endoftext|> and its tokens, in a memory-mapped file of 16-bit
numbers where the vocabulary allows it. A sample of length T is T + 1 consecutive tokens: the first T are read, the last T
predicted.

`PackedBlocks` writes the documents one after the other into a ring and cuts it into blocks of block_size tokens, the last
one shorter, so that every token is predicted exactly once per epoch. The place at which the ring is cut open is drawn anew in
every epoch from (seed, epoch). `SeparateDocuments` makes a sample of each document, cut off after block_size tokens.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from samestep.cut.order import sample_rng
from samestep.data.arrow import Dataset, Features, List, Value, map_once
from samestep.data.documents import load_split
from samestep.data.row_report import add_notes
from samestep.data.tokenizer import (
    TokenizedTexts,
    choose_tokenizer,
    fingerprint,
    train_byte_level_bpe,
    train_characters,
)
from samestep.errors import UsageError
from samestep.printing import format_count
from samestep.recipe.tasks.causal_lm_pretraining import CausalLmPretraining
from samestep.recipe.tasks.text_pretraining import CausalPretraining

RING = 4  # stream of random numbers (see order.sample_rng)


@dataclasses.dataclass(frozen=True)
class Run:
    """One sample: `tokens` [T + 1], of which the first T are read and the last T predicted."""

    tokens: np.ndarray

    @property
    def length(self) -> int:
        """Number of tokens that are read, as many as are predicted."""
        return len(self.tokens) - 1


class TokenBlocks(TokenizedTexts):
    """The tokens, and the micro-batches made of them, which both kinds of samples share.

    Args:
        documents: one row per document, column `text`.
        tokenizer: with an eos_token, which begins every document and ends the last.
        block_size: tokens per sample at most.
        document_mask: whether attention and positions stay inside a document.
        is_row: whether a micro-batch is a row of sequences end to end (`collate_row`) or a table of samples.
        seed: of the ring's cut in every epoch; None: it is never moved (held-out documents).
        num_proc: processes that tokenize.
        description: names the corpus in messages.
    """

    def __init__(
        self,
        documents: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        block_size: int,
        document_mask: bool = False,
        is_row: bool = False,
        seed: int | None = None,
        num_proc: int | None = None,
        description: str = "the corpus",
    ):
        self.end_of_text, self.is_row, self.document_mask, self.seed = (
            tokenizer.eos_token_id,
            is_row,
            document_mask,
            seed,
        )
        dtype = "uint16" if len(tokenizer) <= 2**16 else "int32"
        options = {"features": Features({"tokens": List(Value(dtype))}), "batch_size": 100}  # more is only more memory
        arguments = {"tokenizer": tokenizer, "dtype": dtype}
        key = (fingerprint(tokenizer),)
        table = map_once(documents, _tokenize, key, description, num_proc, fn_kwargs=arguments, **options)
        super().__init__(table, documents, tokenizer, block_size, description)

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer and the documents' tokens."""
        return {"tokenizer": fingerprint(self.tokenizer), "documents": self.tokens.digest()}

    def longest(self) -> Run:
        """Return a sample of block_size tokens."""
        return Run(np.full(self.max_length + 1, self.end_of_text))

    def collate(self, runs: list[Run]) -> dict[str, torch.Tensor | None]:
        """Make a micro-batch of S samples, padded on the right to their longest T; no samples make one row without targets.

        Causal attention looks left only, so nothing that is predicted sees the padding, and no mask is needed for it.

        Returns:
            input_ids: int64 [S, T].
            position_ids: int64 [S, T], anew from 0 at every <|endoftext|>; None unless document_mask: 0, 1, ...
            labels: int64 [M], the next token of each token that is not padding.
            label_index: int64 [M], places of these tokens in the flattened [S * T]; None when nothing is padded.
            counts: int64 [1], M.
            With `is_row`, what `collate_row` returns.
        """
        if self.is_row:
            return self.collate_row(runs)
        lengths = np.array([run.length for run in runs] or [0])
        shape = (len(lengths), max(1, lengths.max()))
        input_ids = np.full(shape, self.end_of_text, np.int64)
        for row, run in zip(input_ids, runs, strict=False):
            row[: run.length] = run.tokens[:-1]
        labels = np.concatenate([np.zeros(0, np.int64), *(run.tokens[1:] for run in runs)], dtype=np.int64)
        place = np.arange(shape[1])
        label_index = position_ids = None
        if lengths.min() < shape[1]:
            label_index = torch.from_numpy(np.flatnonzero(place < lengths[:, None]))
        if self.document_mask:
            # [S, T]: the place of each <|endoftext|>, and by the running maximum, of each token, where its document begins
            starts = np.where(input_ids == self.end_of_text, place, 0)
            position_ids = torch.from_numpy(place - np.maximum.accumulate(starts, axis=1))
        return {
            "input_ids": torch.from_numpy(input_ids),
            "position_ids": position_ids,
            "labels": torch.from_numpy(labels),
            "label_index": label_index,
            "counts": torch.tensor([len(labels)]),
        }

    def collate_row(self, runs: list[Run]) -> dict[str, torch.Tensor]:
        """Make a micro-batch whose sequences, samples or with document_mask their documents, lie end to end, without padding.

        No samples make one token without a target.

        Returns:
            input_ids, position_ids: int64 [1, M], positions anew from 0 in every sequence.
            ends: int32 [Q + 1], 0 and the end of each sequence.
            labels: int64 [M], the next token of each token; none where there are no samples.
            counts: int64 [1], the number of labels.
        """
        tokens = np.concatenate([run.tokens[:-1] for run in runs] or [np.array([self.end_of_text])]).astype(np.int64)
        labels = np.concatenate([np.zeros(0, np.int64), *(run.tokens[1:] for run in runs)], dtype=np.int64)
        is_first = np.zeros(len(tokens), bool)
        is_first[np.cumsum([0, *(run.length for run in runs[:-1])])] = True
        if self.document_mask:
            is_first |= tokens == self.end_of_text
        starts = np.flatnonzero(is_first)
        place = np.arange(len(tokens))
        return {
            "input_ids": torch.from_numpy(tokens)[None],
            "position_ids": torch.from_numpy(place - np.maximum.accumulate(np.where(is_first, place, 0)))[None],
            "ends": torch.from_numpy(np.append(starts, len(tokens)).astype(np.int32)),
            "labels": torch.from_numpy(labels),
            "counts": torch.tensor([len(labels)]),
        }


class PackedBlocks(TokenBlocks):
    """Blocks of a ring of all documents.

    Raises:
        UsageError: training documents (seed is not None) of fewer than block_size tokens.
    """

    def __init__(self, documents: Dataset, tokenizer: PreTrainedTokenizerBase, **settings):
        super().__init__(documents, tokenizer, **settings)
        if self.seed is not None and self.num_tokens < self.max_length:
            raise UsageError(
                f"block_size is {self.max_length}, but {self.description} have {self.num_tokens} tokens in all: lower "
                "--block_size to that or less, or give more text"
            )

    def __len__(self) -> int:
        return -(-self.num_tokens // self.max_length)

    def first_token(self, epoch: int) -> int:
        """Return the token at which the ring is cut open in `epoch`."""
        return 0 if self.seed is None else _cut(self.seed, self.num_tokens, epoch)

    def draw(self, epoch: int, sample_id: int) -> Run:
        """Return block `sample_id` of the ring as it is cut in `epoch`."""
        # The block is tokens [start, stop) of the ring laid out twice; `parts` are its pieces in the ring itself, [0, size)
        size, place = self.num_tokens, sample_id * self.max_length
        start = self.first_token(epoch) + place
        stop = start + min(self.max_length, size - place) + 1
        parts = [(start, min(stop, size)), (max(start, size) - size, stop - size)]  # before and after the ring's seam
        pieces = [self.tokens.read(*part) for part in parts if part[0] < part[1]]
        return Run(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))


class SeparateDocuments(TokenBlocks):
    """One sample per document, cut off after block_size tokens, of the documents' own length otherwise."""

    def __init__(self, documents: Dataset, tokenizer: PreTrainedTokenizerBase, **settings):
        super().__init__(documents, tokenizer, **settings)
        if num_cut := int((self.tokens.lengths() > self.max_length).sum()):
            self.notes.append(f"cut off after {self.max_length} tokens: {format_count(num_cut, 'document')}")

    def __len__(self) -> int:
        return self.num_documents

    def draw(self, epoch: int, sample_id: int) -> Run:
        """Return the start of document `sample_id`; a whole document ends with <|endoftext|>."""
        tokens = self.tokens[sample_id]
        if len(tokens) > self.max_length:
            return Run(tokens[: self.max_length + 1])
        return Run(np.append(tokens, tokens.dtype.type(self.end_of_text)))


@functools.lru_cache(maxsize=4)
def _cut(seed: int, num_tokens: int, epoch: int) -> int:
    return int(sample_rng(seed, RING, epoch, 0).integers(num_tokens))


def build(
    recipe: CausalPretraining, num_proc: int | None = None, on_bad_row: str = "refuse"
) -> tuple[TokenBlocks, TokenBlocks | None]:
    """Build the recipe's training and held-out samples, see `samestep.data`."""
    documents, held_out, reports = load_split(recipe, num_proc, on_bad_row)
    train = {"byte_level_bpe": train_byte_level_bpe, "characters": train_characters}
    tokenizer = choose_tokenizer(
        recipe, lambda: train[recipe.tokenizer](documents, recipe.vocab_size), ["eos_token"], "GPT-2"
    )
    kind = PackedBlocks if recipe.packing else SeparateDocuments
    settings: dict[str, Any] = {"block_size": recipe.block_size, "document_mask": recipe.document_mask}
    settings |= {"num_proc": num_proc, "is_row": isinstance(recipe, CausalLmPretraining)}
    blocks = kind(documents, tokenizer, **settings, seed=recipe.seed, description="training documents")
    rest = kind(held_out, tokenizer, **settings, description="held-out documents") if len(held_out) else None
    blocks.row_reports = add_notes(reports, blocks, rest)
    return blocks, rest


def _tokenize(batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, dtype: str) -> dict[str, list]:
    """Turn documents into `tokens`. The text <|endoftext|> inside a document is text: only documents' borders are marked."""
    token_ids = tokenizer(batch["text"], add_special_tokens=False, split_special_tokens=True, verbose=False)[
        "input_ids"
    ]
    return {"tokens": [np.array([tokenizer.eos_token_id, *ids], dtype) for ids in token_ids]}
