"""Pretrain a causal language model of any architecture of transformers from random weights, without padding."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from samestep.errors import UsageError, reason
from samestep.models import row_norms
from samestep.models.causal_lm import CausalLmSums, choose_config
from samestep.recipe.tasks.causal_lm_pretraining import CausalLmPretraining

PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "down_proj", "dense_4h_to_h", "fc2")
"""Names of the last matrices of attention and of feed-forward layers in transformers."""


def build_model(recipe: CausalLmPretraining, source: Any = None) -> PreTrainedModel:
    """Build the recipe's architecture with random weights, and without dropout.

    Args:
        recipe: decides the shape.
        source: with a `tokenizer`, whose special tokens go into the config; None: none do.

    Raises:
        UsageError: no such architecture, or it has no such field.
    """
    config_class, values = choose_config(recipe, getattr(source, "tokenizer", None))
    try:
        config = config_class(**values)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of any kind: each architecture has its own rules
        raise UsageError(
            f"architecture {recipe.architecture} cannot be made of the recipe's shape: {reason(error)}"
        ) from None


class PretrainingSums(CausalLmSums):
    """Sums the loss of next tokens."""

    @classmethod
    def from_recipe(cls, recipe: CausalLmPretraining, source: Any) -> Self:  # type: ignore[override]
        sums = cls(build_model(recipe, source))  # which looks for leaks between sequences: before projections are 0
        row_norms.use_few_passes(sums)
        if recipe.zero_init_projections:
            sums._zero_projections(recipe.architecture)
        return sums

    @classmethod
    def example(  # type: ignore[override]
        cls, recipe: CausalLmPretraining, num_samples: int
    ) -> dict[str, torch.Tensor | None]:
        place = torch.arange(recipe.block_size * num_samples)
        return {
            "input_ids": torch.zeros(1, len(place), dtype=torch.int64),
            "position_ids": (place % recipe.block_size)[None],
            "ends": torch.arange(num_samples + 1, dtype=torch.int32) * recipe.block_size,
            "labels": torch.zeros_like(place),
        }

    def forward(  # type: ignore[override]
        self, input_ids, position_ids, ends, labels
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the loss and, when evaluating, count correct predictions, both [1]. See TokenBlocks.collate_row."""
        hidden = self.hidden(input_ids, position_ids, ends)[: len(labels)]
        loss_sum, num_correct = self.cross_entropy(hidden, labels)
        return torch.stack([loss_sum]), num_correct[None]

    def locate_targets(self, micro_batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
        ends = micro_batch["ends"]
        place = torch.arange(len(micro_batch["labels"]), device=ends.device)
        sequence = torch.searchsorted(ends[1:], place.to(ends.dtype), right=True)
        return super().locate_targets({**micro_batch, "label_index": place, "label_sequence": sequence})

    @torch.no_grad()
    def _zero_projections(self, architecture: str) -> None:
        """Set the last matrices of attention and of feed-forward layers to 0."""
        layers = [module for module in self.modules() if type(module).__name__ in self._no_split_modules]
        projections = [
            module
            for layer in layers
            for name, module in layer.named_modules()
            if name.rpartition(".")[2] in PROJECTIONS and isinstance(getattr(module, "weight", None), nn.Parameter)
        ]
        if len(projections) != 2 * len(layers) or not layers:
            raise UsageError(
                f"zero_init_projections is true, but the last matrices of the layers of architecture {architecture} have "
                "other names than are known: set it to false"
            )
        for projection in projections:
            projection.weight.zero_()
