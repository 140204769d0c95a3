"""The exact step for loops that people write themselves: `exact_steps`, `exact_windows`, `evaluate`.

A loss has one contract everywhere: it is a function of (model, batch) that returns the sums over the targets of a micro-batch,
[terms] or scalar, and the numbers of targets. A step's loss is

    L = sum_j w_j * (sum over all samples of s_j) / n_j,    n_j the targets of term j in the whole step,

over all micro-batches of all processes; `Step.loss` computes a micro-batch's part of it.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, get_int_from_env, send_to_device
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from samestep import interrupt
from samestep._internals.accelerate_state import prepared_models, prepared_schedulers
from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data.per_sample import PerSample
from samestep.data.steps import MicroBatch, StepData, Steps
from samestep.errors import UsageError
from samestep.printing import format_count
from samestep.step.accumulate import iterate_micro_batches, total_counts
from samestep.step.losses import nonzero
from samestep.step.means import find_mean
from samestep.step.noise import Noise
from samestep.training import prepared
from samestep.training.launch import SIZES, is_sharded
from samestep.training.step import Step

Targets = Callable[[Any], int | torch.Tensor]
SUM = 'a sum over the targets, as F.cross_entropy(..., reduction="sum")'


@dataclasses.dataclass(frozen=True)
class CountedBatch:
    """One batch with its numbers of targets, for one forward and backward.

    Attributes:
        batch: as collated.
        counts: [terms], numbers of targets in the batch, int64, or float64 for sums of weights.
        is_placeholder: the batch counts nothing: this process has no sample left, but DDP waits for its gradient.
        samples: (epoch, sample id) of each sample, where they are known.
    """

    batch: Any
    counts: torch.Tensor
    is_placeholder: bool = False
    samples: Sequence[tuple[int, int]] = ()


class LoopStep(Step):
    """One optimizer step of a loop of one's own: iterate over its micro-batches, on the accelerator's device.

    Attributes:
        index: number of the step; 0 is the first.
        epoch: epochs done when the step is done, a fraction where it is known; of `exact_windows` those of its call.
        is_last_of_epoch: whether no process has a sample of the epoch left after the step: the place to evaluate. With
            `exact_steps` also where the step holds the first samples of the next epoch, too (`epoch_end="carry"`).
        num_targets: n_j, the targets in the whole step, on the device: int64, or float64 for sums of weights; of the shape that
            `targets` returns: scalar or [terms].
        num_micro_batches: k, micro-batches of this process in the step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        place: tuple[int, float, bool | torch.Tensor],
        micro_batches: Sequence[CountedBatch],
        num_targets: torch.Tensor,
        is_first: bool,
        noise: Noise | None = None,
    ):
        index, epoch, self._is_last_of_epoch = place
        super().__init__(accelerator, index, epoch)
        self._num_targets, self._parts, self._is_first, self._noise = num_targets, micro_batches, is_first, noise
        self._current: CountedBatch | None = None
        self._sums: list[torch.Tensor] = []

    @property
    def num_micro_batches(self) -> int:
        return len(self._parts)

    @property
    def num_targets(self) -> torch.Tensor:
        return self._num_targets

    @property
    def loss_scale(self) -> int:
        """k N; 0 for a micro-batch that counts nothing."""
        return 0 if self._find_current().is_placeholder else super().loss_scale

    @property
    def micro_batches(self) -> Iterator[Any]:
        self._sums = []
        if self._is_first:
            _warn_of_gradients(self.accelerator)
        for number, part in enumerate(iterate_micro_batches(self.accelerator, self._parts), 1):
            self._current, num_noted = part, len(self._sums)
            if self._noise is not None:
                self._noise.set_samples(part.samples, self.accelerator.device)
            yield send_to_device(part.batch, self.accelerator.device, non_blocking=True)
            if self._is_first:
                self._check_use(number, is_noted=len(self._sums) > num_noted)
        self._current = None

    def look_ahead(self) -> Iterator[tuple[Any, bool]]:
        """Yield each micro-batch for a forward before the step, without gradient, and whether it counts nothing."""
        for part in self._parts:
            if self._noise is not None:
                self._noise.set_samples(part.samples, self.accelerator.device)
            yield send_to_device(part.batch, self.accelerator.device, non_blocking=True), part.is_placeholder

    @property
    def is_last_of_epoch(self) -> bool:  # of a tensor it waits for the device: where this process has no batch left
        return bool(self._is_last_of_epoch)

    def add_to_log(self, sums: torch.Tensor) -> None:
        """Note the summed losses of a micro-batch, for `mean_loss`."""
        self._sums.append(sums.detach() * 0 if self._find_current().is_placeholder else sums.detach())

    def mean_loss(self) -> torch.Tensor:
        """Compute the mean of each term over all targets of the whole step, without weights; for the log.

        All processes call it, after the step's last micro-batch: it takes one all-reduce.

        Returns:
            scalar or [terms], as `num_targets`.
        """
        total = sum(self._sums, torch.zeros((), device=self.accelerator.device))
        return self.accelerator.reduce(total, reduction="sum") / nonzero(self.num_targets)

    def _find_current(self) -> CountedBatch:
        if self._current is None:
            raise UsageError("step.loss was called outside its loop: call it for each batch of `for batch in step:`")
        return self._current

    def _take_sums(self, sums: torch.Tensor, returned_counts: Any) -> torch.Tensor:
        if self._is_first:
            self._check_sums(sums, returned_counts)
        sums = super()._take_sums(sums, returned_counts)
        return sums * 0 if self._find_current().is_placeholder else sums

    def _check_use(self, number: int, is_noted: bool) -> None:
        """Check after each micro-batch of the first step that the loop used it as it must."""
        if self.accelerator.step != number:
            num_entries = self.accelerator.step
            raise UsageError(
                f"accelerator.accumulate was entered {num_entries} times for {format_count(number, 'micro-batch')}: compute "
                "each one, once, inside `with accelerator.accumulate(model):` (several models: accumulate(first, second))"
            )
        if not is_noted:
            raise UsageError(
                "step.loss was not called for a micro-batch: accelerator.backward(step.loss(sums)), with the summed loss"
            )

    def _check_sums(self, sums: torch.Tensor, returned_counts: Any) -> None:
        """Check in the first step that the loss is a sum, over as many targets as `targets` counted."""
        current = self._find_current()
        counts = current.counts.tolist()
        if (
            returned_counts is not None
            and not current.is_placeholder
            and not np.allclose(loss_counts := to_counts(returned_counts).tolist(), counts, rtol=1e-5, atol=0)
        ):
            raise UsageError(
                f"the loss counts {loss_counts} targets in a micro-batch, targets counts {counts}: both must be what the sum "
                "is over"
            )
        divisors = [[part, total] for part, total in zip(counts, self.num_targets.view(-1).tolist(), strict=True)]
        if mean := find_mean(sums, divisors):
            raise UsageError(
                f"step.loss was given a mean ({mean}): give it {SUM}, or the mean times the number of targets"
            )


