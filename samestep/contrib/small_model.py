"""Make a small model of the kind of another one, which a rehearsal trains: its own architecture, with few and narrow layers.

What decides the names and the kinds of layers stays: experts, windows, shared heads, latents, tied embeddings; so do targets of
adapters, templates, merges and files. Sizes are those that a CPU trains in seconds.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig

from samestep.errors import UsageError, reason
from samestep.models import adapters
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_kv_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
PERIODS = (
    "attn_layer_period",
    "expert_layer_period",
    "sliding_window_pattern",
    "full_attention_interval",
    "layer_group_size",
)
"""Names of the layers after which a pattern comes again."""
HEAD_DIM, MOST_LAYERS, UNKNOWN_VOCABULARY = 16, 8, 2**11
SIZES = {
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "block_ff_dim"), 128),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size"), 128),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "topk_group"), 2),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("linear_num_key_heads", "mamba_ngroups"), 1),
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "state_size", "mamba_d_state", "ssm_state_size"), 8
    ),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "num_nextn_predict_layers"), 1),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "rotary_dim", "mamba_dt_rank"), 8),
    "lru_width": 64,
    "num_kv_shared_layers": 0,
}
"""Field -> its value in a small model, if it is larger."""


def make(recipe: CausalLmFineTuning, folder: Path) -> None:
    """Save a small model of random weights of the kind that a recipe fine-tunes, in the type of its files.

    Args:
        recipe: of its model_name_or_path the configuration is read alone, and of its tokenizer the size.
        folder: gets the model.

    Raises:
        UsageError: there is no configuration that can be read, or no small model of it can be made.
    """
    base = adapters.find_start(recipe)[0]
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            recipe.tokenizer_name or recipe.model_name_or_path, trust_remote_code=False
        )
        num_tokens = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    except Exception:  # of any kind: the rehearsal trains one of its own, and says why
        num_tokens = UNKNOWN_VOCABULARY
    try:
        config = shrink(AutoConfig.from_pretrained(base, trust_remote_code=False), num_tokens)
        dtype = config.dtype if config.dtype in (torch.bfloat16, torch.float16) else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with contextlib.suppress(OSError, ValueError):  # it need not have one
            model.generation_config = GenerationConfig.from_pretrained(base)
        model.save_pretrained(folder)
    except Exception as error:  # of any kind: each architecture has its own rules
        raise UsageError(f"no small model of the kind of {base} can be made ({reason(error)})") from None


def shrink(config: PreTrainedConfig, vocab_size: int | None = None) -> PreTrainedConfig:
    """Return the configuration of a small model of the same kind, with another vocab_size, if one is given."""
    values = config.to_dict()
    for name in ("quantization_config", "architectures", "_name_or_path", "transformers_version"):
        values.pop(name, None)
    return type(config).from_dict(_shrink(values, vocab_size))


def _shrink(values: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
    small = {name: _shrink(part, vocab_size) if _is_config(part) else part for name, part in values.items()}
    layers = next((name for name in LAYERS if isinstance(values.get(name), int)), None)
    if layers is not None:
        small |= _shrink_layers(values, layers)
    small |= _shrink_heads(values)
    for name, size in SIZES.items():
        if isinstance(values.get(name), int) and not isinstance(values[name], bool):
            small[name] = min(values[name], size)
    ids = [value for name, value in values.items() if name.endswith("_token_id") and isinstance(value, int)]
    if vocab_size is not None and isinstance(values.get("vocab_size"), int):
        # A token that a configuration names has a row, also where the tokenizer does not have it
        vocab_size = min(values["vocab_size"], max(vocab_size, 1 + max(ids, default=0)))
        small |= {name: vocab_size for name in ("vocab_size", "vocab_size_per_layer_input") if name in values}
    return small


def _is_config(part: Any) -> bool:
    return isinstance(part, dict) and any(name in part for name in (*WIDTHS, *LAYERS))


def _shrink_layers(values: dict[str, Any], layers: str) -> dict[str, Any]:
    """Choose layers of each kind, at least two, from what is said of each of them."""
    number = values[layers]
    lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == number > 1}
    parts = values.get("per_layer_config") or {}
    kinds = [(*kind, parts.get(place)) for place, kind in enumerate(zip(*lists.values(), strict=True))] or [
        (parts.get(place),) for place in range(number)
    ]
    firsts = {str(kind): place for place, kind in reversed(list(enumerate(kinds)))}
    periods = [values[name] for name in PERIODS if isinstance(values.get(name), int) and not lists.get("layer_types")]
    count = min(number, MOST_LAYERS, max([2, len(firsts), *periods]))
    places = sorted(firsts.values())[:count] if len(firsts) > 1 else []
    places += [place for place in range(number) if place not in places][: count - len(places)]
    places.sort()
    small: dict[str, Any] = {layers: len(places)}
    small |= {name: [value[place] for place in places] for name, value in lists.items()}
    if parts:
        small["per_layer_config"] = {new: parts[old] for new, old in enumerate(places) if old in parts}
    for name in ("mlp_only_layers", "moe_layers", "attn_layer_indices"):  # numbers of layers
        if isinstance(values.get(name), list):
            small[name] = [place for place in values[name] if place < len(places)]
    if values.get("attention_types"):  # of GPT-Neo: what comes again, and how often
        kinds_of_one = values["attention_types"][0][0]
        small |= {"attention_types": [[kinds_of_one, 1]], layers: len(kinds_of_one)}
    return small


def _shrink_heads(values: dict[str, Any]) -> dict[str, Any]:
    """Choose few heads, which share keys and values as before, and the width for them."""
    heads = next((name for name in HEADS if isinstance(values.get(name), int)), None)
    keys = next((name for name in KEY_HEADS if isinstance(values.get(name), int)), None)
    width = next((name for name in WIDTHS if isinstance(values.get(name), int)), None)
    small: dict[str, Any] = {}
    num_heads, num_keys = 4, 4
    if heads is not None and keys is not None and values[keys] < values[heads]:
        num_keys = 1 if values[keys] == 1 else 2
        num_heads = num_keys * min(4, values[heads] // values[keys])
    if keys is not None:
        small |= {name: num_keys for name in KEY_HEADS if isinstance(values.get(name), int)}
    if heads is not None:
        small |= {name: num_heads for name in HEADS if isinstance(values.get(name), int)}
    head_dim = 8 if isinstance(values.get("qk_rope_head_dim"), int) else HEAD_DIM
    small |= {
        name: head_dim
        for name in ("head_dim", "kv_channels", "attention_head_dim")
        if isinstance(values.get(name), int)
    }
    if isinstance(values.get("global_head_dim"), int):
        small["global_head_dim"] = 2 * head_dim
    if width is not None:
        size = num_heads * HEAD_DIM
        small |= {name: size for name in WIDTHS if isinstance(values.get(name), int)}
        expand = values.get("mamba_expand", values.get("expand"))
        for number, dim in (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim")):
            if isinstance(values.get(number), int):
                small |= {number: (expand or 1) * size // HEAD_DIM, dim: HEAD_DIM}
        if heads == "num_heads" and isinstance(expand, int):  # Mamba 2, whose heads share the inner width
            small["num_heads"] = expand * size // HEAD_DIM
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict):
            small[name] = _shrink_rope(values[name], head_dim, values.get("partial_rotary_factor"))
    return small


def _shrink_rope(rope: dict[str, Any], head_dim: int, share: float | None) -> dict[str, Any]:
    """Cut what rotations say of each frequency, or of parts of them, to those of a head."""
    number = int(head_dim * (rope.get("partial_rotary_factor") or share or 1)) // 2
    small = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            value = _shrink_rope(value, head_dim, share)
        elif isinstance(value, list) and name == "mrope_section":
            parts = [max(1, part * number // sum(value)) for part in value[1:]]
            value = [number - sum(parts), *parts]
        elif isinstance(value, list):
            value = value[:number]
        small[name] = value
    return small
