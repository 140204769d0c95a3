"""Models of Hugging Face that no recipe describes: their shape from a configuration, without transformers."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recipes import convnet, transformer
from recipes.errors import UsageError
from recipes.memory import Model
from recipes.transformer import Transformer


def read_config(path: str) -> dict[str, Any]:
    """The configuration in a folder with a config.json, or in a .json file.

    Raises:
        UsageError: missing, unreadable, or not a configuration of transformers.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"model_name_or_path {path} cannot be read: {error.strerror}: give a folder with a config.json, or such a file"
        ) from None
    except ValueError as error:
        raise UsageError(f"model_name_or_path {path} is not JSON: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise UsageError(f"model_name_or_path {path} is not a configuration of transformers: it has no model_type")
    return config


IMAGE = 224
"""Pixels per side of an image."""


def has_formula(config: Mapping[str, Any]) -> bool:
    """Whether `shape_of` knows its class."""
    return _class(config) in _SHAPES


def _class(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "?"


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
    kind = _class(config)
    if kind not in _SHAPES:
        raise UsageError(
            f"{name} is a {kind} (model_type {config['model_type']}), for which there is no formula: known are "
            f"{', '.join(_SHAPES)}; --trace finds its memory with torch"
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


SIZES = (
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *(
        "head_dim",
        "max_position_embeddings",
        "type_vocab_size",
        "n_positions",
        "n_embd",
        "n_layer",
        "n_head",
        "n_inner",
    ),
    *("num_channels", "embedding_size"),
)
LISTS = ("hidden_sizes", "depths")
RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "attn_pdrop", "attention_dropout")


def _check(config: Mapping[str, Any], name: str) -> None:
    """Raise UsageError for the first field that is no size, or no rate."""
    for field in SIZES:
        value = config.get(field)
        if value is not None and not _is_size(value):
            raise UsageError(f"{name}: {field} is {value!r} in its configuration, must be a whole number of 1 or more")
    for field in LISTS:
        value = config.get(field, [1])
        if not isinstance(value, list) or not value or not all(map(_is_size, value)):
            raise UsageError(f"{name}: {field} is {value!r} in its configuration, must be whole numbers of 1 or more")
    for field in RATES:
        value = config.get(field, 0)
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise UsageError(f"{name}: {field} is {value!r} in its configuration, must lie in [0, 1)")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


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
