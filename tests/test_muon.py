"""Muon: its iteration beside the singular values, its step beside the formulas, the same step in every cut."""

import math

import pytest
import torch
from compare import check, hash_run, parameters, relative
from hooks import Watch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from samestep.contrib.optim.muon import orthogonalize
from samestep.errors import UsageError
from samestep.recipe.catalog import load
from samestep.recipe.scaling import Hyperparameters
from samestep.step.optim import Muon, muon

FLAGS = " --optimizer muon --muon_learning_rate 0.02 --muon_momentum 0.9 --muon_weight_decay 0.1 --dtype "


def by_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """Each step of the iteration is an odd polynomial of the singular values."""
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return u @ values.diag() @ v


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (5, 5)])
def test_the_iteration_takes_singular_values_to_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = by_singular_values(matrix)
    assert relative(orthogonalize(matrix), expected) < 1e-13
    assert relative(orthogonalize(matrix.float()), expected) < 1e-5
    assert orthogonalize(matrix.bfloat16()).dtype == torch.float32
    assert 0.5 < torch.linalg.svdvals(orthogonalize(matrix)).min() < torch.linalg.svdvals(expected).max() < 1.3
    assert not orthogonalize(torch.zeros(shape)).any()


def test_rounding_stays_small_where_bfloat16_makes_it_large():
    """What one cut of a step rounds otherwise than another is as large a part of the update as of the gradient."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(256, 8, generator=generator) @ torch.randn(8, 256, generator=generator)
    matrix += 1e-3 * torch.randn(256, 256, generator=generator)  # of few directions, as gradients are
    other = matrix * (1 + 1e-7 * torch.randn(matrix.shape, generator=generator))
    assert relative(orthogonalize(other), orthogonalize(matrix)) < 1e-4
    weights = [nn.Parameter(torch.zeros_like(matrix)) for _ in range(2)]
    for weight, gradient in zip(weights, (matrix, other), strict=True):
        weight.grad = gradient.clone()
        torch.optim.Muon([weight]).step()
    assert relative(*(weight.detach() for weight in weights)) > 1e-3


def test_products_are_of_full_precision():
    seen = []

    def multiply(addmm, *arguments, **options):
        seen.append(torch.get_float32_matmul_precision())
        return addmm(*arguments, **options)

    torch.set_float32_matmul_precision("medium")
    try:
        with Watch(torch.addmm, multiply):
            orthogonalize(torch.eye(3))
        assert set(seen) == {"highest"}
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.names, self.norm = nn.Linear(4, 6), nn.Embedding(3, 4), nn.LayerNorm(4)


class Network(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(5, 4), nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 5)


def test_a_step_is_that_of_the_formulas():
    model = Network().double()
    numbers = Hyperparameters(0.01, 0.8, 0.95, 1e-7)
    optimizer = muon(model, numbers, 0.1, 0.02, 0.9, 0.3)
    hidden = {
        name
        for name, p in model.named_parameters()
        if "momentum_buffer" in optimizer.state[p] or name.endswith("inner.weight")
    }
    assert hidden == {"layers.0.inner.weight", "layers.1.inner.weight"}
    weight, other = model.layers[1].inner.weight, model.head.weight
    copy = nn.Parameter(other.detach().clone())
    adamw = torch.optim.AdamW([copy], 0.01, (0.8, 0.95), 1e-7, 0.1)
    value, buffer = weight.detach().clone(), torch.zeros_like(weight)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        copy.grad = other.grad.clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * group["lr_scale"]
        optimizer.step()
        adamw.step()
        buffer = 0.9 * buffer + 0.1 * weight.grad
        update = by_singular_values(0.1 * weight.grad + 0.9 * buffer)
        value = value * (1 - 0.02 * 0.3) - 0.02 * 0.2 * math.sqrt(6) * update
        assert torch.allclose(weight, value, rtol=1e-12)
        assert torch.allclose(other, copy, rtol=1e-12)
    assert (0.2 * math.sqrt(6) * update).square().mean().sqrt() == pytest.approx(0.2, rel=0.3)


def test_a_gradient_that_is_not_finite_changes_nothing():
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = Muon([{"params": [weight], "momentum": 0.9}])
    weight.grad = torch.full((2, 3), math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert weight.eq(1).all()
    assert not optimizer.state


def test_what_has_no_layers_is_refused():
    model = nn.Linear(3, 2)
    model._no_split_modules = ()
    with pytest.raises(UsageError, match="has no layers with matrices: set optimizer to adamw"):
        muon(model, Hyperparameters(0.01, 0.9, 0.95, 1e-8), 0.1, 0.01, 0.9, 0.1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"optimizer": "muon"}, "muon_momentum is null, but with optimizer muon it must be a number"),
        ({"muon_momentum": 0.9}, "muon_momentum is 0.9, but with optimizer adamw it must be null"),
    ],
)
def test_its_fields_belong_to_it(changes, problem):
    with pytest.raises(UsageError, match=problem):
        load("gpt2_small_cpu", changes)


def test_it_does_not_accumulate_in_its_momentum():
    changes = {"accumulation": "optimizer", "second_moment": None}
    with pytest.raises(
        UsageError, match="accumulation is optimizer, but optimizer is muon, which needs the whole gradient"
    ):
        load("gpt_modern_small_cpu", changes)


@pytest.mark.parametrize(
    ("program", "dtype"), [("pretrain_gpt2", "float64"), ("pretrain_gpt2", "float32"), ("pretrain_bert", "float64")]
)
def test_every_cut_in_time_is_the_same_step(train, program, dtype):
    runs = [
        train(f"b{b}", f"--global_batch_size 10 --per_device_train_batch_size {b}{FLAGS}{dtype}", program=program)
        for b in (10, 3)
    ]
    check(runs[1], runs[0], dtype)
    assert (
        relative(parameters(runs[0], "checkpoint-10"), parameters(train("adamw", f"--dtype {dtype}", program=program)))
        > 1e-2
    )


@pytest.mark.distributed
def test_every_cut_in_space_is_the_same_step_and_it_resumes_on_another_number(train, train_on):
    """Also with weights that are sharded, and to the bit with --reproducible."""
    exact = "--global_batch_size 10 --per_device_train_batch_size 3" + FLAGS + "float64"
    bits = "--global_batch_size 10 --reproducible 3" + FLAGS + "float32"
    whole = train("whole", exact, program="pretrain_gpt2")
    train("pretrain_gpt2/resumed", exact + " --stop_after_step 5", program="pretrain_gpt2")
    runs = {"cut": exact, "bits": bits, "resumed": exact + " --resume_from_checkpoint latest"}
    folder = train_on(2, {f"pretrain_gpt2/{name}": flags for name, flags in runs.items()}) / "pretrain_gpt2"
    for name in ("cut", "resumed"):
        check(folder / name, whole, "float64")
    assert hash_run(folder / "bits") == hash_run(train("bits", bits, program="pretrain_gpt2"))
    folder = train_on(2, {"pretrain_gpt2/sharded": exact}, "fsdp2_2xcpu") / "pretrain_gpt2"
    check(folder / "sharded", whole, "float64")


def test_the_planner_counts_it():
    from stepplan.timing import count_orthogonalization
    from stepplan.workload import from_recipe as plan_recipe

    matrix = torch.randn(6, 10)
    with FlopCounterMode(display=False) as counter:
        orthogonalize(matrix)
    assert counter.get_total_flops() == count_orthogonalization(6, 10)
    for name in ("gpt2_124m", "bert_base", "gpt_modern_124m", "bert_modern_base"):
        numbers = {"optimizer": "muon", "muon_learning_rate": 0.01, "muon_momentum": 0.9, "muon_weight_decay": 0.1}
        recipe = load(name, numbers)
        workload = plan_recipe(recipe)
        with torch.device("meta"):
            model = recipe.parts.find("model").from_recipe(recipe, None)
        optimizer = muon(model, Hyperparameters(0.01, 0.9, 0.95, 1e-8), 0.1, 0.01, 0.9, 0.1)
        shapes = sorted(tuple(sorted(p.shape)) for p in optimizer.param_groups[0]["params"])
        assert shapes == sorted(tuple(sorted(shape)) for shape in workload.orthogonalized)
        others = sum(p.numel() for group in optimizer.param_groups[1:] for p in group["params"])
        hidden = sum(p.numel() for p in optimizer.param_groups[0]["params"])
        assert workload.moment_bytes * (hidden + others) == pytest.approx(4 * hidden + 8 * others, rel=1e-6)
