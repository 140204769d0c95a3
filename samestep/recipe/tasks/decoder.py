"""The fields that recipes of causal language models share, whatever their architecture is called."""

from samestep.recipe.rules import Rule, is_at_most, is_multiple

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


def list_decoder_rules(length: str) -> list[Rule]:
    """List the rules for the shape of a decoder; `length` names the field of the longest sample."""
    return [
        is_multiple("hidden_size", "num_attention_heads"),
        is_multiple("num_attention_heads", "num_key_value_heads"),
        is_at_most(length, "max_position_embeddings"),
    ]
