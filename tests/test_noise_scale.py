"""The noise of the gradient is measured without bias, from any cut on any processes, and its intervals cover the truth."""

import json
import math
import statistics

import numpy as np
import pytest
import torch
from common import TINIES, fresh_accelerator, load_benchmark, metrics, task_of
from torch import nn

from samestep.contrib.noise.meter import NoiseMeter, TermMeter
from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.cut.partition import partition_at_random
from samestep.data.steps import Steps
from samestep.errors import UsageError
from samestep.recipe import batch_size, run_settings
from samestep.recipe.catalog import TASKS
from samestep.recipe.launches import find_refusal

FLAGS = " --global_batch_size 16 --max_train_steps 8 --noise_scale_steps 2"


def noise_lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "noise.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------------------------
# One step


def test_a_step_is_what_the_formula_says():
    """Uneven micro-batches, two terms, a parameter without gradient, a step that begins again, and gradients left clean."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"body": nn.ModuleList([nn.Linear(5, 3)]), "head": nn.Linear(3, 2), "unused": nn.Linear(1, 1)}
    )
    model["head"].bias.requires_grad_(False)
    x, counts = torch.randn(9, 5), torch.tensor([[4, 1], [10, 2], [1, 0]])
    parts = [x[:2], x[2:8], x[8:]]

    def loss(part):
        return model["head"](model["body"][0](part).tanh()).square().sum()

    meter = NoiseMeter(dict(model.named_parameters()))
    assert meter.groups == ["body.0", "head", "unused"]
    for is_complete in (False, True):
        meter.begin(counts, counts.sum(0))
        for part in parts[: None if is_complete else 2]:
            loss(part).backward()
        if not is_complete:
            model.zero_grad()
    signal, noise = meter.finish(1.0)
    trained = [model["body"][0].weight, model["body"][0].bias, model["head"].weight]
    cells = [torch.autograd.grad(loss(part), trained) for part in parts]
    shares = (counts / counts.sum(0)).mean(1).double()
    for places, found, share in ((slice(0, 2), signal[0], noise[0]), (slice(2, 3), signal[1], noise[1])):
        vectors = torch.stack([torch.cat([g.flatten() for g in cell[places]]) for cell in cells]).double()
        products, weights = vectors @ vectors.T, shares[:, None] * shares
        off = ~torch.eye(3, dtype=torch.bool)
        expected = products[off].sum() / weights[off].sum()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(found + share, vectors.sum(0).square().sum(), rtol=1e-5, atol=0)
    assert (signal[2], noise[2]) == (0, 0)
    assert not meter.sums
    model.zero_grad()
    loss(x).backward()
    assert not meter.sums, "the hooks are gone"


def test_terms_are_measured_alone():
    """Each with the shares of its own targets; a term of one micro-batch is not known; gradients of the step stay."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, dtype=torch.float64)
    x, counts = torch.randn(9, 5, dtype=torch.float64), torch.tensor([[4, 1, 0], [10, 2, 3], [1, 0, 0]])
    parts, totals = [x[:2], x[2:8], x[8:]], counts.sum(0)
    model.weight.grad = torch.ones_like(model.weight)

    def losses(number):
        y = model(parts[number])
        return torch.stack([y.square().sum(), y.sin().sum(), y.sum()]) / totals

    meter = TermMeter(list(model.parameters()), 3)
    meter.measure(counts, totals, losses)
    signal, noise = meter.finish()
    assert (model.weight.grad == 1).all()
    for term in (0, 1):
        cells = [
            torch.cat([g.flatten() for g in torch.autograd.grad(losses(number)[term], list(model.parameters()))])
            for number in range(3)
            if counts[number, term]
        ]
        vectors, shares = torch.stack(cells), (counts[:, term] / totals[term])[counts[:, term] > 0].double()
        off = ~torch.eye(len(cells), dtype=torch.bool)
        expected = (vectors @ vectors.T)[off].sum() / (shares[:, None] * shares)[off].sum()
        torch.testing.assert_close(signal[term], expected)
        torch.testing.assert_close(signal[term] + noise[term], vectors.sum(0).square().sum())
    assert signal[2].isnan()


