"""Tiny causal models of transformers with random weights, one for each class that people pack samples for."""

import torch
import transformers

VOCAB = 60
SHARED = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
WIDE = SHARED | {"intermediate_size": 48, "initializer_range": 0.2}
GROUPED = WIDE | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 8}
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
NEXT = {"shared_expert_intermediate_size": 24, "layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8}
# Class -> fields of its config. The weights are larger than is usual, so that what attention does is seen.
CONFIGS = {
    "LlamaForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": HEADS,
    "Qwen3MoeForCausalLM": HEADS | EXPERTS,
    "MistralForCausalLM": GROUPED,
    "Gemma3ForCausalLM": HEADS,
    "Phi3ForCausalLM": GROUPED,
    "GPT2LMHeadModel": GPT,
    "GPTNeoXForCausalLM": WIDE,
    "GPTJForCausalLM": GPT | {"rotary_dim": 4},
    "GraniteForCausalLM": GROUPED,
    "Olmo2ForCausalLM": GROUPED,
    "ModernBertDecoderForCausalLM": WIDE,
    "GptOssForCausalLM": HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "OPTForCausalLM": SHARED | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2},
    "FalconForCausalLM": SHARED | {"initializer_range": 0.2},
    "Mamba2ForCausalLM": MAMBA | {"state_size": 8, "n_groups": 1, "chunk_size": 8},
    "Qwen3NextForCausalLM": HEADS | EXPERTS | LINEAR | NEXT,
    "BloomForCausalLM": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
    "Lfm2ForCausalLM": GROUPED | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
}
# Five samples of different lengths.
SAMPLES = [
    torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in (5, 13, 7, 9, 6)
]


def build(name: str, attention: str = "eager") -> torch.nn.Module:
    """Make a model of a class of `CONFIGS`. Raises ValueError if the class has no such attention."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind._from_config(kind.config_class(**CONFIGS[name]), attn_implementation=attention)
