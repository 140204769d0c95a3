"""The dataset of optimizer steps: item t is everything that this process computes in step t."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from samestep import interrupt
from samestep._internals import torch_autograd
from samestep.cut.layout import Layout, solve_layout
from samestep.cut.order import Order
from samestep.cut.partition import partition
from samestep.errors import UsageError

Cell = dict[str, torch.Tensor | None]
AT_ONCE = 2**20  # bytes of steps that one process prepares one right after the other


class Sample(Protocol):
    """One sample of one epoch."""

    @property
    def length(self) -> int:
        """Its size in tokens, for the partition."""


class SampleSource(Protocol):
    """What a task provides: samples as pure functions of (epoch, sample id)."""

    max_length: int  # no sample is longer

    def draw(self, epoch: int, sample_id: int) -> Any:
        """A `Sample`; cheap, since every process draws the whole global batch to know its lengths."""

    def collate(self, samples: list[Any]) -> Cell:
        """A cell's tensors, with `counts` int64 [terms]; works for no samples (a cell without targets)."""

    def longest(self) -> Any:
        """A `Sample` of max_length tokens: what costs the most memory. Its content means nothing."""


@dataclasses.dataclass(frozen=True)
class StepData:
    """One process's part of one optimizer step.

    Attributes:
        step: its number; 0 is the first.
        cells: tensors of each micro-step.
        counts: int64 [terms], targets of each loss term in these cells.
        samples: (epoch, sample id) of each sample of each cell.
        epoch: epochs done when the step is done, a fraction.
        num_samples, num_tokens: of the whole global batch, padding not counted.
        num_cells: on all processes, empty ones not counted.
    """

    step: int
    cells: list[Cell]
    counts: torch.Tensor
    samples: list[list[tuple[int, int]]]
    epoch: float
    num_samples: int
    num_tokens: int
    num_cells: int

    @property
    def num_bytes(self) -> int:
        """Of the cells."""
        return sum(value.nbytes for cell in self.cells for value in cell.values() if value is not None)

    def pin_memory(self) -> "StepData":
        """Called by the DataLoader: cells in page-locked memory, from which copies to a GPU do not block."""
        return dataclasses.replace(self, cells=torch_autograd.pinned(self.cells))