def _warn_of_gradients(accelerator: Accelerator) -> None:
    """Warn of gradients that are there before the first micro-batch, as of a step that was broken off: they would be added."""
    gradients = (parameter.grad for model in prepared_models(accelerator) for parameter in model.parameters())
    parts = (part.to_local() if isinstance(part, DTensor) else part for part in gradients if part is not None)
    if any(bool(part.any()) for part in parts):
        warnings.warn(
            "the model has a gradient before the first step, as of one that was broken off: optimizer.zero_grad() empties it",
            stacklevel=4,
        )


def exact_steps(
    accelerator: Accelerator,
    dataset: Any,
    collate: Callable[[list], Any],
    *,
    global_batch_size: int,
    per_device_batch_size: int,
    targets: Targets,
    seed: int = 0,
    num_epochs: float | None = None,
    num_steps: int | None = None,
    first_step: int = 0,
    epoch_end: str = "carry",
    length: Callable[[Any], int] | None = None,
    max_tokens: int | None = None,
    num_workers: int = 0,
    noise: Noise | None = None,
) -> "ExactSteps":
    """Take steps with the gradient of one batch of `global_batch_size` samples, on any number of processes.

        for step in exact_steps(accelerator, dataset, collate, global_batch_size=32, per_device_batch_size=8, targets=count):
            for batch in step:
                with accelerator.accumulate(model):
                    accelerator.backward(step.loss(loss_sum(model, batch)))
                    optimizer.step()
                    optimizer.zero_grad()
            scheduler.step()

    Which samples a step holds is a function of the seed and the step's number alone. They are dealt out evenly, in
    micro-batches of at most `per_device_batch_size`; a process without a sample computes one that counts nothing. Prepare the
    model and the optimizer, neither a DataLoader nor the scheduler.

    Args:
        accelerator: made without gradient accumulation.
        dataset: has a length and is indexed by whole numbers.
        collate: list of samples -> batch (tensors in any nesting), or `per_sample(...)`.
        global_batch_size: B, samples of a step.
        per_device_batch_size: b, samples in one forward at most.
        targets: batch -> number of targets over which the loss is summed, an int, or int tensor [terms]; or the sum of their
            weights, floats.
        seed: decides the order of the samples.
        num_epochs: default 1, where num_steps is not given.
        num_steps: steps in all, those before first_step included.
        first_step: number of steps so far, of a training that goes on; it may have run on another number of processes.
        epoch_end: the rule where B does not divide the samples: `carry` (a step may hold the last samples of one epoch and the
            first of the next), `keep` (the epoch's last step is smaller), `drop` (the epoch's last samples are left out).
        length: sample -> its tokens; samples of about one length then share a micro-batch. Every process then reads all
            samples of a step.
        max_tokens: tokens in a micro-batch at most, padding included; needs `length`.
        num_workers: processes that prepare steps ahead.
        noise: what `noise_by_sample(model, seed)` returned: the same dropout for every cut. None: the model draws its own.

    Returns:
        `ExactSteps`: has a length, and iterates over `Step`.

    Raises:
        UsageError: one line for each value that breaks a rule, with the remedy.
    """
    problems = find_problems(accelerator, "exact_steps")
    has_length = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not has_length:
        problems.append(
            f"dataset is a {type(dataset).__name__}, which has no length or cannot be indexed: put it into a DataLoader, for "
            "exact_windows(accelerator, dataloader, gradient_accumulation_steps=..., targets=...)"
        )
    elif not len(dataset):
        problems.append("dataset is empty: give it at least one sample")
    for name, value in (("collate", collate), ("targets", targets), ("length", length or len)):
        if not callable(value):
            problems.append(f"{name} is {type(value).__name__}, must be a function")
    if num_steps is None and hasattr(dataset, "make_order"):
        problems.append("dataset is a stream, whose length is not known: give num_steps")
    if num_epochs is not None and num_steps is not None:
        problems.append(f"num_epochs is {num_epochs} and num_steps is {num_steps}: give one of them")
    if max_tokens is not None and length is None:
        problems.append(f"max_tokens is {max_tokens}, but length is missing: give length=, a sample's number of tokens")
    if problems:
        raise UsageError(problems)
    # A stream brings an order of its own, and reads what a process needs of it (samestep.contrib.streaming)
    make_order = getattr(dataset, "make_order", functools.partial(Order, len(dataset)))
    order = make_order(global_batch_size, seed, epoch_end)
    last = order.num_steps(1 if num_epochs is None else num_epochs) if num_steps is None else num_steps
    if not 0 <= first_step <= last:
        raise UsageError(f"first_step is {first_step}, must be 0 to {last}, the number of steps")
    layout = solve_layout(
        num_processes=accelerator.num_processes,
        global_batch_size=global_batch_size,
        per_device_train_batch_size=per_device_batch_size,
    )
    source: Any = _Source(dataset, collate, targets, length)  # of which no kernel is chosen: it has no longest sample
    steps = getattr(dataset, "steps_class", Steps)(
        source,
        order,
        layout,
        process_index=accelerator.process_index,
        max_tokens=max_tokens,
        same_num_micro_batches=_reduces_every_micro_batch(accelerator),
    )
    notes = [] if noise is None else noise.notes
    accelerator.print(*notes, sep="\n", end="\n" * len(notes))
    return ExactSteps(accelerator, steps, range(first_step, last), num_workers, noise)


