"""Samples end to end are put into few tables, with little padding."""

import numpy as np

from samestep.data import ragged
from samestep.data.ragged import split_by_length


def test_samples_of_like_length_share_a_table():
    parts = [part.tolist() for part in split_by_length(np.array([128, 120, 60, 60, 60, 60, 30, 30, 30, 29, 3]))]
    assert parts == [[128, 120], [60, 60, 60, 60], [30, 30, 30, 29, 3]]
    for lengths in ([5], [5, 4, 3], [90] * 50):
        assert [part.tolist() for part in split_by_length(np.array(lengths))] == [lengths]
    rng = np.random.default_rng(0)
    for _ in range(100):
        lengths = np.sort(rng.integers(1, 512, size=rng.integers(1, 100)))[::-1]
        parts = split_by_length(lengths)
        assert 1 <= len(parts) <= ragged.MAX_TABLES
        assert np.concatenate(parts).tolist() == lengths.tolist()
        unit = 1 << max(0, len(lengths).bit_length() - 4)
        assert not any(len(part) % unit for part in parts[:-1]), "tables have few sizes"
