"""Recipes that pretrain a decoder from random weights, of any size: width, heads, batch, rates and steps by published rules.

The rules are those of github.com/karpathy/nanochat (92d63d4), scripts/base_train.py and nanochat/gpt.py, by its depth:

width       64 per layer, up to a multiple of 128; heads of 128
tokens      12 for each parameter of matrices and head
batch       2^19 tokens at depth 12, with tokens^0.383 (2505.13738), a power of two
rates       with sqrt(batch), and AdamW's with 1 / sqrt(width)
decay       Muon's with sqrt(batch) / tokens (2405.13698)

What they multiply are the numbers of gpt_modern_124m, which has the width of depth 12 and that batch; Muon's rate is the
program's 0.02 in this repository's units, 0.2 sqrt(width) of which are one of its own.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from samestep.errors import UsageError
from samestep.recipe.catalog import load
from samestep.recipe.reading import format_name
from samestep.recipe.tasks.causal_lm_pretraining import CausalLmPretraining
from samestep.recipe.tasks.decoder import SHAPE
from stepplan.base_models import shape_from_config
from stepplan.decoder import Shape
from stepplan.memory import model_from_recipe

BASE = "gpt_modern_730m_8xh100"
"""Recipe with the rules' schedule, of which all others are variants."""
TUNED = "gpt_modern_124m"
"""Recipe whose rates the rules scale."""
WIDTH, HEAD = 64, 128
"""Width per layer, and of a head."""
TOKENS_PER_PARAMETER = 12
TUNED_DEPTH, TUNED_BATCH, BATCH_POWER = 12, 2**19, 0.383
MUON_RATE = 0.02
DEPTHS = range(2, 201, 2)
"""Depths that a number of parameters may mean: of odd ones the width is no multiple of a head's."""
SAMPLES = {"sample-10BT": 10e9, "sample-100BT": 100e9, "sample-350BT": 350e9}
"""Configurations of FineWeb-Edu and their tokens (huggingface.co/datasets/HuggingFaceFW/fineweb-edu)."""


