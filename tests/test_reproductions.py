"""Every reproduction of studies/ says today what its README says, and with the proposals of docs/upstream.md what that says."""

import ast
import doctest
import importlib
import re
import sys

import pytest
from cases import thorough
from common import ROOT
from corpus import variation

from stepaudit.causes import HARMLESS
from stepaudit.judge import compare

sys.path.insert(0, str(ROOT / "studies" / "upstream"))
report = importlib.import_module("report")
README = (report.FOLDER / "README.md").read_text(encoding="utf-8")
PAGE = report.PAGE.read_text(encoding="utf-8")
MAX_LINES, MAX_FUNCTION, MAX_WORDS = 30, 25, 900
OURS = {"samestep", "stepaudit", "stepplan", "recipes", "tests", "benchmarks", "studies"}
OURS |= {path.stem for folder in ("tests/helpers", "studies/upstream") for path in (ROOT / folder).glob("*.py")}
CASES = {case.name: case for case in report.REPRODUCTIONS}
ALWAYS = {
    *("accelerate_tail today", "lightning_tail today", "sentence_cosine_tail today", "transformers_whisper today"),
    *("trl_orpo today", "accelerate_tail mended", "transformers_question_answering mended", "trl_orpo mended"),
    *("sentence_cosine_tail mended", "accelerate_ragged two processes, mended", "trl_dpo_tail in one batch"),
}
"""Runs that are not left to `make test-thorough`: each library today, and mended."""
AUDITED = {
    "accelerate_windows": ["benchmarks/loops/accelerate_documented.py", "--model", "bert_classifier"],
    "transformers_trainer": ["benchmarks/packages/trainer.py", "classifier"],
    "trl_pairs": ["benchmarks/packages/trl_orpo.py"],
    "sentence_transformers_rows": ["benchmarks/packages/sentence_pairs.py", "cosine"],
}
"""Proposal -> a program that the audit finds wrong without it."""
RUNS = [(name, way) for name, case in CASES.items() for way in report.WAYS if report.WAYS[way](case)]


def read_rows(text: str) -> dict[str, list[str]]:
    """Read the table of a page: reproduction -> cells behind its name."""
    rows = re.findall(r"^\| \[(\w+?)(?:\.py)?\]\(\S+\)[^|]*\| (.*) \|$", text, re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in rows}


def expect(name: str, way: str) -> str:
    """Read from the pages what a run says."""
    if way == "today":
        return read_rows(README)[name][1]
    if way == "in one batch":
        return "exact"
    return read_rows(PAGE)[name][1 + ["mended", "two processes", "two processes, mended"].index(way)]


def test_every_file_has_its_row():
    files = {path.stem for path in report.FOLDER.glob("*.py")}
    assert files == CASES.keys() == read_rows(README).keys()
    assert read_rows(PAGE).keys() == {name for name, case in CASES.items() if case.proposal}
    assert {name: cells[0] for name, cells in read_rows(README).items()} == {
        name: report.about(case) for name, case in CASES.items()
    }, "other versions: python studies/upstream/report.py"


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_short_and_stands_alone(name):
    text = CASES[name].text
    assert len(text.splitlines()) <= MAX_LINES
    nodes = list(ast.walk(ast.parse(text)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported
    assert not OURS & {module.partition(".")[0] for module in imported}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "way"), [run if " ".join(run) in ALWAYS else thorough(*run) for run in RUNS], ids=lambda word: word
)
def test_a_run_says_what_the_page_says(server, name, way):
    line, code = report.run(server, CASES[name], way)
    expected = expect(name, way)
    assert (line if way == "today" else report.shorten(line)) == expected
    assert code == (0 if line.startswith("right:") else 1) == (0 if expected == "exact" else 1)


def test_the_page_shows_the_proposals():
    """If not: python studies/upstream/report.py"""
    assert report.write_code(PAGE) == PAGE
    prose = re.sub(r"```.*?```|^\|.*?$|<!--.*?-->", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= MAX_WORDS
    for name in report.PROPOSALS.values():
        nodes = ast.walk(ast.parse((ROOT / "studies" / "upstream" / f"{name}.py").read_text(encoding="utf-8")))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        assert max(node.end_lineno - node.lineno + 1 for node in functions) <= MAX_FUNCTION
        assert "mended" in {node.name for node in functions}


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("proposal", AUDITED)
def test_the_audit_says_exact_with_a_proposal(server, proposal):
    """Of programs that are not ours to change, in 4 x 4 micro-batches beside 16 x 1, the last window of an epoch included."""
    program, *words = AUDITED[proposal]
    wrapper = [str(ROOT / "tests" / "helpers" / "run_mended.py"), proposal]

    def audit(first: list[str]) -> tuple[bool, set[str]]:
        runs = [server.record([*first, str(ROOT / program), *words], variation(cut)) for cut in ((16, 1, 1), (4, 4, 1))]
        found = compare(*runs, 1e-5)
        return found.is_exact, {finding.cause for finding in found.findings} - HARMLESS

    is_exact, causes = audit([])
    assert not is_exact
    assert causes
    assert audit(wrapper) == (True, set())


def test_examples_of_the_report():
    assert doctest.testmod(report).failed == 0
