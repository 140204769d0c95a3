"""Pretrain BERT: BertForPreTraining that returns sums over a micro-batch and scores the vocabulary at masked places only."""

from typing import Any, Self

import numpy as np
import torch
from transformers import BertConfig, BertForPreTraining

from samestep.data.ragged import make_pretraining_micro_batch
from samestep.models import attention
from samestep.models.pretrained import initial_model
from samestep.models.summed_losses import SummedLosses
from samestep.recipe.task_settings import LanguageModelSettings
from samestep.recipe.tasks.bert_pretraining import BertPretraining
from samestep.step import losses


def build_model(recipe: BertPretraining) -> BertForPreTraining:
    """Build the recipe's architecture, with random weights or those of `model_name_or_path`."""
    return initial_model(BertForPreTraining, BertConfig(**recipe.architecture), recipe.model_name_or_path)


class PretrainingSums(SummedLosses):
    """Sums the losses of masked tokens and of next sentences."""

    _no_split_modules = ("BertLayer",)

    def __init__(self, bert: BertForPreTraining):
        super().__init__()
        self.bert = attention.unpad(bert)

    @classmethod
    def from_recipe(cls, recipe: BertPretraining, source: Any = None) -> Self:
        return cls(build_model(recipe))

    @classmethod
    def example(cls, recipe: BertPretraining, num_samples: int) -> dict[str, torch.Tensor | None]:
        length = recipe.max_seq_length
        num_masked = max(1, round((length - 3) * recipe.mlm_probability))  # [CLS], two [SEP]: never masked
        tokens, labels = np.zeros(length, np.int64), np.zeros(num_masked, np.int64)
        return make_pretraining_micro_batch(
            [tokens] * num_samples,
            [length // 2] * num_samples,
            [np.arange(1, 1 + num_masked)] * num_samples,
            [labels] * num_samples,
            [0] * num_samples,
        )

    def forward(
        self, first_index, masked_index, masked_labels, next_sentence_label, **tokens
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum the losses and, when evaluating, count correct predictions: [masked tokens, pairs]. See SentencePairs.collate."""
        hidden = attention.last_hidden_at(self.bert.bert, **tokens)
        token_logits = self.bert.cls.predictions(hidden[masked_index])
        pair_logits = self.bert.cls.seq_relationship(self.bert.bert.pooler(hidden[first_index][:, None]))
        targets = [(token_logits, masked_labels), (pair_logits, next_sentence_label)]
        sums = torch.stack([losses.cross_entropy_sum(*target) for target in targets])
        return sums, None if self.training else torch.stack([losses.num_correct(*target) for target in targets])

    def kernel_candidates(self, device: torch.device, mixed_precision: str, settings: LanguageModelSettings) -> dict:
        return attention.kernel_candidates(self.bert, device, mixed_precision, settings)
