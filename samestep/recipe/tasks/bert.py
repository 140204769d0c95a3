"""The fields that recipes of BERT-like encoders share."""

import dataclasses
from typing import Any

from samestep.recipe.recipe import Recipe
from samestep.recipe.rules import is_at_most, is_multiple, rows
from samestep.recipe.settings import (
    ACTIVATIONS,
    FRACTION,
    LAYERS,
    LENGTH,
    POSITIVE,
    VOCABULARY,
    WIDTH,
    choice,
    limit,
    setting,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertRecipe(Recipe):
    """The fields that recipes of a BERT share: how text becomes samples, and the model's shape."""

    # Data
    tokenizer_name: str | None = setting("tokenizer to load; null: train one on the corpus", decides=False)
    vocab_size: int = setting("vocabulary: of the tokenizer to train, or expected of the one loaded", VOCABULARY)
    do_lower_case: bool = setting("lower-case and strip accents")
    max_seq_length: int = setting("tokens per sample, [CLS] and both [SEP] included", limit(2**24, 8))

    # Model
    model_name_or_path: str | None = setting("weights to start from; null: random", decides=False)
    hidden_size: int = setting("width", WIDTH)
    num_hidden_layers: int = setting("layers", LAYERS)
    num_attention_heads: int = setting("heads; divides hidden_size", WIDTH)
    intermediate_size: int = setting("width of the feed-forward layer", WIDTH)
    hidden_act: str = setting("activation of the feed-forward layer", choice(*ACTIVATIONS))
    max_position_embeddings: int = setting("positions; at least max_seq_length", LENGTH)
    hidden_dropout_prob: float = setting("dropout, drawn by sample", FRACTION)
    attention_probs_dropout_prob: float = setting(
        "attention dropout, drawn by sample where attention is eager", FRACTION
    )
    initializer_range: float = setting("standard deviation of the initial weights", POSITIVE)
    layer_norm_eps: float = setting("eps of the layer normalisation", POSITIVE)

    rules = rows(
        is_multiple("hidden_size", "num_attention_heads"),
        is_at_most("max_seq_length", "max_position_embeddings"),
    )

    @property
    def small_shape(self) -> dict[str, Any]:
        shape: dict[str, Any] = {"num_hidden_layers": min(2, self.num_hidden_layers), "model_name_or_path": None}
        shape |= {"tokenizer_name": self.tokenizer_name or self.model_name_or_path}
        if self.hidden_size > 64:
            shape |= {
                "hidden_size": 64,
                "num_attention_heads": 2,
                "intermediate_size": min(256, self.intermediate_size),
            }
        return shape

    @property
    def architecture(self) -> dict[str, Any]:
        """The model's shape, as `transformers.BertConfig` takes it."""
        names = [field.name for field in dataclasses.fields(BertRecipe)]
        return {name: getattr(self, name) for name in ["vocab_size", *names[names.index("hidden_size") :]]}
