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
    return (config.get("architectures") or ["?"])[0]


def shape_of(config: Mapping[str, Any], length: int | None, *, name: str) -> Model:
    """The model of a configuration, as its own class computes it: the loss of its head, all logits at once.

    Args:
        config: of `read_config`.
        length: tokens of a sample; None for images.
        name: for messages.

    Raises:
        UsageError: a class without a formula, a field that is missing, a length that the model does not have.
    """
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
