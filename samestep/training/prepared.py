"""Reads DataLoaders that accelerate has prepared so that every sample comes once."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
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
            "samples from its beginning: do not prepare it, and deal the stream out yourself: islice(stream, "
            "accelerator.process_index, None, accelerator.num_processes)"
        )
    if isinstance(sampler, DistributedSampler) and not sampler.drop_last and sampler.total_size != len(sampler.dataset):
        raise UsageError(
            f"dataloader has a DistributedSampler, which repeats {sampler.total_size - len(sampler.dataset)} of "
            f"{len(sampler.dataset)} samples: leave it out, and use accelerator.prepare(dataloader) or exact_steps"
        )


@contextlib.contextmanager
def without_repeats(accelerator: Accelerator, loader: Iterable) -> Iterator[Iterator]:
    """Iterate once over a loader, prepared or not, without the samples that accelerate repeats to make the last batches even.

    So processes may have different numbers of batches.
    """
    shard = getattr(loader, "batch_sampler", None)
    if isinstance(loader, DataLoaderDispatcher):
        yield _trim_last_batch(accelerator, loader)
    elif isinstance(shard, BatchSamplerShard) and shard.even_batches:
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


class EvenShard(BatchSamplerShard):
    """A shard without repeated samples, whose length on every process is the length of the longest shard."""

    def __len__(self) -> int:
        whole = len(self.batch_sampler)
        if self.split_batches:
            return whole
        return whole // self.num_processes if self.drop_last else -(-whole // self.num_processes)


def make_even(loader: Any) -> None:
    """Let a prepared loader repeat no samples, and say the same length on every process, for loops that count batches."""
    shard = getattr(loader, "batch_sampler", None)
    if type(shard) is BatchSamplerShard and shard.batch_size is not None:
        shard.even_batches, shard.__class__ = False, EvenShard
