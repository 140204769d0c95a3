"""Cuts a step's samples into micro-batches: which process computes which sample in which of its micro-batches."""

from collections.abc import Sequence

import numpy as np

from samestep.errors import UsageError


def partition(
    lengths: Sequence[int] | np.ndarray, num_processes: int, max_samples: int, max_tokens: int | None = None
) -> list[list[np.ndarray]]:
    """Cut a global batch into micro-batches, a pure function of its arguments, so that all processes agree without talking.

    The samples are sorted by length, longest first (ties by place), and dealt to the processes to and fro (2 1 0 0 1 2
    2 ...), the last round forwards: shares have the sizes of `layout.shares`, and their tokens differ by at most one sample's
    length. Each process's share, still sorted, is filled into micro-batches up to the caps, so that samples of one
    micro-batch have about the same length and need little padding.

    Args:
        lengths: tokens of each sample of the global batch, [B].
        num_processes: N.
        max_samples: largest number of samples in a micro-batch.
        max_tokens: largest number of tokens in a micro-batch, padding included (samples x longest length); None: no such cap.

    Returns:
        For each process a list of micro-batches; a micro-batch is an int64 array of places in the global batch. Every place is
        in exactly one micro-batch. A process without samples (B < N) has one empty micro-batch, so that it takes part in the
        reduction.

    Raises:
        UsageError: a cap below 1, or a sample longer than max_tokens.

    >>> parts = partition([5, 9, 1, 7], num_processes=2, max_samples=1)
    >>> [[places.tolist() for places in micro_batches] for micro_batches in parts]
    [[[3], [0]], [[1], [2]]]
    >>> parts = partition([3], num_processes=2, max_samples=8)
    >>> [[places.tolist() for places in micro_batches] for micro_batches in parts]
    [[[0]], [[]]]
    """
    lengths = np.asarray(lengths, np.int64)
    if max_samples < 1 or num_processes < 1:
        raise UsageError(f"max_samples is {max_samples} and num_processes is {num_processes}: both must be 1 or more")
    if max_tokens is not None and len(lengths) and lengths.max() > max_tokens:
        raise UsageError(
            f"max_tokens is {max_tokens}, but a sample has {lengths.max()} tokens: raise it to that or more"
        )
    by_length, process = np.argsort(-lengths, kind="stable"), _deal_to_and_fro(len(lengths), num_processes)
    return [_fill(by_length[process == rank], lengths, max_samples, max_tokens) for rank in range(num_processes)]


def partition_at_random(
    num_samples: int, num_processes: int, max_samples: int, *, deals_whole: bool = False
) -> list[np.ndarray] | list[list[np.ndarray]]:
    """Cut a global batch into micro-batches whose samples do not depend on their lengths, as measurements of noise need.

    The places of a global batch are in random order already (`samestep.cut.order`), so runs of places are random samples of it.
    Each process's share is cut into as few runs as the cap allows, whose sizes differ by one at most. A global batch that fits
    one micro-batch of one process is cut in two.

    Args:
        num_samples: B.
        num_processes: N.
        max_samples: largest number of samples in a micro-batch.
        deals_whole: cut the whole batch, for `deal`, not the share of each process.

    Returns:
        As `partition`; with `deals_whole` one list of micro-batches.

    >>> [[places.tolist() for places in own] for own in partition_at_random(7, num_processes=2, max_samples=3)]
    [[[1, 2], [5, 6]], [[0, 3, 4]]]
    >>> [places.tolist() for places in partition_at_random(5, 1, 8)[0]]
    [[0, 1, 2], [3, 4]]
    """
    places, process = np.arange(num_samples), _deal_to_and_fro(num_samples, num_processes)
    if num_processes == 1 or deals_whole:
        max_samples = min(max_samples, -(-num_samples // 2))
    if deals_whole:
        return _split_evenly(places, max_samples)
    return [_split_evenly(places[process == rank], max_samples) for rank in range(num_processes)]


def _split_evenly(places: np.ndarray, max_samples: int) -> list[np.ndarray]:
    return np.array_split(places, max(1, -(-len(places) // max(1, max_samples))))


def deal(
    micro_batches: Sequence[np.ndarray], num_processes: int
) -> tuple[list[list[np.ndarray]], list[list[int | None]]]:
    """Deal whole micro-batches, the largest first, to the processes, to and fro as `partition` does with samples.

    Returns:
        For each process a list of micro-batches, and a list of their numbers in `micro_batches`. A process without any has an
        empty micro-batch, whose number is None.

    >>> deal([np.array([0, 1]), np.array([2, 3]), np.array([4])], num_processes=2)[1]
    [[1, 2], [0]]
    """
    process = _deal_to_and_fro(len(micro_batches), num_processes)
    numbers: list[list[int]] = [np.flatnonzero(process == rank).tolist() for rank in range(num_processes)]
    parts = [[micro_batches[number] for number in own] or [micro_batches[0][:0]] for own in numbers]
    return parts, [[*own] if own else [None] for own in numbers]


def _deal_to_and_fro(num_items: int, num_processes: int) -> np.ndarray:
    """Choose the process of each item, int64 [items].

    Item i is dealt in round i // N; every second round goes backwards, and the last, perhaps incomplete one forwards, so that
    the first processes have the larger shares.
    """
    turn, offset = np.divmod(np.arange(num_items), num_processes)
    forwards = (turn[-1:] - turn) % 2 == 0
    return np.where(forwards, offset, num_processes - 1 - offset)


def _fill(share: np.ndarray, lengths: np.ndarray, max_samples: int, max_tokens: int | None) -> list[np.ndarray]:
    """Cut one process's `share` (places, longest sample first) into micro-batches where a cap is reached."""
    micro_batches, first = [], 0
    while first < len(share):
        # The first sample of a micro-batch is its longest, to which the others are padded
        size = max_samples if max_tokens is None else min(max_samples, max_tokens // max(1, lengths[share[first]]))
        micro_batches.append(share[first : first + size])
        first += size
    return micro_batches or [share]
