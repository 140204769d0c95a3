"""The exact step for loops that people write themselves: `exact_steps`, `exact_windows`, `evaluate`.

One contract of a loss everywhere: a function of (model, batch) that returns the sums over the targets of a micro-batch, [terms]
or scalar, and the numbers of targets. A step's loss is

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
from samestep.step.accumulate import iterate_micro_batches, loss_scale, total_counts
from samestep.step.losses import weighted_loss
from samestep.step.means import find_mean
from samestep.training import prepared
from samestep.training.launch import SIZES, is_sharded

Targets = Callable[[Any], int | torch.Tensor]
SUM = 'a sum over the targets, as F.cross_entropy(..., reduction="sum")'


@dataclasses.dataclass(frozen=True)
class CountedBatch:
    """What one forward and backward compute.

    Attributes:
        batch: as collated.
        counts: int64 [terms], its targets.
        is_stand_in: it counts nothing: this process has no sample left, but DDP waits for its gradient.
    """

    batch: Any
    counts: torch.Tensor
    is_stand_in: bool = False


class Step:
    """One optimizer step: iterate over its micro-batches, on the accelerator's device.

    Attributes:
        index: its number; 0 is the first.
        epoch: epochs done when the step is done, a fraction where it is known.
        num_targets: n_j, int64 on the device, of the whole step; shaped as what `targets` returns: scalar or [terms].
        num_micro_batches: k, of this process.
        is_idle: this process has no sample in this step, and computes one that counts nothing.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        index: int,
        epoch: float,
        micro_batches: Sequence[CountedBatch],
        num_targets: torch.Tensor,
        is_first: bool,
    ):
        self.index, self.epoch, self.num_targets = index, epoch, num_targets
        self.num_micro_batches = len(micro_batches)
        self.is_idle = all(part.is_stand_in for part in micro_batches)
        self._accelerator, self._micro_batches, self._is_first = accelerator, micro_batches, is_first
        self._current: CountedBatch | None = None
        self._sums = torch.zeros((), device=accelerator.device)

    def __iter__(self) -> Iterator[Any]:
        self._sums = torch.zeros((), device=self._accelerator.device)
        for number, part in enumerate(iterate_micro_batches(self._accelerator, self._micro_batches), 1):
            self._current, self._num_losses = part, 0
            yield send_to_device(part.batch, self._accelerator.device, non_blocking=True)
            if self._is_first:
                self._check_use(number)
        self._current = None

    def loss(self, sums: Any, weights: Sequence[float] | torch.Tensor | None = None) -> torch.Tensor:
        """This micro-batch's part of the step's loss, times k and N, by which Accelerate and DDP divide: for
        `accelerator.backward`.

        Args:
            sums: summed losses of the micro-batch, scalar or [terms], in any floating dtype; or what the contract of a loss
                returns, (sums, number of targets).
            weights: w_j, [terms]; None: 1.

        Returns:
            scalar in float32 or wider.

        Raises:
            UsageError: no micro-batch is being computed, sums of another shape than the targets', in the first step a mean.
        """
        if self._current is None:
            raise UsageError("step.loss was called outside its loop: call it for each batch of `for batch in step:`")
        sums, own = sums if isinstance(sums, tuple) else (sums, None)
        if not isinstance(sums, torch.Tensor) or sums.shape != self.num_targets.shape:
            what = list(sums.shape) if isinstance(sums, torch.Tensor) else type(sums).__name__
            raise UsageError(
                f"step.loss was given {what}, but targets returns {list(self.num_targets.shape)}: one sum for each number of "
                "targets"
            )
        if self._is_first:
            self._check_sums(sums, own)
        sums = sums.float() if sums.dtype in (torch.float16, torch.bfloat16) else sums
        if self._current.is_stand_in:
            sums = sums * 0
        self._sums = self._sums + sums.detach()
        self._num_losses += 1
        weights = torch.ones_like(sums) if weights is None else torch.as_tensor(weights).to(sums)
        return weighted_loss(sums, self.num_targets, weights) * loss_scale(self._accelerator)

    def mean_loss(self) -> torch.Tensor:
        """The mean of each term over all targets of the whole step, without weights; for the log. All processes call it, after
        the step's last micro-batch: it takes one all-reduce.

        Returns:
            scalar or [terms], as `num_targets`.
        """
        return self._accelerator.reduce(self._sums, reduction="sum") / self.num_targets.clamp(min=1)

    def _check_use(self, number: int) -> None:
        """In the first step, after each micro-batch."""
        if self._accelerator.step != number:
            entered = self._accelerator.step
            raise UsageError(
                f"accelerator.accumulate was entered {entered} times for {number} micro-batch(es): compute each one, once, "
                "inside `with accelerator.accumulate(model):` (several models: accumulate(first, second))"
            )
        if not self._num_losses:
            raise UsageError(
                "step.loss was not called for a micro-batch: accelerator.backward(step.loss(sums)), with the summed loss"
            )

    def _check_sums(self, sums: torch.Tensor, own: Any) -> None:
        """In the first step: is it a sum, and of as many targets as were counted?"""
        counts = self._current.counts.tolist()
        if own is not None and not self._current.is_stand_in and (found := as_counts(own).tolist()) != counts:
            raise UsageError(
                f"the loss counts {found} targets in a micro-batch, targets counts {counts}: both must be what the sum is over"
            )
        possible = [[of, int(n)] for of, n in zip(counts, self.num_targets.view(-1).tolist(), strict=True)]
        if how := find_mean(sums, possible):
            raise UsageError(
                f"step.loss was given a mean ({how}): give it {SUM}, or the mean times the number of targets"
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
) -> "ExactSteps":
    """Take steps whose gradient is that of one batch of `global_batch_size` samples, on any number of processes.

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
        accelerator: not told of any gradient accumulation.
        dataset: has a length and is indexed by whole numbers.
        collate: list of samples -> batch (tensors in any nesting), or `per_sample(...)`.
        global_batch_size: B, samples of a step.
        per_device_batch_size: b, most samples in one forward.
        targets: batch -> number of targets, an int, or int tensor [terms]: what the summed loss is over.
        seed: of the order.
        num_epochs: default 1, where num_steps is not given.
        num_steps: steps in all, those before first_step included.
        first_step: where to go on, on whatever number of processes: steps taken so far.
        epoch_end: where B does not divide the samples: `carry` (a step may hold the last samples of one epoch and the first of
            the next), `keep` (the epoch's last step is smaller), `drop`.
        length: sample -> its tokens; samples of about one length then share a micro-batch. Every process then reads all
            samples of a step.
        max_tokens: most tokens in a micro-batch, padding included; needs `length`.
        num_workers: processes that prepare steps ahead.

    Returns:
        `ExactSteps`: has a length, and iterates over `Step`.

    Raises:
        UsageError: one line for each value that breaks a rule, with the remedy.
    """
    problems = problems_of(accelerator, "exact_steps")
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
    steps = Steps(
        _Source(dataset, collate, targets, length),
        order,
        layout,
        process_index=accelerator.process_index,
        max_tokens=max_tokens,
        same_num_micro_batches=is_sharded(accelerator),
    )
    return ExactSteps(accelerator, steps, range(first_step, last), num_workers)