class Steps(Dataset):
    """Step t of this process, for any t at once: a pure function of its arguments.

    Every process evaluates the same order and partition and keeps its own cells, so nothing is communicated, and a
    `DataLoader`'s workers can prepare any step ahead of time.

    Args:
        source: the samples.
        order: which samples each step holds.
        layout: how each step is cut.
        process_index: this process's place among the layout's.
        max_tokens: most tokens in a cell, padding included; None: no such cap.
        same_num_cells: give every process as many cells as the one with most, empty ones if need be (sharded models, of
            which every forward needs all processes).

    Raises:
        UsageError: max_tokens would not hold the longest sample.
    """

    def __init__(
        self,
        source: SampleSource,
        order: Order,
        layout: Layout,
        *,
        process_index: int,
        max_tokens: int | None = None,
        same_num_cells: bool = False,
    ):
        if max_tokens is not None and max_tokens < source.max_length:
            raise UsageError(
                f"per_device_train_tokens is {max_tokens}, but a sample can have {source.max_length} tokens: raise it to that "
                "or more"
            )
        self.source, self.order, self.layout = source, order, layout
        self.process_index, self.max_tokens, self.same_num_cells = process_index, max_tokens, same_num_cells

    def __getitem__(self, step: int) -> StepData:
        epochs, ids, samples, lengths = self._draw(step)
        parts = self._partition(lengths)
        places = parts[self.process_index]
        if self.same_num_cells:
            places = places + [places[0][:0]] * (max(map(len, parts)) - len(places))
        cells = [self.source.collate([samples[place] for place in cell]) for cell in places]
        return StepData(
            step=step,
            cells=cells,
            counts=torch.stack([cell.pop("counts") for cell in cells]).sum(0),
            samples=[[(int(epochs[place]), int(ids[place])) for place in cell] for cell in places],
            epoch=float((step + 1) / self.order.steps_per_epoch),
            num_samples=len(samples),
            num_tokens=int(lengths.sum()),
            num_cells=sum(len(cell) > 0 for cells in parts for cell in cells),
        )

    def cells_of(self, step: int, num_samples: int, at_once: int) -> list[Cell]:
        """The first samples of a step, cut as one process would whose largest cell is `at_once` samples of max_length."""
        _, _, samples, lengths = self._draw(step)
        places = partition(lengths[:num_samples], 1, *self.caps_of(at_once))[0]
        cells = [self.source.collate([samples[place] for place in cell]) for cell in places]
        return [{name: value for name, value in cell.items() if name != "counts"} for cell in cells]

    def caps_of(self, at_once: int) -> tuple[int, int | None]:
        """per_device_train_batch_size and max_tokens of cells that cost no more than `at_once` samples of max_length: as
        many, or as many tokens, where samples have tokens."""
        if self.source.max_length == 1:
            return at_once, None
        return self.layout.shares[0], at_once * self.source.max_length

    def _draw(self, step: int) -> tuple[np.ndarray, np.ndarray, list[Any], np.ndarray]:
        epochs, ids = self.order.samples(step)
        samples = [self.source.draw(*pair) for pair in zip(epochs.tolist(), ids.tolist(), strict=True)]
        return epochs, ids, samples, np.array([sample.length for sample in samples])

    def _partition(self, lengths: np.ndarray) -> list[list[np.ndarray]]:
        cap = self.layout.per_device_train_batch_size
        return partition(lengths, self.layout.num_processes, cap, self.max_tokens)

    def stream(self, first: int, last: int, num_workers: int | None, device: torch.device) -> Iterator[StepData]:
        """Steps `first` to `last` - 1, prepared ahead of time by `num_workers` processes (0: between steps by this one; None: 2
        beside a GPU, whose kernels leave the CPU idle), pinned for a CUDA `device`.

        What was prepared before `set_caps` is cut anew.
        """
        pinned = device.type == "cuda"
        if num_workers is None:
            num_workers = 2 if pinned else 0
        while first < last:
            caps = self.layout, self.max_tokens
            ahead = self._bursts(first, last)
            if num_workers or pinned:
                ahead = DataLoader(
                    self,
                    batch_size=None,
                    sampler=range(first, last),
                    num_workers=num_workers,
                    pin_memory=pinned,
                    worker_init_fn=interrupt.ignore,
                )
            for data in ahead:
                yield data
                first += 1
                if (self.layout, self.max_tokens) != caps:
                    break

    def _bursts(self, first: int, last: int) -> Iterator[StepData]:
        """Steps `first` to `last` - 1, small ones several at a time: after another step's forward and backward the processor's
        caches have forgotten how to prepare one, which then takes 0.6 ms instead of 0.1 (32 film reviews)."""
        steps = [self[first]]
        at_once = max(1, AT_ONCE // max(1, steps[0].num_bytes))
        while steps:
            yield from steps
            first += len(steps)
            steps = [self[step] for step in range(first, min(first + at_once, last))]

    @property
    def longest_at_once(self) -> int:
        """Most samples of the greatest length in one cell."""
        most = min(self.layout.shares[0], self.layout.per_device_train_batch_size)
        return most if self.max_tokens is None else min(most, self.max_tokens // self.source.max_length)

    def set_caps(self, per_device_train_batch_size: int, max_tokens: int | None) -> None:
        """Cut from now on by other caps."""
        layout = self.layout
        self.max_tokens = max_tokens
        self.layout = solve_layout(
            num_processes=layout.num_processes,
            global_batch_size=layout.global_batch_size,
            per_device_train_batch_size=per_device_train_batch_size,
        )

    def halve(self, step: int) -> bool:
        """Halve the caps so that the largest cells of `step`, on whichever process, become smaller.

        Returns:
            False when no cell has more than one sample: nothing is smaller than that.
        """
        _, _, _, lengths = self._draw(step)
        cells = [cell for cells in self._partition(lengths) for cell in cells if len(cell)]
        rows = max(map(len, cells))
        if rows == 1:
            return False
        max_tokens = self.max_tokens
        if max_tokens is not None:
            used = max(len(cell) * int(lengths[cell].max()) for cell in cells)
            max_tokens = max(self.source.max_length, -(-used // 2))
        self.set_caps(-(-rows // 2), max_tokens)
        return True


def to_device(cell: Mapping[str, torch.Tensor | None], device: torch.device) -> Cell:
    """The cell's tensors on `device`, copied without blocking from pinned memory."""
    return {name: value if value is None else value.to(device, non_blocking=True) for name, value in cell.items()}
