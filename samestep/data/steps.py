"""The dataset of optimizer steps: item t is everything that this process computes in step t."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from samestep import interrupt
from samestep._internals import torch_autograd
from samestep.cut.layout import Layout, solve_layout
from samestep.cut.order import Order
from samestep.cut.partition import deal, partition, partition_at_random
from samestep.errors import UsageError
from samestep.printing import format_count

MicroBatch = dict[str, torch.Tensor | None]
BURST_SIZE = 2**20  # bytes of the steps that one process prepares without a pause


class Sample(Protocol):
    """One sample of one epoch."""

    @property
    def length(self) -> int:
        """Size of the sample in tokens, for the partition."""


MAX_SEARCHED = 20_000  # samples in which a target of each loss term is looked for


class SampleSource(Protocol):
    """The samples of a task, as pure functions of (epoch, sample id)."""

    max_length: int  # no sample is longer

    def __len__(self) -> int:
        """Count the samples."""

    def draw(self, epoch: int, sample_id: int) -> Any:
        """Draw a `Sample`; cheap, since every process draws the whole global batch to know its lengths."""

    def collate(self, samples: list[Any]) -> MicroBatch:
        """Make a micro-batch's tensors, with `counts` int64 [terms]; works for no samples (a micro-batch without targets)."""

    def longest(self) -> Any:
        """Return a `Sample` of max_length tokens, which costs the most memory. Its content means nothing."""


NEEDED = ("__len__", "max_length", "fingerprints", "draw", "collate", "longest")
"""Names of what the training samples of a task have: those of `SampleSource`, and `fingerprints`, what else decides them."""


def check_data(data: tuple[Any, Any]) -> tuple[Any, Any]:
    """Check that the training samples of a task have what a run needs of them; return them, and those that are held out.

    Raises:
        UsageError: something is missing; all of it in one error.
    """
    source, _ = data
    if missing := [name for name in NEEDED if not hasattr(source, name)]:
        raise UsageError(
            f"the training samples, a {type(source).__name__}, have no {', '.join(missing)}: docs/your-own-task.md says what "
            "these are"
        )
    return data


def describe_source(source: Any) -> str:
    """Describe samples for the log, in their own words or by their number: what only has a `repr` would print all of them.

    >>> describe_source([0.5, 1.5])
    '2 samples'
    """
    return format_count(len(source), "sample") if type(source).__str__ is object.__str__ else str(source)


