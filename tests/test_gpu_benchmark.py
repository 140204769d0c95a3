"""benchmarks/gpu.py on tiny shapes, without a GPU: complete tables, small errors, faults that are found."""

import dataclasses
import gc
import json
import math
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from common import fresh_accelerator, load_benchmark
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.utils.flop_counter import FlopCounterMode

from samestep.errors import exit_code
from samestep.models import attention, gpt2_pretraining
from samestep.planner import transformer
from samestep.recipe.recipe import load
from samestep.step import accumulate, batch_norm, losses

gpu = load_benchmark("gpu")
gpu_cases = sys.modules["gpu_cases"]
TINY = {case.name: case for case in gpu_cases.cases(tiny=True)}
RAGGED = TINY["BERT-Large, length 128, as real pairs"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(gc, "freeze", lambda: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # shapes are too small for more
    fresh_accelerator()
    yield
    fresh_accelerator()
    torch.set_num_threads(threads)


def check(case: gpu_cases.Case, kernel: str) -> dict:
    return gpu.Checks(Accelerator(mixed_precision="bf16", cpu=True), case)(gpu_cases.Variant(kernel, 0, kernel))


@pytest.mark.slow
def test_every_case_is_timed_and_exact(tmp_path, monkeypatch):
    """One case of each kind of model, BERT's with samples of several lengths; the other cases differ in size alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen = [case for case in gpu_cases.CASES if case.name in (RAGGED.name, "GPT-2 124M", "ResNet-50")]
    monkeypatch.setattr(gpu_cases, "CASES", chosen)
    assert exit_code(lambda: gpu.main(["--tiny", "--output", str(tmp_path / "gpu")])) == 0
    results, table = json.loads((tmp_path / "gpu.json").read_text()), (tmp_path / "gpu.md").read_text()
    assert table == gpu.markdown(results)
    assert "a test of the program, no measurement" in table
    assert results["left_out"] == []
    assert {row["case"] for row in results["rows"]} == {case.name for case in chosen}
    for case in chosen:
        assert gpu.best(results["rows"], case.name) is not None
        assert f"| **{case.name}** |" in table
    for row in results["rows"]:
        assert "failed" not in row
        for key in ("samples_per_second", "tokens_per_second", "seconds_per_step"):
            assert row[key] > 0
        assert 0 < row["of_products"] <= row["of_products_by_formula"]
        assert row["graphs_while_timed"] == 0
        assert (row["graphs"] > 0) == row["variant"].endswith("compiled")
        assert row["check"]["cut"] <= row["check"]["cut_bound"] <= 1e-5
        assert row["check"]["bf16"] <= 1.5 * row["check"]["bf16_reference"]
        assert min(row["check"]["controls"].values()) > 1e-3
    assert max(len(set(row["micro_steps"]) | {1}) for row in results["rows"]) > 1


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert exit_code(lambda: gpu.main([])) == 2
    assert capsys.readouterr().err.startswith("ERROR: no CUDA device is there")
    assert exit_code(lambda: gpu.main(["--tiny", "--only", "nothing of the kind"])) == 2
    assert "is part of no case's name: BERT-Large" in capsys.readouterr().err


def test_what_fails_is_a_line(monkeypatch, tmp_path, capsys):
    """Memory that runs out is tried again in smaller micro-batches, down to one sample; time that is up leaves the rest out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = []

    def timed(accelerator, case, variant, tokens):
        sizes.append(tokens)
        raise torch.OutOfMemoryError("no | more")

    monkeypatch.setattr(gpu, "timed", timed)
    monkeypatch.setattr(gpu, "Checks", lambda *_: lambda _: {"exact": True, "controls_found": True})
    monkeypatch.setattr(gpu, "_check", lambda _: [])
    seconds = iter([0.0, 0.0, 1.0, *[1e3] * 99])
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(gpu, "product_rate", lambda *_: 1.0)
    argv = ["--tiny", "--only", "124M", "--output", str(tmp_path / "gpu")]
    assert exit_code(lambda: gpu.main(argv)) != 0
    assert sizes == [64, 32]
    assert "failed or not exact: GPT-2 124M" in capsys.readouterr().err
    table = (tmp_path / "gpu.md").read_text()
    assert "failed: no / more" in table
    assert (
        "Left out, as time was up:\n\n- GPT-2 124M: sdpa, compiled\n- GPT-2 124M: eager\n- GPT-2 124M: sdpa\n" in table
    )
    assert "nothing exact was timed" in table


# ---------------------------------------------------------------------------------------------------------------------
# Faults are found


def k_is_not_undone(monkeypatch):
    monkeypatch.setattr(accumulate, "loss_scale", lambda _: 1)


def continue_positions(monkeypatch):
    """Count positions on from sample to sample of a micro-batch."""
    right = attention.last_hidden_at
    wrong = lambda bert, **data: right(bert, **data | {"position_ids": torch.arange(data["input_ids"].numel())[None]})  # noqa: E731
    monkeypatch.setattr(attention, "last_hidden_at", wrong)


def mix_samples(monkeypatch):
    right = gpt2_pretraining.gpt2_hidden

    def wrong(*inputs):
        hidden = right(*inputs)
        return hidden - 0.1 * hidden.mean(0)

    monkeypatch.setattr(gpt2_pretraining, "gpt2_hidden", wrong)


def statistics_of_a_micro_batch(monkeypatch):
    right = batch_norm.WholeStep
    monkeypatch.setattr(batch_norm, "WholeStep", lambda _: right(torch.nn.Identity()))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (RAGGED.name, k_is_not_undone),
        (RAGGED.name, continue_positions),
        ("GPT-2 124M", k_is_not_undone),
        ("GPT-2 124M", mix_samples),
        ("ResNet-50", k_is_not_undone),
        ("ResNet-50", statistics_of_a_micro_batch),
    ],
)
def test_faults_are_found(name, fault, monkeypatch):
    kernel = "channels_last" if name == "ResNet-50" else "sdpa"
    assert check(TINY[name], kernel)["exact"]
    fault(monkeypatch)
    result = check(TINY[name], kernel)
    assert not result["exact"]
    assert result["cut"] > 10 * result["cut_bound"]


