"""docs/audited.md shows every loop that is audited, and what was measured."""

import json

import pytest
from causal_models import CONFIGS
from common import ROOT, load_benchmark

from stepaudit.causes import HARMLESS


@pytest.fixture(scope="module")
def benchmark():
    return load_benchmark("audited")


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / "audited.json").read_text())


def test_every_loop_is_measured_under_all_its_layouts(benchmark, results):
    rows = {row["loop"]: [run["layout"] for run in row["runs"]] for row in results["rows"]}
    layouts = {
        title: ["x".join(map(str, layout)) for layout in loop.layouts] for title, loop in benchmark.LOOPS.items()
    }
    assert rows == layouts
    assert len(rows) >= 60
    assert all((ROOT / loop.program).is_file() for loop in benchmark.LOOPS.values())
    assert [row["model"] for row in results["packing"]] == list(CONFIGS)


def test_verdicts_follow_from_the_numbers(benchmark, results):
    """A loop without a finding is exact in every step, and one with an error has a finding."""
    for row in results["rows"]:
        for run in (run for run in row["runs"] if "failure" not in run):
            is_exact = all(error is not None and error <= benchmark.TOLERANCE for error in run["errors"])
            causes = {finding["cause"] for finding in run["findings"]} - HARMLESS
            assert is_exact or causes, row["loop"]
            assert not is_exact or causes <= {"shifted_labels", "dropped", "num_steps"}, row["loop"]


def test_a_plain_computation_agrees_with_every_verdict(benchmark, results):
    """Where it does not, the page says so."""
    disagreeing = [
        (row["loop"], run["layout"])
        for row in results["rows"]
        for run in row["runs"]
        if "failure" not in run
        and not run["check"]["agrees"]
        and benchmark.ERRS not in benchmark.NOTES.get(row["loop"], "")
    ]
    assert disagreeing == []


def test_what_other_packages_are_needed_is_pinned(benchmark):
    """Loops whose libraries requirements.txt does not have are run with loops-requirements.txt."""
    pinned = {
        line.partition("==")[0]
        for name in ("requirements.txt", "benchmarks/loops-requirements.txt")
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    }
    libraries = {library for loop in benchmark.LOOPS.values() for library in loop.libraries}
    assert libraries <= pinned
    assert benchmark.NOTES.keys() <= benchmark.LOOPS.keys()


def test_the_page_shows_the_results(benchmark, results):
    page = (ROOT / "docs" / "audited.md").read_text(encoding="utf-8")
    parts = benchmark.overview(results, "../", "audit.md"), benchmark.packing(results), benchmark.resuming(results)
    for table in parts:
        assert table in page
