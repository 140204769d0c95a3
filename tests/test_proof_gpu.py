"""benchmarks/proof_gpu.py without a GPU: small shapes, complete tables, small errors, faults that are found."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from cases import thorough
from common import ROOT, fresh_accelerator, load_benchmark, tasks_of, tiny_argv
from forks import call_in_fork
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.utils.flop_counter import FlopCounterMode

from samestep.contrib import whole_step
from samestep.errors import UsageError, exit_code
from samestep.models import attention, gpt2_pretraining
from samestep.recipe import run_settings
from samestep.recipe.catalog import load
from samestep.step import accumulate, losses
from samestep.training import launch
from stepplan import transformer

proof = load_benchmark("proof_gpu")
speed, speed_cases, tasks = proof.speed, sys.modules["proof.speed_cases"], sys.modules["proof.tasks"]
PROGRAM = ROOT / "benchmarks" / "proof_gpu.py"
TINY = {case.name: case for case in speed_cases.cases(tiny=True)}
RAGGED = TINY["BERT-Large, length 128, as real pairs"]


@pytest.fixture(autouse=True)
def fresh():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # shapes are too small for more
    fresh_accelerator()
    yield
    speed._accelerator.cache_clear()
    speed.CHECKS.clear()
    fresh_accelerator()
    torch.set_num_threads(threads)


def check(case: speed_cases.Case, kernel: str) -> dict:
    return speed.Checks(Accelerator(mixed_precision="bf16", cpu=True), case)(speed_cases.Variant(kernel, 0, kernel))


# ---------------------------------------------------------------------------------------------------------------------
# The command


def start(output: Path, *words: str) -> subprocess.Popen:
    """Start the command as a user does, with its output in a pipe."""
    command = [sys.executable, str(PROGRAM), "--tiny", "--output", str(output), *words]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def read(output: Path) -> list[dict]:
    return [line for line in proof.read_rows(output.with_suffix(".jsonl")) if "item" in line]


@pytest.mark.slow
def test_a_rehearsal_is_killed_and_goes_on(tmp_path, capfd, monkeypatch):
    """The part with the shortest items; the workflow rehearses all items of all parts."""
    output = tmp_path / "gpu"
    process = start(output, "--only", "planner")
    for line in process.stdout:
        if "as promised" in line:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    before = read(output)
    assert len(before) == 1
    assert proof.main(["--tiny", "--output", str(output), "--only", "planner"]) == 0
    said = capfd.readouterr().out
    rows = read(output)
    assert rows[0] == before[0], "none is computed twice"
    assert "2 of 2 items computed, 0 not as promised" in said
    assert [row["item"] for row in rows] == list(proof.planner.TINY_WORKS)
    page = output.with_suffix(".md").read_text()
    assert "a rehearsal of the program, no measurement" in page
    assert all(f"| {row['item']} | " in page for row in rows)


@pytest.fixture
def rehearse(monkeypatch, tmp_path):
    """Compute items of a part in this process: rehearse(part, item, ...) -> rows by item."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # which trainings set anew
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def compute(part, *items: str) -> dict[str, dict]:
        rows = {}
        for item in items:
            try:
                rows[item] = {"item": item} | part.compute(item, is_tiny=True)
            except UsageError as error:
                rows[item] = {"item": item, "refused": str(error)}
        return rows

    return compute


def test_scripts_train_or_say_why_not(rehearse):
    rows = rehearse(proof.programs, *(f"train_captcha {kind}" for kind in proof.programs.PRECISIONS))
    assert "mixed_precision is fp16" in rows["train_captcha fp16"]["refused"]
    assert all(len(rows[f"train_captcha {kind}"]["losses"]) == 2 for kind in ("fp32", "bf16"))
    assert all(map(proof.programs.is_good, rows.values()))
    assert proof.programs.markdown(rows).count("| yes |") == 2


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("item", "cuts"),
    [("GPT-2, fp32, cpu", ["4", "uneven", "tokens"]), thorough("GPT-2, 2 processes, fp32, cpu", ["2 processes"])],
)
def test_cuts_in_time_and_in_space_are_the_same(rehearse, item, cuts):
    """GPT-2 in every cut on one process, and in one on two."""
    rows = rehearse(proof.equivalence, item)
    (row,) = rows.values()
    assert list(row["cuts"]) == cuts
    assert proof.equivalence.is_good(row)
    assert "| yes |" in proof.equivalence.markdown(rows)


