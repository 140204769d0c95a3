"""Streamed samples of BERT's pretraining: segments of documents, and pairs of them."""

import functools
from typing import Any, NamedTuple

import numpy as np

from samestep.contrib.streaming.sources import Streamed, build_held_out, list_documents, load_tokenizer
from samestep.contrib.streaming.streams import LeftOut, Stream, derive_seed
from samestep.data import row_report, sentence_pairs
from samestep.data.sentence_pairs import REQUIRED_TOKENS, Document, Pair, SentencePairs
from samestep.data.tokenizer import fingerprint

SHORT = LeftOut("fewer than two tokens")


class Chunk(NamedTuple):
    """A chunk of a document of a stream, of which a sample is drawn.

    Attributes:
        document: its document.
        number: of the chunk in it.
        others: documents from which the second segment may come.
    """

    document: Document
    number: int
    others: list[Document]


def _take_chunk(stream: Stream) -> Chunk:
    """Take the next chunk: those of a document one after the other."""
    document: Document = stream.peek()
    chunk = Chunk(document, stream.used, stream.list_neighbours())
    stream.used += 1
    if stream.used == len(document.cuts) - 1:
        stream.advance()
    return chunk


class StreamedSentencePairs(Streamed, SentencePairs):
    """Segments of a stream's documents. A second segment of another document is one of those that were read with the first.

    Args:
        recipe: of the tasks bert_pretraining and modernbert_pretraining.
        on_bad_row: refuse or skip.
    """

    is_even = False

    def __init__(self, recipe: Any, on_bad_row: str):
        self.tokenizer = tokenizer = load_tokenizer(recipe, REQUIRED_TOKENS, "BERT")
        tokenizer.model_max_length = self.max_length = recipe.max_seq_length
        self._set_numbers(recipe, tokenizer)
        self.notes = []
        self.short_seq_probability = recipe.short_seq_probability
        self.open(recipe, list_documents(recipe, on_bad_row, convert=self._tokenize, assemble=_take_chunk))

    def __str__(self) -> str:
        kind = "segments" if self.next_sentence_probability is None else "pairs of segments"
        return f"{self.describe_stream()}, {kind} of at most {self.max_length} tokens"

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer, and the names and sizes of the shards."""
        return {"tokenizer": fingerprint(self.tokenizer), "shards": self.streams.fingerprint}

    def _tokenize(self, rows: list[tuple[str, Any]]) -> list[Any]:
        documents: list[Any] = []
        for place, text in rows:
            # Chunks are drawn by the row's place without its folder, as the fingerprint has it
            number = derive_seed("document", place.rpartition("/")[2])
            options = self.tokenizer, self.seed, self.max_tokens, self.short_seq_probability
            columns = sentence_pairs._tokenize({"text": [text]}, [number], *options)
            parts = [column[0] for column in columns.values() if column]
            documents.append(Document(*parts) if parts else SHORT)
        return documents

    def draw(self, epoch: int, sample_id: int) -> Pair:
        """Draw sample t of the run."""
        chunk: Chunk = self.streams.draw(int(sample_id)).value

        def draw_other(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
            return chunk.others[int(rng.integers(len(chunk.others)))][:2]

        return self._draw_pair((0, int(sample_id)), chunk.document, chunk.number, draw_other if chunk.others else None)

    @classmethod
    def build(cls, recipe: Any, num_proc: int | None, on_bad_row: str) -> tuple[Any, SentencePairs | None]:
        """Build the streamed samples, and the held-out ones."""
        train, held_out = cls(recipe, on_bad_row), build_held_out(recipe, num_proc, on_bad_row)
        if held_out is not None:
            train.row_reports = row_report.add_notes(held_out.row_reports, train, held_out)
        return train, held_out