class ExactSteps:
    """The steps of a training, of type `Step`. See `exact_steps`.

    Attributes:
        accelerator: as given.
        last: this process's data of the last step that was given; None: none was.
    """

    last: StepData | None

    def __init__(self, accelerator: Accelerator, steps: Steps, numbers: range, num_workers: int, noise: Noise | None):
        self._accelerator, self._steps, self._numbers, self._num_workers = accelerator, steps, numbers, num_workers
        self._noise = noise
        self.accelerator, self.last = accelerator, None

    def __len__(self) -> int:
        """Count the optimizer steps that are left, which a scheduler needs to know."""
        return len(self._numbers)

    def __iter__(self) -> Iterator[Step]:
        loader = DataLoader(
            self._steps,
            batch_size=None,
            sampler=self._numbers,
            num_workers=self._num_workers,
            pin_memory=self._accelerator.device.type == "cuda",
            worker_init_fn=interrupt.ignore_stop_signals,
            generator=torch.Generator(),  # its own: the model's noise does not depend on it
        )
        per_epoch, dtype = self._steps.order.steps_per_epoch, None
        with _reserve_accelerator(self._accelerator, "exact_steps"):
            for data in loader:
                self.last = data
                dtype = dtype or agree_on_dtype(self._accelerator, data.counts)
                counts = total_counts(self._accelerator, convert_counts(data.counts, dtype))
                micro_batches = [
                    CountedBatch(
                        micro_batch["batch"], micro_batch["batch_counts"], micro_batch["is_placeholder"], samples
                    )
                    for micro_batch, samples in zip(data.micro_batches, data.samples, strict=True)
                ]
                is_first = data.step == self._numbers[0]
                if is_first:
                    _check_targets(counts)
                counts = counts.view(data.micro_batches[0]["shape"])
                is_last = (data.step + 1) // per_epoch > data.step // per_epoch
                place = data.step, data.epoch, is_last
                yield LoopStep(self._accelerator, place, micro_batches, counts, is_first, self._noise)


