"""Classify texts: BertForSequenceClassification that returns the sum over a micro-batch."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification

from samestep.data.ragged import make_micro_batch
from samestep.models import attention
from samestep.models.pretrained import initial_model
from samestep.models.summed_losses import SummedLosses
from samestep.recipe.task_settings import FineTuningSettings
from samestep.recipe.tasks.text_classification import TextClassification
from samestep.step import losses

HEADS = ("classifier.", "cls.", "bert.pooler.")
"""Prefixes of the names of weights that a pretrained model may lack, or may have without use: the classifier; pretraining's
heads; the pooler, which not every pretrained model has."""


def build_model(recipe: TextClassification, classes: Sequence[str] | None) -> BertForSequenceClassification:
    """Build the recipe's architecture with one output per class, or a single one (None); random weights or those of
    `model_name_or_path`."""
    labels = {"num_labels": 1, "problem_type": "regression"}
    if classes is not None:
        labels = {"id2label": dict(enumerate(classes)), "label2id": {name: n for n, name in enumerate(classes)}}
    config = BertConfig(**recipe.architecture, **labels)
    model = initial_model(BertForSequenceClassification, config, recipe.model_name_or_path, HEADS)
    model.bert.embeddings.requires_grad_(not recipe.freeze_embeddings)
    return model


class ClassificationSums(SummedLosses):
    """Sums the cross-entropy of classes, or the squared error of numbers."""

    def __init__(self, bert: BertForSequenceClassification):
        super().__init__()
        self.bert = attention.unpad(bert)

    @classmethod
    def from_recipe(cls, recipe: TextClassification, source: Any = None) -> Self:
        numbers = [str(number) for number in range(recipe.num_labels or 2)]
        return cls(build_model(recipe, numbers if source is None else source.classes))

    @classmethod
    def example(cls, recipe: TextClassification, num_samples: int) -> dict[str, torch.Tensor | None]:
        tokens = [np.zeros(recipe.max_seq_length, np.int64)] * num_samples
        num_first = [recipe.max_seq_length] * num_samples
        labels = torch.zeros(num_samples, dtype=torch.int64)
        return {**make_micro_batch(tokens, num_first, [np.zeros(1, np.int64)] * num_samples), "labels": labels}

    def forward(self, labels, **tokens) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum the loss, [1], and, when evaluating, give the logits [samples, classes]. See LabelledTexts.collate."""
        hidden = attention.last_hidden_at(self.bert.bert, **tokens)[: len(labels)]  # [samples, width], first tokens
        logits = self.bert.classifier(self.bert.dropout(self.bert.bert.pooler(hidden[:, None])))
        loss_sum = losses.squared_error_sum if labels.is_floating_point() else losses.cross_entropy_sum
        return torch.stack([loss_sum(logits, labels)]), None if self.training else logits

    def kernel_candidates(self, device: torch.device, mixed_precision: str, settings: FineTuningSettings) -> dict:
        return attention.kernel_candidates(self.bert, device, mixed_precision, settings)

    def compile_layers(self) -> None:
        for layer in self.bert.bert.encoder.layer:
            layer.compile(dynamic=True)  # once for micro-batches of all sizes