class ExactSteps:
    """The steps of a training, of type `Step`. See `exact_steps`."""

    def __init__(self, accelerator: Accelerator, steps: Steps, numbers: range, num_workers: int):
        self._accelerator, self._steps, self._numbers, self._num_workers = accelerator, steps, numbers, num_workers

    def __len__(self) -> int:
        """Optimizer steps that are left: what a scheduler wants to know."""
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
        with _counting(self._accelerator, "exact_steps"):
            for data in loader:
                counts = total_counts(self._accelerator, data.counts)
                micro_batches = [
                    CountedBatch(micro_batch["batch"], micro_batch["own"], micro_batch["is_stand_in"])
                    for micro_batch in data.micro_batches
                ]
                is_first = data.step == self._numbers[0]
                if is_first:
                    _check_targets(counts)
                counts = counts.view(data.micro_batches[0]["shape"])
                yield Step(self._accelerator, data.step, data.epoch, micro_batches, counts, is_first)


def exact_windows(
    accelerator: Accelerator,
    dataloader: Iterable,
    *,
    gradient_accumulation_steps: int,
    targets: Targets,
    num_epochs: int = 1,
) -> Iterator[Step]:
    """Take steps of `gradient_accumulation_steps` batches of a loader on each process, exact for these samples.

    The loop is that of `exact_steps`. The loader may be prepared by accelerate (samples that it would repeat at the end are
    left out) or not (then each process must have its own part of the samples), and may be a stream. It is read k batches ahead.
    The last window of an epoch may be shorter; a process whose loader ends before that of others computes batches that count
    nothing until they are done. Each step takes one all-reduce of a few integers, for which no process waits before its first
    forward.

    Args:
        accelerator: not told of any gradient accumulation.
        dataloader: gives batches (tensors in any nesting), anew in every epoch.
        gradient_accumulation_steps: k, batches of a step on each process.
        targets: batch -> number of targets, an int, or int tensor [terms]: what the summed loss is over.
        num_epochs: times that the loader is read; its `set_epoch`, or that of its sampler and dataset, is called.

    Returns:
        Iterator over `Step`.

    Raises:
        UsageError: one line for each value that breaks a rule, with the remedy.
    """
    problems = problems_of(accelerator, "exact_windows")
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
    return _windows(accelerator, dataloader, gradient_accumulation_steps, targets, num_epochs)


