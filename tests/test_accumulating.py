"""Optimizers that accumulate in their moments: what is exact is, what is estimated is as documented, and no gradient stays."""

import copy
import math

import pytest
import torch
from run_accumulating import OPTIMIZERS, STEPS, build, groups, micro_batch_losses, peak_bytes
from torch import nn

from samestep.errors import UsageError
from samestep.step.optim import AccumulatingAdamW, AccumulatingSGD

EXACT = 1e-14


def miss(ours: list[torch.Tensor], true: list[torch.Tensor]) -> float:
    """Compute the largest relative error of a tensor."""
    return max(((a - b).norm() / b.norm().clamp(min=1e-300)).item() for a, b in zip(ours, true, strict=True))


def plain(name: str) -> dict[str, list[torch.Tensor]]:
    """Take the same steps by the documented formulas, with gradients of micro-batches kept.

    Returns parameters, moments and the last gradient's norm.
    """
    network = build()
    pairs = [(p, group) for group in groups(network) for p in group["params"] if p.requires_grad]
    moments = {p: [torch.zeros_like(p) for _ in range(2)] for p, _ in pairs}
    beta1, beta2, number = 0.9, 0.99, 4
    for step in range(STEPS):
        micro_batches = []
        for _, loss in micro_batch_losses(network, step):
            micro_batches.append(
                torch.autograd.grad(loss(), [p for p, _ in pairs], allow_unused=True, materialize_grads=True)
            )
        norm = math.sqrt(sum(sum(parts).square().sum().item() for parts in zip(*micro_batches, strict=True)))
        with torch.no_grad():
            for (p, group), *parts in zip(pairs, *micro_batches, strict=True):
                whole, squares, (m, v) = sum(parts), sum(part**2 for part in parts), moments[p]
                decay, t = group["weight_decay"], step + 1
                if name == "sgd":
                    m.mul_(0.9).add_(whole + decay * p)
                    p.sub_(group.get("lr", 0.05) * m)
                    continue
                m.mul_(beta1).add_(whole, alpha=1 - beta1)
                mean = m / (1 - beta1**t)
                r = (1 - beta1) / (1 + beta1) * (1 + beta1**t) / (1 - beta1**t)
                square = {
                    "mean_of_squares": number * squares,
                    "sum_of_squares": squares,
                    "unbiased": ((1 - r) * squares + (1 - 1 / number) * mean**2) / (1 - r / number),
                }[name]
                v.mul_(beta2).add_(square, alpha=1 - beta2)
                rate = group.get("lr", 0.01)
                p.mul_(1 - rate * decay).sub_(rate * mean / ((v / (1 - beta2**t)).sqrt() + 1e-8))
    return {"parameters": list(network.parameters()), "moments": [moments[p] for p, _ in pairs], "norm": norm}


