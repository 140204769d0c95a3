"""AdamW and SGD: which weights decay, and which hyperparameters they take."""

import pytest
import torch
from cases import keep
from torch import nn

from samestep.recipe.catalog import load
from samestep.recipe.scaling import Hyperparameters
from samestep.step.optim import AccumulatingAdamW, AccumulatingSGD, adamw, from_recipe, sgd


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
    initial = [p.detach().clone() for p in model.parameters()]
    adamw_step = adamw(model, Hyperparameters(0.01, 0.9, 0.999, 1e-6), weight_decay=0.1)
    model(torch.tensor([[3.0, -2.0]], dtype=torch.float64)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    adamw_step.step()
    for p, old, g, decay in zip(model.parameters(), initial, gradients, (0.1, 0.0), strict=True):
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
    digits = from_recipe(model, load("resnet_digits_cpu"))
    assert isinstance(digits, torch.optim.SGD)
    assert (digits.defaults["lr"], digits.defaults["momentum"], digits.defaults["fused"]) == (0.01, 0.9, True)
    assert [group["weight_decay"] for group in digits.param_groups] == [5e-4, 0.0]
    reader = from_recipe(model, load("captcha_3xa100"))
    assert isinstance(reader, torch.optim.AdamW)
    assert (reader.defaults["lr"], reader.defaults["betas"]) == (6e-4, (0.9, 0.999))
    assert isinstance(from_recipe(model, load("bert_base")), torch.optim.AdamW)


def test_an_update_is_held_back():
    """What `NotFinite.skip_update` sets, fused SGD reads."""
    model = nn.Linear(3, 2)
    optimizer, initial = sgd(model, 0.1, 0.9, 0.01), [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), initial, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# One battery: every optimizer of the package beside torch's own


def accumulating(name: str, k: int, **more):
    """Make the constructor of an optimizer whose steps take k gradients; it takes parameters and a learning rate."""
    if name == "sgd":
        return lambda p, lr: AccumulatingSGD(p, lr, gradient_accumulation_steps=k, **more)
    more = {"second_moment": name, "weight_decay": 0.0} | more
    return lambda p, lr: AccumulatingAdamW(p, lr, gradient_accumulation_steps=k, **more)


BATTERY = {
    "torch sgd": (1, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    "torch adamw": (1, lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.0)),
    "ours sgd": (1, lambda p, lr: sgd(module(p), lr, 0.9, 0.0)),
    "ours adamw": (1, lambda p, lr: adamw(module(p), Hyperparameters(lr, 0.9, 0.999, 1e-8), weight_decay=0.0)),
    "accumulating sgd": (2, accumulating("sgd", 2)),
    "accumulating sgd, substitute": (2, accumulating("sgd", 2, coefficients="substitute")),
    "accumulating sgd, root": (2, accumulating("sgd", 2, coefficients="root")),
    "accumulating sgd, unchanged": (2, accumulating("sgd", 2, coefficients="unchanged")),
    "unbiased": (2, accumulating("unbiased", 2)),
    "mean of squares": (2, accumulating("mean_of_squares", 2)),
    "sum of squares": (2, accumulating("sum_of_squares", 2)),
    "mean of squares, unchanged": (2, accumulating("mean_of_squares", 2, coefficients="unchanged")),
}


def module(parameters: list[nn.Parameter]) -> nn.Module:
    return nn.ParameterList(parameters)


def quadratic(dtype: torch.dtype) -> tuple:
    scale = torch.tensor([10.0, 1.0, 0.1], dtype=dtype)
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    return [weight], lambda: (scale * weight**2).sum() / 2


def rosenbrock(dtype: torch.dtype) -> tuple:
    x, y = (nn.Parameter(torch.tensor([value], dtype=dtype)) for value in (-0.5, 1.0))
    return [x, y], lambda: ((1 - x) ** 2 + 10 * (y - x**2) ** 2).sum()


def factorisation(dtype: torch.dtype) -> tuple:
    generator = torch.Generator().manual_seed(0)
    left, right, u, v = (torch.randn(8, 2, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4))
    u, v = nn.Parameter(u / 4), nn.Parameter(v / 4)
    return [u, v], lambda: (u @ v.T - left @ right.T).square().mean()


PROBLEMS = {  # steps, learning rates of SGD and Adam, what the loss comes down to
    "quadratic": (quadratic, 800, 0.02, 0.02, 1e-4),
    "rosenbrock": (rosenbrock, 1200, 0.002, 0.02, 1e-2),
    "factorisation": (factorisation, 600, 0.05, 0.02, 1e-3),
}


def descend(optimizer: torch.optim.Optimizer, k: int, loss, steps: int) -> float:
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(k):
            (loss() / k).backward()
        optimizer.step()
    return loss().item()


DESCENDS = [(name, problem) for problem in PROBLEMS for name in BATTERY]
CURVED = ("ours sgd", "ours adamw", "accumulating sgd", "unbiased")


@pytest.mark.parametrize(
    ("name", "problem"), keep(DESCENDS, [case for case in DESCENDS if (case[1] == "quadratic") != (case[0] in CURVED)])
)
def test_it_descends(name, problem):
    make_problem, steps, rate_of_sgd, rate_of_adam, goal = PROBLEMS[problem]
    k, make = BATTERY[name]
    parameters, loss = make_problem(torch.float64)
    first = loss().item()
    optimizer = make(parameters, rate_of_sgd if "sgd" in name else rate_of_adam)
    assert descend(optimizer, k, loss, steps) < goal * first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", BATTERY)
def test_its_state_makes_the_round_trip(name, dtype, tmp_path):
    """Saved to a file in the middle of training and loaded into a new optimizer, it goes on as undisturbed."""
    k, make = BATTERY[name]
    parameters, loss = factorisation(dtype)
    optimizer = make(parameters, 0.02)
    descend(optimizer, k, loss, 5)
    torch.save({"optimizer": optimizer.state_dict(), "parameters": parameters}, tmp_path / "state.pt")
    descend(optimizer, k, loss, 5)
    saved = torch.load(tmp_path / "state.pt", weights_only=False)
    others, other_loss = factorisation(dtype)
    with torch.no_grad():
        for other, value in zip(others, saved["parameters"], strict=True):
            other.copy_(value)
    resumed = make(others, 0.5)
    resumed.load_state_dict(saved["optimizer"])
    descend(resumed, k, other_loss, 5)
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    for parameter in others:
        moments = [value for key, value in resumed.state[parameter].items() if key not in ("step", "clip")]
        assert {(moment.dtype, moment.shape) for moment in moments} == {(dtype, parameter.shape)}
