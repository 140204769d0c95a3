"""Loops as people write them: the audit names what is wrong with each; with a few lines of samestep it says exact."""

import textwrap

import pytest
from cases import thorough
from common import ROOT
from corpus import variation
from own_loops import page

from stepaudit.causes import HARMLESS, KINDS
from stepaudit.judge import compare, find_faults
from stepaudit.table import table

LOOPS = ROOT / "tests" / "own_loops"
TOLERANCE = 1e-5
MAX_CHANGED_LINES = 8
MORE_CHANGED_LINES = {"epochs": 11, "gan": 21, "reinforce": 11}
"""Of a loop that does more: a schedule, clipping and evaluations, two networks in turns, a pass that looks ahead."""
NUM_STEPS = 2
SHOWN, SHOWN_STEPS = "accelerate_loop", 8
"""Program whose audit the README shows, and the steps that the audit takes."""
FAULTS = {
    "accelerate_loop": "mean_of_means",
    "epochs": "mean_of_means",
    "causal_lm": "mean_of_means",
    "streaming": "mean_of_means",
    "trainer_bert": "ignores_num_items",
    "gan": "emptied_between",
    "reinforce": "mixed_loss",
}
BY_STEPS = {"causal_lm", "gan", "reinforce"}
"""Programs whose steps are those of `exact_steps`, so that their layouts may be uneven."""
EXACT_STEPS = {(15, 1, 1): [(4, 1, 1), (1, 1, 1), (8, 1, 2), (3, 1, 2), (5, 1, 3), (2, 1, 3)]}
WINDOWS = {(15, 1, 1): [(5, 3, 1), (1, 15, 1), (5, 1, 3), (1, 5, 3)], (14, 1, 1): [(7, 1, 2), (1, 7, 2)]}
"""Layouts b x k x N by the one that they are compared with: 77 samples leave a step of 2 or 7, in which a process is idle."""


@pytest.mark.parametrize("name", FAULTS)
def test_few_lines_change(name):
    assert 0 < page.changed_lines(*page.read(name)) <= MORE_CHANGED_LINES.get(name, MAX_CHANGED_LINES)


def test_the_pages_show_the_programs():
    """If not: python tests/own_loops/page.py"""
    assert all(path.read_text(encoding="utf-8") == page.page(path) for path in page.PAGES)
    shown = {name for names in page.PAGES.values() for name in names}
    assert shown == set(FAULTS) == {path.stem for path in (LOOPS / "before").glob("*.py")}


@pytest.mark.distributed
@pytest.mark.parametrize("name", FAULTS)
def test_the_audit_names_the_fault_before(server, name):
    program, num_steps = str(LOOPS / "before" / f"{name}.py"), SHOWN_STEPS if name == SHOWN else NUM_STEPS
    variations = [variation(layout) for layout in ((16, 1, 1), (4, 4, 1))]
    reference, other = (server.record([program], each, num_steps) for each in variations)
    comparison = compare(reference, other, TOLERANCE)
    if name == SHOWN:  # in the README, its long line in three
        printed = [*table(variations, [], [comparison]).splitlines(), f"NOT exact (tolerance {TOLERANCE:g})"]
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        shown = text.partition(f"-- tests/own_loops/before/{name}.py\n")[2].partition("\n```")[0]
        lines = [
            line for line in printed if not line.startswith(("    do: ", "    or, ")) and "the reference" not in line
        ]
        assert shown.splitlines() == [
            part for line in lines for part in (textwrap.wrap(line, 100) if line.startswith("[1]") else [line])
        ]
    if name == "reinforce":  # in its page
        page_text = (ROOT / "docs" / "adversaries-and-rewards.md").read_text(encoding="utf-8")
        assert f"is off by {100 * comparison.errors[0]:.0f} %" in page_text
    assert not comparison.is_exact
    assert FAULTS[name] in {finding.cause for finding in comparison.findings}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "every"),
    [
        *(("accelerate_loop", 2), ("causal_lm", 2), ("gan", 1), pytest.param("reinforce", 1, marks=pytest.mark.rooms)),
        *(thorough(name, 1) for name in FAULTS if name not in ("gan", "reinforce")),
    ],
)
def test_the_audit_says_exact_after(server, name, every):
    """In every layout, or in every second: the smaller micro-batches on each number of processes."""
    program = str(LOOPS / "after" / f"{name}.py")
    for first, layouts in (EXACT_STEPS if name in BY_STEPS else WINDOWS).items():
        reference = server.record([program], variation(first))
        assert {finding.cause for finding in find_faults(reference)} <= HARMLESS
        for layout in layouts[every - 1 :: every]:
            comparison = compare(reference, server.record([program], variation(layout)), TOLERANCE)
            assert comparison.is_exact, (layout, comparison.findings, comparison.errors)
            assert {finding.cause for finding in comparison.findings} <= HARMLESS


@pytest.mark.distributed
def test_a_shuffled_loader_needs_a_seedable_sampler(server, tmp_path):
    """Without it the audit says `other_samples` on two processes, and its cure, like that of `mean_of_means`, names it."""
    text = (LOOPS / "after" / "epochs.py").read_text(encoding="utf-8")
    program = tmp_path / "epochs.py"
    program.write_text(text.replace("dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)", ""))
    reference, other = (server.record([str(program)], variation(layout), 2) for layout in ((14, 1, 1), (7, 1, 2)))
    findings = {finding.cause: finding.remedy for finding in compare(reference, other, TOLERANCE).findings}
    for remedy in (findings["other_samples"], KINDS["mean_of_means"].remedy, KINDS["tail"].remedy):
        assert "DataLoaderConfiguration(use_seedable_sampler=True)" in remedy
