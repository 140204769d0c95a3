"""Benchmarks share one harness, and what is committed of each is what its code makes of its numbers."""

import argparse
import doctest
import itertools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from common import ROOT, load_benchmark
from waiting import until

from samestep.recipe.catalog import load

harness = load_benchmark("harness")
RESULTS, PAGES = (sorted(path.stem for path in harness.RESULTS.glob(f"*.{end}")) for end in ("json", "md"))
# Generated part of a document -> the document, the results that it shows, and the function that makes it of them.
PARTS = {
    "audit": ("docs/exactness.md", "audit", "overview"),
    "doctor": ("docs/doctor.md", "doctor", "part"),
    "fault-tolerance": ("docs/fault-tolerance.md", "fault_tolerance", "part"),
    "batch norm": ("docs/noise-and-batch-norm.md", "batch_norm", "part"),
    "cifar10": ("docs/cifar10.md", "cifar10", "part"),
    "communication": ("docs/communication.md", "communication", "part"),
    "grid": ("docs/noise-and-batch-norm.md", "reproducible", "describe_grid"),
    "language models": ("docs/planner.md", "language_models", "describe"),
    "loops": ("docs/exactness.md", "loops", "part"),
    "memory": ("docs/planner.md", "memory", "describe"),
    "modern": ("docs/optimizers.md", "modern", "part"),
    "muon": ("docs/optimizers.md", "muon", "part"),
    "overlap": ("docs/overlap.md", "overlap", "part"),
    "stability": ("docs/first-runs.md", "stability", "part"),
    "templates": ("docs/chat-templates.md", "templates", "part"),
    "time": ("docs/planner.md", "timing", "describe"),
    "versions": ("docs/install.md", "versions", "part"),
    "verdicts": ("docs/audit-limits.md", "verdicts", "part"),
}


@pytest.fixture(scope="module")
def programs():
    return {name: load_benchmark(name) for name in RESULTS}


