"""Parameters and modules of each kind of decoder beside transformers' own model of the same configuration, on no device."""

import json
import warnings

import peft
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    GPT2Config,
)

from samestep.cut.layout import solve_layout
from samestep.models.adapters import find_unused_modules
from stepplan.base_models import MODEL_TYPES, find_kind, is_decoder, shape_from_config
from stepplan.cli.model import is_causal
from stepplan.configs import model_from_config
from stepplan.decoder import Decoder, Tuning, Weights
from stepplan.decoder_kinds import ALIASES
from stepplan.memory import planned_memory
from stepplan.recurrences import Scan

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
}
SMALL |= {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24, "n_routed_experts": 8}
LATENT |= EXPERTS | {"num_key_value_heads": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
LLAMA4 = GROUPED | {"intermediate_size_mlp": 160, "num_local_experts": 8, "num_experts_per_tok": 1, "head_dim": 16}
MAMBA2 = {"model_type": "mamba2", "num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 1, "chunk_size": 32}
SCAN = GROUPED | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_chunk_size": 32}
GATED = EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 56}
DELTA = GATED | {"linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 8, "head_dim": 32}
DELTA |= {"linear_value_head_dim": 16}
MIXED = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
NEMOTRON = {"num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2}
NEMOTRON |= EXPERTS | {"head_dim": 32, "moe_shared_expert_intermediate_size": 56, "n_routed_experts": 8}
CASES = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 32},
    "qwen3_moe": EXPERTS | {"num_experts": 8},
    "mixtral": GROUPED | {"num_local_experts": 8},
    "phi3": GROUPED,
    "gemma2": GROUPED | {"head_dim": 32},
    "gemma3_text": GROUPED | {"head_dim": 32},
    "olmo2": GROUPED,
    "olmo3": GROUPED,
    "deepseek_v2": LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek_v3": LATENT | {"q_lora_rank": 24, "n_group": 1, "topk_group": 1},
    "glm4_moe": EXPERTS | {"n_routed_experts": 8, "first_k_dense_replace": 1, "attention_bias": True, "head_dim": 32},
    "gpt_oss": GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32},
    "llama4_text": LLAMA4 | {"interleave_moe_layer_step": 2, "moe_layers": None},
    "gpt_neox": {},
    "phi": GROUPED,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 32, "pad_token_id": 1},
    "falcon": {"multi_query": True},
    "falcon of groups": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon in series": {
        "model_type": "falcon",
        "parallel_attn": False,
        "multi_query": False,
        "bias": True,
        "alibi": True,
    },
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 4},
    "mamba2": MAMBA2,
    "mamba2 with biases": MAMBA2 | {"n_groups": 2, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3},
    "ernie4_5": GROUPED,
    "arcee": GROUPED,
    "cwm": GROUPED,
    "ministral": GROUPED | {"head_dim": 16},
    "ministral3": GROUPED,
    "glm": GROUPED,
    "glm4": GROUPED | {"attention_bias": True},
    "starcoder2": GROUPED,
    "granitemoe": GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": GATED | {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "bamba": SCAN | {"attn_layer_indices": [1]},
    "granitemoehybrid": SCAN
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 56, "layer_types": MIXED},
    "granitemoehybrid dense": SCAN
    | {"model_type": "granitemoehybrid", "num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": MIXED}
    | {"shared_intermediate_size": 56, "mamba_proj_bias": True, "attention_bias": True},
    "falcon_h1": SCAN | {"mamba_d_ssm": 128},
    "falcon_h1 with biases": SCAN
    | {"model_type": "falcon_h1", "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_proj_bias": True, "mlp_bias": True}
    | {"projectors_bias": True, "attention_bias": True},
    "nemotron_h": NEMOTRON | {"layers_block_type": [*MIXED[:3], "mlp"]},
    "nemotron_h of experts": NEMOTRON
    | {"model_type": "nemotron_h", "layers_block_type": [*MIXED[:2], "moe", "mlp"], "use_bias": True, "mlp_bias": True},
    "qwen3_next": DELTA,
    "qwen3_next with dense layers": DELTA
    | {"model_type": "qwen3_next", "mlp_only_layers": [0], "attention_bias": True, "layer_types": MIXED},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
    "mamba2 tied": MAMBA2 | {"head_dim": 16, "num_heads": 16, "expand": 4, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_transformers(case):
    own_names = {"vocab_size": SMALL["vocab_size"]} if case == "mpt" else SMALL
    config = AutoConfig.for_model(**{"model_type": case} | own_names | CASES[case])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_from_config(json.loads(config.to_json_string(use_diff=False)), case)
    assert shape.num_parameters == model.num_parameters()
    linears = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if any(
        isinstance(layer.recurrence, Scan) for layer in shape.kinds
    ):  # a kernel multiplies by its weight, past an adapter
        linears -= {"out_proj"}
    named = {name.rpartition(".")[2] for name in shape.module_names}
    assert linears - {"lm_head", "gate", "router"} == named - {"lm_head", "embed_tokens"}


def test_every_kind_is_compared_or_known_elsewhere():
    compared = {CASES[case].get("model_type", case) for case in CASES}
    assert set(MODEL_TYPES) - compared == {"mistral", "gemma", "granite", "smollm3", "helium"}  # tests/test_configs.py
    assert set(ALIASES.values()) <= compared


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("qwen2_5_vl", "qwen2"), ("qwen3_vl", "qwen3"), ("qwen3_vl_moe", "qwen3_moe"), ("llama4", "llama4_text")],
)
def test_the_text_of_a_model_of_images_is_planned(model_type, kind):
    config = {"model_type": model_type, "architectures": ["XForConditionalGeneration"]}
    config |= {"text_config": {"model_type": f"{model_type}_text", "hidden_size": 64}}
    assert find_kind(config) == kind
    assert is_decoder(config)