def test_memory_that_runs_out_costs_no_exactness(rehearse):
    rows = rehearse(proof.memory, "GPT-2, fp32")
    assert all(map(proof.memory.is_good, rows.values()))
    assert "memory ran out: the step is done again" in proof.memory.markdown(rows)


def test_plans_stand_beside_what_is_measured(rehearse):
    """Memory is measured on GPUs only."""
    rows = rehearse(proof.planner, "Llama, small, LoRA, recomputed")
    (row,) = rows.values()
    assert row["planned_memory"] > 1e6
    assert row["planned_seconds"] > 0 < row["step_seconds"]
    measured = row | {"memory": row["planned_memory"] / 1.1, "step_seconds": row["planned_seconds"]}
    assert "memory: 10.0% off in the median, 10.0% at the worst; seconds: 0.0%" in proof.planner.markdown(
        {"": measured}
    )
    recipes = {work.recipe for work in proof.planner.WORKS.values()}
    assert len(proof.planner.WORKS) == 12
    assert all(load(name) for name in recipes)


def test_in_16_bits_a_gpu_takes_the_kernel_of_variable_length():
    trained = []
    train = lambda *words: trained.append(words) or ([1.0], {"w": torch.ones(1)})  # noqa: E731
    proof.equivalence.compute_by(train, "SFT, bf16, cuda")
    assert [words[3:] for words in trained if words[2] == "bf16"] == [("varlen",)] * 4
    assert [words[3:] for words in trained if words[2] == "no"] == [()]


def test_processes_share_a_gpu(monkeypatch):
    """Over gloo, each as the first process of the device."""
    for on_gpu in (True, False):
        environment = tasks.make_environment(2, "bf16", is_sharded=False, on_gpu=on_gpu)
        assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert bool(tasks.NO_GPU.keys() & environment.keys()) == (not on_gpu)
    monkeypatch.setenv("LOCAL_RANK", "1")

    def share() -> int:
        tasks.share_device()
        backend = launch.InitProcessGroupKwargs(init_method=None).to_kwargs()["backend"]
        print(os.environ["LOCAL_RANK"], backend, file=sys.stderr, flush=True)
        return 0

    assert call_in_fork(share) == (0, "0 gloo\n")


@pytest.mark.slow
def test_every_case_is_timed_and_exact():
    """One case of each kind of model, BERT's with samples of several lengths; the other cases differ in size alone."""
    chosen, rows = (RAGGED.name, "GPT-2 124M", "ResNet-50"), {}
    for task in speed.list_tasks(is_tiny=True, has_gpu=False):
        for item in task.items:
            if item == speed.PRODUCTS or item.partition(": ")[0] in chosen:
                rows[item] = {"item": item} | speed.compute(item, is_tiny=True)
    table = speed.markdown(rows)
    assert rows.pop(speed.PRODUCTS)["flops"] > 0
    assert {row["case"] for row in rows.values()} == set(chosen)
    for case in chosen:
        assert speed.best(list(rows.values()), case) is not None
        assert f"| **{case}** |" in table
    for row in rows.values():
        assert "failed" not in row
        for key in ("samples_per_second", "tokens_per_second", "seconds_per_step"):
            assert row[key] > 0
        assert 0 < row["flops_done_per_second"] <= row["flops_per_second"]
        assert row["graphs_while_timed"] == 0
        assert row["check"]["cut"] <= row["check"]["cut_bound"] <= 1e-5
        assert row["check"]["bf16"] <= 4 * row["check"]["bf16_reference"]
        assert min(row["check"]["controls"].values()) > 1e-3
        assert speed.is_good(row)
    assert any(row["graphs"] for item, row in rows.items() if item.endswith("compiled"))
    assert max(len(set(row["micro_steps"]) | {1}) for row in rows.values()) > 1