def exact_windows(
    accelerator: Accelerator,
    dataloader: Iterable,
    *,
    gradient_accumulation_steps: int,
    targets: Targets,
    num_epochs: int = 1,
) -> "ExactWindows":
    """Take steps of `gradient_accumulation_steps` batches of a loader on each process, exact for these samples.

    The loop is the same as with `exact_steps`. The loader may be prepared by accelerate (samples that it would repeat at the
    end are left out) or not (then each process must have its own part of the samples), and may be a stream. It is read k + 1
    batches ahead. The last window of an epoch may be shorter; a process whose loader ends earlier than others computes batches
    that count nothing until all loaders have ended. Each step takes one all-reduce of a few numbers, for which no process
    waits before its first forward.

    The epoch of the loader stays the caller's: a prepared loader goes on by itself, as it does without samestep, and in a loop
    over epochs the caller sets it, if anything has `set_epoch`. Only where num_epochs is above 1 the later epochs go on from
    the caller's: `set_epoch(epoch + 1)`, and so on.

    Args:
        accelerator: made without gradient accumulation.
        dataloader: gives batches (tensors in any nesting), anew in every epoch.
        gradient_accumulation_steps: k, batches of a step on each process.
        targets: batch -> number of targets over which the loss is summed, an int, or int tensor [terms]; or the sum of their
            weights, floats.
        num_epochs: times that the loader is read.

    Returns:
        `ExactWindows`: iterates over `Step`; has a length if the loader has one. All processes make it.

    Raises:
        UsageError: one line for each value that breaks a rule, with the remedy.
    """
    problems = find_problems(accelerator, "exact_windows")
    if not isinstance(dataloader, Iterable):
        problems.append(
            f"dataloader is {type(dataloader).__name__}, over which one cannot iterate: give it a DataLoader"
        )
    for name, value in (("gradient_accumulation_steps", gradient_accumulation_steps), ("num_epochs", num_epochs)):
        if not isinstance(value, int) or value < 1:
            problems.append(f"{name} is {value!r}, must be a whole number, 1 or more")
    if not callable(targets):
        problems.append(f"targets is {type(targets).__name__}, must be a function")
    if not problems and num_epochs > 1:
        problems += prepared.find_epoch_problems(dataloader, num_epochs)
    if problems:
        raise UsageError(problems)
    prepared.check(accelerator, dataloader)
    return ExactWindows(accelerator, dataloader, gradient_accumulation_steps, targets, num_epochs)