def test_kimi_k2_is_a_deepseek_v3():
    fields = {"model_type": "kimi_k2"} | SMALL | LATENT | {"q_lora_rank": 24}
    other = shape_from_config(fields | {"model_type": "deepseek_v3"}, "v3")
    assert shape_from_config(fields, "k2") == other


@pytest.mark.parametrize("model_type", ["vit", "modernbert"])
def test_encoders_without_a_recipe_are_those_of_transformers(model_type):
    own = (
        {"image_size": 64, "patch_size": 16}
        if model_type == "vit"
        else {"vocab_size": 128, "cls_token_id": 1, "sep_token_id": 2}
    )
    fields = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(model_type, **fields | own)
    kind = AutoModelForImageClassification if model_type == "vit" else AutoModelForMaskedLM
    with torch.device("meta"):
        model = kind.from_config(config)
    values = json.loads(config.to_json_string(use_diff=False))
    assert values.get("architectures") is None
    assert (
        model_from_config(values, None if model_type == "vit" else 32, name="it").num_parameters
        == model.num_parameters()
    )


@pytest.mark.parametrize(
    "own",
    [
        {"share_att_key": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "position_biased_input": False},
        {"share_att_key": False, "type_vocab_size": 2, "max_relative_positions": 24},
        {"relative_attention": False},
    ],
)
def test_a_deberta_is_that_of_transformers(own):
    fields = SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pad_token_id": 0} | own
    config = AutoConfig.for_model("deberta-v2", **fields)
    with torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(config)
    values = json.loads(config.to_json_string(use_diff=False))
    assert model_from_config(values, 32, name="it").num_parameters == model.num_parameters()