def test_what_cannot_be_proved_is_said(capsys, tmp_path):
    if not torch.cuda.is_available():
        assert exit_code(lambda: proof.main([])) == 2
        assert capsys.readouterr().err.startswith("ERROR: no CUDA device is there")
    words = ["--tiny", "--output", str(tmp_path / "gpu"), "--items", "nothing of the kind"]
    assert exit_code(lambda: proof.main(words)) == 2
    assert "is part of no item's name in programs, equivalence" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    words = ["--tiny", "--output", str(tmp_path / "file" / "gpu")]
    assert exit_code(lambda: proof.main(words)) == 2
    assert "file/gpu cannot be written" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text('{"session": 1}\n[1]\n{"session": "1"}\n{"part": "sp')
    assert proof.read_rows(tmp_path / "rows.jsonl") == [{"session": 1}]
    lines = tmp_path / "requirements.txt"
    lines.write_text("# what is needed\nno-such-package>=2\ntrl\n")
    with pytest.raises(
        UsageError, match=r"needs no-such-package, which are not installed: pip install -r .*requirements"
    ):
        proof.check_packages(lines)


def test_the_page_is_what_was_computed():
    """As long as no GPU has computed rows, it says that in one line."""
    rows, page = proof.read_rows(proof.harness.RESULTS / "gpu.jsonl"), proof.PAGE.read_text()
    if not rows:
        assert page == proof.NO_ROWS
        return
    about = [line["about"] for line in rows if "about" in line][-1]
    tasks = [task for module in proof.PARTS.values() for task in module.list_tasks(False, True)]
    assert page == proof.markdown(about, tasks, proof.select(rows, about))


# ---------------------------------------------------------------------------------------------------------------------
# What is left to do


def test_rows_of_other_devices_or_versions_do_not_count():
    about = proof.describe_session(True, "a command")
    other = about | {"device": "another"}
    newer = about | {"versions": about["versions"] | {"torch": "9.9"}}
    lines = [{"session": number, "about": each} for number, each in enumerate([about, other, newer], 1)]
    lines += [{"session": number, "part": "programs", "item": f"item {number}"} for number in (1, 2, 3)]
    assert list(proof.select(lines, about)) == [("programs", "item 1")]
    assert list(proof.select(lines, newer)) == [("programs", "item 3")]


def test_what_is_missing_comes_before_what_failed():
    row = {"part": "programs", "session": 1}
    done, failed = {"losses": [1.0, 1.0]}, {"failed": "it broke"}
    rows = {
        ("programs", "a bf16"): row | {"item": "a bf16"} | done,
        ("programs", "b bf16"): row | {"item": "b bf16"} | failed,
        ("programs", "b fp16"): row | {"item": "b fp16", "refused": "there is none on a CPU"},
        ("programs", "c bf16"): row | {"item": "c bf16", "refused": "and it should not be"},
    }
    tasks = [proof.Task("programs", ("b bf16", "a bf16", "b fp16")), proof.Task("programs", ("c bf16", "d bf16"))]
    assert [task.items for task in proof.find_missing(tasks, rows)] == [("d bf16",), ("b bf16",), ("c bf16",)]