class ExactWindows:
    """The steps of a loader, of type `Step`. See `exact_windows`."""

    def __init__(self, accelerator: Accelerator, loader: Iterable, k: int, targets: Targets, num_epochs: int):
        self._accelerator, self._loader, self._k, self._targets = accelerator, loader, k, targets
        self._num_epochs = num_epochs
        lengths = [prepared.num_batches(loader)]
        lengths = gather_object(lengths) if accelerator.num_processes > 1 else lengths
        known = [length for length in lengths if length is not None]
        # Batches of the process with most; None: one of them does not know
        self._num_batches = max(known) if len(known) == len(lengths) else None

    def __len__(self) -> int:
        """Count the optimizer steps of all epochs, which a scheduler needs to know.

        Raises:
            TypeError: the loader has no length.
        """
        if self._num_batches is None:
            raise TypeError(
                f"exact_windows has no len(): its {type(self._loader).__name__} has none (a stream?); give the scheduler the "
                "number of steps yourself"
            )
        return self._num_epochs * -(-self._num_batches // self._k)

    def __iter__(self) -> Iterator[Step]:
        accelerator, k, index = self._accelerator, self._k, 0
        form: _Form | None = None
        placeholder: Any = None
        with _reserve_accelerator(accelerator, "exact_windows"):
            for epoch in prepared.iterate_epochs(self._loader, self._num_epochs):
                with prepared.without_repeats(accelerator, self._loader) as batches:
                    windows, num_done = _read_windows(batches, k), 0
                    is_last: bool | torch.Tensor = False
                    while not is_last:
                        read, has_more = next(windows, ([], False))
                        window = [CountedBatch(batch, to_counts(self._targets(batch))) for batch in read]
                        if form is None:
                            form, placeholder = _agree_on_form(accelerator, window, self._targets)
                            if form is None:  # no process has a batch
                                return
                        local = sum(part.counts for part in window or [placeholder]) * (len(window) > 0)
                        local = convert_counts(local, form.dtype)
                        # [terms + 2]: the targets, then batches, and processes that have more, summed over all processes
                        numbers = [local.new_full((1,), number) for number in (len(window), has_more)]
                        counts = total_counts(accelerator, torch.cat([local, *numbers]))
                        # Only a process without a batch must know at once whether others have one, and waits for the device
                        if not window and not counts[-2].item():
                            break
                        if window:
                            placeholder = dataclasses.replace(window[-1], is_placeholder=True)
                        num_missing = (k if _reduces_every_micro_batch(accelerator) else 1) - len(window)
                        window += [placeholder] * max(0, num_missing)
                        if not index:
                            _check_targets(counts[:-2])
                        num_done += len(read)
                        progress = min(1.0, num_done / self._num_batches) if self._num_batches else 0.0
                        is_last = False if has_more else counts[-1] == 0
                        num_targets = counts[:-2].view(form.shape)
                        place = index, epoch + progress, is_last
                        yield LoopStep(accelerator, place, window, num_targets, not index)
                        index += 1


def _read_windows(batches: Iterator, k: int) -> Iterator[tuple[list, bool]]:
    """Iterate over (k batches, whether more come): fewer in the last window."""
    window = list(itertools.islice(batches, k))
    while window:
        ahead = list(itertools.islice(batches, 1))
        yield window, bool(ahead)
        window = ahead + list(itertools.islice(batches, k - 1)) if ahead else []


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    data: Any,
    loss: Callable[[nn.Module, Any], tuple[torch.Tensor, Any]],
    *,
    collate: Callable[[list], Any] | None = None,
    per_device_batch_size: int = 8,
) -> torch.Tensor:
    """Compute the mean loss over a whole dataset, each sample counted once, on any number of processes. All of them call it.

    Args:
        accelerator: its processes share the work.
        model: put into evaluation mode, and back.
        data: a dataset with a length, of which each process computes its part; or a DataLoader, prepared or not.
        loss: (model, batch) -> (sums, number of targets): scalars or [terms].
        collate: list of samples -> batch, for a dataset; default torch's.
        per_device_batch_size: samples in one forward at most, for a dataset.

    Returns:
        float64 on the host, scalar or [terms]: sum of all targets' losses over their number; NaN without targets.

    Raises:
        UsageError: a loader for a model that is sharded, a loss that breaks its contract.
    """
    is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if is_sharded(accelerator) and not is_dataset:
        raise UsageError(
            f"data is a {type(data).__name__}, but the model is sharded and each forward needs all processes: give the dataset"
        )
    num_counted = None  # forwards whose sums count; None: all
    if is_dataset:
        # This process takes every N-th sample; where each forward needs all processes, sample 0 fills up, and counts nothing
        indices = range(accelerator.process_index, len(data), accelerator.num_processes)
        parts = [
            indices[first : first + per_device_batch_size] for first in range(0, len(indices), per_device_batch_size)
        ]
        num_counted = len(parts)
        if is_sharded(accelerator):
            num_batches = len(range(0, len(data), accelerator.num_processes * per_device_batch_size))
            parts += [range(1)] * (num_batches - len(parts))
        loader: Iterable = DataLoader(data, batch_sampler=parts, collate_fn=collate, generator=torch.Generator())
    else:
        prepared.check(accelerator, data)
        loader = data
    network = model.module if isinstance(model, DistributedDataParallel) else model
    was_training, totals = model.training, None
    model.eval()
    try:
        with prepared.without_repeats(accelerator, loader) as batches:
            for number, batch in enumerate(batches):
                sums, counts = check_contract(loss(network, send_to_device(batch, accelerator.device)))
                if num_counted is None or number < num_counted:
                    part = torch.stack([sums.double(), counts.to(sums.device).double()])
                    totals = part if totals is None else totals + part
    finally:
        model.train(was_training)
    local_totals = [] if totals is None else [totals.cpu()]
    all_totals = gather_object(local_totals) if accelerator.num_processes > 1 else local_totals
    if not all_totals:
        raise UsageError("data has no sample: there is no mean loss")
    sums, counts = sum(all_totals)
    return sums / counts


