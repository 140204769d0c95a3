"""Finds the samples that a micro-batch computes, from the batches that DataLoaders drew and the tensors that the model got."""

import contextlib
import copy
import dataclasses
import hashlib
import random
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from stepaudit._internals import count_returned, find_table_rows, get_dataset, tree_leaves

MAX_ASKED = 2  # batches of which collate is asked whether it draws
MAX_PENDING = 256  # batches that were drawn and not used; older ones are forgotten


@dataclasses.dataclass(eq=False)
class DrawnBatch:
    """A batch that a DataLoader returned.

    Attributes:
        dataset: id of the loader's dataset.
        samples: indices in the dataset; None if the loader has none.
        digests: hashes of the samples before they were collated; None if they were not seen.
        epoch: how many times the dataset was begun before.
        batch: the value that the program got. A reference is held, so that no other tensor takes its place in memory.
    """

    dataset: int
    samples: list[int] | None
    digests: list[str] | None
    epoch: int
    batch: Any

    def __post_init__(self) -> None:
        self.leaves = [
            leaf for leaf in tree_leaves(to_plain(self.batch)) if isinstance(leaf, torch.Tensor) and leaf.ndim
        ]
        self.storages = {find_storage(leaf) for leaf in self.leaves if leaf.numel()}

    @property
    def num_samples(self) -> int | None:
        items = self.digests if self.samples is None else self.samples
        return None if items is None else len(items)

    def find_largest(self) -> list[torch.Tensor]:
        """Find the tensors that tell a batch from others: the largest, for labels of a few samples may be anybody's."""
        largest = max((leaf.numel() for leaf in self.leaves), default=0)
        return [leaf for leaf in self.leaves if 2 * leaf.numel() >= largest]

    def find_rows(self, tensors: list[torch.Tensor]) -> list[int] | None:
        """Find the samples of this batch that the tensors hold.

        Returns:
            Places in the batch, one per row of a tensor; None if the tensors hold the whole batch, or if rows cannot be told.
        """
        leaves = sorted((leaf for leaf in self.leaves if len(leaf) == self.num_samples), key=torch.numel, reverse=True)
        for tensor in tensors:
            for leaf in leaves:
                if len(tensor) >= len(leaf) or tensor.shape[1:] != leaf.shape[1:]:
                    continue
                numbers_by_hash = {name: number for number, name in enumerate(map(_hash, leaf))}
                rows = [numbers_by_hash.get(_hash(row)) for row in tensor]
                if None not in rows:
                    return rows
        return None


@dataclasses.dataclass(frozen=True)
class UsedBatch:
    """The part of a batch that a micro-batch computes: as of `DrawnBatch`, None for what is unknown."""

    samples: list[int] | None = None
    digests: list[str] | None = None
    epoch: int | None = None
    batch: Any = None


