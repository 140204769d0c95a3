"""Losses of common heads as sums over their targets, computed from logits and labels."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from samestep.errors import UsageError
from samestep.step.losses import IGNORED, cross_entropy_sum, nonzero

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest relative difference from the model's own loss that counts as rounding; in 16 bits 5e-2."""
PAIR_LOGITS = {"next_sentence_label": "seq_relationship_logits", "sentence_order_label": "sop_logits"}
REMEDY = (
    "give ExactTrainer(loss=..., targets=...): loss(model, batch) -> (sums, number of targets), targets(batch) -> number of "
    "targets"
)
BALANCES = (
    "the loss of {} has a term that balances experts, computed from the tokens of a micro-batch (output_router_logits): set "
    "config.output_router_logits = False"
)


def find_balance_weight(config: Any) -> float:
    """Find the weight of the term that balances experts in a model's own loss; 0: there is none."""
    text = config.get_text_config()
    weight = getattr(text, "router_aux_loss_coef", getattr(text, "aux_loss_coef", None))
    return float(weight or 0.0) if getattr(text, "output_router_logits", False) else 0.0


class HeadLoss:
    """Computes summed losses of common heads from their logits.

    Args:
        model: not wrapped.
        label_smoothing: see `cross_entropy_sum`.

    Attributes:
        is_known: whether it is one of these heads.
    """

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0):
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.config, self.label_smoothing = model.config, label_smoothing
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
        self.is_known = bool(self.pair_label or is_causal or is_masked or is_token or self.is_classifier)

    @classmethod
    def find(cls, model: nn.Module, label_smoothing: float = 0.0) -> "HeadLoss | None":
        """Make the loss of a model's head; None if it is not known."""
        head = cls(model, label_smoothing)
        return head if head.is_known else None

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
        omitted_names = set() if self.is_seq2seq else {"labels", self.pair_label}
        outputs = model(**{name: value for name, value in batch.items() if name not in omitted_names})
        logits = outputs["prediction_logits"] if self.pair_label else outputs["logits"]
        sums = [self._sum(logits, self._labels(batch))]
        if self.pair_label:
            pair = outputs[PAIR_LOGITS[self.pair_label]]
            sums.append(self._cross_entropy(pair, batch[self.pair_label]))
        sums, counts = torch.stack(sums), self.targets(batch).to(logits.device)
        if outputs.get("aux_loss") is not None and find_balance_weight(self.config):
            raise UsageError(BALANCES.format(self.name))
        return sums, counts

    @torch.no_grad()
    def is_all_of(self, ask: Callable[[], torch.Tensor], model: nn.Module, batch: Mapping[str, torch.Tensor]) -> bool:
        """Tell whether these sums are all of a trainer's own loss of a batch, which may have other terms, or another mean."""
        try:
            sums, counts = self(model, batch)
        except UsageError:  # which is a ValueError
            raise
        except (LookupError, ValueError, RuntimeError):  # no logits, or not one for each label: a head of its own
            return False
        own, ours = ask().mean().item(), (sums / nonzero(counts)).sum().item()
        dtype = next(model.parameters()).dtype
        return abs(ours - own) <= TOLERANCES.get(dtype, 5e-2) * max(abs(own), 1e-3)

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