def test_a_deberta_stores_what_it_scores():
    """transformers traced on no device: 1,108 and 782 MB, of them 62 weights, gradients and moments."""
    fields = {"model_type": "deberta-v2", "type_vocab_size": 0, "position_biased_input": False, "share_att_key": True}
    fields |= {"relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"]}
    fields |= {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    fields |= {"vocab_size": 2000, "max_position_embeddings": 512, "norm_rel_ebd": "layer_norm", "hidden_act": "gelu"}
    fields |= {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = model_from_config(fields, 512, name="it")
    for autocast, traced in ((False, 1046.1e6), (True, 720.1e6)):
        peaks = model.peaks(8, autocast=autocast, gradient_checkpointing=False)
        assert max(sum(peak) for peak in peaks) == pytest.approx(traced, rel=0.02)


def test_a_mamba2_keeps_what_its_chunks_hold():
    """transformers traced on no device, 3 layers and 32 sequences of 128: peaks, and a layer's products of 256 tokens."""
    fields = {"model_type": "mamba2", "vocab_size": 4000, "hidden_size": 256, "num_hidden_layers": 3, "num_heads": 8}
    fields |= {"head_dim": 64, "state_size": 32, "n_groups": 1, "chunk_size": 64, "conv_kernel": 4}
    model = Decoder(shape=shape_from_config(fields, "it"), sequence_length=128)
    layout = solve_layout(num_processes=1, global_batch_size=32, per_device_train_batch_size=32)
    for precision, recomputed, traced in (("no", False, 767.3e6), ("bf16", False, 650.7e6), ("bf16", True, 261.7e6)):
        planned = planned_memory(model, layout, mixed_precision=precision, gradient_checkpointing=recomputed)
        assert planned.total == pytest.approx(traced, rel=0.03), (precision, recomputed)
    model = Decoder(shape=shape_from_config(fields | {"num_hidden_layers": 1}, "it"), sequence_length=256)
    assert model.forward_flops - 256 * 2 * 4000 * 256 == pytest.approx(254_719_488, rel=1e-3)


HYBRID = SMALL | GROUPED | {"vocab_size": 4000, "hidden_size": 256, "intermediate_size": 384}
WIDE_SCAN = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_chunk_size": 64}
WIDE_SCAN |= {"shared_intermediate_size": 384, "mamba_d_ssm": 512, "layer_types": MIXED}
WIDE_DELTA = DELTA | {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 32, "head_dim": 64}
WIDE_DELTA |= {"linear_value_head_dim": 32, "num_experts": 4, "moe_intermediate_size": 128, "layer_types": MIXED}
WIDE_MAMBA2 = {
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 64,
    "state_size": 32,
    "n_groups": 1,
    "chunk_size": 64,
}
WIDE_NEMOTRON = {
    "layers_block_type": [*MIXED[:3], "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 32,
}
WIDE_NEMOTRON |= {"n_groups": 1, "chunk_size": 64, "head_dim": 64, "mlp_hidden_act": "relu2", "conv_kernel": 4}
TRACED = {
    "mamba2": (WIDE_MAMBA2 | {"conv_kernel": 4}, 0.05, (767.3, 277.6, 650.7, 261.7, 624.6, 225.4, 520.4, 211.6)),
    "granitemoehybrid": (
        WIDE_SCAN | {"mamba_d_conv": 4, "num_local_experts": 0, "num_experts_per_tok": 0},
        0.08,
        (979.4, 330.1, 796.6, 290.9, 799.9, 253.3, 629.1, 226.4),
    ),
    "falcon_h1": (WIDE_SCAN | {"mamba_d_conv": 4}, 0.08, (1182.1, 356.5, 976.6, 311.2, 1000.9, 277.2, 810.9, 233.2)),
    "nemotron_h": (WIDE_NEMOTRON, 0.05, (641.2, 277.4, 559.5, 265.8, 520.8, 225.6, 447.0, 216.0)),
    "qwen3_next": (
        WIDE_DELTA | {"linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 192},
        0.02,
        (1067.1, 366.0, 968.4, 325.5, 933.0, 290.1, 829.0, 248.9),
    ),
}
"""`model_type` -> fields, the bound, and peaks in MB of transformers' own model of 32 sequences of 128 tokens, traced on no
device by `trace.trace_recipe`: all weights, then LoRA of rank 4; in each float32 and bf16; in each saved and recomputed."""


@pytest.mark.parametrize("kind", TRACED)
def test_a_recurrence_keeps_what_transformers_keeps(kind):
    own, bound, peaks = TRACED[kind]
    shape = shape_from_config({"model_type": kind} | HYBRID | own, kind)
    layout = solve_layout(num_processes=1, global_batch_size=32, per_device_train_batch_size=32)
    ways = [(rank, precision, again) for rank in (None, 4) for precision in ("no", "bf16") for again in (False, True)]
    for (rank, precision, again), traced in zip(ways, peaks, strict=True):
        model = Decoder(shape=shape, method=Tuning(rank=rank), sequence_length=128)
        planned = planned_memory(model, layout, mixed_precision=precision, gradient_checkpointing=again).total / 1e6
        assert planned == pytest.approx(traced, rel=bound), (rank, precision, again)


def test_a_gpt2_is_known_without_its_class():
    config = {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
    }
    assert (
        model_from_config(config, 1024, name="it", load_defaults=lambda kind: GPT2Config().to_dict()).num_parameters
        == 124439808
    )
    assert is_causal(config)


ADAPTED = [
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "llama4_text",
    "gpt_neox",
    "phi",
    "qwen2_moe",
    "granitemoe",
]
ADAPTED += ["qwen3_next", "qwen3_5_text", "granitemoehybrid", "bamba"]


@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_are_those_of_peft(case):
    """Beside adapted tables of experts peft adapts no dense layer; tables that it does not know it leaves alone."""
    config = AutoConfig.for_model(**{"model_type": case} | SMALL | CASES[case])
    shape = shape_from_config(json.loads(config.to_json_string(use_diff=False)), case)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
        lora.exclude_modules = find_unused_modules(model) or None
        adapted = peft.get_peft_model(model, lora)
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert Weights(shape=shape, method=Tuning(rank=8)).num_adapter == trained
