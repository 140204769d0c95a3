"""Index tables of samples that lie end to end, with no padding between them: where each token is in the tables of attention."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from samestep.cut.layout import round_up
from samestep.step.losses import IGNORED

TABLES, TABLE = 4, 8192
"""Most tables of a micro-batch, and the scores of a head that take as long as one table more: about 0.2 ms."""


class Rows(NamedTuple):
    """Where the tokens of S samples, end to end, are in a table of S' x T places, both rounded up (`round_up`).

    Attributes:
        ends: int32 [S + 1], 0 and where each sample ends.
        source: int64 [S', T], of each place of the table its token; of padding, the first token behind all samples.
        place: int64 [n], of each token of these samples its place in the table.
        is_token: bool [S', 1, 1, T], True at the first place of a row without a sample, too; None when nothing is padded.
    """

    ends: torch.Tensor
    source: torch.Tensor
    place: torch.Tensor
    is_token: torch.Tensor | None


class Tables(NamedTuple):
    """Where the tokens of a micro-batch are in its tables, end to end; or the g parts of each token, of a group of heads each.

    Attributes:
        sources: int64 [S', g, T], of each table's places the part of a token.
        place: int64 [n g], of each part of a token its place among those of all tables.
        is_token: of each table, see `Rows`.
        ends: of the first table, see `Rows`.
    """

    sources: tuple[torch.Tensor, ...]
    place: torch.Tensor
    is_token: tuple[torch.Tensor | None, ...]
    ends: torch.Tensor


def make_rows(lengths: np.ndarray, first: int = 0, behind: int | None = None) -> Rows:
    """Build the index tables for samples of these lengths.

    Args:
        first: where in the row the first of them begins.
        behind: where the last sample of the micro-batch ends; None: the last of these.

    >>> [value.tolist() for value in make_rows(np.array([2, 1]))]
    [[0, 2, 3], [[0, 1], [2, 3]], [0, 1, 2], [[[[True, True]]], [[[True, False]]]]]
    """
    shape = round_up(len(lengths), 3), round_up(int(lengths.max()), 4)
    is_token = np.zeros(shape, bool)
    is_token[: len(lengths)] = np.arange(shape[1]) < lengths[:, None]
    place = np.flatnonzero(is_token)
    source = np.full(is_token.size, first + len(place) if behind is None else behind)
    source[place] = np.arange(first, first + len(place))
    is_token[len(lengths) :, 0] = True
    ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    mask = None if is_token.all() else torch.from_numpy(is_token[:, None, None])
    return Rows(ends, torch.from_numpy(source.reshape(shape)), torch.from_numpy(place), mask)


def make_tables(parts: Sequence[Rows], num_groups: int) -> Tables:
    """Build the index tables of a micro-batch's samples, given in parts.

    >>> tables = make_tables([make_rows(np.array([2, 1]))], 2)
    >>> tables.sources[0].tolist(), tables.place.tolist()
    ([[[0, 2], [1, 3]], [[4, 6], [5, 7]]], [0, 2, 1, 3, 4, 6])
    """
    sources, places, before = [], [], 0
    group = torch.arange(num_groups, device=parts[0].source.device)
    for part in parts:
        length = part.source.shape[1]
        sources.append(part.source[:, None] * num_groups + group[:, None])
        at = part.place + part.place // length * (length * (num_groups - 1)) + before
        places.append((at[:, None] + group * length).flatten())
        before = before + sources[-1].numel()
    return Tables(tuple(sources), torch.cat(places), tuple(part.is_token for part in parts), parts[0].ends)


def by_length(lengths: np.ndarray) -> list[np.ndarray]:
    """The lengths of a micro-batch's samples, cut so that few scores are of padding: at most `TABLES` parts, with n samples of
    at most T tokens n T^2 + `TABLE` in sum as small as halving, and halving again, makes it. Cuts are at eighths to sixteenths
    of the samples, so that tables have few sizes.

    >>> [part.tolist() for part in by_length(np.array([128, 120, 20, 16, 14, 14]))]
    [[128, 120], [20, 16, 14, 14]]
    """
    parts, unit = [lengths], 1 << max(0, len(lengths).bit_length() - 4)
    while len(parts) < TABLES:
        halves = [half for part in parts for half in _halves(part, unit)]
        if len(halves) == len(parts):
            break
        parts = halves
    return parts


def _halves(lengths: np.ndarray, unit: int) -> list[np.ndarray]:
    """Cut once, behind a multiple of `unit` where it saves most, or not at all."""
    before = np.arange(unit, len(lengths), unit)
    longest_before = np.maximum.accumulate(lengths)[before - 1]
    longest_after = np.maximum.accumulate(lengths[::-1])[::-1][before]
    scores = before * longest_before**2 + (len(lengths) - before) * longest_after**2
    if not len(scores) or scores.min() + TABLE >= len(lengths) * lengths.max() ** 2:
        return [lengths]
    return np.split(lengths, [before[scores.argmin()]])


def make_micro_batch(
    tokens: Sequence[np.ndarray], num_first: Sequence[int], wanted: Sequence[np.ndarray]
) -> dict[str, torch.Tensor | None]:
    """Build what `last_hidden_at` takes of S >= 1 samples, M tokens and W wanted ones, both rounded up: the last are of none.
    Where a table may have padding there is at least one such, whose gradient is 0.

    Args:
        tokens: of each sample.
        num_first: how many of them are of the first kind.
        wanted: places in the sample, ascending, at least one.

    Returns:
        input_ids, token_type_ids, position_ids: int64 [1, M].
        ends, source, place, is_token: of the tokens, see `Rows`.
        wanted: int64 [W], places in the row; wanted_ends, wanted_source, wanted_place: of the wanted tokens.
    """
    lengths = np.array([len(of) for of in tokens])
    starts = np.cumsum(lengths) - lengths
    position_ids = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    is_second = position_ids >= np.repeat(num_first, lengths)
    rows, num_wanted = make_rows(lengths), np.array([len(of) for of in wanted])
    queries, is_padded = make_rows(num_wanted), rows.is_token is not None
    may_pad_wanted = is_padded or queries.is_token is not None  # equal samples are not cut into several tables
    return {
        "input_ids": filled(np.concatenate(tokens), spare=is_padded)[None],
        "token_type_ids": filled(is_second, spare=is_padded)[None],
        "position_ids": filled(position_ids, spare=is_padded)[None],
        **rows._asdict(),
        "wanted": filled(np.concatenate(wanted) + np.repeat(starts, num_wanted), spare=may_pad_wanted),
        "wanted_ends": queries.ends,
        "wanted_source": queries.source,
        "wanted_place": queries.place,
    }


def make_pretraining_micro_batch(
    tokens: Sequence[np.ndarray],
    num_first: Sequence[int],
    places: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    is_random: Sequence[int],
) -> dict[str, torch.Tensor | None]:
    """Build what BERT's pretraining takes of S >= 1 pairs of segments: the first and the masked tokens of each are wanted.

    Args:
        tokens, num_first: see `make_micro_batch`.
        places: of each sample its masked tokens, ascending, without the first; may be none.
        labels: what the masked tokens are.
        is_random: label of each pair.

    Returns:
        those of `make_micro_batch`; first_index, masked_index, masked_labels, next_sentence_label: see `SentencePairs.collate`.
    """
    wanted = [np.concatenate([[0], of]) for of in places]
    num_wanted = np.array([len(of) for of in wanted])
    is_masked = np.ones(num_wanted.sum(), bool)
    is_masked[np.cumsum(num_wanted) - num_wanted] = False
    return {
        **make_micro_batch(tokens, num_first, wanted),
        "first_index": torch.from_numpy(np.flatnonzero(~is_masked)),
        "masked_index": filled(np.flatnonzero(is_masked)),
        "masked_labels": filled(np.concatenate(labels), IGNORED),
        "next_sentence_label": torch.tensor(is_random),
    }


def filled(values: np.ndarray, fill: int = 0, spare: bool = False) -> torch.Tensor:
    """Integers [n] as int64, with `fill` behind them, at least once if `spare`, up to a size that is met again: about 3 % more
    at most.

    >>> filled(np.arange(65)).shape
    torch.Size([66])
    """
    result = np.full(round_up(len(values) + spare, 6), fill, np.int64)
    result[: len(values)] = values
    return torch.from_numpy(result)
