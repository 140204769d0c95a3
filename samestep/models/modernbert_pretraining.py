"""Pretrain ModernBERT: ModernBertForMaskedLM that returns the sum over a micro-batch, and never computes padding.

Samples lie end to end in a row, as for BERT (see `attention`). Positions are rotated by the places of tokens in their own
samples. Most layers see a window around each token: their attention is that of the others with a narrower mask.
"""

from typing import Any, Self

import numpy as np
import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from samestep._internals.transformers_models import attention_kernel
from samestep.data.ragged import Rows, Tables, make_pretraining_micro_batch, make_tables, split_by_length
from samestep.data.sentence_pairs import OF_PAIRS
from samestep.models import attention
from samestep.models.attention import BY_LENGTH, make_parts
from samestep.models.summed_losses import SummedLosses
from samestep.recipe.task_settings import LanguageModelSettings
from samestep.recipe.tasks.modernbert_pretraining import ModernBertPretraining
from samestep.step import losses


def build_model(recipe: ModernBertPretraining, source: Any = None) -> ModernBertForMaskedLM:
    """Build the recipe's architecture with random weights; its config has the special tokens of the source's tokenizer."""
    tokenizer = getattr(source, "tokenizer", None)
    ids = {name: getattr(tokenizer, name, None) for name in ("pad_token_id", "cls_token_id", "sep_token_id")}
    ids |= {"bos_token_id": ids["cls_token_id"], "eos_token_id": ids["sep_token_id"]}
    return ModernBertForMaskedLM(ModernBertConfig(**recipe.architecture, **ids))


class PretrainingSums(SummedLosses):
    """Sums the loss of masked tokens."""

    _no_split_modules = ("ModernBertEncoderLayer",)

    def __init__(self, bert: ModernBertForMaskedLM):
        super().__init__()
        self.bert = bert
        bert.set_attn_implementation(attention.PREFIX + "eager")

    @classmethod
    def from_recipe(cls, recipe: ModernBertPretraining, source: Any = None) -> Self:
        return cls(build_model(recipe, source))

    @classmethod
    def example(cls, recipe: ModernBertPretraining, num_samples: int) -> dict[str, torch.Tensor | None]:
        length = recipe.max_seq_length
        num_masked = max(1, round((length - 2) * recipe.mlm_probability))  # [CLS], [SEP]: never masked
        batch = make_pretraining_micro_batch(
            [np.zeros(length, np.int64)] * num_samples,
            [length] * num_samples,
            [np.arange(1, 1 + num_masked)] * num_samples,
            [np.zeros(num_masked, np.int64)] * num_samples,
            [0] * num_samples,
        )
        return {name: value for name, value in batch.items() if name not in OF_PAIRS}

    def forward(
        self, masked_index, masked_labels, queries, query_ends, query_source, query_place, **tokens
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum the loss and, when evaluating, count correct predictions, both [1]. See SentencePairs.collate."""
        hidden = self.hidden(**tokens)[queries[masked_index]]
        logits = self.bert.decoder(self.bert.head(hidden))
        loss_sum = losses.cross_entropy_sum(logits, masked_labels)
        return torch.stack([loss_sum]), None if self.training else losses.num_correct(logits, masked_labels)[None]

    def hidden(self, input_ids, position_ids, ends, source, place, is_token) -> torch.Tensor:
        """Compute the last hidden states of a row of samples, [M, width]; see `ragged.make_micro_batch`."""
        model, parts = self.bert.model, [Rows(ends, source, place, is_token)]
        config, kernel = model.config, attention_kernel(model.config)
        if kernel.endswith(BY_LENGTH):
            parts = make_parts(split_by_length(ends.diff().numpy()))
        tables = make_tables(parts, config.num_attention_heads if "eager" in kernel else 1)
        hidden = model.embeddings(input_ids)
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype  # of queries
        masks = _narrow(tables, config.sliding_window, dtype)
        rotations = {kind: model.rotary_emb(hidden, position_ids, kind) for kind in dict.fromkeys(config.layer_types)}
        for layer in model.layers:
            rotation = rotations[layer.attention_type]
            hidden = layer(hidden, position_embeddings=rotation, token_tables=tables, narrow_masks=masks)
        return model.final_norm(hidden)[0]

    def kernel_candidates(self, device: torch.device, mixed_precision: str, settings: LanguageModelSettings) -> dict:
        return attention.kernel_candidates(self.bert, device, mixed_precision, settings)


def _narrow(tables: Tables, window: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
    """Make the masks of layers with a window, once for all of them: of each table what is added to its scores, 0 or the lowest
    number, [S', 1, T, T], and [1, 1, T, T] where nothing is padded; `is_token` where a window holds the longest sample.

    A query sees the keys up to `window` places before and after it that are tokens, and itself: padding must see something, for
    in float16 the lowest number and a score can be infinite, and a softmax over nothing NaN.
    """
    masks = []
    for source, is_token in zip(tables.sources, tables.is_token, strict=True):
        length = source.shape[2]
        if window >= length - 1:
            masks.append(is_token)
            continue
        place = torch.arange(length, device=source.device)
        distance = (place - place[:, None]).abs()
        is_seen = (distance <= window)[None, None]
        if is_token is not None:
            is_seen = is_seen & is_token | (distance == 0)
        zeros = torch.zeros(is_seen.shape, dtype=dtype, device=source.device)
        masks.append(zeros.masked_fill_(~is_seen, torch.finfo(dtype).min))
    return tuple(masks)
