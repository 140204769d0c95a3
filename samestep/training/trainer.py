"""transformers' Trainer, and what inherits from it, with the exact step and nothing else changed."""

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer

from samestep.errors import UsageError
from samestep.recipe.extras import require_release
from samestep.step.accumulate import total_counts
from samestep.step.losses import weighted_loss
from samestep.step.means import find_mean
from samestep.training import prepared, ways
from samestep.training.head_loss import REMEDY, HeadLoss, find_balance_weight
from samestep.training.launch import is_sharded
from samestep.training.measured_loss import (
    NUM_ASKED,
    Divisor,
    Measurement,
    Terms,
    choose_small,
    explained,
    is_coarse,
    undisturbed,
    unnoted,
    widened,
)
from samestep.training.micro_batch_watch import MicroBatchWatch
from samestep.training.own_loop import (
    SUM,
    agree_on_dtype,
    check_contract,
    convert_counts,
    find_problems,
    to_counts,
)
from samestep.training.trainer_settings import find_setting_problems

Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, Any]]


OWN = ("_prepare_inputs", "get_batch_samples", "get_train_dataloader", "_inner_training_loop", "_run_epoch")
"""Methods of Trainer that decide which samples a step has: a trainer with its own ones draws, or makes, its samples itself."""


PACKAGES = frozenset(["transformers", "trl"])
"""Packages of trainers that are made exact; `samestep.recipe.extras` has their oldest releases."""


