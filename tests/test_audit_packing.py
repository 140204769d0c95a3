"""`audit_packing` names the module where packed samples first mix, and accuses no model that keeps them apart."""

import copy
import itertools

import pytest
import torch
from causal_models import CONFIGS, SAMPLES, VOCAB, build
from common import TRANSFORMERS
from torch import nn

from stepaudit import audit_packing
from stepaudit.errors import UsageError

LEAKS = {
    "GptOssForCausalLM": "model.layers.0.self_attn (GptOssAttention)",
    "OPTForCausalLM": "model.decoder.layers.0.self_attn (OPTAttention)",
    "FalconForCausalLM": "transformer.h.0.self_attention (FalconAttention)",
    "Mamba2ForCausalLM": "backbone.layers.0.mixer (Mamba2Mixer)",
    "Qwen3NextForCausalLM": "model.layers.0.linear_attn (Qwen3NextGatedDeltaNet)",
    "BloomForCausalLM": "transformer (BloomModel)",  # distances are made between its modules
    "Lfm2ForCausalLM": "model.layers.0.conv (Lfm2ShortConv)",
}
if TRANSFORMERS >= (5, 24):  # it keeps them apart
    del LEAKS["FalconForCausalLM"]


@pytest.mark.parametrize("name", CONFIGS)
def test_models_that_leak_are_named_and_no_others(name):
    findings = audit_packing(build(name), SAMPLES)
    assert [(finding.cause, finding.where) for finding in findings] == (
        [("packing", LEAKS[name])] if name in LEAKS else []
    )


def test_an_attention_without_weights_is_audited():
    assert audit_packing(build("LlamaForCausalLM", "sdpa"), SAMPLES) == []
    (finding,) = audit_packing(build("OPTForCausalLM", "sdpa"), SAMPLES)
    assert finding.where == LEAKS["OPTForCausalLM"]
    assert float(finding.evidence.split("gradient ")[1].split(",")[0]) > 0.1


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
    model = build("LlamaForCausalLM")
    for sequences in ([], SAMPLES[:1], [[1, 2], [3]]):
        with pytest.raises(UsageError, match="two sequences or more, of two tokens or more"):
            audit_packing(model, sequences)
    with pytest.raises(UsageError, match="input_ids are needed"):
        audit_packing(nn.Linear(2, 2), SAMPLES)
