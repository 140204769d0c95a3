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
def measured() -> dict:
    return json.loads((RESULTS / "audit.json").read_text())


def test_verdicts_follow_from_the_numbers(measured):
    tolerance = measured["about"]["tolerance"]
    for row in [*measured["scripts"], *measured["kernels"], measured["control"]]:
        within = max(row["errors"] + row["loss_errors"]) <= row.get("tolerance", tolerance)
        assert row["exact"] == (within and all(found["cause"] in HARMLESS for found in row["findings"]))


def test_every_script_in_every_layout_takes_all_steps(benchmark, measured):
    rows = [(row["script"], row["layout"], len(row["errors"])) for row in measured["scripts"]]
    layouts = [f"b {b}, N {num_processes}" for b, num_processes in benchmark.LAYOUTS]
    assert rows == [(script, layout, 8) for script in benchmark.SCRIPTS for layout in layouts]


def test_every_kernel_of_every_script_takes_all_steps(benchmark, measured):
    rows = [(row["script"], row["precision"], row["kernel"], len(row["errors"])) for row in measured["kernels"]]
    precisions = {name: ["no"] if "float64" in name else ["no", "bf16"] for name in benchmark.KERNELS}
    assert rows == [
        (name, precision, way, 8)
        for name in benchmark.KERNELS
        for precision in precisions[name]
        for way in benchmark.ways_of(name, precision)
    ]


def test_micro_batches_are_so_large_that_they_take_several_tables(measured):
    """In float32, where sums in another order are seen."""
    errors = {(row["script"], row["kernel"]): row["errors"] for row in measured["kernels"] if row["precision"] == "no"}
    by_length = [(script, kernel) for script, kernel in errors if BY_LENGTH in kernel]
    assert len(by_length) == 8
    for script, kernel in by_length:
        assert errors[script, kernel] != errors[script, kernel.replace(BY_LENGTH, "")]


@pytest.mark.parametrize(("program", "precision"), [(p, precision) for p in TINIES for precision in ("no", "bf16")])
def test_the_kernels_are_those_that_auto_compares(benchmark, train, monkeypatch, program, precision):
    asked = []
    monkeypatch.setattr(kernels, "choose", lambda *arguments: asked.append(list(arguments[-1])))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    train("run", "--max_train_steps 1 --global_batch_size 2", program=program)
    (name, *_) = (name for name, (of, *_) in benchmark.SCRIPTS.items() if of == program)
    assert [sorted(names) for names in asked] == [sorted(benchmark.ways_of(name, precision))]


def test_a_script_that_is_not_exact_or_a_control_that_passes_fails(benchmark, measured):
    assert benchmark.is_as_promised(measured)
    wrong, passing = copy.deepcopy(measured), copy.deepcopy(measured)
    wrong["scripts"][-1]["exact"] = False
    other = copy.deepcopy(measured)
    other["kernels"][0]["exact"] = False
    passing["control"]["exact"] = True
    assert not benchmark.is_as_promised(wrong)
    assert not benchmark.is_as_promised(passing)
    assert not benchmark.is_as_promised(other)