class ExactStep(Trainer):
    """The part that `exact` adds to a trainer: the same step for every cut into micro-batches and processes, and `eval_loss`.

    Its loss is sum_j w_j * (sum of term j over the whole step) / (targets of term j in the whole step). No sample comes twice
    at the end of an epoch. All else is the trainer's.

    Args:
        args, kwargs: arguments of the trainer.
        loss: (model, batch) -> (sums, number of targets): scalars or [terms]. None: the trainer's own. For Trainer's and common
            heads (causal, masked and two-term (BERT) language models, classifiers of sequences and tokens) it is computed from
            their logits, and compared with the model's own loss of a few samples. For all others, and for trainers with a loss
            of their own, what it divides by is measured on a few samples (`measured_loss`). Both before the first step.
        targets: batch -> number of targets, int or int tensor [terms], or the sum of their weights, floats. None: the trainer's
            own loss knows it, or your `loss` has such a method (`PackedLoss`); else it costs one more forward of each batch,
            without gradients.
        loss_weights: w_j; default 1.

    Raises:
        UsageError: a dataset without a length; settings that would change the step (`trainer_settings.REFUSED`). Before the
            first step: a loss that is no sum over samples, or depends on padding; modules that normalise by the batch.
    """

    MAY_HAVE: Sequence[str] = ()  # methods of `OWN` that a trainer of this step may have
    TAKES_LOSS = False  # whether loss= is an argument of the trainer

    def __init__(
        self,
        *args: Any,
        loss: Loss | None = None,
        targets: Callable[[Any], int | torch.Tensor] | None = None,
        loss_weights: Sequence[float] | None = None,
        **kwargs: Any,
    ):
        kwargs, loss = (kwargs | {"loss": loss}, None) if self.TAKES_LOSS else (kwargs, loss)
        super().__init__(*args, **kwargs)
        targets = targets or getattr(loss, "targets", None)
        problems = find_problems(self.accelerator, type(self).__name__) + find_setting_problems(self.args)
        if self.compute_loss_func is not None:
            problems.append("compute_loss_func is given, but it is not asked for sums: " + REMEDY)
        is_stream = isinstance(self.train_dataset, IterableDataset) or not hasattr(self.train_dataset, "__len__")
        if self.train_dataset is not None and is_stream:
            problems.append(
                f"train_dataset is a {type(self.train_dataset).__name__}, of which Trainer never steps the last window. Use "
                "exact_windows in a loop of your own, or a dataset with a length"
            )
        if loss is not None and targets is None and is_sharded(self.accelerator):
            problems.append("targets is missing, and the model is sharded: give targets=, batch -> number of targets")
        if loss is not None and self.label_smoother is not None:
            problems.append(
                f"label_smoothing_factor is {self.args.label_smoothing_factor}, but loss is yours: smooth the labels in it"
            )
        if problems:
            raise UsageError(problems)
        self._divisor: Divisor | Terms | None = None
        self._measures = self._is_compared = False
        self._whole_term = ways.make_whole_term(self.model, 0.0 if loss else _find_weight_of_balance(self.model))
        if loss is None:
            loss, targets = self._find_loss()
        self._loss, self._targets, self._weights = loss, targets, loss_weights
        self.loss_is_scaled_for_ga = True
        if not hasattr(Trainer, "loss_is_scaled_for_ga"):
            self.model_accepts_loss_kwargs = True  # transformers before 5.19 divides by k unless the model counts
        self._placeholder: Placeholder | None = None
        self._num_windows, self._watch = 0, MicroBatchWatch()
        self._dtype: torch.dtype | None = None
        self._evaluated: torch.Tensor | None = None  # [2, terms]: sums and counts of the evaluation so far

    @property
    def loss_divisor(self) -> str:
        """Names of what the trainer's own loss is a mean over, found before the first step; empty: it is given, or computed."""
        return self._divisor.name if self._divisor else ""

    def _find_loss(self) -> tuple[Loss, Callable[[Any], torch.Tensor]]:
        """Find the loss as sums: of a head that is known, in a trainer that leaves the loss to it, or measured."""
        model = self.accelerator.unwrap_model(self.model)
        is_known = self._find_parent("compute_loss") is Trainer and not self._whole_term.is_there
        if is_known and (head := HeadLoss.find(model, self.args.label_smoothing_factor)) is not None:
            return head, head.targets
        self._measures = True
        return self._sum_own_loss, self._count_by_divisor

    def _find_parent(self, name: str = "__init__") -> type:
        """Find the class behind this one that has a method: the trainer that was made exact, or what that inherits from."""
        parents = type(self).__mro__
        return next(parent for parent in parents[parents.index(ExactStep) + 1 :] if name in vars(parent))

    def _sum_own_loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._compute_sums(model, batch, False)[:2]

    def _ask_own_loss(self, model: nn.Module, batch: Any, **how: Any) -> Any:
        """Ask the trainer's own loss, which may change the batch it is given, and gather what it logs."""
        with _uneven_gathers(self.accelerator):
            return self._whole_term.ask(super().compute_loss, model, type(batch)(batch), **how)

    def _count_by_divisor(self, batch: Any) -> torch.Tensor:
        assert self._divisor is not None, "measured before the first batch is read"
        return self._divisor.count(batch)

    def _find_total(self, counts: torch.Tensor) -> torch.Tensor:
        """Find what the terms of a step are divided by; counts: of all its parts."""
        return counts if self._divisor is None else self._divisor.find_total(counts)

    def _measure(self, loader: Any) -> None:
        """Check or measure the trainer's own loss, before the first step, on samples that are the same on every process."""
        if self._divisor is None and not self._is_compared:
            modules = {id(value): value for value in vars(self).values() if isinstance(value, nn.Module)}.values()
            is_short = is_coarse(modules, self.accelerator.mixed_precision)
            is_widened = is_short and not is_sharded(self.accelerator) and not _is_quantized(self.model)
            with undisturbed(self, self.model_wrapped), widened(modules if is_widened else ()):
                found = self._find_divisor(loader, is_short and not is_widened)
            self._is_compared = True
            if found is not None:
                self._measures, self._loss, self._targets = True, self._sum_own_loss, self._count_by_divisor
                self._divisor = found

    def _find_divisor(self, loader: Any, is_short: bool) -> Divisor | Terms | None:
        """Find what the trainer's own loss divides by; None for one that is given, or computed as sums, which are checked."""
        if not self._measures and not isinstance(self._loss, HeadLoss):
            return None
        model, collate, head = self.model_wrapped, loader.collate_fn, self._loss
        if len(loader.dataset) and not isinstance(batch := collate([loader.dataset[0]]), Mapping):
            raise UsageError(
                f"data_collator returned a {type(batch).__name__}, must return a mapping from names to tensors; for other "
                "batches give loss= and targets="
            )
        measurement = functools.partial(
            Measurement,
            collate=collate,
            is_coarse=is_short,
            most_rows=self.args.per_device_train_batch_size,
            watched=choose_small(model),
            has_gradient=not is_sharded(self.accelerator),
        )
        if isinstance(head, HeadLoss):
            samples = [loader.dataset[number] for number in range(min(len(loader.dataset), NUM_ASKED))]
            batch = self._prepare_inputs(collate(samples))
            with explained(head.name):
                is_computed = head.is_all_of(lambda: self._ask_own_loss(model, batch), model, batch)
            if is_computed:
                sums = measurement(lambda batch: head(model, self._prepare_inputs(batch))[0], owner=head.name)
                sums.check_sums(loader.dataset)
                return None
        owner = self._find_parent("compute_loss")
        own_loss = measurement(
            lambda batch: self._ask_own_loss(model, self._prepare_inputs(batch)),
            owner=(type(self.accelerator.unwrap_model(model)) if owner is Trainer else owner).__name__,
        )
        return own_loss.find_divisor(loader.dataset)

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        _make_even(loader)
        self._placeholder = (
            Placeholder(loader.collate_fn([loader.dataset[0]])) if self.accelerator.num_processes > 1 else None
        )
        self._train_loader = loader
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Read the micro-batches of a step, as many on every process, and count its n_j, [terms]."""
        if not self._num_windows:
            self._measure(self._train_loader)
        batches = list(itertools.islice(epoch_iterator, num_batches))
        counts = [to_counts(self._count(batch)).to(device) for batch in batches or [self._placeholder]]
        local_counts = sum(counts) if batches else torch.zeros_like(counts[0])
        self._dtype = self._dtype or agree_on_dtype(self.accelerator, local_counts)
        if self._placeholder is not None:
            batches += [self._placeholder] * (num_batches - len(batches))
        self._num_windows += 1
        self._whole_term.look(self, batches)
        return batches, self._find_total(total_counts(self.accelerator, convert_counts(local_counts, self._dtype)))

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take a micro-batch's gradient as the trainer does, of this class's loss and of no other."""
        self._watch.read(inputs)
        before, owner = self._watch.num_losses, self._find_parent("training_step").__name__
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._watch.check_number(before, owner)
        if self._num_windows == 1:
            self._watch.check_scale(loss, owner)
        self._watch.read({})  # compute_loss may be called with other batches in between
        return loss

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate as Trainer does, whose loss is a mean of the batches' means; here it is the mean over all targets."""
        prepared.check(self.accelerator, dataloader)
        self._measure(dataloader)
        if self.accelerator.num_processes > 1 and self._divisor is not None:
            _check_repeated(dataloader, self.args.per_device_eval_batch_size * self.accelerator.num_processes)
        self._evaluated = None
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        name = f"{metric_key_prefix}_loss"
        if name in output.metrics and self._evaluated is not None:
            sums, counts = self.accelerator.reduce(self._evaluated, reduction="sum").cpu()
            totals = torch.stack([sums, self._find_total(counts)])
            weights = torch.ones_like(totals[0]) if self._weights is None else torch.as_tensor(self._weights).to(totals)
            output.metrics[name] = weighted_loss(*totals, weights).item()
        return output

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch as the trainer does, and note its sums, also where that computes a loss without `compute_loss`."""
        num_losses = self._watch.num_losses
        result = super().prediction_step(model, inputs, *args, **kwargs)
        if self._watch.num_losses == num_losses and result[0] is not None:
            with unnoted(self), torch.no_grad(), self.compute_loss_context_manager():
                self.compute_loss(model, self._prepare_inputs(inputs))
        return result

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Compute a micro-batch's part of the step's loss, times N; in evaluation the mean over the batch."""
        if model.training:
            self._watch.check_unchanged(inputs, self._find_parent("training_step").__name__)
        sums, counts, outputs = self._compute_sums(model, inputs, return_outputs)
        counts, scale = counts.view(-1).to(sums.device), 1
        if model.training and num_items_in_batch is not None:
            if self._num_windows == 1:
                _refuse_batch_norm(model)
                self._check_sums(sums, counts, num_items_in_batch)
            counts, scale = num_items_in_batch, self.accelerator.num_processes
        elif not model.training:
            self._note_evaluation(model, inputs, sums.view(-1), counts)
        sums = sums.view(-1) * 0 if isinstance(inputs, Placeholder) else sums.view(-1)
        weights = torch.ones_like(sums) if self._weights is None else torch.as_tensor(self._weights).to(sums)
        loss = (weighted_loss(sums, counts, weights) + self._whole_term.part()) * scale
        self._watch.computed(loss)
        return (loss, outputs) if return_outputs else loss

    def _compute_sums(
        self, model: nn.Module, batch: Any, wants_outputs: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Compute the sums and counts of a batch, and what the model returned, where it is wanted."""
        outputs: list = []
        if self._divisor is not None:

            def ask() -> torch.Tensor:
                asked = self._ask_own_loss(model, batch, return_outputs=wants_outputs)
                loss, output = asked if wants_outputs else (asked, None)
                outputs.append(output)
                return loss

            counts = self._divisor.count(batch)
            sums = self._divisor.take_sums(ask, counts)
            return sums if model.training else self._whole_term.show(sums, counts), counts, outputs[-1]
        hook = model.register_forward_hook(lambda _, __, output: outputs.append(output)) if wants_outputs else None
        try:
            sums, counts = check_contract(self._loss(model, batch))
        finally:
            if hook is not None:
                hook.remove()
        return sums, counts, outputs[-1] if outputs else None

    @torch.no_grad()
    def _note_evaluation(self, model: nn.Module, batch: Any, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Add up the sums and the counts of an evaluation, without the samples that accelerate repeats at its end."""
        part, is_empty = _leave_out_repeated(self.accelerator, batch)
        if part is not batch:
            sums, counts = (x.view(-1) * (not is_empty) for x in check_contract(self._loss(model, part)))
        wide = torch.float32 if sums.device.type == "mps" else torch.float64
        totals = torch.stack([sums.detach().to(wide), counts.to(sums.device).to(wide)])
        self._evaluated = totals if self._evaluated is None else self._evaluated + totals

    @torch.no_grad()
    def _count(self, batch: Any) -> Any:
        if self._targets is not None:
            return self._targets(batch)
        self.model.eval()  # the noise of the forwards that train stays as it is
        counts = check_contract(self._loss(self.model, self._prepare_inputs(batch)))[1]
        self.model.train()
        return counts

    def _check_sums(self, sums: torch.Tensor, counts: torch.Tensor, total: torch.Tensor) -> None:
        if not all(0 < count < math.inf for count in total.tolist()):
            raise UsageError(
                f"loss counts {total.tolist()} targets in the whole first step, must be above 0: do labels miss?"
            )
        if self._weights is not None and len(self._weights) != len(total):
            raise UsageError(f"loss_weights are {len(self._weights)}, but loss has {len(total)} term(s): one for each")
        divisors = [list(pair) for pair in zip(counts.tolist(), total.tolist(), strict=True)]
        if not self._measures and (mean := find_mean(sums, divisors)):
            raise UsageError(f"loss returned a mean ({mean}), must return {SUM}, and the number of targets")


class ExactTrainer(ExactStep, Trainer):
    __doc__ = (ExactStep.__doc__ or "").replace("The part that `exact` adds to a trainer:", "A `Trainer` with", 1)


@functools.cache
def exact(trainer: type[Trainer]) -> type[ExactStep]:
    """Make a trainer exact: `Trainer = exact(SFTTrainer)` is a subclass with the exact step, and nothing else changed.

    Args:
        trainer: transformers' `Trainer`, `Seq2SeqTrainer`, one of TRL's or your own that takes gradients of `compute_loss` on
            a dataset.

    Returns:
        a subclass of it and of `ExactStep`, which says what its constructor takes besides; `ExactTrainer` for `Trainer`.

    Raises:
        UsageError: no class of trainers, one that draws or makes the samples of a step itself, as GRPO's does, or one of a TRL
            that is older than what is tried.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise UsageError(f"trainer is {trainer!r}, must be a class that inherits from transformers.Trainer")
    if issubclass(trainer, ExactStep):
        return trainer
    packages = {parent.__module__.partition(".")[0] for parent in trainer.__mro__}
    for package in sorted(PACKAGES & packages):
        require_release(package, sys.modules[package].__version__, f"exact({trainer.__name__})")
    if trainer is Trainer:
        return ExactTrainer
    step: type[ExactStep] = ways.choose_trainer_step(packages) or ExactStep
    own = [name for name in OWN if getattr(trainer, name, None) is not getattr(Trainer, name, None)]
    if own := [name for name in own if name not in step.MAY_HAVE]:
        raise UsageError(
            f"{trainer.__name__} has its own {', '.join(own)}: it makes or draws the samples of a step itself. They "
            "depend on how it is cut then, and no loss can mend that"
        )
    return type(f"Exact{trainer.__name__}", (step, trainer), {"__module__": __name__, "__doc__": step.__doc__})


def _find_weight_of_balance(model: nn.Module) -> float:
    config = getattr(model, "config", None)
    return find_balance_weight(config) if hasattr(config, "get_text_config") else 0.0


def _is_quantized(model: nn.Module) -> bool:
    """Tell whether weights are integers, with which modules compute in a type of their own."""
    return any(not (p.is_floating_point() or p.is_complex()) for p in model.parameters())


def _refuse_batch_norm(model: nn.Module) -> None:
    """Refuse modules that normalise by the samples of a micro-batch, which no loss can mend. Frozen ones are left alone."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds) and module.training]
    if names:
        raise UsageError(
            f"{names[0]} and {len(names) - 1} more of the model's modules normalise by the samples of a micro-batch: no cut "
            "gives another one's step: take GroupNorm"
        )


class _EvenShard(BatchSamplerShard):
    """A shard without repeated samples, whose length on every process is the length of the longest shard."""

    def __len__(self) -> int:
        whole = len(self.batch_sampler)
        if self.split_batches:
            return whole
        return whole // self.num_processes if self.drop_last else -(-whole // self.num_processes)


def _make_even(loader: Any) -> None:
    """Let a prepared loader repeat no samples, and say the same length on every process, for loops that count batches."""
    shard = prepared.find_shard(loader)
    if type(shard) is BatchSamplerShard and shard.batch_size is not None:
        shard.even_batches, shard.__class__ = False, _EvenShard


@contextlib.contextmanager
def _uneven_gathers(accelerator: Accelerator) -> Iterator[None]:
    """Let processes gather different numbers of rows, as trainers do for their log: the last micro-batches differ in size."""
    if accelerator.num_processes == 1:
        yield
        return
    gather = accelerator.gather

    def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor) or not tensor.ndim:
            return gather(tensor)
        sizes = gather(torch.tensor([len(tensor)], device=accelerator.device)).tolist()
        rows = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        rows[: len(tensor)] = tensor
        parts = gather(rows).split(max(sizes)) if max(sizes) else [rows] * len(sizes)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    accelerator.gather = gather_rows
    try:
        yield
    finally:
        del accelerator.gather


