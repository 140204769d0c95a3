"""Recipes that pretrain a ModernBERT."""

import dataclasses
from typing import Any

from samestep.recipe.recipe import Parts, register
from samestep.recipe.rules import Rule, is_at_most, rows
from samestep.recipe.settings import LAYERS, LENGTH, POSITIVE, PROBABILITY, WIDTH, limit, setting
from samestep.recipe.tasks.streamed import StreamedTexts
from samestep.recipe.tasks.text_pretraining import TextPretraining


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBertPretraining(StreamedTexts, TextPretraining):
    """ModernBERT pretraining: masked language modelling on runs of sentences, without next-sentence prediction."""

    # Data
    do_lower_case: bool = setting("lower-case and strip accents")
    max_seq_length: int = setting("tokens per sample, [CLS] and [SEP] included", limit(2**24, 8))
    short_seq_probability: float = setting("share of the samples cut to a random shorter length", PROBABILITY)
    mlm_probability: float = setting(
        "share of a sample's tokens to predict (80 % [MASK], 10 % random, 10 % kept)", PROBABILITY
    )

    # Model
    hidden_size: int = setting("width", WIDTH)
    num_hidden_layers: int = setting("layers", LAYERS)
    num_attention_heads: int = setting("heads; divides hidden_size", WIDTH)
    intermediate_size: int = setting("width of the gated feed-forward layer (GeGLU)", WIDTH)
    max_position_embeddings: int = setting("positions; at least max_seq_length", LENGTH)
    global_attn_every_n_layers: int = setting(
        "every n-th layer, from the first, attends to the whole sample, the others to local_attention tokens", LAYERS
    )
    local_attention: int = setting("tokens that a layer with a window sees, half of them on each side", limit(2**24, 2))
    global_rope_theta: float = setting("base of the rotary positions of layers that see all", POSITIVE)
    local_rope_theta: float = setting("base of the rotary positions of layers with a window", POSITIVE)
    initializer_range: float = setting("standard deviation of the initial weights", POSITIVE)
    norm_eps: float = setting("eps of the layer normalisation", POSITIVE)

    rules = rows(
        Rule(
            lambda f: f.hidden_size % (2 * f.num_attention_heads),
            "hidden_size {f.hidden_size} is not an even multiple of num_attention_heads {f.num_attention_heads}",
            "change one of them",
        ),
        is_at_most("max_seq_length", "max_position_embeddings"),
    )

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of the only loss term."""
        return {"mlm": 1.0}

    @property
    def small_shape(self) -> dict[str, Any]:
        shape: dict[str, Any] = {"num_hidden_layers": min(2, self.num_hidden_layers)}
        if self.hidden_size > 64:
            shape |= {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
        return shape

    @property
    def architecture(self) -> dict[str, Any]:
        """The model's shape, as `transformers.ModernBertConfig` takes it."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in ["vocab_size", *names[names.index("hidden_size") :]]}


register(
    "modernbert_pretraining",
    ModernBertPretraining,
    Parts(
        settings="samestep.recipe.task_settings:LanguageModelSettings",
        data="samestep.data.sentence_pairs:build",
        model="samestep.models.modernbert_pretraining:PretrainingSums",
        shape="stepplan.memory:modernbert_pretraining",
        script="pretrain_bert.py",
        pipeline_tag="fill-mask",
    ),
)