def shape_of_depth(depth: int) -> dict[str, Any]:
    """Return the fields of the shape with so many layers.

    >>> shape_of_depth(24)["hidden_size"], shape_of_depth(24)["intermediate_size"]
    (1536, 4096)
    """
    width = -(-WIDTH * depth // HEAD) * HEAD
    fields = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // HEAD}
    return fields | {"intermediate_size": round(8 * width / 3 / WIDTH) * WIDTH}


def find_depth(parameters: str) -> int:
    """Find the depth whose model has the nearest number of parameters.

    Raises:
        UsageError: no number of parameters, or one that no depth of `DEPTHS` is near.

    >>> find_depth("1B"), find_depth("124e6"), find_depth("3b")
    (26, 12, 38)
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?) ?([kmb]?)", parameters.lower())
    wanted = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[match[2]] if match else 0.0
    vocabulary = _load(BASE).vocab_size
    sizes = {depth: count_parameters(shape_of_depth(depth) | {"vocab_size": vocabulary}) for depth in DEPTHS}
    if not sizes[DEPTHS[0]] <= wanted <= sizes[DEPTHS[-1]]:
        raise UsageError(
            f"parameters is {format_name(parameters)}, must be from {sizes[DEPTHS[0]]:,} to {sizes[DEPTHS[-1]]:,}: for example "
            "1B, 350M, 3e9"
        )
    return min(sizes, key=lambda depth: abs(math.log(sizes[depth] / wanted)))


def count_parameters(fields: Mapping[str, Any]) -> int:
    """Count the parameters of a shape of the rules, head and embedding once."""
    width, layers = fields["hidden_size"], fields["num_hidden_layers"]
    layer: int = 4 * width**2 + 3 * width * fields["intermediate_size"] + 2 * width + 2 * HEAD
    count: int = layers * layer + width * (fields["vocab_size"] + 1)
    return count


def read_shape(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read the fields of a recipe that pretrains a model of a configuration.

    Raises:
        UsageError: a configuration without a formula, or one whose shape a recipe's fields cannot say.
    """
    shape = shape_from_config(config, name)
    fields = {
        "architecture": config["model_type"],
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
    }
    fields |= {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_key_heads}
    fields |= {
        "intermediate_size": shape.intermediate_size or shape.expert_size,
        "tie_word_embeddings": shape.tied_head,
    }
    fields |= {"vocab_size": shape.vocab_size, "tokenizer_name": None}
    if shape.max_length is not None:
        fields["max_position_embeddings"] = shape.max_length
    if config.get("initializer_range"):
        fields["initializer_range"] = config["initializer_range"]
    recipe = load(BASE, fields)
    planned = model_from_recipe(recipe).num_parameters
    if planned != shape.num_parameters:
        raise UsageError(
            f"{name} has {shape.num_parameters:,} parameters, but a recipe with its {', '.join(SHAPE[:5])} has {planned:,}. "
            "Its configuration says more than the fields of a recipe (a head's width, experts). Give --depth or "
            "--parameters, or train it in a loop of your own"
        )
    return fields


def scale_recipe(shape: Mapping[str, Any], num_tokens: float | None, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Scale what the rules scale to a shape, around what was typed.

    Args:
        shape: fields of the recipe that describe the model.
        num_tokens: of the training; None: `TOKENS_PER_PARAMETER`.
        typed: fields that a user decides.

    Returns:
        The fields in which the recipe differs from `BASE`.
    """
    recipe, tuned = _load(BASE, {**shape, **typed}), _load(TUNED)
    model: Any = model_from_recipe(recipe)
    width, length = recipe.hidden_size, recipe.block_size
    tokens = num_tokens or TOKENS_PER_PARAMETER * _count_multiplied(model.shape)
    tuned_tokens = TOKENS_PER_PARAMETER * _count_multiplied(_shape_of(TUNED_DEPTH))
    batch = 2 ** round(math.log2(TUNED_BATCH * (tokens / tuned_tokens) ** BATCH_POWER))
    samples = typed.get("global_batch_size") or max(1, batch // length)
    scale = math.sqrt(samples * length / TUNED_BATCH)
    assert tuned.muon_weight_decay is not None
    changes = {**shape, "global_batch_size": samples, "learning_rate_batch_size": samples}
    changes |= {"learning_rate": _round(tuned.learning_rate * scale * math.sqrt(tuned.hidden_size / width))}
    changes |= {"muon_learning_rate": _round(MUON_RATE * scale / (0.2 * math.sqrt(width)))}
    changes |= {"muon_weight_decay": _round(tuned.muon_weight_decay * scale * tuned_tokens / tokens)}
    changes |= {"max_train_steps": max(1, round(tokens / (samples * length)))}
    if recipe.dataset_name == _load(BASE).dataset_name and "dataset_config_name" not in typed:
        changes["dataset_config_name"] = next((name for name, size in SAMPLES.items() if size >= tokens), None)
    return changes | dict(typed)


def _load(name: str, changes: Mapping[str, Any] | None = None) -> CausalLmPretraining:
    recipe = load(name, changes)
    assert isinstance(recipe, CausalLmPretraining)
    return recipe


def _shape_of(depth: int) -> Shape:
    model: Any = model_from_recipe(load(BASE, shape_of_depth(depth)))
    shape: Shape = model.shape
    return shape


def _count_multiplied(shape: Shape) -> int:
    """Count the parameters of matrices and head that a token is multiplied by."""
    embedding = 0 if shape.tied_head else shape.vocab_size * shape.hidden_size
    return shape.num_active - shape.num_layers * shape.norm_parameters - shape.hidden_size - embedding


def _round(value: float) -> float:
    """Round to three digits, as recipes are written."""
    return float(f"{value:.3g}")
