"""Shapes of decoders from a configuration of transformers, or from the built-in table of well-known base models."""

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from samestep.errors import UsageError, reason
from samestep.recipe.catalog import catalog_names, load
from samestep.recipe.hub import WAY_OUT
from samestep.recipe.pretrained_shape import find_base
from samestep.recipe.reading import MAX_JSON_BYTES, format_name, format_value, parse_json, read_json
from samestep.recipe.recipe import Recipe
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from stepplan import configs
from stepplan.decoder import Shape
from stepplan.decoder_kinds import ALIASES, KINDS, NAMES, TIED, list_layers

TABLE = Path(__file__).parent / "base_models.json"
MODEL_TYPES = tuple(KINDS)
"""Values of `model_type` that have a formula."""
SUFFIX = re.compile(r"-(instruct|it|pt|chat|base|hf|sft)(?=-|$)|-2507$", re.IGNORECASE)
SECONDS = 10
"""Longest wait for an answer of the hub."""
UNKNOWN_VOCABULARY = 2**15
"""Words of a tokenizer that nobody has read."""
FIELDS = {name: largest for name, largest in configs.SIZES.items() if not name.startswith("n_")} | {
    **dict.fromkeys(
        "num_experts num_local_experts n_routed_experts num_experts_per_tok n_shared_experts".split(), 2**14
    ),
    "moe_intermediate_size": 2**20,
    **dict.fromkeys("q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim".split(), 2**17),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 2**24),
    **dict.fromkeys(("intermediate_size_mlp", "ffn_hidden_size"), 2**20),
    **dict.fromkeys(("num_kv_heads", "expansion_ratio", "interleave_moe_layer_step"), 2**14),
    "first_k_dense_replace": 10_000,
    **dict.fromkeys(("state_size", "n_groups", "conv_kernel", "chunk_size", "ssm_state_size", "mamba_head_dim"), 2**14),
    **dict.fromkeys("mamba_n_groups mamba_d_state mamba_d_conv mamba_chunk_size mamba_expand".split(), 2**14),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_ssm"), 2**17),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2**14),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"), 2**14),
    **dict.fromkeys(("shared_intermediate_size", "shared_expert_intermediate_size"), 2**20),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_latent_size"), 2**20),
    **dict.fromkeys(("decoder_sparse_step", "full_attention_interval"), 10_000),
}
"""Field -> its largest value that is accepted."""
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts; which of them a file has depends on the version of transformers that wrote it."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "deepseek_v3": {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    | {"n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512}
    | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "gpt_oss": {"num_local_experts": 128, "num_experts_per_tok": 4, "head_dim": 64, "attention_bias": True},
}
"""`model_type` of experts -> what transformers takes for fields that a configuration, or a recipe, leaves out."""
MAY_BE_ZERO = (
    "first_k_dense_replace",
    "n_shared_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "sliding_window",
)
OWN_SIZES = ("falcon", "mpt", "mamba2", "qwen3_5_moe_text")
"""Values of `model_type` whose feed-forward layers have a width by another name, or none."""
GENERATORS = ("ForCausalLM", "ForConditionalGeneration")
"""Ends of the names of classes whose head scores the next token."""


class UnknownShapeError(UsageError):
    """A configuration that this planner cannot read, though transformers may build a model of it."""


@functools.cache
def read_table(part: str = "models") -> dict[str, dict[str, Any]]:
    """Read the table of base models: name on the hub -> fields of its configuration.

    Args:
        part: models: decoders of texts; readers: of sources, images or sounds.
    """
    table: dict[str, dict[str, Any]] = {}
    for name, fields in read_json(TABLE, "the table of base models")[part].items():
        table[name] = {**table.get(fields.pop("extends", ""), {}), **fields}
    return table


def find_base_model(name: str) -> dict[str, Any] | None:
    """Find the configuration of a well-known base model by its name on the hub; None: the table has no such model.

    The owner may be left out, and what only says how it was tuned: Instruct, it, chat.

    >>> find_base_model("unsloth/Llama-3.1-8B-Instruct")["hidden_size"], find_base_model("gpt5")
    (4096, None)
    """
    wanted = _shorten(name)
    known = {**read_table(), **read_table("readers")}
    return next((dict(config) for base, config in known.items() if _shorten(base) == wanted), None)


def _shorten(name: str) -> str:
    short = SUFFIX.sub("", name.rpartition("/")[2]).lower()
    return short.removeprefix("meta-")


def find_local_config(name_or_path: str) -> dict[str, Any] | None:
    """Find the configuration of a model in a folder, a file or the table; None: there is none.

    A folder runs/RECIPE that does not exist yet has the shape of that recipe of the catalog, which will write it.

    Raises:
        UsageError: the file is not a configuration of transformers.
    """
    path = Path(name_or_path).expanduser()
    if path.exists() or name_or_path.endswith(".json"):
        return configs.read_config(str(path))
    if path.parent.name == "runs" and path.name in catalog_names():
        return _config_from_recipe(load(path.name))
    return find_base_model(name_or_path)


