"""Accelerate's own loop, made exact: k and N undone, one reduction per step, the fp16 scaler's skips counted."""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs
from common import ROOT, fresh_accelerator, launch_environment, metrics

from samestep.step import accumulate
from samestep.training import launch

COUNT_REDUCTIONS = """
import json, os, sys
from pathlib import Path
import torch
from waiting import until
import torch.distributed as dist
from samestep._internals import torch_distributed
from samestep.step import accumulate; from samestep.training import launch
from samestep.training.launch import create_accelerator

accelerator = create_accelerator()
rank, out = accelerator.process_index, Path(folder)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 1)).double()
model = accelerator.prepare(model)
reduced = []
def hook(state, bucket):
    reduced.append(bucket.index())
    return dist.all_reduce(bucket.buffer().div_(accelerator.num_processes), async_op=True).get_future().then(
        lambda future: future.value()[0])
model.register_comm_hook(None, hook)
collectives = []
def noting(all_reduce):
    return lambda tensor, *args, **kwargs: (collectives.append(tensor.numel()), all_reduce(tensor, *args, **kwargs))[1]
dist.all_reduce, torch_distributed.total = noting(dist.all_reduce), noting(torch_distributed.total)

data = torch.arange(40, dtype=torch.float64).view(10, 4).sin()
micro_batches = [data[:3], data[3:4], data[4:6], data[6:7]] if rank == 0 else [data[7:10]]  # k = 4 here, 1 there
result = []
for step in range(2):
    reduced.clear(), collectives.clear()
    if rank == 1:  # for ever, if the other process waited for the counts
        until((out / f"begun-{step}").exists, "begin of the step")
    counts = accumulate.total_counts(accelerator, torch.tensor([sum(len(micro_batch) for micro_batch in micro_batches)]))
    (out / f"begun-{step}").touch()
    for micro_batch in accumulate.iterate_micro_batches(accelerator, micro_batches):
        with accelerator.accumulate(model):
            loss = model(micro_batch).pow(2).sum() / counts[0]
            accelerator.backward(loss * accumulate.loss_scale(accelerator))
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()
    result.append({"counts": counts.tolist(), "reduced": list(reduced), "collectives": list(collectives), "gradient": gradient})
    model.zero_grad()
(out / f"{rank}.json").write_text(json.dumps(result))
accelerator.wait_for_everyone()
sys.stdout.flush(), os._exit(0)  # a Python hook and gloo's threads do not end in good order
"""


@pytest.mark.distributed
def test_one_reduction_per_step_and_the_exact_gradient_with_uneven_k(trainings, tmp_path):
    environment = launch_environment(ROOT / "accelerate_configs" / "2xcpu.yaml")
    trainings.run([str(tmp_path), COUNT_REDUCTIONS], 2, environment=environment, module="run_with_code")
    data = torch.arange(40, dtype=torch.float64).view(10, 4).sin()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 1)).double()
    model(data).pow(2).mean().backward()
    true = torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()
    for rank in range(2):
        for step in json.loads((tmp_path / f"{rank}.json").read_text()):
            assert step["counts"] == [10]
            assert step["reduced"] == [0], "one bucket, reduced once"
            assert step["collectives"].count(1) == 1, "one all-reduce of the counts"
            assert step["gradient"] == pytest.approx(true, rel=1e-13)


def test_k_of_the_last_step_does_not_leak_into_the_next():
    fresh_accelerator()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    synchronised = []
    for num_micro_batches in (3, 2, 1, 4):
        for _ in accumulate.iterate_micro_batches(accelerator, [None] * num_micro_batches):
            with accelerator.accumulate(model):
                synchronised.append(accelerator.sync_gradients)
        assert accumulate.loss_scale(accelerator) == num_micro_batches
    assert synchronised == [False, False, True, False, True, True, False, False, False, True]


def test_the_norm_of_a_large_gradient_is_exact():
    weight = torch.nn.Parameter(torch.zeros(1001, 5000))
    weight.grad = torch.randn(5000, 1001, generator=torch.Generator().manual_seed(0)).t() * 1e-3
    expected = weight.grad.double().norm().item()
    fresh_accelerator()
    accelerator = Accelerator(cpu=True)
    norm = accumulate.clip(accelerator, [weight], None)
    assert norm.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("share", [None, 2.0, 1.0, 0.3])
