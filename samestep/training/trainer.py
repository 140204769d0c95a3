"""transformers' Trainer with the exact step, and nothing else changed."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import find_batch_size
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from samestep.errors import UsageError
from samestep.step.accumulate import total_counts
from samestep.step.losses import IGNORED, cross_entropy_sum, nonzero, weighted_loss
from samestep.step.means import find_mean
from samestep.training import prepared
from samestep.training.launch import is_sharded
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
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest relative difference from the model's own loss that counts as rounding; in 16 bits 5e-2."""
PAIR_LOGITS = {"next_sentence_label": "seq_relationship_logits", "sentence_order_label": "sop_logits"}
REMEDY = (
    "give ExactTrainer(loss=..., targets=...): loss(model, batch) -> (sums, number of targets), targets(batch) -> number of "
    "targets"
)


class ExactTrainer(Trainer):
    """A `Trainer` whose steps do not depend on how they are cut: micro-batches, processes, a last window that is not full.

    Its loss is sum_j w_j * (sum of term j over the whole step) / (targets of term j in the whole step). Trainer leaves that to
    the model, and most heads take a mean. No sample comes twice at the end of an epoch. `eval_loss` is the mean over all
    targets of the evaluation, too. All else is Trainer's.

    Args:
        args, kwargs: arguments of `Trainer`.
        loss: (model, batch) -> (sums, number of targets): scalars or [terms]. None: for causal, masked and two-term (BERT)
            language models and classifiers of sequences and tokens, computed from their logits, and compared with the model's
            own loss on the first micro-batch.
        targets: batch -> number of targets, int or int tensor [terms], or the sum of their weights, floats. None: built-in
            losses know it; for your `loss` it costs one more forward of each batch, without gradients.
        loss_weights: w_j; default 1.

    Raises:
        UsageError: an unknown head without `loss`; a dataset without a length; settings that would change the step
            (`trainer_settings.REFUSED`).
    """

    def __init__(
        self,
        *args: Any,
        loss: Loss | None = None,
        targets: Callable[[Any], int | torch.Tensor] | None = None,
        loss_weights: Sequence[float] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        problems = find_problems(self.accelerator, "ExactTrainer") + find_setting_problems(self.args)
        if self.compute_loss_func is not None:
            problems.append("compute_loss_func is given, but it is not asked for sums: " + REMEDY)
        is_stream = isinstance(self.train_dataset, IterableDataset) or not hasattr(self.train_dataset, "__len__")
        if self.train_dataset is not None and is_stream:
            problems.append(
                f"train_dataset is a {type(self.train_dataset).__name__}, of which Trainer never steps the last window: use "
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
        if loss is None:
            head = HeadLoss(self.accelerator.unwrap_model(self.model), self.args.label_smoothing_factor)
            loss, targets = head, head.targets
        self._loss, self._targets, self._weights = loss, targets, loss_weights
        self.loss_is_scaled_for_ga = True
        self._placeholder: _Placeholder | None = None
        self._num_windows = 0
        self._dtype: torch.dtype | None = None
        self._evaluated: torch.Tensor | None = None  # [2, terms]: sums and counts of the evaluation so far

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        _make_even(loader)
        self._placeholder = (
            _Placeholder(loader.collate_fn([loader.dataset[0]])) if self.accelerator.num_processes > 1 else None
        )
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Read the micro-batches of a step, as many on every process, and count its n_j, [terms]."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        counts = [to_counts(self._count(batch)).to(device) for batch in batches or [self._placeholder]]
        local_counts = sum(counts) if batches else torch.zeros_like(counts[0])
        self._dtype = self._dtype or agree_on_dtype(self.accelerator, local_counts)
        if self._placeholder is not None:
            batches += [self._placeholder] * (num_batches - len(batches))
        self._num_windows += 1
        return batches, total_counts(self.accelerator, convert_counts(local_counts, self._dtype))

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
        self._evaluated = None
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        name = f"{metric_key_prefix}_loss"
        if name in output.metrics and self._evaluated is not None:
            totals = self.accelerator.reduce(self._evaluated, reduction="sum").cpu()
            weights = torch.ones_like(totals[0]) if self._weights is None else torch.as_tensor(self._weights).to(totals)
            output.metrics[name] = weighted_loss(*totals, weights).item()
        return output

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Compute a micro-batch's part of the step's loss, times N; in evaluation the mean over the batch."""
        outputs: list = []
        hook = model.register_forward_hook(lambda _, __, output: outputs.append(output)) if return_outputs else None
        try:
            sums, counts = check_contract(self._loss(model, inputs))
        finally:
            if hook is not None:
                hook.remove()
        counts, scale = counts.view(-1).to(sums.device), 1
        if model.training and num_items_in_batch is not None:
            if self._num_windows == 1:
                self._check_sums(sums, counts, num_items_in_batch)
            counts, scale = num_items_in_batch, self.accelerator.num_processes
        elif not model.training:
            self._note_evaluation(model, inputs, sums.view(-1), counts)
        sums = sums.view(-1) * 0 if isinstance(inputs, _Placeholder) else sums.view(-1)
        weights = torch.ones_like(sums) if self._weights is None else torch.as_tensor(self._weights).to(sums)
        loss = weighted_loss(sums, counts, weights) * scale
        return (loss, outputs[-1]) if return_outputs else loss

    @torch.no_grad()
    def _note_evaluation(self, model: nn.Module, batch: Any, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Add up the sums and the counts of an evaluation, without the samples that accelerate repeats at its end."""
        state = self.accelerator.gradient_state
        if state.end_of_dataloader and state.remainder > 0:
            # Of the last batch of all processes only the first `remainder` samples are new
            size = find_batch_size(batch)
            num_samples = min(size, max(0, state.remainder - self.accelerator.process_index * size))
            if num_samples < size or is_sharded(self.accelerator):
                part = {name: _take_rows(name, value, size, max(1, num_samples)) for name, value in batch.items()}
                sums, counts = (x.view(-1) * (num_samples > 0) for x in check_contract(self._loss(model, part)))
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
        if mean := find_mean(sums, divisors):
            raise UsageError(f"loss returned a mean ({mean}), must return {SUM}, and the number of targets")


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


def _take_rows(name: str, value: Any, size: int, num_rows: int) -> Any:
    """Take the first rows of what a batch has for each of its `size` samples."""
    if not isinstance(value, torch.Tensor) or not value.ndim or (len(value) == 1 and size > 1):
        return value
    if len(value) != size:
        raise UsageError(
            f"{name} of the last evaluation batch has {len(value)} rows for {size} samples, so that samples that accelerate "
            "repeats cannot be taken out: evaluate on one process, or a number of samples that all batches together divide"
        )
    return value[:num_rows]


class _Placeholder(dict):
    """A batch that counts nothing, for a process that has none left; Trainer keeps its type."""


class HeadLoss:
    """Computes summed losses of common heads from their logits.

    Args:
        model: not wrapped.
        label_smoothing: see `cross_entropy_sum`.

    Raises:
        UsageError: a head that is not one of these.
    """

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0):
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.config, self.label_smoothing, self.is_compared = model.config, label_smoothing, False
        parameters = inspect.signature(model.forward).parameters
        self.pair_label = next((label for label in PAIR_LOGITS if label in parameters and "labels" in parameters), None)
        self.name, function = type(model).__name__, LOSS_MAPPING.get(getattr(model, "loss_type", None))
        names = {parent.__name__ for parent in type(model).__mro__}
        self.is_seq2seq = bool(getattr(self.config, "is_encoder_decoder", False))
        is_causal = function is ForCausalLMLoss or bool(names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
        is_masked = function is ForMaskedLMLoss or bool(names & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()))
        is_token = function is LOSS_MAPPING["ForTokenClassification"]
        self.is_classifier = function is LOSS_MAPPING["ForSequenceClassification"]
        self.is_shifted = is_causal and not is_masked and not self.is_seq2seq
        if not (self.pair_label or is_causal or is_masked or is_token or self.is_classifier):
            raise UsageError(f"the loss of {self.name} is not one that ExactTrainer knows: {REMEDY}")

    def targets(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Count the targets of a batch, int64 [terms]."""
        labels = self._labels(batch)
        if self.is_classifier and labels.is_floating_point():
            return torch.tensor([labels.numel()])
        counts = [(labels != IGNORED).sum()]
        if self.pair_label:
            counts.append((batch[self.pair_label] != IGNORED).sum())
        return torch.stack(counts)

    def __call__(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the sums [terms] and the numbers of targets [terms] of a batch."""
        compares = model.training and not self.is_compared and not self.label_smoothing
        omitted_names = set() if compares or self.is_seq2seq else {"labels", self.pair_label}
        outputs = model(**{name: value for name, value in batch.items() if name not in omitted_names})
        logits = outputs["prediction_logits"] if self.pair_label else outputs["logits"]
        sums = [self._sum(logits, self._labels(batch))]
        if self.pair_label:
            pair = outputs[PAIR_LOGITS[self.pair_label]]
            sums.append(self._cross_entropy(pair, batch[self.pair_label]))
        sums, counts = torch.stack(sums), self.targets(batch).to(logits.device)
        if outputs.get("aux_loss") is not None and getattr(
            self.config.get_text_config(), "router_aux_loss_coef", False
        ):
            raise UsageError(
                f"the loss of {self.name} has a term that balances experts, computed from the tokens of a micro-batch "
                "(output_router_logits): set config.output_router_logits = False"
            )
        if compares:
            self._compare((sums / nonzero(counts)).sum(), outputs.get("loss"), logits.dtype)
        return sums, counts

    def _labels(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the labels, one for each prediction; -100 where nothing is predicted."""
        if "labels" not in batch or (self.pair_label and self.pair_label not in batch):
            names = ["labels", self.pair_label] if self.pair_label else ["labels"]
            raise UsageError(f"batch has {', '.join(batch)}, must have {' and '.join(names)}: {REMEDY}")
        if not self.is_shifted:
            return batch["labels"]
        return (
            batch["shift_labels"] if "shift_labels" in batch else F.pad(batch["labels"][..., 1:], (0, 1), value=IGNORED)
        )

    def _cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy_sum(logits.flatten(0, -2), labels.flatten().to(logits.device), self.label_smoothing)

    def _sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.is_classifier or not labels.is_floating_point():
            return self._cross_entropy(logits, labels)
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        labels = labels.to(wide)
        if self.config.num_labels == 1 or self.config.problem_type == "regression":
            return F.mse_loss(wide.reshape(labels.shape), labels, reduction="sum")
        return F.binary_cross_entropy_with_logits(wide, labels, reduction="sum")

    def _compare(self, loss: torch.Tensor, model_loss: torch.Tensor | None, dtype: torch.dtype) -> None:
        """Check in the first forward that this is all of the model's own loss, which may have terms to balance experts."""
        self.is_compared = True
        if model_loss is None:
            return
        model_value, value = model_loss.mean().item(), loss.item()
        if abs(value - model_value) > TOLERANCES.get(dtype, 5e-2) * max(abs(model_value), 1e-3):
            raise UsageError(
                f"the loss of {self.name} on the first micro-batch is {model_value:.6g} by the model, {value:.6g} by its "
                f"logits and labels: it has other terms; {REMEDY}"
            )
