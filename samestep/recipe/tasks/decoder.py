"""The fields that recipes of causal language models share, whatever their architecture is called."""

from typing import Any

from samestep.recipe.recipe import check_multiple, check_order

SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
)
"""Fields that weights to start from decide."""


def find_problems_of_decoder(recipe: Any, length: str) -> list[str]:
    """Find what is wrong with the shape of a decoder; `length` names the field of the longest sample."""
    is_grouped = recipe.num_key_value_heads is not None
    return [
        *check_multiple(recipe, "hidden_size", "num_attention_heads"),
        *(check_multiple(recipe, "num_attention_heads", "num_key_value_heads") if is_grouped else []),
        *check_order(recipe, length, "max_position_embeddings"),
    ]
