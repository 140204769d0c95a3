"""The cut of a global batch: every sample in exactly one micro-batch, balanced, within the caps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.cut.layout import shares
from samestep.cut.partition import partition
from samestep.errors import UsageError

batches = st.lists(st.integers(1, 128), min_size=1, max_size=200)


@given(lengths=batches, n=st.integers(1, 9), cap=st.integers(1, 64), tokens=st.none() | st.integers(128, 2000))
def test_every_sample_is_in_exactly_one_micro_batch_within_the_caps(lengths, n, cap, tokens):
    processes = partition(lengths, n, cap, tokens)
    assert len(processes) == n
    places = [place for micro_batches in processes for micro_batch in micro_batches for place in micro_batch.tolist()]
    assert sorted(places) == list(range(len(lengths)))
    for micro_batches in processes:
        for micro_batch in micro_batches:
            assert len(micro_batch) <= cap
            assert tokens is None or len(micro_batch) * max((lengths[p] for p in micro_batch), default=0) <= tokens
        assert all(len(micro_batch) for micro_batch in micro_batches) or len(micro_batches) == 1, (
            "an empty micro-batch is the only one of its process"
        )


@given(lengths=batches, n=st.integers(1, 9))
def test_processes_are_balanced(lengths, n):
    processes = partition(lengths, n, max_samples=8)
    sizes = [sum(len(micro_batch) for micro_batch in micro_batches) for micro_batches in processes]
    assert tuple(sizes) == shares(len(lengths), n)
    tokens = [sum(lengths[p] for micro_batch in micro_batches for p in micro_batch) for micro_batches in processes]
    assert max(tokens) - min(tokens) <= max(lengths)


@given(lengths=batches, n=st.integers(1, 4), cap=st.integers(1, 16))
def test_micro_batches_are_sorted_by_length(lengths, n, cap):
    for micro_batches in partition(lengths, n, cap):
        process_lengths = [lengths[p] for micro_batch in micro_batches for p in micro_batch]
        assert process_lengths == sorted(process_lengths, reverse=True)


def test_little_is_padded():
    lengths = np.random.default_rng(0).integers(16, 129, size=256)
    padded = sum(len(c) * lengths[c].max() for micro_batches in partition(lengths, 2, 16) for c in micro_batches)
    shuffled = sum(16 * lengths[i : i + 16].max() for i in range(0, 256, 16))
    assert padded < 1.1 * lengths.sum()
    assert shuffled > 1.5 * lengths.sum()


def test_indivisible_batches():
    assert [[len(c) for c in micro_batches] for micro_batches in partition([5] * 10, 3, 2)] == [[2, 2], [2, 1], [2, 1]]
    assert [[len(c) for c in micro_batches] for micro_batches in partition([5, 5], 3, 2)] == [[1], [1], [0]]


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0)])
def test_caps_below_one(arguments):
    with pytest.raises(UsageError, match="must be 1 or more"):
        partition([1], *arguments)


def test_a_sample_longer_than_the_token_cap():
    with pytest.raises(UsageError, match="max_tokens is 10, but a sample has 11 tokens"):
        partition([3, 11], 1, 8, 10)