def _windows(accelerator: Accelerator, loader: Iterable, k: int, targets: Targets, num_epochs: int) -> Iterator[Step]:
    shape, stand_in, index, device = None, None, 0, accelerator.device
    with _counting(accelerator, "exact_windows"):
        for epoch in range(num_epochs):
            _set_epoch(loader, epoch)
            with prepared.without_repeats(accelerator, loader) as batches:
                num_read = 0
                while True:
                    window = [CountedBatch(batch, as_counts(targets(batch))) for batch in itertools.islice(batches, k)]
                    if shape is None:
                        shape, stand_in = _agree(accelerator, window, targets)
                        if shape is None:  # no process has a batch
                            return
                    num_read += len(window)
                    counts = torch.zeros(shape.numel() + 1, dtype=torch.int64, device=device)
                    for part in window:
                        counts += torch.cat([part.counts.to(device), counts.new_ones(1)])
                    counts = total_counts(accelerator, counts)
                    # Only a process that has nothing itself must know at once whether others have
                    if not window and not counts[-1].item():
                        break
                    if window:
                        stand_in = dataclasses.replace(window[-1], is_stand_in=True)
                    if missing := (k if is_sharded(accelerator) else 1) - len(window):
                        window += [stand_in] * max(0, missing)
                    if not index:
                        _check_targets(counts[:-1])
                    length = len(loader) if hasattr(type(loader), "__len__") and _has_length(loader) else 0
                    done = min(1.0, num_read / length) if length else 0.0
                    yield Step(accelerator, index, epoch + done, window, counts[:-1].view(shape), index == 0)
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
    """Mean loss over a whole dataset, each sample counted once, on any number of processes. All of them call it.

    Args:
        accelerator: its processes share the work.
        model: put into evaluation mode, and back.
        data: a dataset with a length, of which each process computes its part; or a DataLoader, prepared or not.
        loss: (model, batch) -> (sums, number of targets): scalars or [terms].
        collate: list of samples -> batch, for a dataset; default torch's.
        per_device_batch_size: most samples in one forward, for a dataset.

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
        own = range(accelerator.process_index, len(data), accelerator.num_processes)
        parts = [own[first : first + per_device_batch_size] for first in range(0, len(own), per_device_batch_size)]
        num_counted = len(parts)
        if is_sharded(accelerator):
            most = len(range(0, len(data), accelerator.num_processes * per_device_batch_size))
            parts += [range(1)] * (most - len(parts))
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
    own_totals = [] if totals is None else [totals.cpu()]
    everywhere = gather_object(own_totals) if accelerator.num_processes > 1 else own_totals
    if not everywhere:
        raise UsageError("data has no sample: there is no mean loss")
    sums, counts = sum(everywhere)
    return sums / counts


# ---------------------------------------------------------------------------------------------------------------------
# Samples


@dataclasses.dataclass
class _Sample:
    """A sample that is read when it is needed: a process reads its own part of a step, unless lengths are asked for."""

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
    """A `SampleSource` of somebody's dataset."""

    dataset: Any
    collate_fn: Callable[[list], Any]
    targets: Targets
    length: Callable[[Any], int] | None
    max_length: int = 0  # unknown: `partition` refuses a sample that is too long

    def draw(self, epoch: int, sample_id: int) -> _Sample:
        return _Sample(self, epoch, sample_id)

    def collate(self, samples: list[_Sample]) -> MicroBatch:
        is_stand_in = not samples
        samples = samples or [self.draw(0, 0)]
        read = [sample.read() for sample in samples]
        if isinstance(self.collate_fn, PerSample):
            batch = self.collate_fn(read, [(sample.epoch, sample.sample_id) for sample in samples])
        else:
            batch = self.collate_fn(read)
        found = self.targets(batch)
        own = as_counts(found).cpu()
        counts = torch.zeros_like(own) if is_stand_in else own
        shape = found.shape if isinstance(found, torch.Tensor) else torch.Size([])
        return {"batch": batch, "counts": counts, "own": own, "shape": shape, "is_stand_in": is_stand_in}