def _probabilities(q, k):
    return (q.transpose(0, 1) @ k.permute(1, 2, 0) / math.sqrt(q.shape[-1])).softmax(-1)


def _slices(ends_q, ends_k):
    """Make slices of each sample's queries and keys."""
    borders = zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True)
    return [(slice(*span_q), slice(*span_k)) for span_q, span_k in borders]


def _forward(q, k, v, ends_q, ends_k, *_):
    output = torch.empty_like(q)
    for a, b in _slices(ends_q, ends_k):
        y = _probabilities(q[a].float(), k[b].float()) @ v[b].float().transpose(0, 1)
        output[a] = y.transpose(0, 1).to(output.dtype)
    return output, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


def _backward(d_output, q, k, v, output, lse, ends_q, ends_k, *_):
    gradients = tuple(map(torch.empty_like, (q, k, v)))
    for a, b in _slices(ends_q, ends_k):
        dy, q1, k1, v1 = (x.float().transpose(0, 1) for x in (d_output[a], q[a], k[b], v[b]))
        p, dp = _probabilities(q[a].float(), k[b].float()), dy @ v1.transpose(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        parts = (a, ds @ k1), (b, ds.transpose(1, 2) @ q1), (b, p.transpose(1, 2) @ dy)
        for gradient, (place, x) in zip(gradients, parts, strict=True):
            gradient[place] = x.transpose(0, 1).to(gradient.dtype)
    return gradients


def test_kernels_of_variable_length_see_each_sample_alone(monkeypatch):
    """torch's need a GPU; here sums by hand take their place, beneath torch's own operators."""
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
    right = attention.kernel_candidates

    def candidates(model, device, mixed_precision, settings):
        return right(model, torch.device("cuda") if mixed_precision == "bf16" else device, mixed_precision, settings)

    monkeypatch.setattr(attention, "kernel_candidates", candidates)
    assert check(RAGGED, "varlen")["exact"]
    single_sample = lambda *ends: [tuple(slice(0, int(offsets[-1])) for offsets in ends)]  # noqa: E731
    monkeypatch.setattr(sys.modules[__name__], "_slices", single_sample)
    result = check(RAGGED, "varlen")
    assert result["cut"] <= result["cut_bound"]  # which has no such kernel
    assert result["bf16"] > 2 * result["bf16_bound"]
    assert not result["exact"]


# ---------------------------------------------------------------------------------------------------------------------
# Data and arithmetic


@pytest.mark.parametrize("name", [name for name in TINY if "BERT" in name])
def test_micro_batches_hold_every_sample_once_and_few_more_tokens(name):
    case = TINY[name]
    samples = gpu_cases.draw(case, 1)
    step = gpu_cases.make_step(case, samples, torch.device("cpu"), max_tokens=case.tokens)
    assert step.tokens == sum(len(pair.tokens) for pair in samples)
    assert torch.stack(step.counts).sum(0).tolist() == [sum(len(pair.places) for pair in samples), len(samples)]
    labels = torch.cat([micro_batch["masked_labels"] for micro_batch in step.micro_batches]).sort().values
    labels = labels[labels != losses.IGNORED]
    assert labels.tolist() == sorted(np.concatenate([pair.labels for pair in samples]).tolist())
    for micro_batch, (num_masked, num_samples) in zip(
        step.micro_batches, torch.stack(step.counts).tolist(), strict=True
    ):
        assert micro_batch["input_ids"].numel() <= 1.04 * case.tokens + 1, "sizes are rounded up"
        assert micro_batch["source"].numel() <= 1.25 * 1.125 * case.tokens
        queries = micro_batch["input_ids"][0, micro_batch["queries"]]
        assert (queries[micro_batch["masked_index"][:num_masked]] == 3).all()
        assert (micro_batch["position_ids"][0, micro_batch["queries"]][micro_batch["first_index"]] == 0).all()
        assert len(micro_batch["first_index"]) == len(micro_batch["next_sentence_label"]) == num_samples
    assert gpu_cases.draw_lengths(np.random.default_rng(0), 1000, 128, {"counts": [0, 1], "full": 1}).min() > 63


def test_work_is_that_of_real_tokens():
    case = dataclasses.replace(gpu_cases.CASES[0], batch=2)
    formula = 2 * transformer.bert_flops(30522, 1024, 4096, 24, 128, 19)
    whole, actual = gpu_cases.count_flops(case, gpu_cases.draw(case, 0))
    assert whole == formula
    assert 0.96 < actual / formula < 0.98


def test_work_that_is_done_is_what_torch_counts():
    case = TINY["BERT-Large, length 512"]
    step = gpu_cases.make_step(case, gpu_cases.draw(case, 0), torch.device("cpu"))
    model = gpu_cases.build(case, gpu_cases.Variant("", 0, "sdpa"), torch.device("cpu"), few=False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # the others are not counted on a CPU
        sums, _ = model(**step.micro_batches[0])
        sums.sum().backward()
    assert counter.get_total_flops() == step.flops_done


def test_models_and_kernels_are_those_of_the_scripts():
    """On a GPU, where none is needed to name them."""
    kernels = {"bert": ["sdpa", "varlen"], "gpt2": ["sdpa"], "resnet": ["channels_last", "channels_first"]}
    for case in gpu_cases.cases(tiny=True):
        variants = gpu_cases.variants(case, torch.device("cuda"))
        assert [item.name for item in variants if not item.compiled] == kernels[case.kind]
        assert [item.kernel for item in variants if item.compiled and not item.dropout] == kernels[case.kind]
        model = gpu_cases.build(case, variants[0], torch.device("cpu"), few=False)
        assert type(model) is gpu_cases.make_recipe(case).parts.find("model")
        assert any(module._compiled_call_impl is not None for module in model.modules())


def test_published_numbers_are_parts_of_what_their_devices_reach():
    table = {case.name: gpu.published(case) for case in gpu_cases.CASES}
    best = {name: max(rows, key=lambda row: row["of_products"])["of_products"] for name, rows in table.items() if rows}
    shares = {row["hardware"]: row["of_products"] for rows in table.values() for row in rows if "gpt2" in row["work"]}
    assert shares["8xa100-80"] == pytest.approx(0.69, abs=0.01)
    assert shares["8xh100"] == pytest.approx(0.606, abs=0.01)
    assert len(best) == 5
    assert all(0.05 < share < 0.75 for share in best.values())


def test_lengths_have_their_table():
    tables = json.loads(gpu_cases.LENGTHS.read_text())["lengths"]
    assert sum(len(table["counts"]) + 1 for table in tables.values()) <= 60
    rng = np.random.default_rng(0)
    for length, table in tables.items():
        lengths = gpu_cases.draw_lengths(rng, 20000, int(length), table)
        full = table["full"] / (sum(table["counts"]) + table["full"])
        assert lengths.max() == int(length)
        assert (lengths == int(length)).mean() == pytest.approx(full, abs=0.02)


def test_recipes_of_cases_are_the_catalog_s():
    for case in gpu_cases.CASES:
        recipe = load(case.recipe)
        assert getattr(recipe, "max_seq_length", getattr(recipe, "block_size", 1)) == case.length