# ---------------------------------------------------------------------------------------------------------------------
# Samples


@dataclasses.dataclass
class _Sample:
    """A sample that is read when it is needed: a process reads its own part of a step only, unless `length` is given."""

    source: "_Source"
    epoch: int
    sample_id: int
    value: Any = None

    @property
    def length(self) -> int:
        return 1 if self.source.length is None else int(self.source.length(self.read()))

    def read(self) -> Any:
        if self.value is None:
            self.value = self.source.dataset[self.sample_id]
        return self.value


@dataclasses.dataclass
class _Source:
    """A `SampleSource` made of a user's dataset."""

    dataset: Any
    collate_fn: Callable[[list], Any]
    targets: Targets
    length: Callable[[Any], int] | None
    max_length: int = 0  # unknown: `partition` refuses a sample that is too long

    def draw(self, epoch: int, sample_id: int) -> _Sample:
        return _Sample(self, epoch, sample_id)

    def collate(self, samples: list[_Sample]) -> MicroBatch:
        is_placeholder = not samples
        samples = samples or [self.draw(0, 0)]
        values = [sample.read() for sample in samples]
        if isinstance(self.collate_fn, PerSample):
            batch = self.collate_fn(values, [(sample.epoch, sample.sample_id) for sample in samples])
        else:
            batch = self.collate_fn(values)
        num_targets = self.targets(batch)
        batch_counts = to_counts(num_targets).cpu()
        return {
            "batch": batch,
            "counts": torch.zeros_like(batch_counts) if is_placeholder else batch_counts,
            "batch_counts": batch_counts,
            "shape": _get_shape(num_targets),
            "is_placeholder": is_placeholder,
        }


