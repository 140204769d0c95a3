"""Samples as text, their trained tokens marked: of conversations, with their images, or of sources and targets."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from samestep.contrib.showing.images import ShownImage, show_image
from samestep.data.conversations import Conversations
from samestep.data.image_conversations import ImageConversations
from samestep.data.seq2seq import Pairs
from samestep.data.speech import Recordings
from samestep.errors import UsageError

Source = Conversations | Pairs


class Part(NamedTuple):
    """A run of tokens.

    Attributes:
        text: the tokens as text; of an image it is named.
        is_trained: whether they are.
        image: a small copy as a data: URI; empty: it is text.
    """

    text: str
    is_trained: bool
    image: str = ""


class ShownSequence(NamedTuple):
    """A sequence of a sample, for people.

    Attributes:
        name: chosen or rejected, source or target; empty: the only one of its sample.
        length, num_trained: its tokens, and those that are trained.
        parts: runs of its tokens.
    """

    name: str
    length: int
    num_trained: int
    parts: list[Part]


def show_samples(source: Source, num_samples: int, colour: bool = False) -> list[str]:
    """Write some samples as text, their trained tokens marked, and the mask report.

    Args:
        source: of the samples.
        num_samples: at most; see `Conversations.choose_samples`.
        colour: mark by escape sequences of a terminal instead of `[[...]]`.
    """
    lines = _write_samples(source, source.choose_samples(num_samples), colour)
    report = getattr(source, "mask_report", None)
    left_out = getattr(source, "describe_left_out", list)()  # of a stream, which has no report of all rows
    reports = [*map(str, source.row_reports), *left_out, *([] if report is None else [str(report)])]
    return [*lines, "---", str(source), *reports]


def show_row(sources: Sequence[Any], row: str, colour: bool = False) -> list[str]:
    """Write the sample that a row of a file became, as `show_samples` does.

    Args:
        sources: training and held-out conversations; None: there are none.
        row: its place, without the folders, or its line alone.
        colour: see `show_samples`.

    Raises:
        UsageError: samples without a place, or none of this one.
    """
    lines = []
    for source in sources:
        if source is None:
            continue
        if not isinstance(source, Conversations) or getattr(source, "streams", None) is not None:
            raise UsageError(
                "row is set, but only chats and texts that are read whole have rows with places: leave it out"
            )
        places = list(source.rows["place"])
        found = [
            sample_id
            for sample_id, place in enumerate(source.places)
            if f"/{places[int(place)]}".endswith((f"/{row}", f":{row}"))
        ]
        lines += _write_samples(source, found, colour)
    if not lines:
        raise UsageError(f"row is {row[:200]!r}, and no sample comes from there: give FILE:LINE of a row that is used")
    return lines


def _write_samples(source: Source, sample_ids: Sequence[int], colour: bool) -> list[str]:
    before, after, marks = ("\x1b[1;4m", "\x1b[0m", "") if colour else ("[[", "]]", ": in [[ ]]")
    lines = []
    for sample_id in sample_ids:
        lines.append(f"--- sample {sample_id} ({find_place(source, sample_id)})")
        for sequence in read_sequences(source, sample_id):
            heading = f"{sequence.name}: " if sequence.name else ""
            text = "".join(f"{before}{part.text}{after}" if part.is_trained else part.text for part in sequence.parts)
            lines += [
                f"{heading}{sequence.length} tokens, {sequence.num_trained} trained{marks}",
                text.rstrip("\n"),
            ]
    return lines


def find_place(source: Source, sample_id: int) -> str:
    """Find the file and the line, or the like, of a sample; of a pair its origin."""
    if (streams := getattr(source, "streams", None)) is not None:
        return str(streams.draw(sample_id).places[0])
    if isinstance(source, Pairs):
        name = source.source_names[int(source.source_numbers[sample_id])]
        return f"pair {sample_id}" if name == "all" else name
    return str(source.rows[int(source.places[sample_id])]["place"])


def read_sequences(source: Source, sample_id: int, with_copies: bool = False) -> list[ShownSequence]:
    """Read a sample's sequences as texts, of a pair of answers the chosen one first; a source stands before its target.

    Args:
        source: of the sample.
        sample_id: its number.
        with_copies: whether small copies of images are made.
    """
    if isinstance(source, Pairs):
        return _read_pair(source, sample_id)
    sample, start, sequences = source.draw(0, sample_id), 0, []
    images = _find_images(source, sample_id, with_copies)
    for length, name in zip(sample.lengths, ("chosen", "rejected") if source.is_pairs else ("",), strict=True):
        tokens, mask = (values[start : start + length] for values in (sample.tokens, sample.is_trained))
        parts = _read_parts(source.tokenizer, tokens, mask, images)
        sequences.append(ShownSequence(name, length, int(mask.sum()), parts))
        start += length
    return sequences


def _find_images(source: Conversations, sample_id: int, with_copies: bool) -> list[tuple[ShownImage, int, int]]:
    """Find the images of a sample, and the tokens from which to which each stands."""
    if not isinstance(source, ImageConversations):
        return []
    places = enumerate(source.locate_images(sample_id), 1)
    return [(show_image(n, name, end - first, with_copies), first, end) for n, (name, first, end) in places]


def _read_parts(
    tokenizer: Any, tokens: np.ndarray, mask: np.ndarray, images: Sequence[tuple[ShownImage, int, int]] = ()
) -> list[Part]:
    """Read runs of tokens that are trained, or not, or of an image."""
    borders = {0, len(tokens), *(np.flatnonzero(np.diff(mask)) + 1).tolist()}
    for _, first, end in images:
        borders |= {min(first, len(tokens)), min(end, len(tokens))}
    parts = []
    for first, end in itertools.pairwise(sorted(borders)):
        parts += [Part(f"[{image.name}]", False, image.uri) for image, start, _ in images if first == start]
        if not any(start <= first < behind for _, start, behind in images):
            parts.append(Part(_printable(tokenizer.decode(tokens[first:end])), bool(mask[first])))
    return parts


def _read_pair(source: Pairs, sample_id: int) -> list[ShownSequence]:
    """Read a source, of speech its length and rate, and its target, whose given tokens are not trained."""
    sample, sources = source.draw(0, sample_id), source.sources
    if isinstance(sources, Recordings):
        words = f"[recording {sources.describe(sample_id)}: {sources.measure(sample_id)}]"
        parts = [Part(_printable(words), False)]
    else:
        tokens = np.asarray(sample.source)
        parts = _read_parts(source.tokenizer, tokens, np.zeros(len(tokens), bool))
    mask = np.arange(len(sample.labels)) >= sample.num_given
    target = _read_parts(source.tokenizer, sample.labels, mask)
    return [
        ShownSequence("source", sources.length(sample.source), 0, parts),
        ShownSequence("target", len(sample.labels), int(mask.sum()), target),
    ]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
