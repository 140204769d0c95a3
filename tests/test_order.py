"""The samples of a step: each exactly once per epoch, any step at once, the same on every layout."""

from collections import Counter

import numpy as np
import pytest
from cases import thorough
from hypothesis import given
from hypothesis import strategies as st

from samestep.cut.order import Order, permute, sample_rng
from samestep.errors import UsageError

PRIMES = [2, 3, 7, 31, 97, 1009]


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(n, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@pytest.mark.parametrize("n", [4, thorough(5)])
def test_all_orders_are_equally_likely(n):
    """Chi-square over all n! orders: 100 expected of each; the bound is passed by chance once in 10^6."""
    orders = {4: 24, 5: 120}[n]
    counts = Counter(tuple(permute(np.arange(n), n, seed, 0)) for seed in range(100 * orders))
    chi_square = sum((counts[order] - 100) ** 2 / 100 for order in counts) + 100 * (orders - len(counts))
    assert chi_square < {4: 72, 5: 208}[n]


def test_places_and_samples_are_not_correlated():
    n = 10007
    for epoch in range(3):
        order = permute(np.arange(n), n, 1, epoch)
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.04
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.04


def test_seeds_and_epochs_differ():
    orders = {tuple(permute(np.arange(50), 50, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_any_place_of_a_huge_epoch_at_once():
    """No array of the size of the epoch is made: 4 places of 10^18 samples."""
    ids = permute(np.array([0, 1, 10**18 - 2, 10**18 - 1]), 10**18, 3, 5)
    assert len(set(ids.tolist())) == 4
    assert all(0 <= i < 10**18 for i in ids.tolist())


def test_the_order_never_changes():
    """Golden values: a change here breaks every checkpoint's data position."""
    assert permute(np.arange(10), 10, 42, 0).tolist() == [1, 3, 4, 9, 8, 2, 5, 7, 6, 0]
    assert sample_rng(42, 1, 2, 3).integers(1000, size=4).tolist() == [957, 482, 152, 264]


@pytest.mark.parametrize("n", PRIMES)
@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_carry_uses_every_sample_once_per_epoch(n, size):
    order = Order(n, size, seed=1)
    epochs, ids = (
        np.concatenate(parts) for parts in zip(*(order.samples(t) for t in range(-(-3 * n // size))), strict=True)
    )
    assert all(len(order.samples(t)[0]) == size for t in range(3))
    for epoch in range(3):
        assert sorted(ids[epochs == epoch].tolist()) == list(range(n))
    assert order.steps_per_epoch * size == n


@pytest.mark.parametrize("n", PRIMES)
@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_keep_ends_each_epoch_with_a_smaller_step(n, size):
    order = Order(n, size, seed=1, epoch_end="keep")
    per_epoch = -(-n // size)
    assert order.steps_per_epoch == per_epoch
    for epoch in range(3):
        steps = [order.samples(t) for t in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
        assert sorted(np.concatenate([ids for _, ids in steps]).tolist()) == list(range(n))
        assert all((epochs == epoch).all() for epochs, _ in steps)
        assert len(steps[-1][1]) == (n - 1) % size + 1


@pytest.mark.parametrize("n", PRIMES)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_drop_leaves_out_the_rest_of_each_epoch(n, size):
    if size > n:
        with pytest.raises(UsageError, match="exceeds"):
            Order(n, size, seed=1, epoch_end="drop")
        return
    order = Order(n, size, seed=1, epoch_end="drop")
    per_epoch = n // size
    remainders = set()
    for epoch in range(20):
        ids = np.concatenate([order.samples(t)[1] for t in range(epoch * per_epoch, (epoch + 1) * per_epoch)]).tolist()
        assert len(ids) == len(set(ids)) == per_epoch * size
        remainders.add(tuple(sorted(set(range(n)) - set(ids))))
    assert n % size == 0 or n < 10 or len(remainders) > 1, "other samples must be left out in each epoch"


def test_captcha_steps_of_the_source_document():
    """50,030 samples, B 3072, drop: 16 steps per epoch, 2,400 in 150 epochs; 1536 leaves 32.57 steps."""
    order = Order(50030, 3072, 0, "drop")
    assert (order.steps_per_epoch, order.num_steps(150)) == (16, 2400)
    assert float(Order(50030, 1536, 0).steps_per_epoch) == pytest.approx(32.57, abs=0.005)
    assert Order(100, 30, 0).num_steps(1) == 4
    assert Order(100, 10, 0).num_steps(0.1) == 1


def test_samples_have_their_own_numbers():
    draws = {sample_rng(*key).random() for key in np.ndindex(3, 3, 10, 10)}
    assert len(draws) == 900
    assert sample_rng(1, 2, 3, 4).random() == sample_rng(1, 2, 3, 4).random()


@given(seed=st.integers(-(2**63), 2**64), stream=st.integers(0, 100), counter=st.tuples(*[st.integers(0, 2**63)] * 2))
def test_numbers_are_those_of_philox_with_this_key_and_counter(seed, stream, counter):
    philox = np.random.Philox(key=np.array([seed % 2**64, stream], np.uint64), counter=np.array([0, 0, *counter], "u8"))
    assert np.array_equal(sample_rng(seed, stream, *counter).bit_generator.random_raw(9), philox.random_raw(9))


def test_bad_arguments():
    for arguments in ((0, 1, 0), (1, 0, 0), (1, 1, 0, "wrap")):
        with pytest.raises(UsageError):
            Order(*arguments)


# ------------------------------------------------------------------------------------------------------------- mixtures


@pytest.mark.parametrize("epoch_end", ["carry", "keep", "drop"])
def test_a_mixture_uses_each_source_as_often_as_it_says(epoch_end):
    """Uses of the samples of a source differ by at most one at any time, if no epoch leaves a rest out."""
    mixture, size = ((7, 7), (5, 15), (40, 13)), 6
    order = Order(35, size, seed=3, epoch_end=epoch_end, mixture=mixture)
    num_steps = 8 * 35 // size
    parts = [order.samples(step) for step in range(num_steps)]
    passes, ids = (np.concatenate(values) for values in zip(*parts, strict=True))
    assert len(set(zip(passes.tolist(), ids.tolist(), strict=True))) == len(ids), "no use comes twice"
    assert ids.min() == 0
    assert ids.max() == 51
    if epoch_end == "keep":
        per_epoch = int(order.steps_per_epoch)
        for epoch in range(1, 8):
            done = np.concatenate([ids for _, ids in parts[: epoch * per_epoch]])
            counts = np.bincount(done, minlength=52)
            for first, (num_samples, num_uses) in zip((0, 7, 12), mixture, strict=True):
                source = counts[first : first + num_samples]
                assert source.sum() == epoch * num_uses
                assert source.max() - source.min() <= 1


def test_a_mixture_of_equal_weights_is_another_order_of_the_same_samples():
    order = Order(12, 5, seed=3, mixture=((7, 7), (5, 5)))
    parts = [order.samples(step) for step in range(12)]  # five epochs
    passes, ids = (np.concatenate(values) for values in zip(*parts, strict=True))
    for number in range(5):
        assert sorted(ids[12 * number : 12 * (number + 1)].tolist()) == list(range(12))
        assert set(passes[12 * number : 12 * (number + 1)].tolist()) == {number}
    assert [Order(12, 5, seed=3, mixture=((7, 7), (5, 5))).samples(9)[1].tolist()] == [parts[9][1].tolist()]
    first, second = ids[:12].tolist(), ids[12:24].tolist()
    assert first != second
