"""Reads DataLoaders, prepared by accelerate or not: every sample once, in the epoch that the caller has set."""

import contextlib
import operator
from collections.abc import Iterable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SkipBatchSampler,
    SkipDataLoader,
)
from accelerate.utils import find_batch_size, slice_tensors
from torch.utils.data import DistributedSampler

from samestep.errors import UsageError


def check(accelerator: Accelerator, loader: Any) -> None:
    """Refuse a loader that repeats samples, if nobody can tell which ones.

    Raises:
        UsageError: an `IterableDataset` that accelerate deals out by itself, a `DistributedSampler` that repeats samples.
    """
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    if isinstance(dataset, IterableDatasetShard) and accelerator.num_processes > 1 and not dataset.drop_last:
        raise UsageError(
            "dataloader is prepared with dispatch_batches=False, where accelerate fills the last batch of a stream with "
            "samples from its beginning. Do not prepare it, and deal the stream out yourself: islice(stream, "
            "accelerator.process_index, None, accelerator.num_processes)"
        )
    if isinstance(sampler, DistributedSampler) and not sampler.drop_last and sampler.total_size != len(sampler.dataset):
        raise UsageError(
            f"dataloader has a DistributedSampler, which repeats {sampler.total_size - len(sampler.dataset)} of "
            f"{len(sampler.dataset)} samples: leave it out, and use accelerator.prepare(dataloader) or exact_steps"
        )


def find_shard(loader: Any) -> BatchSamplerShard | None:
    """Find what deals the batches out to the processes, also below `skip_first_batches`; None: nothing does."""
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        while isinstance(sampler, SkipBatchSampler):
            sampler = sampler.batch_sampler
        if isinstance(sampler, BatchSamplerShard):
            return sampler
    return None


def num_batches(loader: Any) -> int | None:
    """Count the batches of an epoch on this process; None: the loader does not know."""
    try:
        # A prepared stream is asked for all of its batches, also where the first ones are skipped
        num_skipped = 0 if isinstance(loader, SkipDataLoader) else getattr(loader, "skip_batches", 0)
        return max(0, len(loader) - num_skipped)
    except (TypeError, NotImplementedError):  # as a DataLoader of a stream
        return None


def find_epoch_problems(loader: Any, num_epochs: int) -> list[str]:
    """Find what forbids to read a loader in several epochs: a line for each."""
    remedy = f"read one epoch at a time, and set it yourself: for epoch in range({num_epochs}): ... exact_windows(...)"
    if isinstance(loader, Iterator):
        return [
            f"num_epochs is {num_epochs}, but dataloader is an iterator, which can be read once: give the DataLoader itself"
        ]
    if getattr(loader, "skip_batches", 0) or isinstance(getattr(loader, "batch_sampler", None), SkipBatchSampler):
        return [f"num_epochs is {num_epochs}, but dataloader skips its first batches in every epoch: {remedy}"]
    return [
        f"num_epochs is {num_epochs}, but {type(part).__name__} has set_epoch and no attribute epoch, from which to go on: "
        f"{remedy}"
        for part in _find_parts_with_epoch(loader)
        if _get_epoch(part) is None
    ]


def iterate_epochs(loader: Any, num_epochs: int) -> Iterator[int]:
    """Iterate over 0, 1, ...: the first epoch is the caller's, and the later ones go on from it.

    A prepared loader goes on by itself. What has `set_epoch` otherwise is set to the caller's epoch plus 1, 2, ...
    """
    parts = [(part, _get_epoch(part)) for part in _find_parts_with_epoch(loader)] if num_epochs > 1 else []
    for number in range(num_epochs):
        if number:
            for part, first in parts:
                part.set_epoch(first + number)
        yield number


def _find_parts_with_epoch(loader: Any) -> list[Any]:
    """Find what has `set_epoch`, outermost first: the loader itself, or in it samplers and datasets."""
    if isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
        return []  # it sets theirs in each epoch
    found: list[Any] = []
    todo, seen = [loader], set()
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if hasattr(part, "set_epoch"):
            found.append(part)
            continue
        names = ("batch_sampler", "sampler", "dataset")
        todo += [value for name in names if (value := getattr(part, name, None)) is not None]
    return found


def _get_epoch(part: Any) -> int | None:
    """Read the epoch, a number, a tensor or a value that workers share; None: there is none."""
    epoch = getattr(part, "epoch", None)
    try:
        return operator.index(getattr(epoch, "value", epoch))
    except TypeError:
        return None


@contextlib.contextmanager
def without_repeats(accelerator: Accelerator, loader: Iterable) -> Iterator[Iterator]:
    """Iterate once over a loader, prepared or not, without the samples that accelerate repeats to make the last batches even.

    So processes may have different numbers of batches.
    """
    shard = find_shard(loader)
    if isinstance(loader, DataLoaderDispatcher):
        yield _trim_last_batch(accelerator, loader)
    elif shard is not None and shard.even_batches:
        shard.even_batches = False
        try:
            yield iter(loader)
        finally:
            shard.even_batches = True
    else:
        yield iter(loader)


def _trim_last_batch(accelerator: Accelerator, loader: DataLoaderDispatcher) -> Iterator[Any]:
    """Iterate over a loader that one process reads for all, and trim the last batch.

    The last batch of all processes together has `remainder` samples, and is filled to a multiple of N with the first ones.
    """
    for batch in loader:
        if loader.end_of_dataloader and loader.remainder > 0:
            size = find_batch_size(batch)
            # Process i has samples i * size to (i + 1) * size - 1 of it, of which only the first `remainder` are new
            num_samples = min(size, loader.remainder - accelerator.process_index * size)
            if num_samples <= 0:
                continue
            batch = slice_tensors(batch, slice(num_samples)) if num_samples < size else batch
        yield batch
