"""Models of Hugging Face that no recipe describes: their shape from a configuration, without transformers."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.planner import convnet, transformer
from samestep.planner.memory import Model
from samestep.planner.transformer import Transformer
from samestep.recipe.reading import format_name, format_value, read_json
from samestep.recipe.settings import ACTIVATIONS


def read_config(path: str) -> dict[str, Any]:
    """The configuration in a folder with a config.json, or in a .json file.

    Raises:
        UsageError: missing, unreadable, or not a configuration of transformers.
    """
    file = Path(path)
    file = file / "config.json" if os.path.isdir(file) else file
    what = f"model_name_or_path {format_name(path)}"
    config = read_json(file, f"{what} (a folder with a config.json, or such a file)")
    if "model_type" not in config:
        raise UsageError(f"{what} is not a configuration of transformers: it has no model_type")
    return config


IMAGE = 224
"""Pixels per side of an image."""


def has_formula(config: Mapping[str, Any]) -> bool:
    """Whether `shape_of` knows its class."""
    return _class(config) in _SHAPES


def _class(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return named[0][:60] if isinstance(named, list) and named and isinstance(named[0], str) else "?"


def shape_of(config: Mapping[str, Any], length: int | None, *, name: str) -> Model:
    """The model of a configuration, as its own class computes it: the loss of its head, all logits at once.

    Args:
        config: of `read_config`.
        length: tokens of a sample; None for images.
        name: for messages.

    Raises:
        UsageError: a class without a formula, a field that is missing, a length that the model does not have.
    """
    _check(config, name)
    config = {field: value for field, value in config.items() if value is not None}
    kind = _class(config)
    if kind not in _SHAPES:
        raise UsageError(
            f"{name} is a {format_name(kind)} (model_type {format_name(config['model_type'])}), for which there is no "
            f"formula: known are {', '.join(_SHAPES)}; --trace finds its memory with torch"
        )
    is_text = kind != "ResNetForImageClassification"
    if is_text and length is None:
        raise UsageError(f"{name} reads tokens: --seq_len is missing (tokens of a sample)")
    most = config.get("max_position_embeddings", config.get("n_positions"))
    if is_text and most is not None and length > most:
        raise UsageError(f"seq_len is {length}, but {name} has {most} positions: use {most} or less")
    try:
        return _SHAPES[kind](config, length)
    except KeyError as error:
        raise UsageError(f"{name}: its configuration has no {error.args[0]}") from None


# Field -> the largest that is believed, as in recipes.
SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**17,
    "num_key_value_heads": 2**17,
    "head_dim": 2**17,
    "max_position_embeddings": 2**24,
    "type_vocab_size": 2**24,
    "n_positions": 2**24,
    "n_embd": 2**17,
    "n_layer": 10_000,
    "n_head": 2**17,
    "n_inner": 2**20,
    "num_channels": 2**14,
    "embedding_size": 2**17,
    "num_labels": 2**24,
}
LISTS = {"hidden_sizes": 2**17, "depths": 1000}
MOST_STAGES = 64
RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "attn_pdrop", "attention_dropout")


def _check(config: Mapping[str, Any], name: str) -> None:
    """Raise UsageError for the first field that is no size, no activation, or no rate."""

    def refuse(field: str, value: Any, rule: str) -> None:
        raise UsageError(f"{name}: {field} is {format_value(value)} in its configuration, must be {rule}")

    for field, most in SIZES.items():
        value = config.get(field)
        if value is not None and not _is_size(value, most):
            refuse(field, value, f"a whole number from 1 to {most:,}")
    for field, most in LISTS.items():
        value = config.get(field, [1])
        is_list = isinstance(value, list) and 0 < len(value) <= MOST_STAGES
        if not is_list or not all(_is_size(of, most) for of in value):
            refuse(field, value, f"up to {MOST_STAGES} whole numbers from 1 to {most:,}")
    if len(config.get("hidden_sizes", [1])) != len(config.get("depths", config.get("hidden_sizes", [1]))):
        refuse("depths", config["depths"], f"as many numbers as hidden_sizes {format_value(config['hidden_sizes'])}")
    for field in ("hidden_act", "activation_function"):
        value = config.get(field)
        if value is not None and (not isinstance(value, str) or value not in ACTIVATIONS):
            refuse(field, value, f"one of {', '.join(ACTIVATIONS)}")
    for field in RATES:
        value = config.get(field, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            refuse(field, value, "a number in [0, 1)")
    if not isinstance(config["model_type"], str):
        refuse("model_type", config["model_type"], "text")
    if not isinstance(config.get("id2label") or {}, dict):
        refuse("id2label", config["id2label"], "a mapping of numbers to names")
    if config.get("layer_type", "basic") not in ("basic", "bottleneck"):
        refuse("layer_type", config["layer_type"], "basic or bottleneck")


def _is_size(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _num_labels(config: Mapping[str, Any]) -> int:
    """transformers keeps their names, and leaves them out where there are two."""
    return len(config.get("id2label") or {}) or config.get("num_labels", 2)


def _masked_language_model(config: Mapping[str, Any], length: int) -> Transformer:
    """BERT without pooler and next-sentence head, logits at every place."""
    whole, h = transformer.bert(config, length, length), config["hidden_size"]
    missing = (h * h + h) + (2 * h + 2)
    flops = whole.flops_per_sample - 3 * (2 * h * h + 4 * h)
    return dataclasses.replace(whole, num_outside=whole.num_outside - missing, flops_per_sample=flops)


def _resnet(config: Mapping[str, Any], _: int | None) -> convnet.ConvNet:
    return convnet.resnet({**config, "num_labels": _num_labels(config)}, IMAGE, IMAGE)


_SHAPES: dict[str, Callable[[Mapping[str, Any], Any], Model]] = {
    "BertForPreTraining": lambda config, length: transformer.bert(config, length, length),
    "BertForMaskedLM": _masked_language_model,
    "BertForSequenceClassification": lambda config, length: transformer.bert(
        {**config, "num_labels": _num_labels(config)}, length, None
    ),
    "GPT2LMHeadModel": lambda config, length: transformer.gpt2(config, length, chunked=False),
    "LlamaForCausalLM": transformer.llama,
    "MistralForCausalLM": transformer.llama,
    "Qwen2ForCausalLM": lambda config, length: transformer.llama(config, length, qkv_bias=True),
    "Qwen3ForCausalLM": lambda config, length: transformer.llama(config, length, qk_norm=True),
    "ResNetForImageClassification": _resnet,
}
