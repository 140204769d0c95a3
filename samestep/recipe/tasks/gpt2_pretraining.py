"""Recipes that pretrain GPT-2."""

import dataclasses
from typing import Any

from samestep.recipe.recipe import Parts, register
from samestep.recipe.rules import is_at_most, is_multiple, rows
from samestep.recipe.settings import FRACTION, LAYERS, LENGTH, POSITIVE, WIDTH, choice, setting
from samestep.recipe.tasks.text_pretraining import CausalPretraining


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2Pretraining(CausalPretraining):
    """GPT-2 pretraining: causal language modelling."""

    # Model
    model_name_or_path: str | None = setting("weights to start from; null: random", decides=False)
    n_positions: int = setting("positions; at least block_size", LENGTH)
    n_embd: int = setting("width", WIDTH)
    n_layer: int = setting("layers", LAYERS)
    n_head: int = setting("heads; divides n_embd", WIDTH)
    activation_function: str = setting(
        "activation of the feed-forward layer; gelu_pytorch_tanh is GPT-2's gelu_new in one kernel",
        choice("gelu_pytorch_tanh", "gelu_new", "gelu", "relu", "silu"),
    )
    resid_pdrop: float = setting("dropout after each layer, drawn by sample", FRACTION)
    embd_pdrop: float = setting("dropout of the embeddings, drawn by sample", FRACTION)
    attn_pdrop: float = setting("attention dropout, drawn by sample where attention is eager", FRACTION)
    initializer_range: float = setting("standard deviation of the initial weights", POSITIVE)
    layer_norm_epsilon: float = setting("eps of the layer normalisation", POSITIVE)

    rules = rows(is_multiple("n_embd", "n_head"), is_at_most("block_size", "n_positions"))

    @property
    def small_shape(self) -> dict[str, Any]:
        shape: dict[str, Any] = {"n_layer": min(2, self.n_layer), "model_name_or_path": None}
        shape |= {"tokenizer_name": self.tokenizer_name or self.model_name_or_path}
        return shape | ({"n_embd": 64, "n_head": 2} if self.n_embd > 64 else {})

    @property
    def architecture(self) -> dict[str, Any]:
        """The model's shape, as `transformers.GPT2Config` takes it."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in ["vocab_size", *names[names.index("n_positions") :]]}


register(
    "gpt2_pretraining",
    Gpt2Pretraining,
    Parts(
        settings="samestep.recipe.task_settings:CausalLmSettings",
        data="samestep.data.token_blocks:build",
        model="samestep.models.gpt2_pretraining:PretrainingSums",
        shape="stepplan.memory:gpt2_pretraining",
        script="pretrain_gpt2.py",
        pipeline_tag="text-generation",
    ),
)
