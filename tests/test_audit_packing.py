"""`audit_packing` names the module where packed samples first mix, and accuses no model that keeps them apart."""

import copy
import itertools

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from stepaudit import audit_packing
from stepaudit.errors import UsageError

VOCAB = 60
SAMPLES = [torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in (5, 12, 7, 9)]
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=48, **more)),
    "gpt2": lambda **more: GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, **more)),
    "opt": lambda **more: OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, **more)),
    "falcon": lambda **more: FalconForCausalLM(FalconConfig(**SIZES, **more)),
    "bloom": lambda **more: BloomForCausalLM(
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, **more)
    ),
}


def build(name: str, **more) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](initializer_range=0.2, **more)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_models_that_keep_samples_apart_are_not_accused(name, attention):
    assert audit_packing(build(name, attn_implementation=attention), SAMPLES) == []


@pytest.mark.parametrize(
    ("name", "place"), [("opt", "layers.0.self_attn"), ("falcon", "h.0.self_attention"), ("bloom", "BloomModel")]
)
def test_models_that_leak_are_named_with_the_module(name, place):
    """Bloom's distances are made between its modules."""
    (finding,) = audit_packing(build(name, attn_implementation="eager"), SAMPLES)
    assert finding.cause == "packing"
    assert place in finding.where
    assert float(finding.evidence.split("gradient ")[1].split(",")[0]) > 1e-3


class Recurrent(nn.Module):
    """Predicts the next token by a GRU, which does not look at positions."""

    def __init__(self, is_restarted: bool):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(VOCAB, 8), nn.GRU(8, 8, batch_first=True)
        self.head, self.is_restarted = nn.Linear(8, VOCAB), is_restarted

    def forward(self, input_ids, position_ids):
        x = self.embedding(input_ids)
        starts = [*(position_ids[0] == 0).nonzero().flatten().tolist(), x.shape[1]]
        bounds = itertools.pairwise(starts) if self.is_restarted else [(0, x.shape[1])]
        return self.head(torch.cat([self.gru(x[:, begin:end])[0] for begin, end in bounds], 1))


def test_a_recurrent_state_leaks_unless_it_is_restarted():
    """Any module with this forward is audited; it is left as it is."""
    torch.manual_seed(0)
    model = Recurrent(is_restarted=False).train()
    state = copy.deepcopy(model.state_dict())
    (finding,) = audit_packing(model, SAMPLES)
    assert finding.where == "gru (GRU)"
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(state[name].equal(value) for name, value in model.state_dict().items())
    assert audit_packing(Recurrent(is_restarted=True), SAMPLES) == []


def test_bad_input_gets_one_line():
    model = build("llama")
    for sequences in ([], SAMPLES[:1], [[1, 2], [3]]):
        with pytest.raises(UsageError, match="two sequences or more, of two tokens or more"):
            audit_packing(model, sequences)
    with pytest.raises(UsageError, match="input_ids are needed"):
        audit_packing(nn.Linear(2, 2), SAMPLES)
