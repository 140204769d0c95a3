"""benchmarks/results/audit.md shows what was measured, and its verdicts follow from the numbers."""

import copy
import json

import pytest
from common import ROOT, TINIES, load_benchmark

from samestep.models.attention import BY_LENGTH
from samestep.training import kernels
from stepaudit.judge import HARMLESS

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def benchmark():
    return load_benchmark("audit")


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads((RESULTS / "audit.json").read_text())


def test_verdicts_follow_from_the_numbers(results):
    tolerance = results["about"]["tolerance"]
    for row in [*results["scripts"], *results["kernels"], results["control"]]:
        is_within_tolerance = max(row["errors"] + row["loss_errors"]) <= row.get("tolerance", tolerance)
        assert row["exact"] == (
            is_within_tolerance and all(finding["cause"] in HARMLESS for finding in row["findings"])
        )


def test_every_script_in_every_layout_takes_all_steps(benchmark, results):
    rows = [(row["script"], row["layout"], len(row["errors"])) for row in results["scripts"]]
    layouts = [f"b {b}, N {num_processes}" for b, num_processes in benchmark.LAYOUTS]
    assert rows == [(script, layout, 8) for script in benchmark.SCRIPTS for layout in layouts]


def test_every_kernel_of_every_script_takes_all_steps(benchmark, results):
    rows = [(row["script"], row["precision"], row["kernel"], len(row["errors"])) for row in results["kernels"]]
    precisions = {name: ["no"] if "float64" in name else ["no", "bf16"] for name in benchmark.KERNELS}
    assert rows == [
        (name, precision, kernel, 8)
        for name in benchmark.KERNELS
        for precision in precisions[name]
        for kernel in benchmark.list_kernels(name, precision)
    ]


def test_micro_batches_are_so_large_that_they_take_several_tables(results):
    """In float32, where sums in another order are seen."""
    errors = {(row["script"], row["kernel"]): row["errors"] for row in results["kernels"] if row["precision"] == "no"}
    by_length = [(script, kernel) for script, kernel in errors if BY_LENGTH in kernel]
    assert len(by_length) == 8
    for script, kernel in by_length:
        assert errors[script, kernel] != errors[script, kernel.replace(BY_LENGTH, "")]


@pytest.mark.parametrize(
    ("program", "precision"),
    [(p, precision) for p in TINIES for precision in ("no", "bf16")],
)
def test_the_kernels_are_those_that_auto_compares(benchmark, train, monkeypatch, program, precision):
    compared_names = []
    monkeypatch.setattr(kernels, "choose_kernel", lambda *arguments: compared_names.append(list(arguments[-1])))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    train("run", "--max_train_steps 1 --global_batch_size 2", program=program)
    (name, *_) = (name for name, (script_program, *_) in benchmark.SCRIPTS.items() if script_program == program)
    assert [sorted(names) for names in compared_names] == [sorted(benchmark.list_kernels(name, precision))]


def test_a_script_that_is_not_exact_or_a_control_that_passes_fails(benchmark, results):
    assert benchmark.is_as_promised(results)
    wrong_script, passing_control = copy.deepcopy(results), copy.deepcopy(results)
    wrong_script["scripts"][-1]["exact"] = False
    wrong_kernel = copy.deepcopy(results)
    wrong_kernel["kernels"][0]["exact"] = False
    passing_control["control"]["exact"] = True
    assert not benchmark.is_as_promised(wrong_script)
    assert not benchmark.is_as_promised(passing_control)
    assert not benchmark.is_as_promised(wrong_kernel)