def _config_from_recipe(recipe: Recipe) -> dict[str, Any] | None:
    if not isinstance(recipe, CausalLmFineTuning):
        return None
    if recipe.model_name_or_path is not None:
        return find_local_config(find_weights(recipe))
    return config_from_recipe(recipe)


def find_config(name_or_path: str) -> dict[str, Any]:
    """Find the configuration of a model: a folder or file here, the table, or the hub.

    Raises:
        UsageError: it is none of them.
    """
    config = find_local_config(name_or_path)
    return config if config is not None else _download_config(name_or_path)


def _name_near(name: str) -> str:
    """Name the model of the table that is spelled the most like one that is not there.

    >>> _name_near("llama-7b"), _name_near("nothing")
    ('; did you mean meta-llama/Llama-2-7b?', '')
    """
    known = {_shorten(base): base for base in read_table()}
    near = get_close_matches(_shorten(name), known, n=1, cutoff=0.75)
    return f"; did you mean {known[near[0]]}?" if near else ""


def _download_config(name: str) -> dict[str, Any]:
    problem = f"model_name_or_path {format_name(name)} is no folder here and not in the planner's table of base models"
    near = _name_near(name)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise UsageError(
            f"{problem}: give a folder with a config.json, or a name of the hub, such as Qwen/Qwen3-8B{near}"
        )
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    cached = sorted(cache.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"))
    if cached:
        return configs.read_config(str(cached[-1]))
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise UsageError(f"{problem}, and HF_HUB_OFFLINE is set: give a folder with its config.json{near}")
    import urllib.error  # here: they take their time
    import urllib.request

    token = os.environ.get("HF_TOKEN")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(f"{endpoint}/{name}/resolve/main/config.json", headers=headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return parse_json(answer.read(MAX_JSON_BYTES + 1), "its config.json")
    except (OSError, ValueError) as error:  # no network, no such model, no right to see it, no JSON
        if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError):
            cause = getattr(error.reason, "strerror", None) or reason(OSError(error.reason))
            raise UsageError(f"{problem}, and the hub cannot be reached ({cause}); {WAY_OUT}{near}") from None
        raise UsageError(
            f"{problem}, and the hub does not give its config.json ({reason(error)[:200]}){near}"
        ) from None


def find_kind(config: Mapping[str, Any]) -> str | None:
    """Find the `model_type` that has the formula of a configuration, or of the texts of one; None: it is no text."""
    kind = {**config, **_text_part(config)}.get("model_type")
    return ALIASES.get(kind, kind) if isinstance(kind, str) else None


def _fill_defaults(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Add to a configuration of experts what it leaves out, and `num_experts` by whatever name it has it."""
    defaults = DEFAULTS.get(kind, {})
    numbers = [part[name] for part in (config, defaults) for name in COUNTS if part.get(name) is not None]
    return defaults | dict(config) | ({"num_experts": numbers[0]} if numbers else {})


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that is about texts, where it has one."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else {}


def is_decoder(config: Mapping[str, Any]) -> bool:
    """Tell whether a configuration is of a language model of the kinds in `MODEL_TYPES`, head included.

    >>> is_decoder({"model_type": "qwen3"}), is_decoder({"model_type": "qwen3", "architectures": ["Qwen3Model"]})
    (True, False)
    """
    classes = config.get("architectures")
    is_generator = not isinstance(classes, list) or not classes or str(classes[0]).endswith(GENERATORS)
    return find_kind(config) in MODEL_TYPES and is_generator


def may_be_decoder(config: Mapping[str, Any]) -> bool:
    """Tell whether a configuration is of a language model, of a kind with a formula or by the name of its class.

    >>> may_be_decoder({"model_type": "jamba", "architectures": ["JambaForCausalLM"]}), may_be_decoder({"model_type": "jamba"})
    (True, False)
    """
    if is_decoder(config) or configs.has_formula(config) or config.get("is_encoder_decoder"):
        return is_decoder(config)
    name = configs.find_class(config)
    return name.endswith(GENERATORS[0]) or (name.endswith(GENERATORS[1]) and bool(_text_part(config)))


def find_num_positions(config: Mapping[str, Any]) -> int | None:
    """Find the most tokens that a model of a configuration reads; None: it does not say."""
    for field in ("max_position_embeddings", "n_positions"):
        value = {**config, **_text_part(config)}.get(field)
        if isinstance(value, int) and value > 0:
            return value
    return None


def shape_from_config(config: Mapping[str, Any], name: str) -> Shape:
    """Return the shape of a decoder from its configuration.

    Args:
        config: as of transformers; that of a model of texts and images has a `text_config`.
        name: for messages.

    Raises:
        UsageError: a model_type without a formula, a field that is missing or no valid size.
    """
    kind = find_kind(config)
    config = {**config, **_text_part(config)}
    if kind not in MODEL_TYPES:
        raise UnknownShapeError(
            f"{name} has model_type {format_value(config.get('model_type'))}, for which there is no formula: known are "
            f"{', '.join(MODEL_TYPES)}; --trace finds its memory with torch"
        )
    config = {field: value for field, value in config.items() if value is not None}
    config |= {ours: config[theirs] for ours, theirs in NAMES.get(kind, {}).items() if config.get(theirs) is not None}
    if listed := list_layers(config):
        config.setdefault("num_hidden_layers", len(listed))
    configs.check_sizes(config, name, FIELDS, MAY_BE_ZERO)
    config = _fill_defaults(config, kind)

    def need(field: str) -> int:
        if config.get(field) is None:
            raise UnknownShapeError(f"{name}: its configuration has no {field}")
        return int(config[field])

    heads, layers, width = (need(field) for field in ("num_attention_heads", "num_hidden_layers", "hidden_size"))
    values: dict[str, Any] = {
        "vocab_size": need("vocab_size"),
        "hidden_size": width,
        "num_layers": layers,
        "intermediate_size": config.get("intermediate_size") or (0 if kind in OWN_SIZES else need("intermediate_size")),
        "num_heads": heads,
        "num_key_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or max(1, width // heads),
        "tied_head": bool(config.get("tie_word_embeddings", kind.startswith("gemma") or kind in TIED)),
        "qkv_bias": bool(config.get("attention_bias")),
        "max_length": config.get("max_position_embeddings"),
        "stored_bytes": 2 if config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16") else 4,
    }
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", kind not in ("qwen2", "qwen3", "qwen3_moe", "deepseek_v2")):
        values |= {"window": window}
    try:
        return make_shape(values | KINDS[kind](config, values))
    except KeyError as error:
        raise UnknownShapeError(f"{name}: its configuration has no {error.args[0]}") from None


def make_shape(fields: Mapping[str, Any]) -> Shape:
    """Make a shape of its fields; `layers`, where they differ, are what each layer changes."""
    changes: list[dict[str, Any]] = list(fields.get("layers", ()))
    shape = Shape(**{**fields, "layers": ()})
    kinds = [dict(kind) for kind in dict.fromkeys(tuple(sorted(each.items())) for each in changes)]
    layers = [dataclasses.replace(shape, **kind, num_layers=changes.count(kind)) for kind in kinds]
    return dataclasses.replace(shape, layers=tuple(layers)) if len(layers) > 1 else (layers or [shape])[0]


def find_weights(recipe: Recipe) -> str:
    """Find the whole weights that a recipe starts from: of an adapter that it goes on with, those of its base."""
    path = str(getattr(recipe, "model_name_or_path", None))
    return path if getattr(recipe, "lora_rank", None) is None else find_base(path) or path


def shape_from_recipe(recipe: CausalLmFineTuning) -> Shape:
    """Return the shape of a recipe's model: of its own fields, or of the configuration of model_name_or_path.

    Raises:
        UsageError: the configuration cannot be found, or has no formula; max_seq_length is above the model's positions, or
            lora_rank above its width.
    """
    config = config_from_recipe(recipe)
    shape = shape_from_config(config, recipe.model_name_or_path or f"architecture {recipe.architecture}")
    check_shape(recipe, shape)
    return shape


def config_from_recipe(recipe: CausalLmFineTuning) -> dict[str, Any]:
    """Return the configuration of a recipe's decoder: of its own fields, or of model_name_or_path; as `shape_from_recipe`."""
    if recipe.model_name_or_path is not None:
        return find_config(find_weights(recipe))
    fields = {name: value for name, value in recipe.shape.items() if value is not None}
    fields |= {"model_type": recipe.architecture, "vocab_size": recipe.vocab_size or UNKNOWN_VOCABULARY}
    return fields | {"head_dim": recipe.hidden_size // recipe.num_attention_heads}


def check_shape(recipe: CausalLmFineTuning, shape: Shape) -> None:
    """Raise UsageError where max_seq_length is above a shape's positions, or lora_rank above its width."""
    name = recipe.model_name_or_path or recipe.name
    if shape.max_length is not None and recipe.max_seq_length > shape.max_length:
        raise UsageError(
            f"max_seq_length is {recipe.max_seq_length:,}, but {name} has {shape.max_length:,} positions: lower it to at most "
            "that"
        )
    if recipe.lora_rank is not None and recipe.lora_rank > shape.hidden_size:
        raise UsageError(
            f"lora_rank is {recipe.lora_rank:,}, above the width {shape.hidden_size:,} of {name}: lower it, or train all "
            "weights (lora_rank null)"
        )
