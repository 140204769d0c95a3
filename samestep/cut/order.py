"""The samples of each step: a pure function of (seed, step, dataset length), any step at once, no state.

An epoch's order is a seeded bijection of [0, n), evaluated only at the places that are needed, so it costs the same at step 0
and at step 10^7, and for 10^3 and 10^9 samples.
"""

import dataclasses
import fractions
import functools
import math
from typing import Any

import numpy as np

from samestep.cut.layout import num_steps, steps_per_epoch
from samestep.cut.spans import Spans

# Rounds of the Feistel network. Four make a pseudo-random permutation when the round function is random (Luby and
# Rackoff 1988, https://doi.org/10.1137/0217022); small domains want more.
ROUNDS = 12
GROUP = 2048  # samples whose order is computed at once


def _mix(x: Any) -> Any:
    """Apply the finaliser of splitmix64 (Steele, Lea and Flood 2014): uint64 -> uint64, a bijection with full avalanche."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, num_samples: int, seed: int, epoch: np.ndarray | int) -> np.ndarray:
    """Compute the seeded bijection of [0, num_samples) of each epoch, at some places.

    A generalised Feistel network over a x b places, a b >= n, with cycle walking: a place outside [0, n) is permuted
    again until it falls inside (Black and Rogaway 2002, https://doi.org/10.1007/3-540-45760-7_9). a and b are about
    sqrt(n), so few places walk.

    Args:
        index: places in the epoch, integers in [0, num_samples), any shape.
        num_samples: n, at least 1.
        seed: any integer.
        epoch: epoch of each place, integers that broadcast to `index`, or one epoch for all places.

    Returns:
        Sample ids, int64, same shape as `index`.

    >>> sorted(permute(np.arange(7), 7, seed=0, epoch=3).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """
    index, epoch = np.broadcast_arrays(np.asarray(index, np.int64), np.asarray(epoch, np.int64))
    a = math.isqrt(num_samples - 1) + 1
    b = -(-num_samples // a)
    with np.errstate(over="ignore"):  # products of uint64 are meant modulo 2^64
        key = _mix(_mix(np.uint64(seed % 2**64) + np.uint64(0x9E3779B97F4A7C15)) ^ epoch.astype(np.uint64))
        result, active = index.copy(), np.ones(index.shape, bool)
        while active.any():
            # A place p in [0, a b) is the pair (left, right) = (p // b, p % b), each [active places]. A round adds noise from
            # one half to the other, modulo the size of that other half. A subtraction would undo it: the round is a bijection.
            left, right, keys = result[active] // b, result[active] % b, key[active]
            for number in range(ROUNDS):
                source, size = (right, a) if number % 2 == 0 else (left, b)
                noise = _mix(_mix(keys + np.uint64(number)) ^ source.astype(np.uint64))
                step = (noise % np.uint64(size)).astype(np.int64)
                if number % 2 == 0:
                    left = (left + step) % a
                else:
                    right = (right + step) % b
            result[active] = left * b + right
            active &= result >= num_samples
    return result


@dataclasses.dataclass(frozen=True)
class Order:
    """The samples of every step.

    Attributes:
        num_samples: n, length of the dataset.
        global_batch_size: B; the largest one where the batch grows.
        seed: seed of the order of every epoch.
        epoch_end: treatment of the rest when B does not divide n. `carry`: the stream of epochs is cut every B samples, so a
            step may hold the last samples of one epoch and the first samples of the next. `keep`: the epoch's last step is
            smaller. `drop`: the rest of the epoch is left out (other samples in each epoch).
        mixture: of several sources, which lie one after the other in the dataset, for each its number of samples, and how many
            of them an epoch uses; `num_samples` are the uses. Empty: an epoch uses each sample once. See `find_uses`.
        stages: of a batch that grows, (place, size), see `spans.Spans`: the same stream of samples, cut elsewhere. Empty: every
            step has B samples.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    epoch_end: str = "carry"
    mixture: tuple[tuple[int, int], ...] = ()
    stages: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        steps_per_epoch(self.num_samples, self.global_batch_size, self.epoch_end)  # checks the rules

    @property
    def steps_per_epoch(self) -> fractions.Fraction:
        """Optimizer steps per epoch, of B samples; not whole for `carry` when B does not divide n."""
        return steps_per_epoch(self.num_samples, self.global_batch_size, self.epoch_end)

    @functools.cached_property
    def spans(self) -> Spans:
        """Part of the stream of samples that each step holds."""
        return Spans(self.num_samples, self.epoch_end, self.stages or ((0, self.global_batch_size),))

    def count_epochs(self, step: int) -> float:
        """Count the epochs, a fraction, that are done after a step (0 is the first)."""
        if self.stages:
            return self.spans.find(step)[1] / self.num_samples
        return float((step + 1) / self.steps_per_epoch)

    def num_steps(self, num_epochs: float) -> int:
        """Count the steps of `num_epochs` epochs, rounded up."""
        return num_steps(self.steps_per_epoch, num_epochs)

    def samples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the samples of a step (0 is the first).

        Returns:
            epoch, int64 [S], and sample id, int64 [S]; S = B except in the last step of an epoch under `keep`, and where the
            batch grows. Of a mixture, a sample's pass over its source instead of the epoch: so no pair of both comes twice in
            a training.

        >>> order = Order(num_samples=5, global_batch_size=3, seed=0)
        >>> [order.samples(step)[0].tolist() for step in range(3)]
        [[0, 0, 0], [0, 0, 1], [1, 1, 1]]
        """
        # A permutation costs about the same for one place and for a thousand: small steps are computed many at a time.
        per_group = max(1, GROUP // self.global_batch_size)
        epoch, ids, ends = _compute_group(self, step // per_group, per_group)
        # ends [per_group + 1] holds the borders of the group's steps
        place = step % per_group
        return epoch[ends[place] : ends[place + 1]], ids[ends[place] : ends[place + 1]]

    def _find_places(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Find epoch and place in the epoch's order of each sample of a step, both int64 [S]."""
        return np.divmod(np.arange(*self.spans.find(step), dtype=np.int64), self.num_samples)


@functools.lru_cache(maxsize=4)
def _compute_group(order: Order, group: int, per_group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute epoch and sample id of all samples of steps [group * per_group, (group + 1) * per_group).

    Returns:
        epoch and sample id, both int64 [samples of the group], and ends, int64 [per_group + 1]: step i of the group has the
        samples [ends[i], ends[i + 1]).
    """
    places = [order._find_places(step) for step in range(group * per_group, (group + 1) * per_group)]
    epoch, index = (np.concatenate(parts) for parts in zip(*places, strict=True))
    ends = np.cumsum([0] + [len(index) for _, index in places])
    ids = permute(index, order.num_samples, order.seed, epoch)
    if order.mixture:
        epoch, ids = find_uses(ids, epoch, order.mixture, order.seed)
    for array in (epoch, ids):
        array.setflags(write=False)  # they belong to the cache
    return epoch, ids, ends


def find_uses(
    places: np.ndarray, epoch: np.ndarray, mixture: tuple[tuple[int, int], ...], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the samples of a mixture that places of its epochs stand for.

    The uses of a source go through its samples in passes, each of which uses every sample once, in an order of its own. An
    epoch ends where it ends, in the middle of a pass perhaps, and the next one goes on from there. So after any number of
    epochs no sample of a source was used more than once more often than another one.

    Args:
        places: of uses in their epoch, int64 [S]: those of the first source, then those of the second, ...
        epoch: of each place, int64 [S].
        mixture: see `Order`.
        seed: any integer.

    Returns:
        pass over the source, int64 [S], and number of the sample among those of all sources, int64 [S].

    >>> epochs = np.arange(3).repeat(6)
    >>> passes, ids = find_uses(np.tile(np.arange(6), 3), epochs, ((3, 2), (2, 4)), seed=0)
    >>> np.bincount(ids).tolist(), passes[ids < 3].tolist(), passes[ids >= 3].tolist()
    ([2, 2, 2, 6, 6], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    """
    passes, ids = np.zeros_like(epoch), np.zeros_like(places)
    first_use = first_sample = 0
    for number, (num_samples, num_uses) in enumerate(mixture):
        chosen = (first_use <= places) & (places < first_use + num_uses)
        uses = epoch[chosen] * num_uses + places[chosen] - first_use
        passes[chosen] = uses // num_samples
        # Seeds are less than 2^32: so no source has the order of another one, or that of the epochs
        source_seed = seed + ((number + 1) << 32)
        ids[chosen] = first_sample + permute(uses % num_samples, num_samples, source_seed, passes[chosen])
        first_use, first_sample = first_use + num_uses, first_sample + num_samples
    return passes, ids


def sample_rng(seed: int, stream: int, epoch: int, sample_id: int) -> np.random.Generator:
    """Make the generator of one sample's random numbers in one epoch.

    The numbers are the same on every machine and process, whatever random numbers were drawn earlier.

    Philox4x64 keyed by (seed, stream) and counted by (epoch, sample_id): distinct arguments give disjoint sequences
    (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405).

    Args:
        seed: the recipe's seed.
        stream: number of the purpose (masks, pairs, ...), so that two purposes do not share random numbers.
        epoch: 0 or more.
        sample_id: 0 or more.
    """
    key: Any = _Key(np.array([seed % 2**64, stream], np.uint64))
    return np.random.Generator(np.random.Philox(key, counter=np.array([0, 0, epoch, sample_id], np.uint64)))


class _Key(np.random.bit_generator.ISeedSequence):
    """A key that Philox takes unchanged, where numpy would hash a seed into a key.

    `Philox(key=...)` does the same in 8 microseconds instead of 3: it asks the system for a random seed first.
    """

    def __init__(self, key: np.ndarray):
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return self.key
