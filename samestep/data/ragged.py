"""Build index tables of samples that lie end to end, without padding: the place of each token in the tables of attention."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from samestep.cut.layout import round_up
from samestep.step.losses import IGNORED

MAX_TABLES, TABLE_COST = 4, 8192
"""The largest number of tables of a micro-batch; the scores of a head that take as long as one table more, about 0.2 ms."""


class Rows(NamedTuple):
    """Holds where the tokens of S samples, end to end, are in a table of S' x T places, both rounded up (`round_up`).

    Attributes:
        ends: int32 [S + 1], 0 and the end of each sample.
        source: int64 [S', T], the token of each place of the table; for padding, the first token after all samples.
        place: int64 [n], the place in the table of each of these samples' n tokens.
        is_token: bool [S', 1, 1, T], True also at the first place of a row without a sample; None when nothing is padded.
    """

    ends: torch.Tensor
    source: torch.Tensor
    place: torch.Tensor
    is_token: torch.Tensor | None


class Tables(NamedTuple):
    """Holds where the tokens of a micro-batch, end to end, are in its tables.

    With g groups of heads a token has g parts, one per group, and the tables hold parts. Tables follow each other, so that the
    places of all tables are numbered through.

    Attributes:
        sources: of each table int64 [S', g, T], the part of a token at each place.
        place: int64 [n g], the place of each part of a token.
        is_token: of each table, see `Rows`.
        ends: of the first table, see `Rows`.
    """

    sources: tuple[torch.Tensor, ...]
    place: torch.Tensor
    is_token: tuple[torch.Tensor | None, ...]
    ends: torch.Tensor


def make_rows(lengths: np.ndarray, first: int = 0, end: int | None = None) -> Rows:
    """Build the index tables for samples of these lengths.

    Args:
        lengths: int [S], tokens of each sample, S >= 1.
        first: place of the first sample's first token in the row of the micro-batch's tokens.
        end: place after the micro-batch's last token; None: these samples are the last.

    >>> [value.tolist() for value in make_rows(np.array([2, 1]))]
    [[0, 2, 3], [[0, 1], [2, 3]], [0, 1, 2], [[[[True, True]]], [[[True, False]]]]]
    """
    shape = round_up(len(lengths), 3), round_up(int(lengths.max()), 4)
    is_token = np.zeros(shape, bool)
    is_token[: len(lengths)] = np.arange(shape[1]) < lengths[:, None]
    place = np.flatnonzero(is_token)
    # The samples' tokens, first, first + 1, ..., fill the table's rows from the left; all other places point after the last.
    source = np.full(is_token.size, first + len(place) if end is None else end)
    source[place] = np.arange(first, first + len(place))
    is_token[len(lengths) :, 0] = True  # a softmax over nothing but padding would be NaN
    ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    mask = None if is_token.all() else torch.from_numpy(is_token[:, None, None])
    return Rows(ends, torch.from_numpy(source.reshape(shape)), torch.from_numpy(place), mask)


def make_tables(parts: Sequence[Rows], num_groups: int) -> Tables:
    """Build the index tables of a micro-batch's samples.

    Args:
        parts: the tables of the samples, in order.
        num_groups: g, into how many parts a token is split.

    >>> tables = make_tables([make_rows(np.array([2, 1]))], 2)
    >>> tables.sources[0].tolist(), tables.place.tolist()
    ([[[0, 2], [1, 3]], [[4, 6], [5, 7]]], [0, 2, 1, 3, 4, 6])
    """
    sources, places, num_places = [], [], 0
    group = torch.arange(num_groups, device=parts[0].source.device)
    for part in parts:
        length = part.source.shape[1]
        # [S', g, T]: token t has the parts t g, ..., t g + g - 1.
        sources.append(part.source[:, None] * num_groups + group[:, None])
        # From place s T + t of [S', T] to the g places s g T + group T + t of [S', g, T], behind the tables so far.
        first = part.place + part.place // length * (length * (num_groups - 1)) + num_places
        places.append((first[:, None] + group * length).flatten())
        num_places = num_places + sources[-1].numel()
    return Tables(tuple(sources), torch.cat(places), tuple(part.is_token for part in parts), parts[0].ends)


def split_by_length(lengths: np.ndarray) -> list[np.ndarray]:
    """Cut the lengths of a micro-batch's samples into at most `MAX_TABLES` parts, so that few scores are of padding.

    A part with n samples of at most T tokens costs n T^2 + `TABLE_COST`; each part is cut in two where that makes the sum
    smallest, and the halves again. Cuts are at eighths to sixteenths of the samples, so that tables have few sizes.

    >>> [part.tolist() for part in split_by_length(np.array([128, 120, 20, 16, 14, 14]))]
    [[128, 120], [20, 16, 14, 14]]
    """
    parts, unit = [lengths], 1 << max(0, len(lengths).bit_length() - 4)
    while len(parts) < MAX_TABLES:
        halves = [half for part in parts for half in _halves(part, unit)]
        if len(halves) == len(parts):
            break
        parts = halves
    return parts


def _halves(lengths: np.ndarray, unit: int) -> list[np.ndarray]:
    """Cut once, after a multiple of `unit` samples where it saves most, or not at all."""
    cuts = np.arange(unit, len(lengths), unit)
    longest_left = np.maximum.accumulate(lengths)[cuts - 1]
    longest_right = np.maximum.accumulate(lengths[::-1])[::-1][cuts]
    scores = cuts * longest_left**2 + (len(lengths) - cuts) * longest_right**2
    if not len(scores) or scores.min() + TABLE_COST >= len(lengths) * lengths.max() ** 2:
        return [lengths]
    return np.split(lengths, [cuts[scores.argmin()]])


def make_micro_batch(
    tokens: Sequence[np.ndarray], num_first: Sequence[int], queries: Sequence[np.ndarray]
) -> dict[str, torch.Tensor | None]:
    """Build the arguments of `last_hidden_at` for S >= 1 samples, with M tokens and W queries, both rounded up.

    Queries are the tokens for which the last layer is computed. The spare tokens and queries at the end belong to no sample.
    Where a table may have padding there is at least one, whose gradient is 0.

    Args:
        tokens: of each sample.
        num_first: of each sample, how many of its tokens are of the first kind.
        queries: of each sample the places of its queries, ascending, at least one.

    Returns:
        input_ids, token_type_ids, position_ids: int64 [1, M].
        ends, source, place, is_token: of the tokens, see `Rows`.
        queries: int64 [W], places in the row; query_ends, query_source, query_place: of the queries, see `Rows`.
    """
    lengths = np.array([len(sample) for sample in tokens])
    starts = np.cumsum(lengths) - lengths
    # [tokens], all samples end to end: each token's place in its own sample, and whether it is of the second kind.
    position_ids = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    is_second = position_ids >= np.repeat(num_first, lengths)
    rows, num_queries = make_rows(lengths), np.array([len(places) for places in queries])
    query_rows, is_padded = make_rows(num_queries), rows.is_token is not None
    may_pad_queries = is_padded or query_rows.is_token is not None  # equal samples are not cut into several tables
    return {
        "input_ids": pad_integers(np.concatenate(tokens), spare=is_padded)[None],
        "token_type_ids": pad_integers(is_second, spare=is_padded)[None],
        "position_ids": pad_integers(position_ids, spare=is_padded)[None],
        **rows._asdict(),
        "queries": pad_integers(np.concatenate(queries) + np.repeat(starts, num_queries), spare=may_pad_queries),
        "query_ends": query_rows.ends,
        "query_source": query_rows.source,
        "query_place": query_rows.place,
    }


def make_pretraining_micro_batch(
    tokens: Sequence[np.ndarray],
    num_first: Sequence[int],
    places: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    is_random: Sequence[int],
) -> dict[str, torch.Tensor | None]:
    """Build the arguments of BERT's pretraining for S >= 1 pairs of segments; a pair's queries are its first and masked tokens.

    Args:
        tokens, num_first: see `make_micro_batch`.
        places: of each sample the places of its masked tokens, ascending, without the first token; may be empty.
        labels: of each sample its masked tokens before they were masked.
        is_random: label of each pair.

    Returns:
        what `make_micro_batch` returns; first_index, masked_index, masked_labels, next_sentence_label: see
        `SentencePairs.collate`.
    """
    queries = [np.concatenate([[0], masked_places]) for masked_places in places]
    num_queries = np.array([len(sample_queries) for sample_queries in queries])
    # bool [queries], all samples end to end: all but the first of each sample.
    is_masked = np.ones(num_queries.sum(), bool)
    is_masked[np.cumsum(num_queries) - num_queries] = False
    return {
        **make_micro_batch(tokens, num_first, queries),
        "first_index": torch.from_numpy(np.flatnonzero(~is_masked)),
        "masked_index": pad_integers(np.flatnonzero(is_masked)),
        "masked_labels": pad_integers(np.concatenate(labels), IGNORED),
        "next_sentence_label": torch.tensor(is_random),
    }


def pad_integers(values: np.ndarray, fill: int = 0, spare: bool = False) -> torch.Tensor:
    """Pad integers [n] with `fill` to int64 [n'], a size that recurs: at most about 3 % more; at least one more if `spare`.

    >>> pad_integers(np.arange(65)).shape
    torch.Size([66])
    """
    result = np.full(round_up(len(values) + spare, 6), fill, np.int64)
    result[: len(values)] = values
    return torch.from_numpy(result)
