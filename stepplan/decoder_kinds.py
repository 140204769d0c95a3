"""Kinds of decoders beside a Llama: which fields of a configuration say it, and how `decoder.Shape` has it.

Each function takes a configuration and the fields of a shape that all decoders share, and returns those that its kind changes.
Where layers differ, `layers` has what each of them changes besides, in their order.
Numbers of parameters are compared with transformers' own models in tests/test_decoder_kinds.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

from stepplan.decoder import Latent
from stepplan.recurrences import DeltaRule, Scan

Fields = Mapping[str, Any]
Kind = Callable[[Fields, Fields], dict[str, Any]]

NAMES: dict[str, dict[str, str]] = {
    "opt": {"intermediate_size": "ffn_dim"},
    "mpt": {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    | {"max_position_embeddings": "max_seq_len"},
    "mamba2": {"num_attention_heads": "num_heads"},
}
"""`model_type` -> fields that it calls otherwise."""
TIED = ("opt", "falcon", "mpt", "starcoder2", "ernie4_5")
"""Values of `model_type` whose head is the embedding where a configuration does not say it."""
NEOX = (
    ("qkv_proj", "query_key_value"),
    ("o_proj", "dense"),
    ("up_proj", "dense_h_to_4h"),
    ("down_proj", "dense_4h_to_h"),
)


def _count_biases(values: Fields) -> int:
    """Count the biases of all matrices of a layer without a gate."""
    keys, width = values["num_key_heads"] * values["head_dim"], values["hidden_size"]
    count: int = values["num_heads"] * values["head_dim"] + 2 * keys + width + values["intermediate_size"] + width
    return count


def _plain(config: Fields, values: Fields, **more: Any) -> dict[str, Any]:
    """Describe a layer of LayerNorm with biases, and a feed-forward layer without a gate, its matrices with biases."""
    width, norms = values["hidden_size"], more.get("num_pre_norms", 2)
    activation = config.get("hidden_act", config.get("activation_function", config.get("activation", "gelu")))
    changes = {"activation": str(activation), "has_layer_norm": True, "qkv_bias": False}
    return changes | {"extra_layer": _count_biases(values) + norms * width, "extra_outside": width} | more


def gpt_neox(config: Fields, values: Fields) -> dict[str, Any]:
    """GPT-NeoX, Pythia: one matrix of queries, keys and values."""
    return _plain(config, values, is_fused=True, names=NEOX)


def phi(config: Fields, values: Fields) -> dict[str, Any]:
    """Phi-1 to 2: attention and feed-forward layer side by side behind one normalisation; a head with a bias."""
    names = (("o_proj", "dense"), ("up_proj", "fc1"), ("down_proj", "fc2"))
    outside = values["hidden_size"] + values["vocab_size"]
    return _plain(config, values, num_pre_norms=1, names=names, extra_outside=outside)


def opt(config: Fields, values: Fields) -> dict[str, Any]:
    """OPT: learned positions, two of them for padding."""
    names = (("o_proj", "out_proj"), ("up_proj", "fc1"), ("down_proj", "fc2"))
    positions = (config["max_position_embeddings"] + 2) * values["hidden_size"]
    return _plain(config, values, names=names, extra_outside=positions + values["hidden_size"])


def falcon(config: Fields, values: Fields) -> dict[str, Any]:
    """Falcon: one head of keys, or groups of them; attention and feed-forward layer side by side; biases of norms only."""
    is_new = bool(config.get("new_decoder_architecture"))
    keys = config.get("num_kv_heads") or values["num_heads"] if is_new or not config.get("multi_query", True) else 1
    norms = 2 if (is_new and config.get("num_ln_in_parallel_attn") != 1) or not config.get("parallel_attn", True) else 1
    values = {
        **values,
        "num_key_heads": keys,
        "intermediate_size": config.get("ffn_hidden_size") or 4 * values["hidden_size"],
    }
    biases = _count_biases(values) if config.get("bias") else 0
    changes = _plain(config, values, is_fused=True, names=NEOX, num_pre_norms=norms)
    changes |= {"extra_layer": biases + norms * values["hidden_size"], "is_eager": True, "copies_scores": True}
    return changes | {name: values[name] for name in ("num_key_heads", "intermediate_size")}


def mpt(config: Fields, values: Fields) -> dict[str, Any]:
    """MPT: no bias anywhere; attention with a bias of distances, which transformers computes from stored scores."""
    names = (("qkv_proj", "Wqkv"), ("o_proj", "out_proj"))
    changes = {
        "activation": "gelu",
        "has_layer_norm": True,
        "is_fused": True,
        "names": names,
        "is_eager": True,
        "copies_scores": True,
    }
    return changes | {"intermediate_size": config.get("expansion_ratio", 4) * values["hidden_size"]}


def starcoder2(config: Fields, values: Fields) -> dict[str, Any]:
    """StarCoder 2: grouped queries, biases everywhere."""
    changes = _plain(config, values, names=(("up_proj", "c_fc"), ("down_proj", "c_proj")))
    biases = _count_biases(values) if config.get("use_bias", True) else 0
    return changes | {"extra_layer": biases + 2 * values["hidden_size"]}


def gemma2(config: Fields, values: Fields) -> dict[str, Any]:
    """Gemma 2: normalisations on both sides, soft caps, a window in every second layer."""
    return {"num_post_norms": 2, "soft_caps": True} | _window(config, values, every=2)


def gemma3(config: Fields, values: Fields) -> dict[str, Any]:
    """Gemma 3: normalisations on both sides and of queries and keys, a window in five of six layers."""
    return {"num_post_norms": 2, "qk_norm": "head"} | _window(config, values, every=6)


def olmo2(config: Fields, values: Fields) -> dict[str, Any]:
    """OLMo 2: normalisations behind attention and feed-forward layer."""
    return {"qk_norm": "width", "num_post_norms": 2, "num_pre_norms": 0}


def olmo3(config: Fields, values: Fields) -> dict[str, Any]:
    """OLMo 3: as OLMo 2, with a window in three of four layers."""
    return olmo2(config, values) | _window(config, values, every=4)


def _window(config: Fields, values: Fields, every: int) -> dict[str, Any]:
    """Describe a window in all layers but each `every`th, or in those that the configuration lists."""
    kinds = _list_layers(config, values) or [
        "full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(values["num_layers"])
    ]
    window = config.get("sliding_window") or None
    return {"window": window, "layers": [{"window": None if kind == "full_attention" else window} for kind in kinds]}


PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern` (Nemotron-H)."""