def ours(name: str) -> dict:
    network = build()
    optimizer = OPTIMIZERS[name](groups(network))
    optimizer.gradient_accumulation_steps = 4
    for step in range(STEPS):
        for _, loss in micro_batch_losses(network, step):
            loss().backward()
            assert all(parameter.grad is None for parameter in network.parameters())
        norm = optimizer.clip_grad_norm_()
        optimizer.step()
    moments = [
        [optimizer.state[p][moment] for moment in optimizer.moments]
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    ]
    return {"parameters": list(network.parameters()), "moments": moments, "norm": norm.item()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_are_those_of_the_formulas(name):
    actual, true = ours(name), plain(name)
    assert miss(actual["parameters"], true["parameters"]) < EXACT
    for moment, theirs in zip(actual["moments"], true["moments"], strict=True):
        assert miss(moment, theirs[: len(moment)]) < EXACT


def test_sgd_is_torchs():
    """Weight decay, groups, frozen parameters, momentum; k changes from step to step."""
    model_a, model_b = build(), build()
    a = AccumulatingSGD(groups(model_a), 0.05, 0.9)
    b = torch.optim.SGD(groups(model_b), 0.05, 0.9)
    for step in range(STEPS):
        for group in [*a.param_groups, *b.param_groups]:
            group["lr"] = 0.05 / (1 + step)
        a.gradient_accumulation_steps = 1 + step % 4
        for _, loss in list(micro_batch_losses(model_a, step))[: 1 + step % 4]:
            loss().backward()
        b.zero_grad()
        for _, loss in list(micro_batch_losses(model_b, step))[: 1 + step % 4]:
            loss().backward()
        a.step()
        b.step()
    assert miss(list(model_a.parameters()), list(model_b.parameters())) < EXACT
    theirs = [b.state[p]["momentum_buffer"] for p in model_b.parameters() if p.requires_grad]
    assert miss([a.state[p]["momentum_buffer"] for p in model_a.parameters() if p.requires_grad], theirs) < EXACT


@pytest.mark.parametrize("name", ["unbiased", "mean_of_squares", "sum_of_squares"])
def test_of_one_micro_batch_it_is_torchs_adamw(name):
    model_a, model_b = build(), build()
    a = OPTIMIZERS[name](groups(model_a))
    b = torch.optim.AdamW(groups(model_b), 0.01, (0.9, 0.99), weight_decay=0.0)
    for step in range(STEPS):
        for network, optimizer in ((model_a, a), (model_b, b)):
            optimizer.zero_grad()
            sum(loss() for _, loss in micro_batch_losses(network, step)).backward()
            optimizer.step()
    assert miss(list(model_a.parameters()), list(model_b.parameters())) < EXACT


@pytest.fixture(scope="module", params=[2, 3])
def processes(request, run_processes):
    """Run the processes of `run_accumulating.py`; the results of each."""
    return run_processes("run_accumulating", request.param)


@pytest.mark.distributed
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_number_of_processes_takes_the_same_steps(processes, name):
    """Micro-batches of different sizes, different k, a process without samples; weights that differed before `distribute`."""
    true = plain(name)
    for result in processes:
        assert miss(result[name]["parameters"], true["parameters"]) < EXACT
        for tensor, first in zip(result[name]["state"], processes[0][name]["state"], strict=True):
            assert torch.equal(tensor, first)
        assert result[name]["norm"] == pytest.approx(true["norm"], rel=0.3)


@pytest.mark.distributed
def test_reductions_begin_in_the_last_backward(processes):
    for rank, result in enumerate(processes):
        early, buckets = result["sgd"]["early"], result["sgd"]["buckets"]
        has_samples = len(processes) == 2 or rank != 1
        assert buckets == 3
        assert set(early) == {2 if has_samples else 0}  # the two matrices; not all micro-batches use what comes then


@pytest.mark.distributed
def test_no_buffer_of_a_gradients_size_on_several_processes(processes):
    """Parameters, two moments, and what a layer or a bucket needs: no fourth of that size."""
    for parameter_bytes, peak in (processes[0]["bytes"], peak_bytes(1)):
        assert 3 * parameter_bytes < peak < 3.4 * parameter_bytes


def train(optimizer, network, k: int, steps: int, first: int = 0) -> None:
    optimizer.gradient_accumulation_steps = k
    for step in range(first, first + steps):
        for _, loss in list(micro_batch_losses(network, step))[:k]:
            loss().backward()
        optimizer.step()


@pytest.mark.parametrize("coefficients", ["substitute", "root", "unchanged"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_coefficients_per_micro_step(coefficients, kind):
    """m = b m + (1 - b) g_i in each micro-batch, with the documented b; parameters move at the last."""
    k, beta1, beta2 = 4, 0.9, 0.99
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    start = weight.detach().clone()
    more = {"gradient_accumulation_steps": k, "coefficients": coefficients}
    if kind == "sgd":
        optimizer = AccumulatingSGD([weight], 0.1, beta1, **more)
    else:
        adam = {"second_moment": "mean_of_squares", "weight_decay": 0.0}
        optimizer = AccumulatingAdamW([weight], 0.1, (beta1, beta2), **adam, **more)
    decays = [
        {"substitute": 1 - (1 - beta) / k, "root": beta ** (1 / k), "unchanged": beta}[coefficients]
        for beta in (beta1, beta2)
    ]
    m, v, expected = torch.zeros(2).double(), torch.zeros(2).double(), start
    for step in range(3):
        for i in range(k):
            g = torch.tensor([1.0 + i + step, (-1.0) ** i], dtype=torch.float64)
            (weight * g / k).sum().backward()
            m = decays[0] * m + (1 - decays[0]) * g
            v = decays[1] * v + (1 - decays[1]) * g**2
        optimizer.step()
        if kind == "sgd":
            expected = expected - 0.1 * m / (1 - beta1)  # torch's buffer is m / (1 - beta)
        else:
            t = k * (step + 1)
            expected = expected - 0.1 * m / (1 - decays[0] ** t) / ((v / (1 - decays[1] ** t)).sqrt() + 1e-8)
        assert torch.allclose(weight, expected, rtol=EXACT)


def test_clipping_is_as_documented():
    """The step has the length of the exactly clipped one; far below the limit nothing changes."""
    free, tight, wide = (build() for _ in range(3))
    for network in (free, tight, wide):
        network.first = nn.Linear(70, 50).double()  # so that every parameter is projected exactly
        network.last, network.frozen = nn.Linear(50, 3).double(), nn.Linear(50, 50).double().requires_grad_(False)
    tight.load_state_dict(free.state_dict())
    wide.load_state_dict(free.state_dict())
    a, b, c = (
        OPTIMIZERS["sgd"]([group | {"weight_decay": 0.0} for group in groups(network)])
        for network in (free, tight, wide)
    )
    previous = None
    for step in range(5):
        for network, optimizer, limit in ((free, a, math.inf), (tight, b, 0.05), (wide, c, 1e6)):
            optimizer.gradient_accumulation_steps = 4
            gradients = []
            for _, loss in micro_batch_losses(network, step):
                live = [p for p in network.parameters() if p.requires_grad]
                gradients.append(torch.autograd.grad(loss(), live, allow_unused=True, materialize_grads=True))
                loss().backward()
            whole = torch.cat([sum(parts).flatten() for parts in zip(*gradients, strict=True)])
            if optimizer is b:
                momentum = torch.cat([b.state[p]["momentum_buffer"].flatten() for p in live]) if step else 0 * whole
                norm = b.clip_grad_norm_(limit)
                assert norm.item() == pytest.approx(whole.norm().item(), rel=1e-12)
                b.step()
                now = torch.cat([b.state[p]["momentum_buffer"].flatten() for p in live])
                exact = (
                    0.9 * previous + whole * min(1, limit / (norm + 1e-6)) if step else whole * (limit / (norm + 1e-6))
                )
                assert now.norm().item() == pytest.approx(exact.norm().item(), rel=1e-9)
                assert torch.dot(now, momentum).item() == pytest.approx(
                    now.norm().item() * momentum.norm().item(), rel=1e-9
                )
            else:
                optimizer.clip_grad_norm_(limit)
            optimizer.step()
        previous = torch.cat([b.state[p]["momentum_buffer"].flatten() for p in tight.parameters() if p.requires_grad])
        previous = previous.clone()
    assert miss(list(wide.parameters()), list(free.parameters())) == 0
    assert miss(list(tight.parameters())[1:], list(free.parameters())[1:]) > 1e-3


@pytest.mark.parametrize("scale", [2.0**-7, 2.0**7])
def test_adam_under_constant_clipping_takes_no_notice_of_the_gradients_scale(scale):
    """As with exact clipping: the moments are clipped alike, and their ratio stays."""
    networks = [build(), build()]
    for network, factor in zip(networks, (1.0, scale), strict=True):
        optimizer = OPTIMIZERS["unbiased"](groups(network))
        optimizer.gradient_accumulation_steps = 4
        for step in range(20):
            for _, loss in micro_batch_losses(network, step):
                (1e3 * factor * loss()).backward()
            optimizer.clip_grad_norm_(1e-3)
            optimizer.step()
    assert miss(list(networks[0].parameters()), list(networks[1].parameters())) < 1e-3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_in_the_middle_it_is_undisturbed(name):
    network = build()
    optimizer = OPTIMIZERS[name](groups(network))
    train(optimizer, network, 3, 5)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(network.state_dict())
    train(optimizer, network, 3, 5, first=5)
    again = build(seed=1)
    resumed = OPTIMIZERS[name](groups(again))
    train(resumed, again, 2, 2)  # what it did before is forgotten
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(resumed, again, 3, 5, first=5)
    assert miss(list(again.parameters()), list(network.parameters())) == 0


def test_clipping_scales_the_second_moment_to_the_sum_it_would_have():
    network = build()
    optimizer = OPTIMIZERS["sum_of_squares"](groups(network))
    optimizer.gradient_accumulation_steps = 4
    expected = 0.0
    for step, limit in enumerate((math.inf, 0.02)):
        squares = 0.0
        live = [p for p in network.parameters() if p.requires_grad]
        for _, loss in micro_batch_losses(network, step):
            parts = torch.autograd.grad(loss(), live, allow_unused=True, materialize_grads=True)
            squares += sum(part.square().sum().item() for part in parts)
            loss().backward()
        clip = min(1.0, limit / (optimizer.clip_grad_norm_(limit).item() + 1e-6))
        expected = 0.99 * expected + 0.01 * clip**2 * squares
        optimizer.step()
        assert sum(optimizer.state[p]["exp_avg_sq"].sum().item() for p in live) == pytest.approx(expected, rel=1e-12)
    assert clip < 0.9


def test_the_state_of_a_new_optimizer_makes_it_new():
    network, twin = build(), build()
    old, new = (OPTIMIZERS["unbiased"](groups(model)) for model in (network, twin))
    empty = copy.deepcopy(old.state_dict())
    for step in range(2):
        next(iter(micro_batch_losses(network, step)))[1]().backward()
        old.clip_grad_norm_(1e-3)
        old.step()
    network.load_state_dict(twin.state_dict())
    old.load_state_dict(empty)
    for model, optimizer in ((network, old), (twin, new)):
        for step in range(3):
            next(iter(micro_batch_losses(model, step)))[1]().backward()
            optimizer.clip_grad_norm_(1e-2)
            optimizer.step()
    assert miss(list(network.parameters()), list(twin.parameters())) == 0


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_gradients_of_other_strides():
    """As one has that was there before the backward."""
    weight = nn.Parameter(torch.zeros(600, 300))
    optimizer = AccumulatingSGD([weight], 0.1)
    weight.grad = torch.arange(180000.0).view(300, 600).t()
    expected = weight.grad + 1
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], expected)


def test_states_are_torchs():
    for ours, theirs in (
        (OPTIMIZERS["sgd"], lambda parameters: torch.optim.SGD(parameters, 0.05, 0.9)),
        (OPTIMIZERS["unbiased"], lambda parameters: torch.optim.AdamW(parameters, 0.01, (0.9, 0.99))),
    ):
        model_a, model_b = build(), build()
        a, b = ours(groups(model_a)), theirs(groups(model_b))
        train(a, model_a, 1, 3)
        b.load_state_dict(a.state_dict())
        model_b.load_state_dict(model_a.state_dict())
        c = ours(groups(model_b))
        c.load_state_dict(b.state_dict())
        for parameter, twin in zip(model_a.parameters(), model_b.parameters(), strict=True):
            assert a.state[parameter].keys() == b.state[twin].keys() == c.state[twin].keys()
            assert a.state[parameter].keys() - {"step", "clip"} == set(a.moments if parameter.requires_grad else ())
            for key, value in a.state[parameter].items():
                assert torch.equal(value, b.state[twin][key])
                assert torch.equal(value, c.state[twin][key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_and_memory_formats(dtype):
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)).to(dtype).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(network)
    a = AccumulatingAdamW(network.parameters(), 0.01, second_moment="sum_of_squares")
    b = torch.optim.AdamW(twin.parameters(), 0.01, foreach=True)
    for step in range(3):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
        for model, optimizer in ((network, a), (twin, b)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {state.dtype for p in network.parameters() for state in [a.state[p][name] for name in a.moments]} == {dtype}
    assert all(a.state[p]["exp_avg"].stride() == p.stride() for p in network.parameters())
    rtol = {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    for actual, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(actual, theirs, rtol=rtol, atol=rtol)


def test_parameters_without_gradients_are_left_alone():
    """As torch does: no decay of weights or moments."""
    active, idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = AccumulatingAdamW([active, idle], 0.1, weight_decay=0.5)
    optimizer.num_micro_batches = 2
    optimizer.step()
    assert not optimizer.state_dict()["state"]
    active.sum().backward()
    assert optimizer.clip_grad_norm_(1.0).item() == pytest.approx(3**0.5)
    optimizer.step()
    assert torch.equal(idle, torch.ones(3))
    assert not torch.equal(active, torch.ones(3))
    assert (optimizer.state[active]["step"], optimizer.state[idle]["step"]) == (1, 0)


def test_a_closure_is_the_last_micro_step():
    weight = nn.Parameter(torch.ones(2))
    optimizer = AccumulatingSGD([weight], 0.1, gradient_accumulation_steps=2)
    weight.sum().backward()

    def closure():
        loss = 2 * weight.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4
    assert torch.allclose(weight, torch.full((2,), 0.7))


def test_an_optimizer_that_is_gone_leaves_gradients_alone():
    weight = nn.Parameter(torch.ones(2))
    optimizer = AccumulatingSGD([weight], 0.1)
    del optimizer
    weight.sum().backward()
    assert weight.grad is not None


def test_discarded_gradients_leave_no_trace():
    network = build()
    optimizer = OPTIMIZERS["unbiased"](groups(network))
    train(optimizer, network, 2, 1)
    state = copy.deepcopy(optimizer.state_dict())
    with optimizer.discard_gradients():
        sum(loss() for _, loss in micro_batch_losses(network, 0)).backward()
    assert all(parameter.grad is None for parameter in network.parameters())
    for place, tensors in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][place][key]) for key, value in tensors.items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: AccumulatingSGD(p, -1.0, 1.0, gradient_accumulation_steps=0), "lr is -1.0, must be 0 or greater"),
        (lambda p: AccumulatingSGD(p, 0.1, 1.0), r"momentum is 1.0, must be in \[0, 1\)"),
        (lambda p: AccumulatingSGD(p, 0.1, gradient_accumulation_steps=0), "gradient_accumulation_steps is 0"),
        (lambda p: AccumulatingSGD(p, 0.1, coefficients="none"), "coefficients is 'none', must be one of exact"),
        (lambda p: AccumulatingAdamW(p, 0.1, (0.9, 1.0)), r"betas is 1.0, must be in \[0, 1\)"),
        (
            lambda p: AccumulatingAdamW(p, 0.1, second_moment="exact"),
            "second_moment is 'exact', must be one of unbiased",
        ),
        (lambda p: AccumulatingAdamW(p, 0.1, coefficients="root"), "coefficients is root, but second_moment unbiased"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make([nn.Parameter(torch.ones(2))])


def test_misuse_is_refused():
    weight = nn.Parameter(torch.ones(2))
    optimizer = AccumulatingSGD([weight], 0.1)
    weight.sum().backward()
    with pytest.raises(UsageError, match="got gradient 2 of a step with gradient_accumulation_steps 1"):
        weight.sum().backward()
    with pytest.raises(UsageError, match="state_dict in the middle of a step"):
        optimizer.state_dict()
    optimizer.step()
    weight.grad = torch.ones(2)
    optimizer._open()
    with pytest.raises(UsageError, match=r"a \.grad that was not folded"):
        optimizer.step()
    with pytest.raises(UsageError, match="coefficients is root"):
        AccumulatingSGD([weight], 0.1, coefficients="root").clip_grad_norm_(1.0)
    with pytest.raises(UsageError, match="does not fill its memory"):
        AccumulatingSGD([nn.Parameter(torch.ones(4, 4)[:, :2])], 0.1).allocate()
    table = nn.Embedding(4, 2, sparse=True)
    sparse = AccumulatingSGD(table.parameters(), 0.1)
    with pytest.raises(UsageError, match="sparse=False"):
        table(torch.tensor([1])).sum().backward()
    assert sparse
