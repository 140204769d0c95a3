"""Documents to BERT's pretraining samples: pairs of segments with masked tokens (Devlin et al. 2019, 1810.04805).

Every document is tokenized into sentences and cut into chunks of consecutive sentences of about `max_seq_length` tokens, once,
with `datasets`. A chunk is a sample. The rest is drawn anew in every epoch from (seed, epoch, sample id): the cut of the chunk
into segments A and B, whether a passage of another document replaces B, how a pair that is too long is truncated, and which
tokens are masked. So no pair is seen twice, no pair is stored, and any epoch can be drawn without those before it.

The passage that replaces B has the number of sentences that brings it nearest to B's length. The lengths are rarely equal, so a
pair's length says something about whether B follows: on the built-in documentation at length 128, a rule that looks at the
length alone (a threshold) is right for 0.62 of the training pairs and 0.66 of the held-out ones. Compare next-sentence
accuracies with these.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from samestep.cut.order import sample_rng
from samestep.data.arrow import Dataset, ListColumn, hash_parts, map_once
from samestep.data.documents import load_split, split_sentences
from samestep.data.ragged import make_pretraining_micro_batch
from samestep.data.row_report import add_notes
from samestep.data.tokenizer import TokenizedTexts, choose_tokenizer, fingerprint, train_wordpiece
from samestep.errors import UsageError
from samestep.printing import format_count
from samestep.recipe.tasks.bert_pretraining import BertPretraining
from samestep.recipe.tasks.modernbert_pretraining import ModernBertPretraining
from samestep.step.losses import IGNORED

# Streams of random numbers (see order.sample_rng).
CHUNKS, PAIRS, MASKS = 1, 2, 3
REQUIRED_TOKENS = ("cls_token", "sep_token", "mask_token", "pad_token")
NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]
OF_PAIRS = ("first_index", "next_sentence_label", "token_type_ids")
"""Arguments of a model that only samples of two segments have."""


class Document(NamedTuple):
    """A document, tokenized.

    Attributes:
        tokens: int32 [tokens].
        ends: int32 [sentences], where each sentence ends, in tokens.
        cuts: int32 [chunks + 1], borders of the chunks, in sentences.
    """

    tokens: np.ndarray
    ends: np.ndarray
    cuts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Pair:
    """One sample of one epoch, before masking.

    Attributes:
        epoch, sample_id: of which the pair is a function.
        first, second: token ids of segments A and B, int32 views; second is None where the sample is no pair.
        is_random: 0 when B follows A, 1 when it comes from another document (the label of `BertForPreTraining`).
    """

    epoch: int
    sample_id: int
    first: np.ndarray
    second: np.ndarray | None
    is_random: int

    @property
    def length(self) -> int:
        """Number of tokens, with [CLS] and every [SEP]."""
        return len(self.first) + (2 if self.second is None else len(self.second) + NUM_SPECIAL)


class SentencePairs(TokenizedTexts):
    """The samples of a corpus.

    Args:
        documents: one row per document, column `text`.
        tokenizer: with [CLS], [SEP], [MASK] and [PAD].
        recipe: gives `seed`, which decides every draw; `max_seq_length`, tokens per sample at most; `short_seq_probability`,
            the share of the chunks cut to a random shorter length; `mlm_probability`, the share of a sample's ordinary tokens
            that are to be predicted (rounded, at least one); perhaps `next_sentence_probability`, the share of the pairs whose
            B follows A; without it a chunk is one segment, no pair.
        num_proc: processes that tokenize.
        description: names the corpus in messages.

    Raises:
        UsageError: fewer than two documents, so that no passage of another document can be drawn.
    """

    def __init__(
        self,
        documents: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        recipe: Any,
        *,
        num_proc: int | None = None,
        description: str = "the corpus",
    ):
        self._set_numbers(recipe, tokenizer)
        settings = {"seed": self.seed, "max_tokens": self.max_tokens}
        settings |= {"short_seq_probability": recipe.short_seq_probability}
        key = fingerprint(tokenizer), settings
        arguments = settings | {"tokenizer": tokenizer}
        table = map_once(documents, _tokenize, key, description, num_proc, fn_kwargs=arguments, with_indices=True)
        super().__init__(table, documents, tokenizer, recipe.max_seq_length, description)
        self.ends, self.cuts = ListColumn(table, "ends"), ListColumn(table, "cuts")
        if num_short := len(documents) - len(self.tokens):
            self.notes.insert(0, f"left out: {format_count(num_short, 'document')} of fewer than two tokens")
        is_pair = self.next_sentence_probability is not None
        if len(self.tokens) < 1 + is_pair:
            rule = "sentence pairs need at least 2, so that B can come from another document" if is_pair else "give one"
            raise UsageError(
                f"{description} has {len(self.tokens)} document(s) of two tokens or more: {rule} (--txt_documents blocks: "
                "blank lines in .txt files separate documents)"
            )

    def _set_numbers(self, recipe: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set what decides the draws."""
        self.seed, self.mlm_probability = recipe.seed, recipe.mlm_probability
        self.next_sentence_probability = getattr(recipe, "next_sentence_probability", None)
        is_pair = self.next_sentence_probability is not None
        self.max_tokens = recipe.max_seq_length - (NUM_SPECIAL if is_pair else 2)  # [CLS] A [SEP]
        self.cls, self.sep, self.mask_token = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
        self.is_special = np.zeros(len(tokenizer), bool)
        self.is_special[tokenizer.all_special_ids] = True
        self.ordinary = np.flatnonzero(~self.is_special)

    def __len__(self) -> int:
        """Count the chunks: the gaps between neighbouring cuts of each document."""
        return self.cuts.num_values - len(self.cuts)

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer, the documents' tokens, and their chunks."""
        first_samples = np.concatenate([[0], np.cumsum(self.cuts.lengths() - 1)])
        documents = hash_parts(self.tokens.digest(), first_samples.tobytes())
        return {"tokenizer": fingerprint(self.tokenizer), "documents": documents}

    def draw(self, epoch: int, sample_id: int) -> Pair:
        """Draw the pair, or the one segment, of a sample in an epoch."""
        # The sample is chunk `chunk` of document `row`
        row, chunk = self.cuts.find_gap(sample_id)
        document = Document(self.tokens[row], self.ends[row], self.cuts[row])

        def draw_other(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
            other_row = int(rng.integers(len(self.tokens) - 1))
            other_row += other_row >= row  # any row but the pair's own
            return self.tokens[other_row], self.ends[other_row]

        return self._draw_pair((int(epoch), int(sample_id)), document, chunk, draw_other)

    def _draw_pair(
        self,
        key: tuple[int, int],
        document: Document,
        chunk: int,
        draw_other: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]] | None,
    ) -> Pair:
        """Draw the pair, or the one segment, of a chunk of a document.

        Args:
            key: epoch and sample id.
            draw_other: draws another document, its tokens and the ends of its sentences; None: there is no other.
        """
        rng = sample_rng(self.seed, PAIRS, *key)
        tokens, ends, cuts = document  # sentence i is tokens[ends[i - 1] : ends[i]]
        first, last = cuts[chunk], cuts[chunk + 1]  # the chunk's sentences: [first, last), at least two
        if self.next_sentence_probability is None:
            segment = tokens[ends[first - 1] if first else 0 : ends[last - 1]]
            front = int(rng.integers(max(0, len(segment) - self.max_tokens) + 1))
            return Pair(*key, segment[front : front + self.max_tokens], None, 0)
        start, middle, stop = (
            ends[place - 1] if place else 0 for place in (first, int(rng.integers(first + 1, last)), last)
        )
        a, b = tokens[start:middle], tokens[middle:stop]
        is_random = rng.random() >= self.next_sentence_probability
        if is_random and draw_other is None:
            is_random = False
        elif is_random:
            tokens, ends = draw_other(rng)
            place = int(rng.integers(len(ends)))
            start = ends[place - 1] if place else 0
            # Lengths in tokens of the passages that begin with sentence `place`, of 1, 2, ... sentences
            lengths = ends[place:] - start
            b = tokens[start : start + lengths[np.abs(lengths - len(b)).argmin()]]
        a, b = self._truncate(a, b, rng)
        return Pair(*key, a, b, int(is_random))

    def longest(self) -> Pair:
        """Return a pair of max_seq_length tokens."""
        tokens = np.full(self.max_tokens, self.tokenizer.unk_token_id, np.int32)
        if self.next_sentence_probability is None:
            return Pair(0, 0, tokens, None, 0)
        return Pair(0, 0, tokens[:1], tokens[1:], 0)

    def _truncate(self, a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Cut the longer segment, at its front or back at random, token by token, until the pair fits."""
        if len(a) + len(b) <= self.max_tokens:
            return a, b
        size_a = min(len(a), max(self.max_tokens - len(b), (self.max_tokens + 1) // 2))
        segments = []
        for segment, size in ((a, size_a), (b, self.max_tokens - size_a)):
            front = int(rng.binomial(len(segment) - size, 0.5))
            segments.append(segment[front : front + size])
        return segments[0], segments[1]

    def mask(self, pair: Pair) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mask a pair: of the masked tokens 80 % become [MASK], 10 % a random ordinary token, 10 % stay as they are.

        Special tokens are never masked.

        Returns:
            input ids int64 [length], masked places int64 [m] ascending, the true tokens at these places int64 [m].
        """
        second: list[Any] = [] if pair.second is None else [pair.second, [self.sep]]
        tokens = np.concatenate([[self.cls], pair.first, [self.sep], *second], dtype=np.int64)
        rng = sample_rng(self.seed, MASKS, pair.epoch, pair.sample_id)
        candidates = np.flatnonzero(~self.is_special[tokens])
        num_masked = 0
        if len(candidates) and self.mlm_probability > 0:
            num_masked = max(1, round(len(candidates) * self.mlm_probability))
        places = np.sort(rng.permutation(candidates)[:num_masked])
        labels = tokens[places]
        kind = rng.random(num_masked)
        noise = self.ordinary[rng.integers(len(self.ordinary), size=num_masked)]
        tokens[places] = np.where(kind < 0.8, self.mask_token, np.where(kind < 0.9, noise, labels))
        return tokens, places, labels

    def collate(self, pairs: list[Pair]) -> dict[str, torch.Tensor | None]:
        """Make a micro-batch of S samples end to end, without padding; no samples make one without targets.

        Returns:
            what `ragged.make_micro_batch` returns, with each sample's first and masked tokens as queries.
            first_index: int64 [S], places of the first tokens among the queries.
            masked_index: int64 [M'], those of the masked tokens, and 0 up to a rounded size.
            masked_labels: int64 [M'], -100 up to that size.
            next_sentence_label: int64 [S].
            counts: int64 [2], targets of the masked-token and the next-sentence loss: M and S.
            Of samples that are no pairs without first_index and next_sentence_label, and counts is int64 [1].
        """
        samples = pairs or [Pair(0, 0, np.zeros(0, np.int32), np.zeros(0, np.int32), IGNORED)]
        tokens, places, labels = zip(*map(self.mask, samples), strict=True)
        num_first, is_random = [len(pair.first) + 2 for pair in samples], [pair.is_random for pair in samples]
        batch = make_pretraining_micro_batch(tokens, num_first, places, labels, is_random)
        counts = [sum(map(len, labels)), len(pairs)]
        if self.next_sentence_probability is None:
            batch = {name: value for name, value in batch.items() if name not in OF_PAIRS}
            counts = counts[:1]
        return batch | {"counts": torch.tensor(counts)}


def build(
    recipe: BertPretraining | ModernBertPretraining, num_proc: int | None = None, on_bad_row: str = "refuse"
) -> tuple[SentencePairs, SentencePairs | None]:
    """Build the recipe's training and held-out samples, see `samestep.data`."""
    documents, held_out, reports = load_split(recipe, num_proc, on_bad_row)
    tokenizer = choose_tokenizer(
        recipe, lambda: train_wordpiece(documents, recipe.vocab_size, recipe.do_lower_case), REQUIRED_TOKENS, "BERT"
    )
    train = SentencePairs(documents, tokenizer, recipe, num_proc=num_proc, description="training documents")
    rest = None
    if len(held_out):
        rest = SentencePairs(held_out, tokenizer, recipe, num_proc=num_proc, description="held-out documents")
    train.row_reports = add_notes(reports, train, rest)
    return train, rest


def _tokenize(
    batch: dict[str, list],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    max_tokens: int,
    short_seq_probability: float,
) -> dict[str, list]:
    """Turn documents into all their `tokens`, the `ends` of their sentences in tokens, and `cuts`, the chunks' borders in
    sentences."""
    columns: dict[str, list] = {"tokens": [], "ends": [], "cuts": []}
    for text, index in zip(batch["text"], indices, strict=True):
        sentences = split_sentences(text)
        token_ids = tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"] if sentences else []
        # A sentence longer than a sample is cut; a document of one sentence is cut in the middle.
        pieces = [ids[start : start + max_tokens] for ids in token_ids for start in range(0, len(ids), max_tokens)]
        if len(pieces) == 1 and len(pieces[0]) > 1:
            half = len(pieces[0]) // 2
            pieces = [pieces[0][:half], pieces[0][half:]]
        if len(pieces) < 2:
            continue
        lengths = np.array([len(piece) for piece in pieces])
        rng = sample_rng(seed, CHUNKS, 0, index)
        columns["tokens"].append(np.concatenate(pieces).astype(np.int32))
        columns["ends"].append(np.cumsum(lengths).astype(np.int32))
        columns["cuts"].append(_chunk(lengths, max_tokens, short_seq_probability, rng))
    return columns


def _chunk(lengths: np.ndarray, max_tokens: int, short_seq_probability: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the borders of the chunks, in sentences, int32: [0, ..., len(lengths)]; every chunk has at least two sentences.

    Args:
        lengths: int64 [sentences], in tokens.
    """
    cuts, size, target = [0], 0, None
    for place, length in enumerate(lengths):
        if target is None:
            short = rng.random() < short_seq_probability
            target = int(rng.integers(2, max_tokens + 1)) if short else max_tokens
        size += length
        # A chunk ends where it is long enough, has two sentences or more, and leaves two or more for the next one
        if size >= target and place - cuts[-1] >= 1 and len(lengths) - place > 2:
            cuts.append(place + 1)
            size, target = 0, None
    return np.array([*cuts, len(lengths)], np.int32)