@pytest.mark.parametrize(("num_processes", "cap", "max_tokens"), [(1, 24, None), (1, 5, None), (3, 2, 31), (5, 9, 40)])
def test_measured_steps_hold_the_same_samples_cut_whatever_their_lengths(num_processes, cap, max_tokens):
    source = load_benchmark("noise_scale").Gradients("ragged")
    layout = solve_layout(num_processes=num_processes, global_batch_size=24, per_device_train_batch_size=cap)
    options = {"max_tokens": max_tokens, "random_steps": 3}
    processes = [
        Steps(source, Order(100, 24, seed=5), layout, process_index=rank, **options) for rank in range(num_processes)
    ]
    for step in (1, 2):
        parts = [steps[step] for steps in processes]
        cells = [cell for part in parts for cell in part.samples if cell]
        ids = Order(100, 24, seed=5).samples(step)[1].tolist()
        assert sorted(sample for cell in cells for _, sample in cell) == sorted(ids)
        assert {part.is_cut_at_random for part in parts} == {step == 2}
        assert all(torch.equal(part.micro_batch_counts.sum(0), part.counts) for part in parts)
        if step == 2:
            assert len(cells) == parts[0].num_micro_batches >= 2
            lengths = [source.draw(0, sample).length for sample in ids]
            limit = min(cap, max_tokens // max(lengths)) if max_tokens else cap
            assert max(map(len, cells)) <= limit
            places = [sorted(ids.index(sample) for _, sample in cell) for cell in cells]
            expected = partition_at_random(24, num_processes, limit)
            assert places == [cell.tolist() for own in expected for cell in own], "lengths decide nothing"


# ---------------------------------------------------------------------------------------------------------------------
# Many steps, of problems whose truth is known


@pytest.mark.parametrize(("kind", "flags"), [("two_terms", "7"), ("ragged", "24")])
def test_intervals_cover_the_truth(tmp_path, kind, flags):
    """The benchmark has more runs, layouts and processes."""
    benchmark, number = load_benchmark("noise_scale"), 30
    fresh_accelerator()
    benchmark.write_recipe(kind, 10 * number, tmp_path / "problem.yaml")
    words = ["--recipe", str(tmp_path / "problem.yaml"), "--output_dir", str(tmp_path / "run"), "--speed", "safe"]
    words += ["--noise_scale_steps", "1", "--logging_steps", "100", "--per_device_train_batch_size", flags]
    try:
        benchmark.train(kind, words)
    finally:
        TASKS.pop(f"known_noise_{kind}", None)
    rows = benchmark.judge(kind, tmp_path / "run", 10)
    assert len(rows) == number
    for term in (0, 1) if kind == "two_terms" else ():
        own = benchmark.judge(kind, tmp_path / "run", 10, term)
        assert sum(row["low"] <= row["truth"] <= row["high"] for row in own) >= 0.75 * number
        name = ("first", "second")[term]
        found = batch_size.estimate(batch_size.read_measurements(metrics(tmp_path / "run"), name), confidence=0.999)
        assert found.low < statistics.fmean(row["truth"] for row in own) < found.high < 3 * found.low
    assert sum(row["low"] <= row["truth"] <= row["high"] for row in rows) >= 0.75 * number
    whole = batch_size.estimate(batch_size.read_measurements(metrics(tmp_path / "run")), confidence=0.999)
    assert whole.low < statistics.fmean(row["truth"] for row in rows) < whole.high < 1.8 * whole.low


@pytest.mark.parametrize(("signal_spread", "noise_spread", "is_told"), [(2, 5, False), (0.02, 20, True)])
def test_fieller(signal_spread, noise_spread, is_told):
    """Of 400 runs of six normal measurements, the interval covers the truth in 87 to 93 of 100.

    It has no upper end in many where the signal is hardly there, and is as wide as the noise's spread where it is.
    """
    rng, covered, unbounded = np.random.default_rng(0), 0, 0
    for _ in range(400):
        signals, noises = rng.normal(1, signal_spread, 6), rng.normal(50, noise_spread, 6)
        found = batch_size.estimate(
            [batch_size.Measurement(step, *pair) for step, pair in enumerate(zip(signals, noises, strict=True))]
        )
        covered += found.low <= 50 <= found.high
        unbounded += math.isinf(found.high)
    assert 0.87 <= covered / 400 <= 0.93
    assert unbounded == 0 if is_told else unbounded > 100


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def test_a_run_writes_what_it_measured(train):
    """In every n-th step; the curve stays, through an end in between."""
    usual = metrics(train("usual", FLAGS.replace(" --noise_scale_steps 2", "")))
    train("measured", f"{FLAGS} --per_device_train_batch_size 5 --stop_after_step 5")
    folder = train("measured", f"{FLAGS} --per_device_train_batch_size 5 --resume_from_checkpoint latest")
    lines, noises = metrics(folder), noise_lines(folder)
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in usual], rel=1e-5)
    measured = [line for line in lines if "grad_noise" in line]
    assert [line["step"] for line in measured] == [line["step"] for line in noises] == [2, 4, 6, 8]
    for line, noise in zip(measured, noises, strict=True):
        assert line["grad_signal"] + line["grad_noise"] == pytest.approx(line["grad_norm"] ** 2, rel=1e-4)
        norms = [(line[f"{term}_grad_signal"] + line[f"{term}_grad_noise"]) ** 0.5 for term in ("mlm", "nsp")]
        assert abs(norms[0] - norms[1]) < line["grad_norm"] < sum(norms), "the terms add up to the gradient"
        for name in ("grad_signal", "grad_noise"):
            assert sum(layer[name] for layer in noise["layers"].values()) == pytest.approx(line[name], rel=1e-3)
        assert noise["samples"] == 16
        assert noise["targets"]["nsp"] == 16 < noise["targets"]["mlm"]
        assert noise["per_device_train_batch_size"] == 5
    assert not (folder.parent / "usual" / "noise.jsonl").exists()