def to_counts(value: Any) -> torch.Tensor:
    """Convert numbers of targets to int64 [terms], sums of their weights to float64 [terms].

    Raises:
        UsageError: the value is no number, or no tensor of numbers of at most one dimension; it is negative or not finite.
    """
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    is_float = isinstance(value, (float, np.floating))
    if isinstance(value, torch.Tensor):
        is_float = value.is_floating_point()
        is_number = value.ndim <= 1 and value.numel() > 0 and value.dtype != torch.bool and not value.is_complex()
        is_number &= value.dtype not in (torch.float16, torch.bfloat16)  # in which sums are coarse
        description = f"a tensor of {value.dtype} {list(value.shape)}"
        if is_float and value.device.type == "mps":  # which has no float64
            value = value.cpu()
    else:
        description = f"{value!r}"[:60]
    if not is_number:
        raise UsageError(
            f"targets returned {description}, must be the number of targets, an int or an int tensor [terms]. For example "
            "(labels != -100).sum(). Or the sum of their weights, a float or a tensor [terms] of float32 or float64"
        )
    counts = torch.as_tensor(value, dtype=torch.float64 if is_float else torch.int64).detach().reshape(-1)
    if counts.device.type == "cpu" and not ((counts >= 0) & counts.isfinite()).all():
        raise UsageError(f"targets returned {counts.tolist()}, must be finite and not negative")
    return counts


def agree_on_dtype(accelerator: Accelerator, counts: torch.Tensor | None) -> torch.dtype:
    """Agree with all processes, which call it once, on the dtype of counts; None: this process has none."""
    kinds = [counts is not None and counts.is_floating_point()]
    return torch.float64 if any(gather_object(kinds) if accelerator.num_processes > 1 else kinds) else torch.int64


def convert_counts(counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert counts to the dtype that was agreed on in the first step.

    Raises:
        UsageError: a sum of weights where the first step had numbers of targets.
    """
    if counts.is_floating_point() and not dtype.is_floating_point:
        raise UsageError(
            f"targets returned {counts.tolist()}, but whole numbers in the first step: sums of weights must be floats in every "
            "batch"
        )
    return counts.to(dtype)


def check_contract(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Check that a loss returned sums and numbers of targets of one shape, and return both as tensors."""
    if not (isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[0], torch.Tensor)):
        raise UsageError(
            f"loss returned {type(result).__name__}, must return (sums, number of targets), sums being {SUM}"
        )
    sums, counts = result[0], to_counts(result[1])
    if sums.numel() != counts.numel() or sums.ndim > 1:
        raise UsageError(
            f"loss returned sums {list(sums.shape)} and {counts.numel()} number(s) of targets: one for each sum"
        )
    return sums, counts.view(sums.shape)


def _check_targets(counts: torch.Tensor) -> None:
    """Check in the first step that every term has targets: without, it teaches nothing."""
    if not all(0 < count < math.inf for count in counts.tolist()):
        raise UsageError(
            f"targets counted {counts.tolist()} in the whole first step, must be above 0 and finite: count what the sum is "
            "over, for example (labels != -100).sum()"
        )


@dataclasses.dataclass(frozen=True)
class _Form:
    """Shape and dtype of the targets on all processes."""

    shape: torch.Size
    dtype: torch.dtype