class Batches:
    """Holds batches that were drawn until a micro-batch uses them."""

    def __init__(self) -> None:
        self.pending_batches: deque[DrawnBatch] = deque(maxlen=MAX_PENDING)
        self.current_batch: DrawnBatch | None = None  # used by the last micro-batch
        self.newest_dataset: int | None = None  # of the batch that was drawn last
        self.evaluated_datasets: set[int] = set()  # datasets whose batches a model in evaluation was given
        self.digests: deque[list[str] | None] = deque(maxlen=MAX_PENDING)
        self.draws_in_collate, self.num_asked = False, 0
        self.num_begun: Counter[int] = Counter()  # epochs of each dataset

    def draw_index(self, next_index: Callable, iterator: Any) -> Any:
        """Draw indices in the place of a DataLoader's method, and note them."""
        index = next_index(iterator)
        iterator.__dict__.setdefault("_audit_drawn", deque()).append(index)
        return index

    def fetch(self, fetch: Callable, fetcher: Any, index: Any) -> Any:
        """Make a batch of indices in the place of a fetcher's method, and hash its samples before they are collated."""
        collate = fetcher.collate_fn

        def look(samples: Any) -> Any:
            # Without automatic collation the samples are batches already.
            self.digests.append(_hash_samples(samples) if fetcher.auto_collation else None)
            states = _read_generators()
            batch = collate(samples)
            self.draws_in_collate |= states != _read_generators()
            if self.num_asked < MAX_ASKED and fetcher.auto_collation:
                self.num_asked += 1
                with _keep_generators():
                    self.draws_in_collate |= _differs_again(collate, samples)
            return batch

        fetcher.collate_fn = look
        try:
            return fetch(fetcher, index)
        finally:
            fetcher.collate_fn = collate

    def draw_batch(self, next_batch: Callable, iterator: Any) -> Any:
        """Return the next batch in the place of a DataLoader's method, and note it as drawn."""
        self.digests.clear()
        is_first = count_returned(iterator) == 0
        batch = next_batch(iterator)
        index = iterator.__dict__["_audit_drawn"].popleft()
        digests = self.digests.pop() if len(self.digests) == 1 else None  # workers collate elsewhere
        self.newest_dataset = id(get_dataset(iterator))
        self.num_begun[self.newest_dataset] += is_first
        epoch, samples = self.num_begun[self.newest_dataset] - 1, _find_samples(get_dataset(iterator), index)
        self.pending_batches.append(DrawnBatch(self.newest_dataset, samples, digests, epoch, batch))
        return batch

    def count_pending_samples(self) -> int | None:
        """Return the number of samples of the first batch that was drawn and not used; None if it is unknown."""
        return self.pending_batches[0].num_samples if self.pending_batches else None

    def evaluate(self) -> None:
        """Note that the loader that drew last serves a model in evaluation, which computes without gradients."""
        if self.newest_dataset is not None and (
            self.current_batch is None or self.current_batch.dataset != self.newest_dataset
        ):
            self.evaluated_datasets.add(self.newest_dataset)

    def use(self, calls: Iterable[tuple[Any, tuple, dict]]) -> UsedBatch:
        """Find the batch that a micro-batch computes, and mark it as used.

        The batch is one whose tensors the model was given, as they are or copied. If there is none, it is the next batch of the
        loader that drew last, unless that loader is used for evaluation.

        Args:
            calls: module, args and kwargs of each call of the model since the last backward.

        Returns:
            What is known of it.
        """
        tensors = [
            leaf
            for _, *call in calls
            for leaf in tree_leaves(to_plain(call))
            if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.numel()
        ]
        storages = {find_storage(leaf) for leaf in tensors}
        match = next((batch for batch in self.pending_batches if batch.storages & storages), None)
        if match is None and self.current_batch is not None and self.current_batch.storages & storages:
            match = self.current_batch
        if match is None:
            copies = [*self.pending_batches, *([self.current_batch] if self.current_batch else [])]
            match = next(
                (batch for batch in copies if any(_is_copy(a, b) for a in batch.find_largest() for b in tensors)), None
            )
        if match is None and (match := self._find_next()) is not None and self._is_repeated(match, tensors):
            self.pending_batches.remove(match)
            return UsedBatch(epoch=match.epoch)
        if match is None:
            return UsedBatch()
        rows = match.find_rows(tensors) if match.num_samples else None
        is_again = match is self.current_batch and rows is None and not _is_whole(match, tensors)
        if match in self.pending_batches:
            self.pending_batches.remove(match)
        self.current_batch = match

        def select(values: list | None) -> list | None:
            if values is None:
                return None
            # A second part of a batch whose parts cannot be told apart: its samples were counted with the first part.
            return [] if is_again else values if rows is None else [values[row] for row in rows]

        return UsedBatch(select(match.samples), select(match.digests), match.epoch, match.batch)

    def _find_next(self) -> DrawnBatch | None:
        """Find the next batch of the loader that drew last, unless that loader is used for evaluation."""
        if self.newest_dataset in self.evaluated_datasets:
            return None
        return next((batch for batch in self.pending_batches if batch.dataset == self.newest_dataset), None)

    def _is_repeated(self, batch: DrawnBatch, tensors: list[torch.Tensor]) -> bool:
        """Tell whether a loader returns the samples of the batch before again, for the program to compute other rows of them.

        So do loaders of prompts whose answers are generated all at once: which samples the rows are of is not known then.
        """
        before = self.current_batch
        is_same = before is not None and (before.samples, before.digests) == (batch.samples, batch.digests)
        return is_same and batch.num_samples is not None and not _is_whole(batch, tensors)


def _read_generators() -> tuple[bytes, Any, Any]:
    """Read the states of the global generators of torch, random and NumPy, to be compared."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), _freeze(np.random.get_state(legacy=False))


def _freeze(state: Any) -> Any:
    """Return what equals a copy of a generator's state, and nothing else: its arrays as bytes, its mappings as tuples.

    >>> _freeze({"state": {"key": np.array([1, 2], np.uint8)}, "has_gauss": 0})
    (('state', (('key', b'\\x01\\x02'),)), ('has_gauss', 0))
    """
    if isinstance(state, dict):
        return tuple((name, _freeze(value)) for name, value in state.items())
    return state.tobytes() if isinstance(state, np.ndarray) else state


@contextlib.contextmanager
def _keep_generators() -> Iterator[None]:
    """Put the global generators back behind a call that the program does not make."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _differs_again(collate: Callable, samples: Any) -> bool:
    """Tell whether a copy of a collating object makes two batches of the same samples; a function has no copy."""
    if isinstance(collate, types.FunctionType | types.BuiltinFunctionType):
        return False
    try:
        copied = copy.deepcopy(collate)
        first, second = (tree_leaves(to_plain(copied(copy.deepcopy(samples)))) for _ in range(2))
    except Exception:  # of any kind: it is somebody's program, and is called once more than it expects
        return False
    pairs = zip(first, second, strict=False)
    return len(first) != len(second) or any(
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and not (a.shape == b.shape and bool((a == b).all()))
        for a, b in pairs
    )