@pytest.mark.distributed
def test_processes_and_restarts(train_on):
    """Exact sums see the same micro-batches on any processes; DistributedDataParallel others, of the same noise."""
    found = {}
    for num_processes in (1, 2):
        runs = {f"pretrain_bert/exact{num_processes}": f"{FLAGS} --reproducible 3"}
        runs[f"pretrain_bert/usual{num_processes}"] = f"{FLAGS} --per_device_train_batch_size 3"
        folder = train_on(num_processes, runs)
        for name in runs:
            found[name] = [line for line in metrics(folder / name) if "grad_noise" in line]
    for ours, theirs in zip(found["pretrain_bert/exact1"], found["pretrain_bert/exact2"], strict=True):
        ours, theirs = ({name: line[name] for name in line if "seconds" not in name} for line in (ours, theirs))
        ours, theirs = ({name: line[name] for name in line if name != "slowest_process"} for line in (ours, theirs))
        assert ours == theirs
    means = {name: statistics.fmean(line["grad_noise"] for line in lines) for name, lines in found.items()}
    assert max(means.values()) < 1.5 * min(means.values()), means


@pytest.mark.parametrize(
    ("program", "flags", "field"),
    [
        ("pretrain_bert", "--global_batch_size 1", "global_batch_size"),
        ("pretrain_bert", "--accumulation optimizer --second_moment unbiased", "accumulation"),
        ("train_captcha", "--normalization batch", "normalization"),
        ("train_captcha", "--normalization batch --exact_batch_norm", "normalization"),
    ],
)
def test_what_cannot_be_measured_is_refused(program, flags, field):
    argv = [*TINIES[program], *flags.split(), "--noise_scale_steps", "5"]
    with pytest.raises(UsageError, match=f"noise_scale_steps is 5, but .*{field}"):
        run_settings.parse(argv, task_of(program), "")


def test_sharded_weights_are_refused():
    assert "noise_scale_steps is 5" in str(find_refusal(is_sharded=True, noise_scale_steps=5))
    assert find_refusal(noise_scale_steps=5) is None
