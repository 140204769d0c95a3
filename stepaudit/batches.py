"""Which samples a micro-batch computes: from what DataLoaders drew, and from what the model was given."""

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from stepaudit._internals import loaded, rows_chosen, tree_leaves

MOST_PENDING = 256  # batches that were drawn and not used; older ones are forgotten


@dataclasses.dataclass(eq=False)
class Drawn:
    """A batch that a DataLoader returned.

    Attributes:
        dataset: id of the loader's dataset.
        samples: indices in the dataset; None if it has none.
        digests: hashes of its samples before they were collated; None if unseen.
        batch: what the program got. Kept, so that no other tensor takes its place in memory.
    """

    dataset: int
    samples: list[int] | None
    digests: list[str] | None
    batch: Any

    def __post_init__(self) -> None:
        self.leaves = [leaf for leaf in tree_leaves(plain(self.batch)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        self.storages = {_storage(leaf) for leaf in self.leaves if leaf.numel()}

    @property
    def num_samples(self) -> int | None:
        known = self.digests if self.samples is None else self.samples
        return None if known is None else len(known)

    def make_rows(self, tensors: list[torch.Tensor]) -> list[int] | None:
        """Which of its samples the tensors hold: [] for none, None for all of them or when that cannot be told."""
        ours = sorted((leaf for leaf in self.leaves if len(leaf) == self.num_samples), key=torch.numel, reverse=True)
        for given in tensors:
            for leaf in ours:
                if len(given) >= len(leaf) or given.shape[1:] != leaf.shape[1:]:
                    continue
                numbers = {name: number for number, name in enumerate(map(_hash, leaf))}
                rows = [numbers.get(_hash(row)) for row in given]
                if None not in rows:
                    return rows
        return None


class Batches:
    """Batches that were drawn, until a micro-batch uses them."""

    def __init__(self) -> None:
        self.pending: deque[Drawn] = deque(maxlen=MOST_PENDING)
        self.current: Drawn | None = None  # the one that the last micro-batch used
        self.newest: int | None = None  # dataset of the batch that was drawn last
        self.evaluated: set[int] = set()  # datasets whose batches a model in evaluation was given
        self.digests: deque[list[str] | None] = deque(maxlen=MOST_PENDING)

    def index(self, next_index: Callable, iterator: Any) -> Any:
        """In the place of a DataLoader's method that draws indices."""
        index = next_index(iterator)
        iterator.__dict__.setdefault("_audit_drawn", deque()).append(index)
        return index

    def fetch(self, fetch: Callable, fetcher: Any, index: Any) -> Any:
        """In the place of a method that makes a batch of indices: looks at the samples before they are collated."""
        collate = fetcher.collate_fn

        def look(samples: Any) -> Any:
            self.digests.append(_digests(samples) if fetcher.auto_collation else None)  # else they are batches already
            return collate(samples)

        fetcher.collate_fn = look
        try:
            return fetch(fetcher, index)
        finally:
            fetcher.collate_fn = collate

    def draw(self, following: Callable, iterator: Any) -> Any:
        """In the place of a DataLoader's method that returns the next batch."""
        self.digests.clear()
        batch = following(iterator)
        index = iterator.__dict__["_audit_drawn"].popleft()
        digests = self.digests.pop() if len(self.digests) == 1 else None  # workers collate elsewhere
        self.newest = id(loaded(iterator))
        self.pending.append(Drawn(self.newest, _samples(loaded(iterator), index), digests, batch))
        return batch

    def evaluate(self) -> None:
        """Note that a model in evaluation computes without gradients: on the loader that was used last."""
        if self.newest is not None and (self.current is None or self.current.dataset != self.newest):
            self.evaluated.add(self.newest)

    def use(self, calls: Iterable[tuple[Any, tuple, dict]]) -> tuple[list[int] | None, list[str] | None, Any]:
        """Samples and digests of a micro-batch, and its batch; None for what is unknown.

        The batch is one whose tensors the model was given, as they are or copied; if there is none, the next of the loader
        that was drawn from last, unless that one is used for evaluation.
        """
        given = [
            leaf
            for _, *call in calls
            for leaf in tree_leaves(plain(call))
            if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.numel()
        ]
        storages = {_storage(leaf) for leaf in given}
        found = next((of for of in self.pending if of.storages & storages), None)
        if found is None and self.current is not None and self.current.storages & storages:
            found = self.current
        if found is None:
            copies = [*self.pending, *([self.current] if self.current else [])]
            found = next((of for of in copies if any(_is_copy(a, b) for a in of.leaves for b in given)), None)
        if found is None:
            found = next((of for of in self.pending if of.dataset == self.newest not in self.evaluated), None)
        if found is None:
            return None, None, None
        rows = found.make_rows(given) if found.num_samples else None
        is_again = found is self.current and rows is None and not _is_whole(found, given)
        if found in self.pending:
            self.pending.remove(found)
        self.current = found

        def chosen(of: list | None) -> list | None:
            if of is None:
                return None
            # A part of the batch that cannot be told from the others: its samples were counted with the first part.
            return [] if is_again else of if rows is None else [of[row] for row in rows]

        return chosen(found.samples), chosen(found.digests), found.batch


def _is_whole(drawn: Drawn, given: list[torch.Tensor]) -> bool:
    """Whether the model was given as many rows as the batch has, or nothing that shows it."""
    return not given or drawn.num_samples is None or any(len(leaf) >= drawn.num_samples for leaf in given)


def row_names(row: torch.Tensor) -> list[str]:
    """Shape, and hashes of a row: whole, and without what repeats at its end, or at its beginning (padding)."""
    row = row.detach().cpu()
    if row.ndim == 0 or len(row) < 2:
        return [str(tuple(row.shape)), *[_hash(row)] * 3]
    flat = row.reshape(len(row), -1)
    differs = (flat != flat[-1]).any(1).nonzero(), (flat != flat[0]).any(1).nonzero()
    end = int(differs[0][-1]) + 1 if len(differs[0]) else 0
    begin = int(differs[1][0]) if len(differs[1]) else len(row)
    return [str(tuple(row.shape)), _hash(row), _hash(row[:end]), _hash(row[begin:])]


def _samples(dataset: Any, index: Any) -> list[int] | None:
    """Indices in the dataset at the bottom: `Subset` and `datasets.Dataset.shard` have other ones of their own."""
    if not isinstance(index, (list, tuple)) or not all(isinstance(number, (int, np.integer)) for number in index):
        return None
    numbers = [int(number) for number in index]
    while isinstance(dataset, Subset):
        numbers, dataset = [int(dataset.indices[number]) for number in numbers], dataset.dataset
    return rows_chosen(dataset, numbers)


def _digests(samples: Any) -> list[str] | None:
    """A hash of each sample's content; None where one holds what cannot be hashed."""
    try:
        return [_digest(sample).hexdigest() for sample in samples]
    except (TypeError, ValueError, RuntimeError):
        return None


def _digest(sample: Any) -> Any:
    found = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(plain(sample)):
        if isinstance(leaf, torch.Tensor):
            found.update(_content(leaf))
        elif isinstance(leaf, np.ndarray):
            found.update(_content(torch.as_tensor(leaf)))
        elif isinstance(leaf, (int, float, str, bytes, np.generic)) or leaf is None:
            found.update(repr(leaf).encode())
        else:
            raise TypeError(type(leaf).__name__)
        found.update(b"|")
    return found


def _hash(row: torch.Tensor) -> str:
    return hashlib.blake2b(_content(row), digest_size=8).hexdigest()


def _content(tensor: torch.Tensor) -> bytes:
    """Its numbers, the same ones whatever their dtype."""
    tensor = tensor.detach().cpu()
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64).contiguous().numpy().tobytes()


def _is_copy(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.numel() > 1 and bool((a.detach().cpu() == b.detach().cpu()).all())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def plain(value: Any) -> Any:
    """Mappings that pytree does not know (BatchEncoding) as dicts."""
    if type(value) in (list, tuple):
        return [plain(item) for item in value]
    return dict(value) if hasattr(value, "keys") and hasattr(value, "items") else value