def test_what_ends_a_process_is_a_row_and_the_rest_is_computed(tmp_path):
    """A crash of the first item takes no other with it, and one that hangs is ended."""
    program = tmp_path / "child.py"
    program.write_text(
        "import json, os, signal, sys, threading\n"
        "part, file, session, size, *items = sys.argv[1:]\n"
        "for item in items:\n"
        "    if item == 'crash': os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    if item == 'hang': threading.Event().wait()\n"
        "    print(json.dumps({'part': part, 'item': item, 'session': int(session)}), file=open(file, 'a'), flush=True)\n"
    )
    clock = iter(range(0, 10**9, 100))  # whoever looks again finds 100 s gone
    file = tmp_path / "rows.jsonl"
    with proof.Runner(file, 1, True, 1, math.inf, program, lambda: next(clock)) as runner:
        for _ in runner.run([proof.Task("programs", ("first", "crash", "last"), seconds=10**8)]):
            pass
        for _ in runner.run([proof.Task("programs", ("hang", "after"), seconds=10**4)]):
            pass
    rows = {row["item"]: row for row in proof.read_rows(file)}
    assert list(rows) == ["first", "crash", "last", "hang", "after"]
    assert f"ended with {-signal.SIGSEGV}: see " in rows["crash"]["failed"]
    assert "took more than 10000 s: see " in rows["hang"]["failed"]
    assert not {"failed"} & (rows["first"].keys() | rows["last"].keys() | rows["after"].keys())


@pytest.mark.parametrize("name", proof.equivalence.MODELS)
def test_models_are_what_their_program_trains(name, tmp_path):
    program, flags, _ = proof.equivalence.MODELS[name]
    cut = proof.equivalence.CUTS["uneven"]
    argv = tiny_argv(program, tmp_path / "corpus.jsonl", tmp_path / "run", f"{proof.equivalence.STEP}{flags}{cut}")
    recipe, _ = run_settings.parse(argv, tasks_of(program), "")
    assert recipe.global_batch_size == 16


def test_what_differs_is_not_as_promised():
    """Of each part a row that is as promised, and one that is not."""
    cut = {"losses": 1e-7, "parameters": 1e-6, "rounding": 1e-3}
    exact, rounded = (
        {"bounds": (1e-5, 1e-4), "cuts": {"4": cut}},
        {"bounds": None, "rounding": 1e-3, "cuts": {"4": cut}},
    )
    bits = {"curve": "a", "model": "b", "optimizer": "c"}
    lost = {"events": ["memory ran out"], "losses": 1e-7, "parameters": 1e-6}
    for module, good, bad in (
        (proof.programs, {"item": "x bf16", "losses": [1.0]}, {"item": "x bf16", "refused": "no"}),
        (proof.equivalence, exact, exact | {"cuts": {"4": cut | {"losses": 2e-5}}}),
        (proof.equivalence, exact, exact | {"cuts": {"4": cut | {"parameters": 2e-4}}}),
        (proof.equivalence, rounded, rounded | {"cuts": {"4": cut | {"rounding": 2.1e-3}}}),
        (proof.reproducible, {"hashes": dict.fromkeys("abc", bits)}, {"hashes": {"a": bits, "b": bits, "c": {}}}),
        (proof.reproducible, {"hashes": dict.fromkeys("abc", bits)}, {"hashes": {"a": bits, "b": bits}}),
        (proof.memory, lost, lost | {"events": []}),
        (proof.memory, lost, lost | {"losses": 1e-3}),
    ):
        assert module.is_good(good)
        assert not module.is_good(bad)
        assert not module.is_good({"item": "x bf16", "failed": "it broke"})


def test_memory_that_runs_out_is_tried_in_smaller_micro_batches():
    """Down to one sample."""
    sizes = []

    def timed(accelerator, case, variant, tokens):
        sizes.append(tokens)
        raise torch.OutOfMemoryError("no | more")

    checks = {"GPT-2 124M": lambda _: {"exact": True, "controls_found": True}}
    row = speed.measure_variant(
        Accelerator(cpu=True), TINY["GPT-2 124M"], speed_cases.Variant("sdpa", 2, "sdpa"), checks, timed
    )
    assert sizes == [64, 32]
    assert row["failed"] == "no / more"
    assert not speed.is_good(row)
    del row["check"]
    table = speed.markdown({"GPT-2 124M: sdpa": row})
    assert "failed: no / more" in table
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
    right = whole_step.WholeStep
    monkeypatch.setattr(whole_step, "WholeStep", lambda _: right(torch.nn.Identity()))


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


FAULTS = []
"""Whether the kernels below see all samples as one."""


