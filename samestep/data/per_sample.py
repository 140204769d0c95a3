"""Makes collate functions that draw random numbers (masks of a masked language model, ...) functions of the sample, not of the
batch."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from samestep.cut.order import sample_rng
from samestep.errors import UsageError

STREAM = 1000  # of random numbers, apart from the streams of the recipes' own sources, which have one seed for all


class PerSample:
    """A collator whose draws for a sample depend on (seed, epoch, sample id) and on nothing else. See `per_sample`."""

    def __init__(self, collator: Any, seed: int):
        if getattr(collator, "seed", None) is not None:
            raise UsageError(
                f"collator has a seed of its own, {collator.seed}: leave it out, per_sample gives every sample its own"
            )
        self.collator, self.seed = collator, seed
        self.pads_left = getattr(getattr(collator, "tokenizer", None), "padding_side", "right") == "left"

    def __call__(self, samples: Sequence[Any], keys: Sequence[tuple[int, int]] | None = None) -> Mapping[str, Any]:
        """Collate samples.

        Args:
            samples: as the collator takes them.
            keys: (epoch, sample id) of each sample.

        Raises:
            UsageError: no keys (a DataLoader does not know them), or batches that are no mapping of tensors.
        """
        if keys is None:
            raise UsageError(
                "per_sample has to know which samples it collates, which a DataLoader does not say: give it to exact_steps, as "
                "collate"
            )
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            batch = self.collator(list(samples))
            for row, (sample, key) in enumerate(zip(samples, keys, strict=True)):
                self._seed(*key)
                self._write(batch, row, self.collator([sample]))
        finally:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])
        return batch

    def _seed(self, epoch: int, sample_id: int) -> None:
        number = int(sample_rng(self.seed, STREAM, epoch, sample_id).integers(2**32))
        torch.default_generator.manual_seed(number)
        np.random.seed(number)
        random.seed(number)

    def _write(self, batch: Mapping[str, Any], row: int, single: Mapping[str, Any]) -> None:
        """Put a sample that was collated by itself, [1, L], into its row of the batch, [B, L' >= L].

        The padding behind the sample (before it, if the tokenizer pads on the left) stays as it is in the batch.
        """
        if not isinstance(single, Mapping) or not all(isinstance(value, torch.Tensor) for value in single.values()):
            raise UsageError(
                f"collator returned {type(single).__name__}, must return a mapping of tensors (return_tensors='pt')"
            )
        for name, value in single.items():
            # Each axis after the first: the sample's `length` numbers go to the start or the end of the batch's `size`
            sizes = zip(value.shape[1:], batch[name].shape[1:], strict=True)
            places = tuple(slice(size - length, size) if self.pads_left else slice(length) for length, size in sizes)
            batch[name][(row, *places)] = value[0]


def per_sample(collator: Callable[[list], Mapping[str, torch.Tensor]], seed: int) -> PerSample:
    """Make a collator's draws (`DataCollatorForLanguageModeling`'s masks) a function of the seed, the epoch and the sample.

    The collator sees every sample once by itself, with torch, numpy and random seeded for it, and all of them once together,
    for the padding. So the same sample is masked in the same way in every cut of the step, and otherwise in the next epoch.

    Args:
        collator: list of samples -> mapping of tensors [samples, ...], padded on the right or on the tokenizer's side.
        seed: any integer.

    Returns:
        A collate function for `exact_steps`, which tells it the epoch and the id of each sample.

    Raises:
        UsageError: a collator with a seed of its own.
    """
    return PerSample(collator, seed)