def list_layers(config: Fields) -> list[str]:
    """List the kinds of all layers as a configuration names them; []: it names none.

    >>> list_layers({"hybrid_override_pattern": "M-*"})
    ['linear_attention', 'mlp', 'full_attention']
    """
    kinds, pattern = config.get("layer_types") or config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if isinstance(kinds, list):
        return [str(kind) for kind in kinds]
    return [PATTERN.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else []


def _list_layers(config: Fields, values: Fields) -> list[str]:
    """List the kinds of as many layers as there are; []: the configuration names none, or other numbers of them."""
    kinds = list_layers(config)
    return kinds if len(kinds) == values["num_layers"] else []


def mixtral(config: Fields, values: Fields) -> dict[str, Any]:
    """Mixtral: experts of the dense width."""
    return _experts(config, config["intermediate_size"])


def qwen3_moe(config: Fields, values: Fields) -> dict[str, Any]:
    """Qwen3 with experts in every layer."""
    return {"qk_norm": "head"} | _experts(config, config["moe_intermediate_size"])


def _experts(config: Fields, size: int, shared_size: int = 0) -> dict[str, Any]:
    """Describe experts of a width, beside some that every token visits."""
    count = config["num_experts"]
    experts = {
        "num_experts": count,
        "expert_size": size,
        "experts_per_token": min(config["num_experts_per_tok"], count),
    }
    return experts | {"intermediate_size": shared_size}


def _shared(config: Fields, values: Fields) -> dict[str, Any]:
    """Describe experts behind dense layers, beside some that every token visits."""
    size, layers = config["moe_intermediate_size"], values["num_layers"]
    experts = _experts(config, size, size * (config.get("n_shared_experts") or 0))
    first = config.get("first_k_dense_replace", 0)
    return {"layers": [experts if layer >= first else {} for layer in range(layers)]}


def deepseek(config: Fields, values: Fields) -> dict[str, Any]:
    """DeepSeek-V2 and V3, Kimi K2: latent attention."""
    rotated, value_dim = config["qk_rope_head_dim"], config["v_head_dim"]
    latent = Latent(config.get("q_lora_rank") or 0, config["kv_lora_rank"], rotated, value_dim)
    heads = {"head_dim": config["qk_nope_head_dim"] + rotated, "num_key_heads": values["num_heads"]}
    return _shared(config, values) | heads | {"latent": latent}


def glm4_moe(config: Fields, values: Fields) -> dict[str, Any]:
    """GLM-4.5: biases of queries, keys and values."""
    return _shared(config, values) | {"qk_norm": "head" if config.get("use_qk_norm") else "none"}


def gpt_oss(config: Fields, values: Fields) -> dict[str, Any]:
    """gpt-oss: biases everywhere, a sink per head, a window in every second layer, attention from stored scores."""
    count, size, width = config["num_experts"], config["intermediate_size"], values["hidden_size"]
    keys, queries = values["num_key_heads"] * values["head_dim"], values["num_heads"] * values["head_dim"]
    biases = (queries + 2 * keys + width) * bool(config.get("attention_bias", True)) + values["num_heads"]
    changes = {
        "qkv_bias": False,
        "extra_layer": biases + count * (2 * size + width + 1),
        "is_eager": True,
    }
    # Both halves before and after their limits, the sigmoid, and the gated one
    changes |= {"all_linear": "linears", "expert_tensors": 6, "copies_scores": True}
    return changes | _experts(config, size) | _window(config, values, every=2)


def llama4(config: Fields, values: Fields) -> dict[str, Any]:
    """Llama 4: experts beside a shared one in each layer, or in every second; attention in chunks in three of four layers."""
    layers, step = values["num_layers"], config.get("interleave_moe_layer_step") or 1
    mixtures = config.get("moe_layers") or range(step - 1, layers, step)
    experts = _experts(config, config["intermediate_size"], config["intermediate_size"])
    # A query of a chunk sees half of it and more: as many keys as one of a window of half the chunk
    window = (config.get("attention_chunk_size") or 0) // 2 or None
    changes = [
        (experts if layer in mixtures else {}) | {"window": window if (layer + 1) % 4 else None}
        for layer in range(layers)
    ]
    return {"intermediate_size": config["intermediate_size_mlp"], "all_linear": "router", "layers": changes}


def _scan(
    config: Fields, width: int, names: str = "num_heads head_dim n_groups state_size chunk_size conv_kernel"
) -> Scan:
    """Describe Mamba 2's recurrence in a model of this width; `names` are the fields of its sizes."""
    heads, size, groups, state, chunk, kernel = (config[name] for name in names.split())
    convolved = heads * size + 2 * groups * state
    scan = Scan(heads, size, groups, state, chunk, kernel, extra=0)
    biases = convolved * bool(config.get("use_conv_bias", config.get("mamba_conv_bias", True)))
    # Of each head a decay, a step and a skip; a normalisation before the last matrix
    extra = convolved * kernel + 3 * heads + scan.inner + biases
    if config.get("use_bias", config.get("mamba_proj_bias")):
        extra += sum(linear.out for linear in scan.linears(width))
    return scan._replace(extra=extra)


MAMBA_NAMES = "mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_chunk_size mamba_d_conv"
"""Fields of a scan in models of IBM and TII."""
RECURRENT = ("linear_attention", "mamba")
"""Names of a layer that has a recurrence in attention's place."""


def mamba2(config: Fields, values: Fields) -> dict[str, Any]:
    """Mamba 2: a recurrence behind one normalisation, and no feed-forward layer."""
    changes = {"recurrence": _scan(config, values["hidden_size"]), "has_attention": False, "mixer": "mixer"}
    return changes | {"intermediate_size": 0, "num_pre_norms": 1, "qkv_bias": False, "all_linear": "linears"}


def _hybrid(config: Fields, values: Fields, scan: Scan) -> dict[str, Any]:
    """Describe layers with a scan in attention's place, where the configuration does not name attention."""
    attends = config.get("attn_layer_indices") or ()
    kinds = _list_layers(config, values) or [
        "attention" if layer in attends else "mamba" for layer in range(values["num_layers"])
    ]
    recurrent = {"recurrence": scan, "has_attention": False, "mixer": "mamba"}
    biases = (values["hidden_size"]) * values["qkv_bias"]
    attention = {"extra_layer": values.get("extra_layer", 0) + biases}
    return {"layers": [recurrent if kind in RECURRENT else attention for kind in kinds], "all_linear": "linears"}


def bamba(config: Fields, values: Fields) -> dict[str, Any]:
    """Bamba: scans, attention in few layers, a feed-forward layer in all."""
    return _hybrid(config, values, _scan(_find_heads(config, values), values["hidden_size"], MAMBA_NAMES))


def _find_heads(config: Fields, values: Fields) -> Fields:
    """Add the width of a scan's heads where a configuration leaves it to be found."""
    inner = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * values["hidden_size"]
    size = config.get("mamba_d_head", "auto")
    return {**config, "mamba_d_head": inner // config["mamba_n_heads"] if size == "auto" else size}


def granite_hybrid(config: Fields, values: Fields) -> dict[str, Any]:
    """Granite 4: as Bamba, with experts beside one that every token visits, or with that one alone."""
    names = (("gate_up_proj", "input_linear"), ("down_proj", "output_linear"))
    shared = config["shared_intermediate_size"]
    changes = {"fuses_gate": True, "names": names, "intermediate_size": shared}
    if config.get("num_experts"):
        changes |= _experts(config, config["intermediate_size"], shared)
    return bamba(config, values) | changes


def falcon_h1(config: Fields, values: Fields) -> dict[str, Any]:
    """Falcon-H1: a scan beside attention in each layer."""
    scan = _scan(_find_heads(config, values), values["hidden_size"], MAMBA_NAMES)
    width, biased = values["hidden_size"], bool(config.get("mlp_bias"))
    extra = scan.extra - scan.inner * (not config.get("mamba_rms_norm"))
    if config.get("mamba_proj_bias"):
        extra -= width
    extra += width * bool(config.get("projectors_bias"))
    biases = (2 * values["intermediate_size"] + width) * biased + width * values["qkv_bias"]
    return {"recurrence": scan._replace(extra=extra), "extra_layer": biases, "all_linear": "linears"}


def nemotron_h(config: Fields, values: Fields) -> dict[str, Any]:
    """Nemotron-H: each layer is a scan, attention, a feed-forward layer without a gate, or experts."""
    names = "mamba_num_heads mamba_head_dim n_groups ssm_state_size chunk_size conv_kernel"
    alone = {"has_attention": False, "intermediate_size": 0}
    width, size = values["hidden_size"], values["intermediate_size"]
    scan = _scan(config, width, names)

    def make_dense(size: int) -> dict[str, Any]:
        return alone | {"intermediate_size": size, "extra_layer": (size + width) * bool(config.get("mlp_bias"))}

    kinds = {
        **dict.fromkeys(RECURRENT, alone | {"recurrence": scan}),
        **{name: {"intermediate_size": 0} for name in ("full_attention", "attention")},
        "mlp": make_dense(size),
    }
    layers = _list_layers(config, values)
    if "moe" in layers:
        if config.get("moe_latent_size"):
            raise KeyError("formula for moe_latent_size")
        shared = config["moe_shared_expert_intermediate_size"]
        experts = _experts(config, config["moe_intermediate_size"], shared)
        kinds["moe"] = make_dense(shared) | experts | {"expert_tensors": 2}
    changes = {"num_pre_norms": 1, "activation": str(config.get("mlp_hidden_act", "relu2")), "mixer": "mixer"}
    return changes | {"qkv_bias": False, "layers": [kinds[kind] for kind in layers], "all_linear": "linears"}


def qwen3_next(config: Fields, values: Fields) -> dict[str, Any]:
    """Qwen3-Next: the delta rule in three of four layers, gated attention in the others, experts beside a gated one."""
    return _delta(config, values, _gated_experts(config, values), is_split=False)


def qwen3_5(config: Fields, values: Fields) -> dict[str, Any]:
    """Qwen3.5: as Qwen3-Next, dense."""
    return _delta(config, values, [{}] * values["num_layers"], is_split=True)


def qwen3_5_moe(config: Fields, values: Fields) -> dict[str, Any]:
    """Qwen3.5 with experts."""
    return _delta(config, values, _gated_experts(config, values), is_split=True)


def _delta(config: Fields, values: Fields, feed_forward: list[dict[str, Any]], *, is_split: bool) -> dict[str, Any]:
    """Describe layers of the delta rule among some of attention, each with its feed-forward layer."""
    names = "num_key_heads key_head_dim num_value_heads value_head_dim conv_kernel_dim"
    sizes = [config[f"linear_{name}"] for name in names.split()]
    rule = DeltaRule(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], is_split)
    recurrent = {"recurrence": rule, "has_attention": False, "mixer": "linear_attn"}
    attention = {"extra_layer": (values["num_heads"] * values["head_dim"] + values["hidden_size"]) * values["qkv_bias"]}
    every = config.get("full_attention_interval") or 4
    kinds = _list_layers(config, values) or [
        "full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(values["num_layers"])
    ]
    mixers = [recurrent if kind in RECURRENT else attention for kind in kinds]
    layers = [mixer | more for mixer, more in zip(mixers, feed_forward, strict=True)]
    return {"qk_norm": "head", "gates_output": True, "layers": layers}


def qwen2_moe(config: Fields, values: Fields) -> dict[str, Any]:
    """Qwen2 with experts beside a gated one, in every layer or some."""
    return {
        "qkv_bias": bool(config.get("qkv_bias", True)),
        "layers": _gated_experts(config, values),
        "all_linear": "linears",
    }


def _gated_experts(config: Fields, values: Fields) -> list[dict[str, Any]]:
    """List what each layer changes where some have experts beside a gated one that every token visits."""
    experts = _experts(config, config["moe_intermediate_size"], config["shared_expert_intermediate_size"])
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return [
        experts | {"gates_shared": True} if layer not in dense and (layer + 1) % step == 0 else {}
        for layer in range(values["num_layers"])
    ]


LLAMAS = ("llama", "mistral", "gemma", "granite", "smollm3", "helium", "ernie4_5")
KINDS: dict[str, Kind] = {
    **dict.fromkeys(LLAMAS, lambda config, values: {}),
    **dict.fromkeys(("cwm", "ministral", "ministral3"), lambda config, values: _window(config, values, every=4)),
    "arcee": lambda config, values: {"activation": str(config.get("hidden_act", "relu2"))},
    "glm": lambda config, values: {"fuses_gate": True},
    "glm4": lambda config, values: {"fuses_gate": True, "num_post_norms": 2},
    "starcoder2": starcoder2,
    "qwen2": lambda config, values: {"qkv_bias": True},
    "qwen3": lambda config, values: {"qk_norm": "head"},
    "phi3": lambda config, values: {"is_fused": True, "fuses_gate": True},
    "mixtral": mixtral,
    "granitemoe": lambda config, values: mixtral(config, values) | {"all_linear": "linears"},
    "qwen3_moe": qwen3_moe,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "llama4_text": llama4,
    "gpt_neox": gpt_neox,
    "phi": phi,
    "opt": opt,
    "falcon": falcon,
    "mpt": mpt,
    "mamba2": mamba2,
    "bamba": bamba,
    "granitemoehybrid": granite_hybrid,
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen2_moe": qwen2_moe,
}
"""`model_type` -> what it changes."""
ALIASES = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    **dict.fromkeys(("exaone", "internlm3", "iquestcoder"), "llama"),
    **dict.fromkeys(("kimi_k2", "sarvam_mla"), "deepseek_v3"),
    **dict.fromkeys(("sarvam_moe", "solar_open"), "glm4_moe"),
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text"), "qwen3"),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), "qwen3_moe"),
}
"""Other values of `model_type` -> the one whose texts are computed so."""