def _agree_on_form(
    accelerator: Accelerator, window: list[CountedBatch], targets: Targets
) -> tuple[_Form | None, CountedBatch | None]:
    """Agree in the first window on the form of the targets on all processes (None: no process has a batch).

    Returns:
        The form, and a placeholder for processes without a batch.
    """
    first = window[:1]
    dtype = agree_on_dtype(accelerator, first[0].counts if first else None)
    if accelerator.num_processes > 1:
        shapes = gather_object([_get_shape(targets(part.batch)) for part in first] or [None])
        distinct_shapes = {shape for shape in shapes if shape is not None}
        if len(distinct_shapes) > 1:
            raise UsageError(
                f"targets returned {sorted(map(list, distinct_shapes))} on different processes, must have one shape everywhere"
            )
        if None in shapes and distinct_shapes:
            parts = gather_object([(send_to_device(part.batch, "cpu"), part.counts.cpu()) for part in first])
            first = first or [CountedBatch(*parts[0])]
    if not first:
        return None, None
    shape = _get_shape(targets(first[0].batch))
    return _Form(shape, dtype), dataclasses.replace(first[0], is_placeholder=True)


def _get_shape(num_targets: Any) -> torch.Size:
    return num_targets.shape if isinstance(num_targets, torch.Tensor) else torch.Size([])


def _reduces_every_micro_batch(accelerator: Accelerator) -> bool:
    """Say whether each forward or backward needs all processes, so that all need as many micro-batches."""
    return is_sharded(accelerator) or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)


# ---------------------------------------------------------------------------------------------------------------------
# Wrong use

ENGINES = {
    DistributedType.DEEPSPEED: "where accelerator.backward takes the step, before its gradient can be clipped",
    DistributedType.MEGATRON_LM: "which scales the loss and accumulates by its own rules",
}
"""Types that are refused -> why."""


@contextlib.contextmanager
def _reserve_accelerator(accelerator: Accelerator, name: str) -> Iterator[None]:
    """Keep the accelerator to this loop, which counts its micro-batches; afterwards the accelerator is as before."""
    if problems := find_problems(accelerator, name):
        raise UsageError(problems)
    options = accelerator.gradient_state.plugin_kwargs
    saved_options = dict(options)
    try:
        yield
    finally:
        options.clear()
        options.update(saved_options)
        accelerator.step = 0


def find_problems(accelerator: Accelerator, name: str) -> list[str]:
    """Find the problems that would make every step wrong: a line for each."""
    problems, k = [], accelerator.gradient_accumulation_steps
    if k > 1:
        variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        remedy = (
            f"unset {variable}, or remove gradient_accumulation_steps from the launch file"
            if os.environ.get(variable) == str(k)
            else "make it without: Accelerator()"
        )
        problems.append(
            f"gradient_accumulation_steps of the Accelerator is {k}, must be 1: {name} counts the micro-batches of each step; "
            f"{remedy}"
        )
    if any(
        scheduler.step_with_optimizer and not scheduler.split_batches for scheduler in prepared_schedulers(accelerator)
    ):
        problems.append(
            "the scheduler is prepared, so that it steps once per process in every optimizer step. Leave it out of "
            "accelerator.prepare, and call scheduler.step() once behind the micro-batches of a step"
        )
    if accelerator.distributed_type in ENGINES:
        problems.append(
            f"distributed_type is {accelerator.distributed_type.value}, {ENGINES[accelerator.distributed_type]}: launch with "
            "MULTI_GPU, or for weights in parts with FSDP and fsdp_version 2"
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        problems.append(
            "the Accelerator has a parallelism_config, with which processes can share samples: leave it out, for data "
            "parallelism alone"
        )
    if (size := get_int_from_env(SIZES, 1)) > 1 and accelerator.num_processes == 1:
        problems.append(
            f"{size} processes were launched, but each would train alone: on CPUs make it with Accelerator(cpu=True), and "
            "launch with distributed_type MULTI_GPU, as accelerate_configs/2xcpu.yaml"
        )
    return problems
