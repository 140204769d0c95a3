"""What texts name, and the trees: every row has a state, every leaf a plan that says so, every picture is generated.

That their commands are run is a test of test_printed_commands.py.
"""

import re

import pytest
from common import ROOT, load_docs_program

sources, trees = load_docs_program("sources"), load_docs_program("trees")
LIST = sources.read()
CLAIMS = (ROOT / "studies" / "claims" / "claims.md").read_text(encoding="utf-8")
LEAVES = [(name, leaf) for name, tree in trees.TREES.items() for leaf in trees.list_leaves(tree)]
FITS = re.compile(r"(\d+) (?:samples )?fit\b")
"""Samples of a micro-batch, in what is said of a row."""
PLANNED = [leaf for _, leaf in LEAVES if "strategy" in leaf]


def test_every_row_has_a_state_and_says_how_or_why_not():
    assert len(LIST["rows"]) == 89
    assert len({row.what for row in LIST["rows"]}) == 89
    for row in LIST["rows"]:
        assert row.state in sources.STATES, row
        assert set(row.texts) <= set(LIST["texts"]), row
        assert row.what, row
        assert row.how, row


def test_what_works_has_a_command_and_each_command_a_row():
    for row in LIST["rows"]:
        assert row.command in (None, *LIST["commands"]), row
        assert row.command is not None or row.state not in ("works", "study"), row
        assert (row.command == "claims") == (row.state == "study"), row
    assert set(LIST["commands"]) == {row.command for row in LIST["rows"]} - {None}


@pytest.mark.parametrize("row", [row for row in LIST["rows"] if row.state == "study"], ids=lambda row: row.what[:30])
def test_a_study_names_its_experiment(row):
    """Experiments whose claims and results are there."""
    names = [
        name for name in re.findall(r"`(\w+)`", row.how) if re.search(rf"^## .* \(`{name}`\)$", CLAIMS, re.MULTILINE)
    ]
    assert names, row
    for name in names:
        assert list((ROOT / "studies" / "claims" / "results").glob(f"{name}-*.json")), name


@pytest.mark.parametrize("row", [row for row in LIST["rows"] if FITS.search(row.how)], ids=lambda row: row.command)
def test_what_is_said_to_fit_is_what_the_planner_says(row):
    """Without the micro-batch that the text names: the most that one forward holds, and k where it is said."""
    command = re.sub(r" --per_device_train_batch_size \d+", "", LIST["commands"][row.command])
    plan = trees.ask_planner(command)
    assert plan["per_device_train_batch_size"] == int(FITS.search(row.how)[1])
    if k := re.search(r"\bk (?:is|may be) (\d+)", row.how):
        assert plan["gradient_accumulation_steps"] == int(k[1])


@pytest.mark.parametrize("leaf", PLANNED, ids=lambda leaf: leaf["do"])
def test_the_planner_says_what_the_tree_says(leaf):
    plan = trees.ask_planner(leaf["command"])
    assert plan["strategy"] == leaf["strategy"]
    assert bool(plan["sharded"]) == leaf.get("sharded", False)


def test_a_tree_is_drawn_whole():
    """If pictures differ: make docs. Each leaf, question and answer is in both; boxes do not overlap."""
    assert {leaf["strategy"] for leaf in PLANNED} == {
        *("direct", "accumulate", "data parallel", "data parallel and accumulate"),
    }
    for name in trees.TREES:
        for colour in trees.COLOURS:
            drawn = trees.draw(name, colour)
            assert (ROOT / "docs" / f"tree-{name}-{colour}.svg").read_text(encoding="utf-8") == drawn
            assert drawn.count("<rect") == len(list(boxes(trees.place(trees.TREES[name]))))
        placed = list(boxes(trees.place(trees.TREES[name])))
        numbers = [box.number for box in placed if box.number is not None]
        assert sorted(numbers) == list(range(1, len(numbers) + 1))
        for box in placed:
            for other in placed:
                apart = abs(box.x - other.x) >= trees.BOX_WIDTH or box.y + box.height <= other.y
                assert box is other or apart or other.y + other.height <= box.y, (box.lines, other.lines)


def boxes(box):
    yield box
    for _, child in box.children:
        yield from boxes(child)
