"""Recipes that pretrain any causal language model."""

import dataclasses
from typing import Any

from samestep.recipe.recipe import Parts, register
from samestep.recipe.rules import rows
from samestep.recipe.settings import LAYERS, LENGTH, POSITIVE, WIDTH, limit, setting
from samestep.recipe.tasks.decoder import SHAPE, ExpertsRecipe, list_decoder_rules
from samestep.recipe.tasks.text_pretraining import CausalPretraining


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLmPretraining(ExpertsRecipe, CausalPretraining):
    """Pretraining a causal language model: of any architecture of transformers, from random weights."""

    # Model
    architecture: str = setting("model_type of transformers: qwen3, llama, ...")
    hidden_size: int = setting("width", WIDTH)
    num_hidden_layers: int = setting("layers", LAYERS)
    num_attention_heads: int = setting("heads; divides hidden_size", WIDTH)
    num_key_value_heads: int | None = setting("heads of keys and values; null: num_attention_heads", WIDTH)
    intermediate_size: int = setting("width of the feed-forward layer", limit(2**20))
    max_position_embeddings: int = setting("positions; at least block_size", LENGTH)
    tie_word_embeddings: bool = setting("whether the head is the embedding's matrix")
    initializer_range: float = setting("standard deviation of the initial weights", POSITIVE)
    zero_init_projections: bool = setting(
        "begin with zeros in the last matrix of attention and of the feed-forward layer, so that every layer passes on what it "
        "gets"
    )

    rules = rows(*list_decoder_rules("block_size"))

    @property
    def small_shape(self) -> dict[str, Any]:
        shape: dict[str, Any] = {"num_hidden_layers": min(2, self.num_hidden_layers)}
        if self.hidden_size > 64:
            shape |= {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
            shape |= {"num_key_value_heads": None if self.num_key_value_heads is None else 2}
        return shape

    @property
    def model_in_words(self) -> str:
        return f" ({self.architecture}, {self.num_hidden_layers} layers of width {self.hidden_size:,})"

    @property
    def shape(self) -> dict[str, Any]:
        """The model's shape, as transformers' configuration of `architecture` takes it."""
        return {name: getattr(self, name) for name in SHAPE}


register(
    "causal_lm_pretraining",
    CausalLmPretraining,
    Parts(
        settings="samestep.recipe.task_settings:CausalLmSettings",
        data="samestep.data.token_blocks:build",
        model="samestep.models.causal_lm_pretraining:PretrainingSums",
        shape="stepplan.memory:causal_lm_pretraining",
        script="pretrain_gpt2.py",
        pipeline_tag="text-generation",
    ),
)
