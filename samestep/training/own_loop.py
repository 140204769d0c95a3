"""The exact step for loops that people write themselves: `exact_steps`, `exact_windows`, `evaluate`.

A loss has one contract everywhere: it is a function of (model, batch) that returns the sums over the targets of a micro-batch,
[terms] or scalar, and the numbers of targets. A step's loss is

    L = sum_j w_j * (sum over all samples of s_j) / n_j,    n_j the targets of term j in the whole step,

over all micro-batches of all processes; `Step.loss` computes a micro-batch's part of it.
"""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, get_int_from_env, send_to_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from samestep import interrupt
from samestep._internals.accelerate_state import prepared_schedulers
from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data.per_sample import PerSample
from samestep.data.steps import MicroBatch, Steps
from samestep.errors import UsageError
from samestep.printing import format_count
from samestep.step.accumulate import iterate_micro_batches, loss_scale, total_counts
from samestep.step.losses import weighted_loss
from samestep.step.means import find_mean
from samestep.step.noise import Noise
from samestep.training import prepared
from samestep.training.launch import SIZES, is_sharded

Targets = Callable[[Any], int | torch.Tensor]
SUM = 'a sum over the targets, as F.cross_entropy(..., reduction="sum")'


@dataclasses.dataclass(frozen=True)
class CountedBatch:
    """One batch with its numbers of targets, for one forward and backward.

    Attributes:
        batch: as collated.
        counts: int64 [terms], numbers of targets in the batch.
        is_placeholder: the batch counts nothing: this process has no sample left, but DDP waits for its gradient.
        samples: (epoch, sample id) of each sample, where they are known.
    """

    batch: Any
    counts: torch.Tensor
    is_placeholder: bool = False
    samples: Sequence[tuple[int, int]] = ()


