"""AdamW and SGD: which weights decay, and which hyperparameters they take."""

import pytest
import torch
from torch import nn

from recipes.optim import adamw, of_recipe, sgd
from recipes.recipe import load
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


def test_sgd_is_the_documented_one_and_decays_filters_only():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).double()
    optimizer = sgd(model, 0.1, 0.9, 0.01)
    decays = {name: 0.01 if name == "0.weight" else 0.0 for name, _ in model.named_parameters()}
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in values.items()}
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.randn(4, 1, 2, 2, dtype=torch.float64)) ** 3).sum().backward()
        for name, p in model.named_parameters():
            velocity[name] = 0.9 * velocity[name] + p.grad + decays[name] * values[name]
            values[name] = values[name] - 0.1 * velocity[name]
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose(p, values[name], rtol=1e-12)


def test_a_recipe_names_its_optimizer():
    model = nn.Linear(3, 2)
    digits = of_recipe(model, load("resnet_digits_cpu"))
    assert isinstance(digits, torch.optim.SGD)
    assert (digits.defaults["lr"], digits.defaults["momentum"], digits.defaults["fused"]) == (0.1, 0.9, True)
    assert [group["weight_decay"] for group in digits.param_groups] == [1e-4, 0.0]
    reader = of_recipe(model, load("captcha_3xa100"))
    assert isinstance(reader, torch.optim.AdamW)
    assert (reader.defaults["lr"], reader.defaults["betas"]) == (6e-4, (0.9, 0.999))
    assert isinstance(of_recipe(model, load("bert_base")), torch.optim.AdamW)


def test_an_update_is_held_back():
    """What `Recovery.hold_back` sets, fused SGD reads."""
    model = nn.Linear(3, 2)
    optimizer, before = sgd(model, 0.1, 0.9, 0.01), [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
