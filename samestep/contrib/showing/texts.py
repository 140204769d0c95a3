"""Samples of conversations as text, their trained tokens marked."""

import itertools
from typing import NamedTuple

import numpy as np

from samestep.data.conversations import Conversations


class ShownSequence(NamedTuple):
    """A sequence of a sample, for people.

    Attributes:
        name: chosen or rejected; empty: the only one of its sample.
        length, num_trained: its tokens, and those that are trained.
        parts: runs of tokens as text, and whether they are trained.
    """

    name: str
    length: int
    num_trained: int
    parts: list[tuple[str, bool]]


def show_samples(source: Conversations, num_samples: int, colour: bool = False) -> list[str]:
    """Write some samples as text, their trained tokens marked, and the mask report.

    Args:
        source: of the samples.
        num_samples: at most; see `Conversations.choose_samples`.
        colour: mark by escape sequences of a terminal instead of `[[...]]`.
    """
    before, after, marks = ("\x1b[1;4m", "\x1b[0m", "") if colour else ("[[", "]]", ": in [[ ]]")
    lines = []
    for sample_id in source.choose_samples(num_samples):
        lines.append(f"--- sample {sample_id} ({find_place(source, sample_id)})")
        for sequence in read_sequences(source, sample_id):
            heading = f"{sequence.name}: " if sequence.name else ""
            text = "".join(f"{before}{part}{after}" if is_trained else part for part, is_trained in sequence.parts)
            lines += [
                f"{heading}{sequence.length} tokens, {sequence.num_trained} trained{marks}",
                text.rstrip("\n"),
            ]
    return [*lines, "---", str(source), *map(str, source.row_reports), str(source.mask_report)]


def find_place(source: Conversations, sample_id: int) -> str:
    """Find the file and the line, or the like, of a sample."""
    return source.rows[int(source.places[sample_id])]["place"]


def read_sequences(source: Conversations, sample_id: int) -> list[ShownSequence]:
    """Read a sample's sequences as texts, of a pair the chosen one first."""
    sample, start, sequences = source.draw(0, sample_id), 0, []
    for length, name in zip(sample.lengths, ("chosen", "rejected") if source.is_pairs else ("",), strict=True):
        tokens, mask = (values[start : start + length] for values in (sample.tokens, sample.is_trained))
        borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), length]
        parts = [
            (_printable(source.tokenizer.decode(tokens[first:last])), bool(mask[first]))
            for first, last in itertools.pairwise(borders)
        ]
        sequences.append(ShownSequence(name, length, int(mask.sum()), parts))
        start += length
    return sequences


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
