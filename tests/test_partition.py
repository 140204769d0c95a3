"""The cut of a global batch: every sample in exactly one cell, balanced, within the caps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.cut.layout import shares
from samestep.cut.partition import partition
from samestep.errors import UsageError

batches = st.lists(st.integers(1, 128), min_size=1, max_size=200)


@given(lengths=batches, n=st.integers(1, 9), cap=st.integers(1, 64), tokens=st.none() | st.integers(128, 2000))
def test_every_sample_is_in_exactly_one_cell_within_the_caps(lengths, n, cap, tokens):
    processes = partition(lengths, n, cap, tokens)
    assert len(processes) == n
    places = [place for cells in processes for cell in cells for place in cell.tolist()]
    assert sorted(places) == list(range(len(lengths)))
    for cells in processes:
        for cell in cells:
            assert len(cell) <= cap
            assert tokens is None or len(cell) * max((lengths[p] for p in cell), default=0) <= tokens
        assert all(len(cell) for cell in cells) or len(cells) == 1, "an empty cell is the only one of its process"


@given(lengths=batches, n=st.integers(1, 9))
def test_processes_are_balanced(lengths, n):
    processes = partition(lengths, n, max_samples=8)
    sizes = [sum(len(cell) for cell in cells) for cells in processes]
    assert tuple(sizes) == shares(len(lengths), n)
    tokens = [sum(lengths[p] for cell in cells for p in cell) for cells in processes]
    assert max(tokens) - min(tokens) <= max(lengths)


@given(lengths=batches, n=st.integers(1, 4), cap=st.integers(1, 16))
def test_cells_are_sorted_by_length(lengths, n, cap):
    for cells in partition(lengths, n, cap):
        of_process = [lengths[p] for cell in cells for p in cell]
        assert of_process == sorted(of_process, reverse=True)


def test_little_is_padded():
    lengths = np.random.default_rng(0).integers(16, 129, size=256)
    padded = sum(len(c) * lengths[c].max() for cells in partition(lengths, 2, 16) for c in cells)
    shuffled = sum(16 * lengths[i : i + 16].max() for i in range(0, 256, 16))
    assert padded < 1.1 * lengths.sum()
    assert shuffled > 1.5 * lengths.sum()


def test_indivisible_batches():
    assert [[len(c) for c in cells] for cells in partition([5] * 10, 3, 2)] == [[2, 2], [2, 1], [2, 1]]
    assert [[len(c) for c in cells] for cells in partition([5, 5], 3, 2)] == [[1], [1], [0]]


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0)])
def test_caps_below_one(arguments):
    with pytest.raises(UsageError, match="must be 1 or more"):
        partition([1], *arguments)


def test_a_sample_longer_than_the_token_cap():
    with pytest.raises(UsageError, match="max_tokens is 10, but a sample has 11 tokens"):
        partition([3, 11], 1, 8, 10)
