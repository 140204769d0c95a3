"""Small sizes for the configurations of transformers, and for the configurations that lie in them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig, ResNetConfig

WIDTH, LENGTH, PIXELS, MELS, FRAMES = 32, 64, 64, 16, 32
"""Numbers of a vector, a vocabulary and a text, the side of an image, the bins of a spectrogram, and its longest."""
SIZES = {
    **dict.fromkeys("hidden_size d_model n_embd dim embedding_size emb_dim word_embed_proj_dim d_embed".split(), WIDTH),
    **dict.fromkeys(
        "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim hidden_dim d_ff n_inner d_inner".split(), WIDTH
    ),
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers".split(), 2
    ),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads".split(), 2
    ),
    **dict.fromkeys("num_key_value_heads num_experts_per_tok type_vocab_size conv_kernel".split(), 2),
    **dict.fromkeys("max_position_embeddings n_positions n_ctx vocab_size".split(), LENGTH),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts time_step_rank".split(), 4),
    **dict.fromkeys("d_kv d_head head_dim v_head_dim kv_lora_rank q_lora_rank rotary_dim".split(), 16),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size expert_intermediate_size".split(), 16),
    **dict.fromkeys("qk_rope_head_dim qk_nope_head_dim".split(), 16),
    **dict.fromkeys("mamba_d_state state_size num_buckets num_latents".split(), 8),
    **dict.fromkeys("n_group num_group num_expert_group topk_group n_shared_experts first_k_dense_replace".split(), 1),
    **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 0},
    **{"num_mel_bins": MELS, "max_source_positions": FRAMES // 2, "num_kv_shared_layers": 0, "qk_head_dim": 32},
    **{
        "d_latents": WIDTH,
        "num_self_attends_per_block": 2,
        "num_experts_per_token": 2,
        "use_cache": False,
        "use_timm_backbone": False,
    },
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2},
    **{"image_size": PIXELS, "patch_size": 8, "apply_spec_augment": False, "num_queries": 6},
}
"""Fields of configurations, by the names that models use."""
RULES = (
    (r"vocab_size", 32, LENGTH),
    (r"(_layers|_depth|^depth|num_blocks|_num_layer|_layer)$", 3, 2),
    (r"_heads$", 3, 2),
    (r"(?<!position)(_dim|_size|_width|_dims|_channels|^width|_rank)$", 64, WIDTH),
)
"""Other whole numbers: a pattern of names, from which value on, and what they become."""
UNTOUCHED = (
    r"feat_extract|window|chunk|max_|kernel|stride|scal|loss|crop|group|num_labels|image|patch|temporal|num_channels"
    r"|in_channels"
)
"""Names of numbers that stay."""
WIDE_LISTS = ("conv_dim", "decoder_in_channels")
INDICES = r"^(?!encode_proj).*(ind(ex|ice)|idx|_ids$|_layers$|_blocks$|_layer_)"
NOISE = r"drop|mask_(time|feature)_prob|jitter"
KEPT = ("output_router_logits", "router_aux_loss_coef", "problem_type", "tie_word_embeddings", "is_decoder")
"""Fields that keep the value that they have, as they say what the loss is."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
SPECIAL: dict[str, dict[str, Any]] = {
    "beit data2vec-vision": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "autoformer informer time_series_transformer": {"prediction_length": 4, "context_length": 8},
    "bros": {"hidden_size": 128},
    "chameleon emu3": {"vocabulary_map": {"<image>": 60, "<|extra_200|>": 61}},
    "codegen": {"n_head": 4, "rotary_dim": 8},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "encoder-decoder vision-encoder-decoder speech-encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 0},
    "glm4v_moe_text": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "glm4v_text glm_image_text glm_ocr_text": {"rope_parameters": ROPE},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "levit": {"patch_size": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "nemotron_h": {"n_groups": 1},
    "mistral4": {"head_dim": 32},
    "mimi": {"upsample_groups": WIDTH},
    "qwen2_5_omni_thinker qwen3_omni_moe_thinker": {"vision_start_token_id": 58},
    "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text paddleocr_vl_text": {"rope_parameters": ROPE},
    "reformer": {"axial_pos_embds": False},
    "step3p5": {"sliding_window": 8},
    "swin swinv2 donut-swin maskformer-swin": {"window_size": 2},
    "textnet": {"stem_out_channels": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields of single types of models, whose sizes must go together."""


def make_config(usual: PreTrainedConfig) -> Any:
    """Make a configuration of small sizes without dropout from another one; what it raises where sizes do not go together."""
    if usual.model_type == "timm_backbone":
        return _replace_timm(usual)
    fields, parts = usual.to_dict(), find_parts(usual)
    small = {
        name: value
        for name, usual_value in fields.items()
        if name not in parts
        # What is small already is said, too: else it would be what the class has if nobody says it
        and ((value := _shrink(name, usual_value, fields)) != usual_value or SIZES.get(name) == value)
    }
    renamed, kind = getattr(type(usual), "attribute_map", {}), type(usual)
    set_too = {
        name: size
        for name, size in SIZES.items()
        if name not in fields
        and name not in renamed
        and hasattr(usual, name)
        and not ("depths" in fields and size == 2)
    }
    computed = {name for name in small | set_too if isinstance(getattr(kind, name, None), property)}
    kept = {name: fields[name] for name in KEPT if name in fields}
    if "depths" in fields and "out_features" in fields:  # of a backbone
        kept["out_features"] = fields["out_features"]
    given = kept | set_too | small | {name: make_config(part) for name, part in parts.items()}
    config = kind(**{name: value for name, value in given.items() if name not in computed} | _find_special(usual))
    if {"encoder", "decoder"} <= parts.keys():
        config.decoder.is_decoder = config.decoder.add_cross_attention = True
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = SIZES["decoder_start_token_id"]
    return config


def _replace_timm(usual: Any) -> PreTrainedConfig:
    """Make a backbone that needs no package of its own, with as many maps of features."""
    stages = [f"stage{number}" for number in usual.out_indices or [4] if number > 0]
    return ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1] * 4, out_features=stages or ["stage4"]
    )


def find_parts(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """Find the configurations that lie in one."""
    return {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}


def find_field(config: PreTrainedConfig, *names: str) -> Any:
    """Find the first of some fields in a configuration, or in those that lie in it; None: it has none of them."""
    for name in names:
        for place in (config, *find_parts(config).values()):
            if (value := getattr(place, name, None)) is not None:
                return value
    return None


def _find_special(usual: PreTrainedConfig) -> dict[str, Any]:
    return next((fields for types, fields in SPECIAL.items() if usual.model_type in types.split()), {})


def _shrink(name: str, value: Any, fields: Mapping[str, Any]) -> Any:
    """Make a value of a configuration small, or leave it."""
    if re.search(NOISE, name) and _is_all(value, float):
        return [0.0] * len(value) if isinstance(value, (list, tuple)) else 0.0
    if isinstance(value, dict) and "mrope_section" in value:
        turned = int(SIZES["head_dim"] * value.get("partial_rotary_factor", 1)) // 2
        return value | {"mrope_section": [turned - 2 * (turned // 3), turned // 3, turned // 3]}
    if isinstance(value, (list, tuple)) and value:
        return type(value)(_shrink_list(name, value, fields))
    is_staged = "depths" in fields and SIZES.get(name) == 2 and "layer" in name
    if is_staged or (name == "embed_dim" and isinstance(fields.get("num_heads"), (list, tuple))):
        return value
    if (
        name in SIZES
        and isinstance(value, (int, type(None)))
        and isinstance(SIZES[name], bool) == isinstance(value, bool)
    ):
        return min(value or SIZES[name], SIZES[name]) if name == "patch_size" else SIZES[name]
    return _shrink_number(name, value) if isinstance(value, int) and not isinstance(value, bool) else value


def _shrink_number(name: str, value: int) -> int:
    if re.search(r"_token_(id|index)$", name) and value >= LENGTH:
        return LENGTH - 1 - sum(map(ord, name)) % 8
    if not re.search(UNTOUCHED, name):
        for pattern, least, size in RULES:
            if re.search(pattern, name) and value >= least:
                return size
    return value


def _shrink_list(name: str, values: Sequence[Any], fields: Mapping[str, Any]) -> Sequence[Any]:
    """Cut a list with an entry for each layer to as many layers, of different kinds if there are some."""
    num_layers = [value for key, value in fields.items() if SIZES.get(key) == 2 and re.search("layer", key)]
    if _is_all(values, int) and name in ("image_size", "patch_size"):
        return [min(value, SIZES[name]) for value in values]
    if name == "eos_token_id":
        return [SIZES[name]]
    if name == "depths":
        return [1] * len(values)
    if name in WIDE_LISTS:
        return [WIDTH] * len(values)
    if (len(values) in num_layers and "depths" not in fields) or name.endswith(("layer_types", "_layers_block_type")):
        other = next((value for value in values if value != values[0]), values[-1])
        return values[:2] if values[0] == other or _is_all(values, int) else [values[0], other]
    if _is_all(values, int) and re.search(INDICES, name) and num_layers and "depths" not in fields:
        return sorted({min(value, 1) for value in values})
    return values


def _is_all(value: Any, kind: type) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(each, kind) and not isinstance(each, bool) for each in values)
