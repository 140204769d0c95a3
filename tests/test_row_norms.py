"""RMS normalisations in few passes beside transformers' own."""

import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from samestep.models.row_norms import RowNorm, use_few_passes


def test_values_and_gradients_are_those_of_the_model():
    generator = torch.Generator().manual_seed(0)
    norm, same = LlamaRMSNorm(6, eps=0.1), LlamaRMSNorm(6, eps=0.1)
    for module in (norm, same):
        module.weight.data = torch.linspace(-1, 2, 6)
    assert use_few_passes(same) == 1
    x, g = (torch.randn(3, 4, 6, generator=generator) for _ in range(2))
    results = []
    for module in (norm, same):
        own = x.clone().requires_grad_()
        y = module(own)
        y.backward(g)
        results.append((y, own.grad, module.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    exact = (x.double().requires_grad_(), norm.weight.detach().double().requires_grad_(), 0.1)
    assert torch.autograd.gradcheck(RowNorm.apply, exact)
    assert same(x.bfloat16()).dtype == norm(x.bfloat16()).dtype


def test_other_forms_stay_as_they_are():
    """Gemma's weight is added to 1."""
    assert use_few_passes(torch.nn.ModuleList([GemmaRMSNorm(4), torch.nn.LayerNorm(4)])) == 0
    norm = LlamaRMSNorm(4)
    norm.forward = lambda x: x
    assert use_few_passes(norm) == 0
