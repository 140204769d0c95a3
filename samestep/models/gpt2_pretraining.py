"""Pretrain GPT-2: GPT2LMHeadModel that returns the sum over a micro-batch, and never holds the logits of all its tokens."""

import contextlib
from collections.abc import Iterator
from typing import Any, Self

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from samestep.models import stop_tokens
from samestep.models.pretrained import causal_kernel_candidates, gpt2_hidden, initial_model
from samestep.models.summed_losses import SummedLosses
from samestep.recipe.task_settings import CausalLmSettings
from samestep.recipe.tasks.gpt2_pretraining import Gpt2Pretraining
from samestep.step import losses


def build_model(recipe: Gpt2Pretraining, end_of_text: int) -> GPT2LMHeadModel:
    """Build the recipe's architecture, with random weights or those of `model_name_or_path`."""
    config = GPT2Config(**recipe.architecture, bos_token_id=end_of_text, eos_token_id=end_of_text)
    return initial_model(GPT2LMHeadModel, config, recipe.model_name_or_path)


class PretrainingSums(SummedLosses):
    """Sums the loss of next tokens."""

    _no_split_modules = ("GPT2Block",)

    def __init__(self, gpt2: GPT2LMHeadModel, block_size: int | None = None):
        super().__init__()
        self.gpt2, self.block_size = gpt2, block_size or gpt2.config.n_positions

    @property
    def causal_lm(self) -> GPT2LMHeadModel:
        """The model of transformers."""
        return self.gpt2

    @contextlib.contextmanager
    def own_attention(self) -> Iterator[GPT2LMHeadModel]:
        """Let the model be called by its own forward within this context, as generating text needs it: it always may."""
        yield self.gpt2

    @classmethod
    def from_recipe(cls, recipe: Gpt2Pretraining, source: Any = None) -> Self:
        model = build_model(recipe, 0 if source is None else source.end_of_text)
        stop_tokens.add(model, source)
        return cls(model, recipe.block_size)

    @classmethod
    def example(cls, recipe: Gpt2Pretraining, num_samples: int) -> dict[str, torch.Tensor | None]:
        input_ids = torch.zeros(num_samples, recipe.block_size, dtype=torch.int64)
        position_ids = torch.arange(recipe.block_size).expand_as(input_ids) if recipe.document_mask else None
        labels = torch.zeros(input_ids.numel(), dtype=torch.int64)
        return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels, "label_index": None}

    def forward(self, input_ids, position_ids, labels, label_index) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the loss and, when evaluating, count correct predictions, both [1]. See TokenBlocks.collate."""
        hidden = gpt2_hidden(self.gpt2.transformer, input_ids, position_ids).flatten(0, 1)
        hidden = hidden if label_index is None else hidden[label_index]
        loss_sum, num_correct = losses.linear_cross_entropy(hidden, self.gpt2.lm_head.weight, labels)
        return torch.stack([loss_sum]), num_correct[None]

    def kernel_candidates(self, device: torch.device, mixed_precision: str, settings: CausalLmSettings) -> dict:
        return causal_kernel_candidates(
            self.gpt2, device, mixed_precision, self.block_size, settings.attn_implementation
        )

    def compile_layers(self) -> None:
        for block in self.gpt2.transformer.h:
            block.compile()