def read_results(name: str) -> dict:
    return json.loads((harness.RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def read_part(document: Path, name: str) -> str:
    """Read what stands between the markers of a generated part of a document."""
    text = document.read_text(encoding="utf-8")
    return text.split(f"<!-- {name}: begin -->\n")[1].split(f"<!-- {name}: end -->\n")[0]


def test_all_results_are_shown():
    assert set(RESULTS) == set(PAGES) | {name for _, name, _ in PARTS.values()}
    assert set(PAGES) <= set(RESULTS)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_what_was_measured(programs, name):
    assert (harness.RESULTS / f"{name}.md").read_text(encoding="utf-8") == programs[name].markdown(read_results(name))


@pytest.mark.parametrize("part", PARTS)
def test_a_generated_part_of_a_document_shows_what_was_measured(programs, part):
    document, name, function = PARTS[part]
    assert read_part(ROOT / document, part) == getattr(programs[name], function)(read_results(name))


def test_recipes_promise_what_was_measured(programs):
    results = read_results("stability")
    for row in results["rows"]:
        assert load(row["recipe"]).expect == programs["stability"].expectation(row, results["about"])


def test_the_causes_in_the_guide_are_generated(programs):
    assert read_part(ROOT / "docs" / "audit.md", "causes") == programs["verdicts"].guide()


def test_their_examples(programs):
    assert doctest.testmod(harness).failed == 0
    assert doctest.testmod(programs["stability"]).failed == 0
    assert doctest.testmod(programs["reproducible"]).failed == 0
    assert doctest.testmod(programs["versions"]).failed == 0


def test_every_cut_keeps_the_rule_of_the_grid(programs):
    """As committed; and a difference in any column breaks it, but one of key biases, which is told apart by name."""
    reproducible = programs["reproducible"]
    rows = read_results("reproducible")["grid"]["rows"]
    num_cuts = len(
        reproducible.list_cuts(reproducible.GRID_BATCH, reproducible.GRID_PROCESSES, reproducible.GRID_TOKENS)
    )
    assert [row["cuts"] for row in rows] == [num_cuts - 1] * len(reproducible.GRID) * 2
    assert reproducible.find_breaks(rows) == []
    names = ["a.c_attn.bias", "b.self.key.bias", "b.self.value.bias"]
    whole = {name: torch.ones(6) for name in names}
    for place, kind in ((0, "parameters"), (2, "key biases"), (5, "parameters")):
        changed = whole | {names[0]: whole[names[0]] + 0.5 * (torch.arange(6) == place)}
        ours, theirs = (
            {"loss": torch.ones(2), "norm": torch.ones(2), "gradient": whole, "parameters": each}
            for each in (changed, whole)
        )
        errors = reproducible.compare_ends(ours, theirs)
        assert {name for name, error in errors.items() if error} == {kind}
        assert errors[kind] == pytest.approx(0.5 / 18**0.5)
        row = {"program": "some", "dtype": "float64"} | errors
        assert reproducible.find_breaks([row]) == (["some, float64: parameters"] if kind == "parameters" else [])
    keys = whole | {names[1]: 3 * whole[names[1]]}
    errors = reproducible.compare_ends(theirs | {"parameters": keys, "loss": torch.tensor([1.0, 0.9])}, theirs)
    assert errors["parameters"] == 0
    assert errors["key biases"] > 0
    assert errors["loss"] == pytest.approx(0.1)


def test_the_grid_of_chat_models_is_whole_and_holds(programs):
    """As committed: in float64 without an exception; in float32 all losses, and what else is beyond it is so of whole batches,
    beside float64, too."""
    grid, cells = programs["chat_grid"], read_results("chat_grid")["cells"]
    assert len({tuple(row[name] for name in grid.KEY) for row in cells}) == len(cells) == 4 * 2 * 2 * 7
    assert {row["layouts"] for row in cells} == {len(grid.LAYOUTS)}
    assert max(row["loss"] for row in cells) <= 1e-5
    breaks = grid.find_breaks(cells)
    assert {row["dtype"] for row, _ in breaks} <= {"float32"}
    for row, name in breaks:
        assert row[name] < 2 * row["rounding"][name]
    wrong = [{**cells[0], "dtype": "float64", "gradient": 1e-11}, {**cells[0], "parameters": float("nan")}]
    assert [name for _, name in grid.find_breaks(wrong)] == ["gradient", "parameters"]


def test_a_page_of_less_communication():
    """The bytes are over those of the exact step, flags apart; a way costs loss if all seeds say so."""
    communication = load_benchmark("communication")
    sent = {
        "exact": {"allreduce_ float32": 800.0, "control": 5.0},
        "top_k": {"allgather_ float32": 4.0, "allgather_ int32": 4.0},
    }
    losses = {"exact": [5.0, 5.2, 5.1], "top_k": [5.1, 5.3, 5.21]}
    results = {"steps": 60, "bytes": sent, "losses": losses, "about": {"command": "make some"}}
    lines = communication.describe(results).splitlines()
    assert "| the exact step |  | 800 | 1.0 | 5 | 5.1000 (5.0000 to 5.2000) | +0.0000 |  |" in lines
    assert [cell.strip() for cell in lines[-1].split("|")][3:8] == [
        "8",
        "100.0",
        "0",
        "5.2100 (5.1000 to 5.3000)",
        "+0.1033",
    ]
    assert lines[-1].endswith("| yes |")
    assert {str(communication.make_recipe(way, 60).communication) for way in communication.WAYS} >= {
        "None",
        "top_k 0.01 of 4 workers",
    }


def test_turns_rotate_and_warm_up_is_not_listed():
    order, numbers = [], iter(range(100))
    calls = {name: lambda name=name: order.append(name) or next(numbers) for name in "abc"}
    assert harness.in_turns(calls, rounds=2, warm_up=1) == {"a": [5, 7], "b": [3, 8], "c": [4, 6]}
    assert "".join(order) == "abcbcacab"


def test_flags_are_checked(capsys):
    parser = harness.flags("some", "about", rounds=3, only=["x", "y"], precisions=True)
    assert parser.parse_args([]).only == ["x", "y"]
    arguments = parser.parse_args(["--rounds", "7", "--only", "y", "--precisions", "bf16"])
    assert (arguments.rounds, arguments.only, arguments.precisions) == (7, ["y"], ["bf16"])
    assert arguments.output == harness.RESULTS / "some"
    for words, argument in (
        (["--rounds", "0"], "--rounds"),
        (["--rounds", "two"], "--rounds"),
        (["--only", "z"], "--only"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert f"argument {argument}: " in capsys.readouterr().err
    with pytest.raises(argparse.ArgumentTypeError):
        harness.positive("-1")


def test_what_is_written_is_read(tmp_path, capsys):
    rows = [{"name": name, "value": value} for value, name in enumerate("abc")]
    assert harness.read_other_rows(tmp_path / "new" / "some", "rows", "name", ["a"]) == []
    harness.write(tmp_path / "new" / "some", {"rows": rows}, "a page\n")
    assert (tmp_path / "new" / "some.md").read_text() == "a page\n"
    assert capsys.readouterr().out == "a page\n\n"
    assert harness.read_other_rows(tmp_path / "new" / "some", "rows", "name", ["b"]) == [rows[0], rows[2]]
    document = tmp_path / "document.md"
    document.write_text("before\n<!-- x y: begin -->\nold\n<!-- x y: end -->\nafter\n")
    harness.write_part(document, "x y", "new\n")
    assert document.read_text() == "before\n<!-- x y: begin -->\nnew\n<!-- x y: end -->\nafter\n"


def test_parts_of_documents_are_written_where_results_are_kept(tmp_path, capsys):
    parts = {"muon": ("optimizers.md", "new\n")}
    harness.write(tmp_path / "muon", {"rows": []}, parts=parts)
    assert harness.read(tmp_path / "muon") == {"rows": []}
    assert (capsys.readouterr().out, list(tmp_path.glob("*.md"))) == ("new\n\n", [])
    assert read_part(ROOT / "docs" / "optimizers.md", "muon") != "new\n"


def test_a_training_is_made_once_and_its_weights_are_left_out(tmp_path):
    """Until it depends on something else; a program that fails is named."""
    write = "import json, pathlib, sys; f = pathlib.Path(sys.argv[-1]); (f / 'checkpoint-3').mkdir(parents=True)"
    write += (
        "; n = f.parent / 'n'; n.open('a').write('x'); (f / 'a.safetensors').touch(); (f / 'b.safetensors').touch()"
    )
    write += "; (f / 'all_results.json').write_text(json.dumps({'times': len(n.read_text())}))"
    words = [sys.executable, "-c", write]
    made = [harness.train_once(words, tmp_path / "run", text, 1, ["b.safetensors"]) for text in ("a", "a", "b")]
    assert [results["times"] for results in made] == [1, 1, 2]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["all_results.json", "b.safetensors"]
    with pytest.raises(SystemExit, match="failed:\nno such recipe"):
        harness.run([sys.executable, "-c", "import sys; sys.exit('no such recipe')"])


def test_programs_run_only_in_their_turns(tmp_path, monkeypatch):
    """By a clock that shows how many turns have begun or ended. In each a program writes, the others are stopped."""
    moments, seen = itertools.count(), []
    monkeypatch.setattr(harness, "clock", lambda: float(next(moments)))
    loop = "n = 0\nwhile n < 3 * 10**4:\n    n += 1\n    print(n)"
    programs = [
        harness.Program([sys.executable, "-c", loop], tmp_path, tmp_path / f"{name}.log", threads=1) for name in "ab"
    ]

    def size(program) -> int:
        return program.log.stat().st_size

    def is_still(program) -> bool:
        """Whether it has ended or is stopped, which is not at once after the signal."""
        if program.done:
            return True
        state = Path(f"/proc/{program.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "TZ"

    def wait(program, seconds) -> None:
        """Wait for so many bytes of the log in place of seconds."""
        other = programs[1 - programs.index(program)]
        until(lambda: is_still(other), "stop of the other")
        before = [size(program), size(other)]
        until(lambda: program.done or size(program) > before[0] + seconds, "progress")
        seen.append(program)
        assert size(other) == before[1]
        if not program.done:
            raise subprocess.TimeoutExpired("", seconds)

    for program in programs:
        program.process.wait = partial(wait, program)
    harness.run_in_turns(programs, 10**4)
    assert seen[:4] == programs * 2
    for program in programs:
        assert program.log.read_text().split()[-1] == str(3 * 10**4)
        assert program.seconds == len(program.turns) == seen.count(program)
        assert harness.running_time(program.turns, 1e9) == program.seconds
    monkeypatch.undo()
    failing = harness.Program([sys.executable, "-c", "1 / 0"], tmp_path, tmp_path / "c.log", threads=1)
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        failing.turn(None)


def test_nothing_heavy_is_imported_with_it():
    """Start-up is measured with it."""
    code = "import sys, harness; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks").returncode == 0


def test_results_have_a_line_for_each_row():
    rows = [{"name": "a", "losses": [1.5, 2.0], "of": {"b": {"c": [1]}}}, {"name": "d", "losses": []}]
    results = {"rows": rows, "none": {}, "seconds": {"first": 1.0, "more": {"second": [2]}}}
    text = harness.format_results(results)
    assert json.loads(text) == results
    assert '    {"name": "d", "losses": []}\n' in text
    assert len(text.splitlines()) == 11
