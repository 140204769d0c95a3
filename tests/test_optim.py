"""AdamW: which weights decay, and which hyperparameters it takes."""

import pytest
import torch
from torch import nn

from recipes.optim import adamw
from recipes.scaling import Hyperparameters


def test_decay_is_for_matrices_only():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    model[1].weight.requires_grad_(True)
    optimizer = adamw(model, Hyperparameters(1e-3, 0.8, 0.95, 1e-7), weight_decay=0.1)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == {
        **{"0.weight": 0.1, "1.weight": 0.1, "1.bias": 0.0, "2.weight": 0.0, "2.bias": 0.0}
    }
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (1e-3, (0.8, 0.95), 1e-7, True)


def test_a_step_is_the_published_one():
    """Loshchilov and Hutter 2019, algorithm 2, one step from zero moments: bias correction leaves g / (|g| + eps)."""
    model = nn.Linear(2, 1).double()
    before = [p.detach().clone() for p in model.parameters()]
    adamw_step = adamw(model, Hyperparameters(0.01, 0.9, 0.999, 1e-6), weight_decay=0.1)
    model(torch.tensor([[3.0, -2.0]], dtype=torch.float64)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    adamw_step.step()
    for p, old, g, decay in zip(model.parameters(), before, gradients, (0.1, 0.0), strict=True):
        expected = old * (1 - 0.01 * decay) - 0.01 * g / (g.abs() + 1e-6)
        assert p.detach().flatten().tolist() == pytest.approx(expected.flatten().tolist(), rel=1e-9)