def test_the_gradient_is_clipped_as_torch_does(dtype, share):
    """Of any layout: whole, of a convolution in channels_last, a transposed one, none at all."""
    fresh_accelerator()
    accelerator = Accelerator(cpu=True)
    noise = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(300, 17, generator=noise),
        torch.randn(6, 5, 3, 3, generator=noise).contiguous(memory_format=torch.channels_last),
        torch.randn(9, 40, generator=noise).t(),
        torch.randn((), generator=noise),
        torch.zeros(0),
    ]
    gradients = [(10 * gradient).to(dtype) for gradient in gradients]
    ours, theirs = ([torch.nn.Parameter(torch.empty_like(g)) for g in gradients] for _ in range(2))
    for parameter, other, gradient in zip(ours, theirs, gradients, strict=True):
        parameter.grad, other.grad = gradient.clone(), gradient.clone()
    ours.append(torch.nn.Parameter(torch.ones(3, dtype=dtype)))  # without a gradient
    norm = torch.linalg.vector_norm(torch.cat([gradient.flatten().double() for gradient in gradients])).item()
    limit = None if share is None else share * norm
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 0}[
        dtype
    ]  # 16 bits, too few for squares, are left to torch
    actual = accumulate.clip(accelerator, ours, limit).item()
    expected = torch.nn.utils.clip_grad_norm_(theirs, float("inf") if limit is None else limit).item()
    assert actual == pytest.approx(expected, rel=tolerance)
    assert actual == pytest.approx(norm, rel=tolerance or 1e-3)
    for parameter, other, gradient in zip(ours[:-1], theirs, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=tolerance, atol=0)
        assert share is None or share < 2 or torch.equal(parameter.grad, gradient)
    assert ours[-1].grad is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_has_a_norm_that_is_not(value):
    fresh_accelerator()
    accelerator = Accelerator(cpu=True)
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    for weight, number in zip(weights, (1.0, value), strict=True):
        weight.grad = torch.full_like(weight, number)
    assert not accumulate.clip(accelerator, weights, None).isfinite()
    assert weights[0].grad.isfinite().all()
    assert not accumulate.clip(accelerator, weights, 1.0).isfinite()
    assert (
        value == float("inf") or not weights[0].grad.isfinite().any()
    )  # as torch does; with inf all are multiplied by 0


def test_noise_is_a_function_of_seed_step_and_process():
    draws = set()
    for seed, step, rank in [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0)]:
        process = SimpleNamespace(process_index=rank, device=torch.device("cpu"))
        accumulate.seed_noise(process, seed, step)
        first = torch.rand(1).item()
        accumulate.seed_noise(process, seed, step)
        assert torch.rand(1).item() == first
        draws.add(first)
    assert len(draws) == 4


def test_steps_that_the_scaler_skips_are_counted_and_logged(train, monkeypatch):
    """fp16's scaler, on the CPU: a scale that overflows skips the first step, leaves the weights, and is reported."""
    original = launch.create_accelerator

    def with_scaler(**kwargs):
        accelerator = original(**kwargs)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
        accelerator.autocast_handler = AutocastKwargs(enabled=False)  # fp32 on the CPU; only the scaler is under test
        return accelerator

    monkeypatch.setattr(launch, "create_accelerator", with_scaler)
    flags = "--global_batch_size 8 --per_device_train_batch_size 3 --mlm_loss_weight 1000"
    output_dir = train("scaled", flags)
    lines = metrics(output_dir)
    assert lines[0]["skipped"]
    assert lines[0]["grad_norm"] is None
    assert sum(line.get("skipped", False) for line in lines) == 1
    assert json.loads((output_dir / "all_results.json").read_text())["skipped_steps"] == 1
    assert json.loads((output_dir / "checkpoint-10" / "state.json").read_text())["num_skipped"] == 1
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in lines)
    monkeypatch.undo()
    plain = metrics(train("plain", flags))
    assert lines[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-6)
    assert lines[1]["loss"] != pytest.approx(plain[1]["loss"], rel=1e-6), "the first step was not taken"
    assert lines[1]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=0.5), "unscaled before clipping"