@dataclasses.dataclass(frozen=True)
class StepData:
    """One process's part of one optimizer step.

    Attributes:
        step: number of the step; 0 is the first.
        micro_batches: tensors of each micro-batch.
        counts: int64 [terms], targets of each loss term in these micro-batches.
        samples: (epoch, sample id) of each sample of each micro-batch.
        epoch: epochs done when the step is done, a fraction.
        num_samples, num_tokens: size of the whole global batch, padding not counted.
        num_micro_batches: micro-batches on all processes, empty ones not counted.
        numbers: number of each micro-batch among those of all processes, where they are dealt whole; None: an empty one that
            was added.
        micro_batch_counts: int64 [micro-batches, terms], of which `counts` is the sum.
        is_cut_at_random: whether the step is cut at random, not by length: its micro-batches are independent samples.
        num_samples_by_source: of a mixture, the samples of each source in the whole global batch.
        sizes: samples of each micro-batch of each process, so that a process knows the place of its numbers among all.
        micro_batches_by_part: where a process computes several parts of the step, the number of micro-batches of each.
    """

    step: int
    micro_batches: list[MicroBatch]
    counts: torch.Tensor
    samples: list[list[tuple[int, int]]]
    epoch: float
    num_samples: int
    num_tokens: int
    num_micro_batches: int
    numbers: list[int | None]
    micro_batch_counts: torch.Tensor
    is_cut_at_random: bool = False
    num_samples_by_source: dict[str, int] = dataclasses.field(default_factory=dict)
    sizes: list[list[int]] = dataclasses.field(default_factory=list)
    micro_batches_by_part: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Size of the micro-batches in memory, bytes."""
        return sum(
            value.nbytes for micro_batch in self.micro_batches for value in micro_batch.values() if value is not None
        )

    def pin_memory(self) -> "StepData":
        """Copy the micro-batches to page-locked memory, from which copies to a GPU do not block. Called by the DataLoader."""
        return dataclasses.replace(self, micro_batches=torch_autograd.pin_memory(self.micro_batches))


def find_terms_without_target(
    source: SampleSource, names: Sequence[str], max_searched: int = MAX_SEARCHED
) -> list[str]:
    """Find the loss terms that have no target in any of the source's samples, of which the first usually has one of each.

    Args:
        source: gives the samples.
        names: of the loss terms.
        max_searched: most samples that are looked at, spread over all.
    """
    num_samples, start, size = min(len(source), max_searched), 0, 1
    counts = np.zeros(len(names), np.int64)
    while start < num_samples and not counts.all():
        places = range(start, min(start + size, num_samples))
        samples = [source.draw(0, place * len(source) // num_samples) for place in places]
        counts += source.collate(samples)["counts"].numpy()
        start, size = start + size, min(2 * size, 64)
    return [name for name, count in zip(names, counts, strict=True) if not count]


def check_terms(source: SampleSource, weights: Mapping[str, float]) -> None:
    """Check that each loss term has a target in the training data: one without is 0 to the end.

    Args:
        source: gives the samples.
        weights: of the terms, by name; a term of weight 0 needs no target.

    Raises:
        UsageError: names the terms.
    """
    if names := [name for name in find_terms_without_target(source, list(weights)) if weights[name]]:
        raise UsageError(
            f"the training data have no target of the loss {', '.join(names)}, which would be 0 in every step. Look at the "
            "rows, the tokenizer and the lengths, or set the weight of the loss to 0"
        )


class Steps(Dataset):
    """Step t of this process, for any t at once: a pure function of its arguments.

    Every process evaluates the same order and partition and keeps its own micro-batches, so nothing is communicated, and a
    `DataLoader`'s workers can prepare any step ahead of time.

    Args:
        source: gives the samples.
        order: decides which samples each step holds.
        layout: decides how each step is cut.
        process_index: number of this process among the layout's processes.
        max_tokens: most tokens in a micro-batch, padding included; None: no such cap.
        same_num_micro_batches: give every process as many micro-batches as the one with most, empty ones if need be (sharded
            models, each of whose forwards needs all processes).
        deals_whole: cut the step as for one process, and deal the micro-batches to the processes: so the micro-batches do not
            depend on the number of processes.
        random_steps: every so many steps, one is cut at random; None: never.

    Attributes:
        own_parts: parts of the step, of which the layout has the number, that this process computes one after the other; empty,
            unless it is set: the part of its own number.

    Raises:
        UsageError: max_tokens would not hold the longest sample.
    """

    burst_size = BURST_SIZE

    def __init__(
        self,
        source: SampleSource,
        order: Order,
        layout: Layout,
        *,
        process_index: int,
        max_tokens: int | None = None,
        same_num_micro_batches: bool = False,
        deals_whole: bool = False,
        random_steps: int | None = None,
    ):
        if max_tokens is not None and max_tokens < source.max_length:
            raise UsageError(
                f"per_device_train_tokens is {max_tokens}, but a sample can have {source.max_length} tokens: raise it to that "
                "or more"
            )
        self.source, self.order, self.layout = source, order, layout
        self.process_index, self.max_tokens = process_index, max_tokens
        self.same_num_micro_batches, self.deals_whole = same_num_micro_batches, deals_whole
        self.random_steps = random_steps
        self.own_parts: Sequence[int] = ()

    def __getitem__(self, step: int) -> StepData:
        source: Any = self.source  # one with a mixture counts samples by source, too
        # Arrays are over the step's samples, [global batch]. `parts` has a list for each process: its micro-batches, as arrays
        # of places among these samples; `places` is this process's list
        epochs, ids, samples, lengths = self._draw(step)
        parts, numbers_of_all = self._partition(step, lengths)
        own = self.own_parts or [self.process_index]
        places = [micro_batch for part in own for micro_batch in parts[part]]
        numbers = [number for part in own for number in numbers_of_all[part]]
        if self.same_num_micro_batches:
            num_missing = max(map(len, parts)) - len(places)
            places, numbers = places + [places[0][:0]] * num_missing, numbers + [None] * num_missing
        micro_batches = [self.source.collate([samples[place] for place in micro_batch]) for micro_batch in places]
        counts = torch.stack([micro_batch.pop("counts") for micro_batch in micro_batches])
        return StepData(
            step=step,
            micro_batches=micro_batches,
            counts=counts.sum(0),
            samples=[[(int(epochs[place]), int(ids[place])) for place in micro_batch] for micro_batch in places],
            epoch=self.order.count_epochs(step),
            num_samples=len(samples),
            num_tokens=int(lengths.sum()),
            num_micro_batches=sum(len(micro_batch) > 0 for micro_batches in parts for micro_batch in micro_batches),
            numbers=numbers,
            micro_batch_counts=counts,
            is_cut_at_random=self._is_cut_at_random(step, len(samples)),
            num_samples_by_source=source.count_by_source(ids) if self.order.mixture else {},
            sizes=[list(map(len, micro_batches)) for micro_batches in parts],
            micro_batches_by_part=[len(parts[part]) for part in self.own_parts],
        )

    def cut_first_samples(self, step: int, num_samples: int, max_samples: int) -> list[MicroBatch]:
        """Cut the first samples of a step for one process whose largest micro-batch is `max_samples` samples of max_length.

        Returns:
            tensors of each micro-batch, without `counts`.
        """
        _, _, samples, lengths = self._draw(step)
        places = partition(lengths[:num_samples], 1, *self.find_caps(max_samples))[0]
        micro_batches = [self.source.collate([samples[place] for place in micro_batch]) for micro_batch in places]
        return [
            {name: value for name, value in micro_batch.items() if name != "counts"} for micro_batch in micro_batches
        ]

    def find_caps(self, max_samples: int) -> tuple[int, int | None]:
        """Find per_device_train_batch_size and max_tokens of micro-batches that cost no more than `max_samples` samples of
        max_length: as many samples or, where samples have tokens, as many tokens."""
        if self.source.max_length == 1:
            return max_samples, None
        return self.layout.shares[0], max_samples * self.source.max_length

    def _draw(self, step: int) -> tuple[np.ndarray, np.ndarray, list[Any], np.ndarray]:
        epochs, ids = self.order.samples(step)
        samples = [self.source.draw(*pair) for pair in zip(epochs.tolist(), ids.tolist(), strict=True)]
        return epochs, ids, samples, np.array([sample.length for sample in samples])

    def _is_cut_at_random(self, step: int, num_samples: int) -> bool:
        every = self.random_steps
        return every is not None and (step + 1) % every == 0 and num_samples > 1

    def _partition(self, step: int, lengths: np.ndarray) -> tuple[list[list[np.ndarray]], list[list[int | None]]]:
        """Cut a step: for each process its micro-batches, and their numbers."""
        cap, num_processes = self.layout.per_device_train_batch_size, self.layout.num_processes
        if self._is_cut_at_random(step, len(lengths)):
            if (
                self.max_tokens is not None
            ):  # as many samples in each as if all were the longest: lengths decide nothing
                cap = min(cap, max(1, self.max_tokens // max(1, int(lengths.max()))))
            parts: Any = partition_at_random(len(lengths), num_processes, cap, deals_whole=self.deals_whole)
            if self.deals_whole:
                return deal(parts, num_processes)
            return parts, [[None] * len(micro_batches) for micro_batches in parts]
        if self.deals_whole:
            return deal(partition(lengths, 1, cap, self.max_tokens)[0], num_processes)
        parts = partition(lengths, num_processes, cap, self.max_tokens)
        return parts, [[None] * len(micro_batches) for micro_batches in parts]

    def stream(self, first: int, last: int, num_workers: int | None, device: torch.device) -> Iterator[StepData]:
        """Prepare steps `first` to `last` - 1 ahead of time.

        Steps that were prepared before a call of `set_caps` or `set_process` are prepared anew.

        Args:
            num_workers: processes that prepare steps. 0: this one does, between steps; None: 2 beside a GPU, whose kernels
                leave the CPU idle, else 0.
            device: where the micro-batches will go; for CUDA they are put into pinned memory.
        """
        is_cuda = device.type == "cuda"
        if num_workers is None:
            num_workers = 2 if is_cuda else 0
        while first < last:
            cut = self.cut
            steps = self._bursts(first, last)
            if num_workers or is_cuda:
                steps = DataLoader(
                    self,
                    batch_size=None,
                    sampler=range(first, last),
                    num_workers=num_workers,
                    pin_memory=is_cuda,
                    worker_init_fn=interrupt.ignore_stop_signals,
                )
            for data in steps:
                yield data
                first += 1
                if self.cut != cut:
                    break

    def _bursts(self, first: int, last: int) -> Iterator[StepData]:
        """Prepare steps `first` to `last` - 1, small ones several at a time.

        After another step's forward and backward the processor's caches no longer hold the code and the data that prepare a
        step, which then takes 0.6 ms instead of 0.1 (32 film reviews).
        """
        steps = [self[first]]
        num_steps = max(1, self.burst_size // max(1, steps[0].num_bytes))
        while steps:
            yield from steps
            first += len(steps)
            steps = [self[step] for step in range(first, min(first + num_steps, last))]

    @property
    def max_longest_samples(self) -> int:
        """Most samples of the greatest length in one micro-batch."""
        limit = min(self.layout.shares[0], self.layout.per_device_train_batch_size)
        return limit if self.max_tokens is None else min(limit, self.max_tokens // self.source.max_length)

    @property
    def cut(self) -> tuple[Layout, int | None, int]:
        """All that decides how steps are cut, and which part is this process's: the layout, max_tokens, process_index."""
        return self.layout, self.max_tokens, self.process_index

    def set_caps(self, per_device_train_batch_size: int, max_tokens: int | None) -> None:
        """Change the caps by which steps are cut from now on."""
        self.max_tokens = max_tokens
        self._solve(self.layout.num_processes, per_device_train_batch_size)

    def set_process(self, process_index: int, num_processes: int) -> None:
        """Cut steps for another number of processes from now on: k changes, and the caps stay.

        Args:
            process_index: number of this process among them.
            num_processes: N.
        """
        self.process_index = process_index
        self._solve(num_processes, self.layout.per_device_train_batch_size)

    def _solve(self, num_processes: int, cap: int) -> None:
        """Cut steps for so many processes, and micro-batches of so many samples at most, from now on."""
        self.layout = solve_layout(
            num_processes=num_processes,
            global_batch_size=self.layout.global_batch_size,
            per_device_train_batch_size=cap,
        )

    def halve(self, step: int) -> bool:
        """Halve the caps so that the largest micro-batches of `step`, on whichever process, become smaller.

        Returns:
            False when no micro-batch has more than one sample: then nothing is smaller.
        """
        _, _, _, lengths = self._draw(step)
        micro_batches = [
            micro_batch
            for micro_batches in self._partition(step, lengths)[0]
            for micro_batch in micro_batches
            if len(micro_batch)
        ]
        rows = max(map(len, micro_batches))
        if rows == 1:
            return False
        max_tokens = self.max_tokens
        if max_tokens is not None:
            num_tokens = max(len(micro_batch) * int(lengths[micro_batch].max()) for micro_batch in micro_batches)
            max_tokens = max(self.source.max_length, -(-num_tokens // 2))
        self.set_caps(-(-rows // 2), max_tokens)
        return True


def to_device(micro_batch: Mapping[str, torch.Tensor | None], device: torch.device) -> MicroBatch:
    """Copy a micro-batch's tensors to `device`, without blocking where they are in pinned memory."""
    return {
        name: value if value is None else value.to(device, non_blocking=True) for name, value in micro_batch.items()
    }