def _check_repeated(loader: Any, num_together: int) -> None:
    """Refuse an evaluation in which accelerate repeats samples of several rows: which are new is not known."""
    num_samples = len(loader.dataset)
    if num_samples % num_together and (num_rows := _count_rows(loader.collate_fn([loader.dataset[0]]))) != 1:
        raise UsageError(
            f"the evaluation has {num_samples} samples, each of {num_rows} rows, and accelerate repeats some to fill "
            f"{num_together}, which cannot be taken out. Evaluate a multiple of {num_together}, or on one process"
        )


def _leave_out_repeated(accelerator: Accelerator, batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Leave out the samples of an evaluation's last batch that accelerate repeats; if it has no others, one stays."""
    state = accelerator.gradient_state
    if accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
        return batch, False
    # Of the last batch of all processes only the first `remainder` samples are new
    size = _count_rows(batch)
    num_samples = min(size, max(0, state.remainder - accelerator.process_index * size))
    if num_samples == size and not is_sharded(accelerator):
        return batch, False
    return {name: _take_rows(name, value, size, max(1, num_samples)) for name, value in batch.items()}, num_samples == 0


def _count_rows(batch: Mapping[str, Any]) -> int:
    return next(len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim)


def _take_rows(name: str, value: Any, size: int, num_rows: int) -> Any:
    """Take the first rows of what a batch has for each of its `size` samples."""
    if not isinstance(value, torch.Tensor) or not value.ndim or (len(value) == 1 and size > 1):
        return value
    if len(value) != size:
        raise UsageError(
            f"{name} of the last evaluation batch has {len(value)} rows for {size} samples, so that samples that accelerate "
            "repeats cannot be taken out. Evaluate on one process, or a number of samples that all batches together divide"
        )
    return value[:num_rows]


class Placeholder(dict):
    """A batch that counts nothing, for a process that has none left; Trainer keeps its type."""