class Step:
    """One optimizer step: iterate over its micro-batches, on the accelerator's device.

    Attributes:
        index: number of the step; 0 is the first.
        epoch: epochs done when the step is done, a fraction where it is known.
        num_targets: n_j, the targets in the whole step, int64 on the device; of the shape that `targets` returns: scalar or
            [terms].
        num_micro_batches: k, micro-batches of this process in the step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        index: int,
        epoch: float,
        micro_batches: Sequence[CountedBatch],
        num_targets: torch.Tensor,
        is_first: bool,
        noise: Noise | None = None,
    ):
        self.index, self.epoch, self.num_targets = index, epoch, num_targets
        self.num_micro_batches = len(micro_batches)
        self._accelerator, self._micro_batches, self._is_first = accelerator, micro_batches, is_first
        self._noise = noise
        self._current: CountedBatch | None = None
        self._sums = torch.zeros((), device=accelerator.device)

    def __iter__(self) -> Iterator[Any]:
        self._sums = torch.zeros((), device=self._accelerator.device)
        for number, part in enumerate(iterate_micro_batches(self._accelerator, self._micro_batches), 1):
            self._current, self._num_losses = part, 0
            if self._noise is not None:
                self._noise.set_samples(part.samples, self._accelerator.device)
            yield send_to_device(part.batch, self._accelerator.device, non_blocking=True)
            if self._is_first:
                self._check_use(number)
        self._current = None

    def loss(self, sums: Any, weights: Sequence[float] | torch.Tensor | None = None) -> torch.Tensor:
        """Compute this micro-batch's part of the step's loss, for `accelerator.backward`.

        It is multiplied by k and N, by which Accelerate and DDP divide:  k N sum_j w_j s_j / n_j.

        Args:
            sums: s_j, summed losses of the micro-batch, scalar or [terms], in any floating dtype; or (sums, number of targets),
                as the contract of a loss returns them.
            weights: w_j, [terms]; None: 1.

        Returns:
            scalar in float32 or wider.

        Raises:
            UsageError: no micro-batch is being computed, sums of another shape than the targets', in the first step a mean.
        """
        if self._current is None:
            raise UsageError("step.loss was called outside its loop: call it for each batch of `for batch in step:`")
        sums, returned_counts = sums if isinstance(sums, tuple) else (sums, None)
        if not isinstance(sums, torch.Tensor) or sums.shape != self.num_targets.shape:
            description = list(sums.shape) if isinstance(sums, torch.Tensor) else type(sums).__name__
            raise UsageError(
                f"step.loss was given {description}, but targets returns {list(self.num_targets.shape)}: one sum for each "
                "number of targets"
            )
        if self._is_first:
            self._check_sums(sums, returned_counts)
        sums = sums.float() if sums.dtype in (torch.float16, torch.bfloat16) else sums
        if self._current.is_placeholder:
            sums = sums * 0
        self._sums = self._sums + sums.detach()
        self._num_losses += 1
        weights = torch.ones_like(sums) if weights is None else torch.as_tensor(weights).to(sums)
        return weighted_loss(sums, self.num_targets, weights) * loss_scale(self._accelerator)

    def mean_loss(self) -> torch.Tensor:
        """Compute the mean of each term over all targets of the whole step, without weights; for the log.

        All processes call it, after the step's last micro-batch: it takes one all-reduce.

        Returns:
            scalar or [terms], as `num_targets`.
        """
        return self._accelerator.reduce(self._sums, reduction="sum") / self.num_targets.clamp(min=1)

    def _check_use(self, number: int) -> None:
        """Check after each micro-batch of the first step that the loop used it as it must."""
        if self._accelerator.step != number:
            num_entries = self._accelerator.step
            raise UsageError(
                f"accelerator.accumulate was entered {num_entries} times for {format_count(number, 'micro-batch')}: compute "
                "each one, once, inside `with accelerator.accumulate(model):` (several models: accumulate(first, second))"
            )
        if not self._num_losses:
            raise UsageError(
                "step.loss was not called for a micro-batch: accelerator.backward(step.loss(sums)), with the summed loss"
            )

    def _check_sums(self, sums: torch.Tensor, returned_counts: Any) -> None:
        """Check in the first step that the loss is a sum, over as many targets as `targets` counted."""
        counts = self._current.counts.tolist()
        if (
            returned_counts is not None
            and not self._current.is_placeholder
            and (loss_counts := to_counts(returned_counts).tolist()) != counts
        ):
            raise UsageError(
                f"the loss counts {loss_counts} targets in a micro-batch, targets counts {counts}: both must be what the sum "
                "is over"
            )
        divisors = [[part, int(total)] for part, total in zip(counts, self.num_targets.view(-1).tolist(), strict=True)]
        if mean := find_mean(sums, divisors):
            raise UsageError(
                f"step.loss was given a mean ({mean}): give it {SUM}, or the mean times the number of targets"
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
        targets: batch -> number of targets over which the loss is summed, an int, or int tensor [terms].
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
    if num_epochs is not None and num_steps is not None:
        problems.append(f"num_epochs is {num_epochs} and num_steps is {num_steps}: give one of them")
    if max_tokens is not None and length is None:
        problems.append(f"max_tokens is {max_tokens}, but length is missing: give length=, a sample's number of tokens")
    if problems:
        raise UsageError(problems)
    order = Order(len(dataset), global_batch_size, seed, epoch_end)
    last = order.num_steps(1 if num_epochs is None else num_epochs) if num_steps is None else num_steps
    if not 0 <= first_step <= last:
        raise UsageError(f"first_step is {first_step}, must be 0 to {last}, the number of steps")
    layout = solve_layout(
        num_processes=accelerator.num_processes,
        global_batch_size=global_batch_size,
        per_device_train_batch_size=per_device_batch_size,
    )
    source: Any = _Source(dataset, collate, targets, length)  # of which no kernel is chosen: it has no longest sample
    steps = Steps(
        source,
        order,
        layout,
        process_index=accelerator.process_index,
        max_tokens=max_tokens,
        same_num_micro_batches=is_sharded(accelerator),
    )
    notes = [] if noise is None else noise.notes
    accelerator.print(*notes, sep="\n", end="\n" * len(notes))
    return ExactSteps(accelerator, steps, range(first_step, last), num_workers, noise)


class ExactSteps:
    """The steps of a training, of type `Step`. See `exact_steps`."""

    def __init__(self, accelerator: Accelerator, steps: Steps, numbers: range, num_workers: int, noise: Noise | None):
        self._accelerator, self._steps, self._numbers, self._num_workers = accelerator, steps, numbers, num_workers
        self._noise = noise

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
        with _reserve_accelerator(self._accelerator, "exact_steps"):
            for data in loader:
                counts = total_counts(self._accelerator, data.counts)
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
                yield Step(self._accelerator, data.step, data.epoch, micro_batches, counts, is_first, self._noise)


def exact_windows(
    accelerator: Accelerator,
    dataloader: Iterable,
    *,
    gradient_accumulation_steps: int,
    targets: Targets,
    num_epochs: int = 1,
) -> Iterator[Step]:
    """Take steps of `gradient_accumulation_steps` batches of a loader on each process, exact for these samples.

    The loop is the same as with `exact_steps`. The loader may be prepared by accelerate (samples that it would repeat at the
    end are left out) or not (then each process must have its own part of the samples), and may be a stream. It is read k
    batches ahead. The last window of an epoch may be shorter; a process whose loader ends earlier than others computes batches
    that count nothing until all loaders have ended. Each step takes one all-reduce of a few integers, for which no process
    waits before its first forward.

    Args:
        accelerator: made without gradient accumulation.
        dataloader: gives batches (tensors in any nesting), anew in every epoch.
        gradient_accumulation_steps: k, batches of a step on each process.
        targets: batch -> number of targets over which the loss is summed, an int, or int tensor [terms].
        num_epochs: times that the loader is read; `set_epoch` of the loader, its sampler and its dataset is called, if any.

    Returns:
        Iterator over `Step`.

    Raises:
        UsageError: one line for each value that breaks a rule, with the remedy.
    """
    problems = find_problems(accelerator, "exact_windows")
    if not isinstance(dataloader, Iterable):
        problems.append(
            f"dataloader is {type(dataloader).__name__}, over which one cannot iterate: give it a DataLoader"
        )
    if num_epochs > 1 and isinstance(dataloader, Iterator):
        problems.append(
            f"num_epochs is {num_epochs}, but dataloader is an iterator, which can be read once: give the DataLoader itself"
        )
    for name, value in (("gradient_accumulation_steps", gradient_accumulation_steps), ("num_epochs", num_epochs)):
        if not isinstance(value, int) or value < 1:
            problems.append(f"{name} is {value!r}, must be a whole number, 1 or more")
    if not callable(targets):
        problems.append(f"targets is {type(targets).__name__}, must be a function")
    if problems:
        raise UsageError(problems)
    prepared.check(accelerator, dataloader)
    return _iterate_windows(accelerator, dataloader, gradient_accumulation_steps, targets, num_epochs)


def _iterate_windows(
    accelerator: Accelerator, loader: Iterable, k: int, targets: Targets, num_epochs: int
) -> Iterator[Step]:
    shape, placeholder, index, device = None, None, 0, accelerator.device
    with _reserve_accelerator(accelerator, "exact_windows"):
        for epoch in range(num_epochs):
            _set_epoch(loader, epoch)
            with prepared.without_repeats(accelerator, loader) as batches:
                num_batches = 0
                while True:
                    window = [CountedBatch(batch, to_counts(targets(batch))) for batch in itertools.islice(batches, k)]
                    if shape is None:
                        shape, placeholder = _agree_on_shape(accelerator, window, targets)
                        if shape is None:  # no process has a batch
                            return
                    num_batches += len(window)
                    # [terms + 1]: targets of each term, and last the number of batches, summed over all processes
                    counts = torch.zeros(shape.numel() + 1, dtype=torch.int64, device=device)
                    for part in window:
                        counts += torch.cat([part.counts.to(device), counts.new_ones(1)])
                    counts = total_counts(accelerator, counts)
                    # Only a process without a batch must know at once whether others have one: .item() waits for the device
                    if not window and not counts[-1].item():
                        break
                    if window:
                        placeholder = dataclasses.replace(window[-1], is_placeholder=True)
                    if num_missing := (k if is_sharded(accelerator) else 1) - len(window):
                        window += [placeholder] * max(0, num_missing)
                    if not index:
                        _check_targets(counts[:-1])
                    sized: Any = loader
                    length = len(sized) if hasattr(type(loader), "__len__") and _has_length(loader) else 0
                    progress = min(1.0, num_batches / length) if length else 0.0
                    yield Step(accelerator, index, epoch + progress, window, counts[:-1].view(shape), index == 0)
                    index += 1


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
        counts = torch.zeros_like(batch_counts) if is_placeholder else batch_counts
        shape = num_targets.shape if isinstance(num_targets, torch.Tensor) else torch.Size([])
        return {
            "batch": batch,
            "counts": counts,
            "batch_counts": batch_counts,
            "shape": shape,
            "is_placeholder": is_placeholder,
        }


def to_counts(value: Any) -> torch.Tensor:
    """Convert numbers of targets to int64 [terms].

    Raises:
        UsageError: the value is neither an int nor an integer tensor of at most one dimension, or is negative.
    """
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if isinstance(value, torch.Tensor):
        is_whole = value.ndim <= 1 and not value.is_floating_point() and value.dtype != torch.bool and value.numel() > 0
        description = f"a tensor of {value.dtype} {list(value.shape)}"
    else:
        description = f"{value!r}"[:60]
    if not is_whole:
        raise UsageError(
            f"targets returned {description}, must be the number of targets, an int or an int tensor [terms]: for example "
            "(labels != -100).sum()"
        )
    counts = torch.as_tensor(value, dtype=torch.int64).detach().reshape(-1)
    if counts.device.type == "cpu" and int(counts.min()) < 0:
        raise UsageError(f"targets returned {description}, must not be negative")
    return counts


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
    if 0 in counts.tolist():
        raise UsageError(
            f"targets counted {counts.tolist()} in the whole first step, must be above 0: count what the sum is over, for "
            "example (labels != -100).sum()"
        )


def _agree_on_shape(
    accelerator: Accelerator, window: list[CountedBatch], targets: Targets
) -> tuple[torch.Size | None, Any]:
    """Agree in the first window on the shape of the targets on all processes (None: no process has a batch).

    Returns:
        The shape, and a placeholder for processes without a batch.
    """
    first = window[:1]
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
    return _get_shape(targets(first[0].batch)), dataclasses.replace(first[0], is_placeholder=True)


def _get_shape(num_targets: Any) -> torch.Size:
    return num_targets.shape if isinstance(num_targets, torch.Tensor) else torch.Size([])


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except TypeError:  # a DataLoader of a stream
        return False
    return True


def _set_epoch(loader: Any, epoch: int) -> None:
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


# ---------------------------------------------------------------------------------------------------------------------
# Wrong use


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
            "the scheduler is prepared, so that it steps once per process in every optimizer step: leave it out of "
            "accelerator.prepare, and call scheduler.step() once behind the micro-batches of a step"
        )
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        problems.append(
            f"distributed_type is {accelerator.distributed_type.value}, which scales the loss and accumulates by its own "
            "rules: launch with MULTI_GPU or FSDP"
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        problems.append(
            "the Accelerator has a parallelism_config, with which processes can share samples: leave it out, for data "
            "parallelism alone"
        )
    if (size := get_int_from_env(SIZES, 1)) > 1 and accelerator.num_processes == 1:
        problems.append(
            f"{size} processes were launched, but each would train alone: on CPUs launch with ACCELERATE_USE_CPU=true and "
            "distributed_type MULTI_GPU"
        )
    return problems