def _is_whole(batch: DrawnBatch, tensors: list[torch.Tensor]) -> bool:
    """Tell whether the model was given as many rows as the batch has; True as well where no tensor shows the number."""
    return not tensors or batch.num_samples is None or any(len(leaf) >= batch.num_samples for leaf in tensors)


def describe_row(row: torch.Tensor) -> list[str]:
    """Describe a row [any shape] by its shape and hashes: whole, without padding at its end, without it at its beginning.

    Padding is whatever repeats the last entry, or the first one. Of a row with several dimensions (frames behind their bands, a
    picture) further hashes are without padding at the end of each, and of all but the first.
    """
    row = row.detach().cpu()
    if row.ndim == 0 or len(row) < 2:
        return [str(tuple(row.shape)), *[_hash(row)] * 3]
    ends = [_find_end(row, dimension) for dimension in range(row.ndim)] if row.numel() else [0] * row.ndim
    flipped = row.flip(0)
    begin = len(row) - (_find_end(flipped, 0) if row.numel() else 0)
    parts = [row, row[: ends[0]], row[begin:]]
    if row.ndim > 1:
        parts += [row.narrow(dimension, 0, end) for dimension, end in enumerate(ends) if dimension and end]
    if row.ndim > 2 and all(ends[1:]):
        parts.append(row[(slice(None), *(slice(0, end) for end in ends[1:]))])
    return [str(tuple(row.shape)), *map(_hash, parts)]


def _find_end(row: torch.Tensor, dimension: int) -> int:
    """Find where the entries begin that all repeat the last one of a dimension."""
    entries = row.movedim(dimension, 0).reshape(row.shape[dimension], -1)
    differences = (entries != entries[-1]).any(1).nonzero()
    return int(differences[-1]) + 1 if len(differences) else 0


def sum_hashes(tensor: torch.Tensor) -> int:
    """Return a number that depends on all numbers of a tensor, in whatever order they are: a sum of hashes modulo 2^64."""
    numbers = np.frombuffer(_to_bytes(tensor), dtype=np.uint64)
    numbers = (numbers ^ (numbers >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return int((numbers ^ (numbers >> np.uint64(32))).sum(dtype=np.uint64))


def _find_samples(dataset: Any, index: Any) -> list[int] | None:
    """Find the indices in the innermost dataset: `Subset` and `datasets.Dataset.shard` number their samples anew."""
    if not isinstance(index, (list, tuple)) or not all(isinstance(number, (int, np.integer)) for number in index):
        return None
    numbers = [int(number) for number in index]
    while isinstance(dataset, Subset):
        numbers, dataset = [int(dataset.indices[number]) for number in numbers], dataset.dataset
    return find_table_rows(dataset, numbers)


def _hash_samples(samples: Any) -> list[str] | None:
    """Hash the content of each sample; None if one of them cannot be hashed."""
    try:
        return [_hash_sample(sample).hexdigest() for sample in samples]
    except (TypeError, ValueError, RuntimeError):
        return None


def _hash_sample(sample: Any) -> Any:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(to_plain(sample)):
        if isinstance(leaf, torch.Tensor):
            digest.update(_to_bytes(leaf))
        elif isinstance(leaf, np.ndarray):
            digest.update(_to_bytes(torch.as_tensor(leaf)))
        elif isinstance(leaf, (int, float, str, bytes, np.generic)) or leaf is None:
            digest.update(repr(leaf).encode())
        else:
            raise TypeError(type(leaf).__name__)
        digest.update(b"|")
    return digest


def _hash(row: torch.Tensor) -> str:
    return hashlib.blake2b(_to_bytes(row), digest_size=8).hexdigest()


def _to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the numbers of a tensor as bytes that do not depend on its dtype (float64 or int64)."""
    tensor = tensor.detach().cpu()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64).contiguous().numpy().tobytes()


def _is_copy(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether a tensor is a copy of another; one that is the same number everywhere is a copy of none."""
    if a.shape != b.shape or a.numel() < 2:
        return False
    a, b = a.detach().cpu().flatten(), b.detach().cpu().flatten()
    return bool((a == b).all()) and bool((a != a[0]).any())


def find_storage(tensor: torch.Tensor) -> int:
    """Return the place in memory of a tensor's numbers, which views and `detach` share; 0 for one that is not dense."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def to_plain(value: Any) -> Any:
    """Turn mappings that pytree does not know (BatchEncoding) into dicts."""
    if type(value) in (list, tuple):
        return [to_plain(item) for item in value]
    return dict(value) if hasattr(value, "keys") and hasattr(value, "items") else value