def _slices(ends_q, ends_k):
    """Make slices of each sample's queries and keys."""
    if FAULTS:
        return [tuple(slice(0, int(offsets[-1])) for offsets in (ends_q, ends_k))]
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
    FAULTS.append("one sample")
    try:
        result = check(RAGGED, "varlen")
    finally:
        FAULTS.clear()
    assert result["cut"] <= result["cut_bound"]  # which has no such kernel
    assert result["bf16"] > 2 * result["bf16_bound"]
    assert not result["exact"]


# ---------------------------------------------------------------------------------------------------------------------
# Data and arithmetic


@pytest.mark.parametrize("name", [name for name in TINY if "BERT" in name])
def test_micro_batches_hold_every_sample_once_and_few_more_tokens(name):
    case = TINY[name]
    samples = speed_cases.draw(case, 1)
    step = speed_cases.make_step(case, samples, torch.device("cpu"), max_tokens=case.tokens)
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
    assert speed_cases.draw_lengths(np.random.default_rng(0), 1000, 128, {"counts": [0, 1], "full": 1}).min() > 63


def test_work_is_that_of_real_tokens():
    case = dataclasses.replace(speed_cases.CASES[0], batch=2)
    formula = 2 * transformer.bert_flops(30522, 1024, 4096, 24, 128, 19)
    whole, actual = speed_cases.count_flops(case, speed_cases.draw(case, 0))
    assert whole == formula
    assert 0.96 < actual / formula < 0.98


def test_work_that_is_done_is_what_torch_counts():
    case = TINY["BERT-Large, length 512"]
    step = speed_cases.make_step(case, speed_cases.draw(case, 0), torch.device("cpu"))
    model = speed_cases.build(case, speed_cases.Variant("", 0, "sdpa"), torch.device("cpu"), few=False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # the others are not counted on a CPU
        sums, _ = model(**step.micro_batches[0])
        sums.sum().backward()
    assert counter.get_total_flops() == step.flops_done


def test_models_and_kernels_are_those_of_the_scripts():
    """On a GPU, where none is needed to name them."""
    kernels = {"bert": ["sdpa", "varlen"], "gpt2": ["sdpa"], "resnet": ["channels_last", "channels_first"]}
    for case in speed_cases.cases(tiny=True):
        variants = speed_cases.variants(case, torch.device("cuda"))
        assert [item.name for item in variants if not item.compiled] == kernels[case.kind]
        assert [item.kernel for item in variants if item.compiled and not item.dropout] == kernels[case.kind]
        model = speed_cases.build(case, variants[0], torch.device("cpu"), few=False)
        assert type(model) is speed_cases.make_recipe(case).parts.find("model")
        assert any(module._compiled_call_impl is not None for module in model.modules())


def test_published_numbers_are_parts_of_what_their_devices_reach():
    table = {case.name: speed.published(case) for case in speed_cases.CASES}
    best = {name: max(rows, key=lambda row: row["of_products"])["of_products"] for name, rows in table.items() if rows}
    shares = {row["hardware"]: row["of_products"] for rows in table.values() for row in rows if "gpt2" in row["work"]}
    assert shares["8xa100-80"] == pytest.approx(0.69, abs=0.01)
    assert shares["8xh100"] == pytest.approx(0.606, abs=0.01)
    assert len(best) == 5
    assert all(0.05 < share < 0.75 for share in best.values())


def test_lengths_have_their_table():
    tables = json.loads(speed_cases.LENGTHS.read_text())["lengths"]
    assert sum(len(table["counts"]) + 1 for table in tables.values()) <= 60
    rng = np.random.default_rng(0)
    for length, table in tables.items():
        lengths = speed_cases.draw_lengths(rng, 20000, int(length), table)
        full = table["full"] / (sum(table["counts"]) + table["full"])
        assert lengths.max() == int(length)
        assert (lengths == int(length)).mean() == pytest.approx(full, abs=0.02)


def test_recipes_of_cases_are_the_catalog_s():
    for case in speed_cases.CASES:
        recipe = load(case.recipe)
        assert getattr(recipe, "max_seq_length", getattr(recipe, "block_size", 1)) == case.length