def as_counts(found: Any) -> torch.Tensor:
    """Numbers of targets, as int64 [terms].

    Raises:
        UsageError: something else than an int, or an integer tensor of at most one dimension, not negative.
    """
    is_whole = isinstance(found, (int, np.integer)) and not isinstance(found, bool)
    if isinstance(found, torch.Tensor):
        is_whole = found.ndim <= 1 and not found.is_floating_point() and found.dtype != torch.bool and found.numel() > 0
        what = f"a tensor of {found.dtype} {list(found.shape)}"
    else:
        what = f"{found!r}"[:60]
    if not is_whole:
        raise UsageError(
            f"targets returned {what}, must be the number of targets, an int or an int tensor [terms]: for example (labels != "
            "-100).sum()"
        )
    counts = torch.as_tensor(found, dtype=torch.int64).detach().reshape(-1)
    if counts.device.type == "cpu" and int(counts.min()) < 0:
        raise UsageError(f"targets returned {what}, must not be negative")
    return counts


def check_contract(returned: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums, counts) of a loss, of one shape."""
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2 and isinstance(returned[0], torch.Tensor)):
        raise UsageError(
            f"loss returned {type(returned).__name__}, must return (sums, number of targets), sums being {SUM}"
        )
    sums, counts = returned[0], as_counts(returned[1])
    if sums.numel() != counts.numel() or sums.ndim > 1:
        raise UsageError(
            f"loss returned sums {list(sums.shape)} and {counts.numel()} number(s) of targets: one for each sum"
        )
    return sums, counts.view(sums.shape)


def _check_targets(counts: torch.Tensor) -> None:
    """In the first step: a term without targets teaches nothing."""
    if 0 in counts.tolist():
        raise UsageError(
            f"targets counted {counts.tolist()} in the whole first step, must be above 0: count what the sum is over, for "
            "example (labels != -100).sum()"
        )


def _agree(accelerator: Accelerator, window: list[CountedBatch], targets: Targets) -> tuple[torch.Size | None, Any]:
    """In the first window: the shape of the targets on all processes (None: no process has a batch), and a stand-in for one
    that has none."""
    first = window[:1]
    if accelerator.num_processes > 1:
        shapes = gather_object([_shape(targets(part.batch)) for part in first] or [None])
        known = {shape for shape in shapes if shape is not None}
        if len(known) > 1:
            raise UsageError(
                f"targets returned {sorted(map(list, known))} on different processes, must have one shape everywhere"
            )
        if None in shapes and known:
            parts = gather_object([(send_to_device(part.batch, "cpu"), part.counts.cpu()) for part in first])
            first = first or [CountedBatch(*parts[0])]
    if not first:
        return None, None
    return _shape(targets(first[0].batch)), dataclasses.replace(first[0], is_stand_in=True)


def _shape(found: Any) -> torch.Size:
    return found.shape if isinstance(found, torch.Tensor) else torch.Size([])


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
def _counting(accelerator: Accelerator, name: str) -> Iterator[None]:
    """Micro-batches are counted here; afterwards the accelerator is as before."""
    if problems := problems_of(accelerator, name):
        raise UsageError(problems)
    options = accelerator.gradient_state.plugin_kwargs
    before = dict(options)
    try:
        yield
    finally:
        options.clear()
        options.update(before)
        accelerator.step = 0


def problems_of(accelerator: Accelerator, name: str) -> list[str]:
    """What makes every step wrong, in a line each."""
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
    if any(of.step_with_optimizer and not of.split_batches for of in prepared_schedulers(accelerator)):
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
