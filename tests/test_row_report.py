"""What is said of rows that are not used, or not whole."""

import json
import subprocess
import sys
from types import SimpleNamespace

import datasets
import pytest

from samestep.data import row_report
from samestep.data.row_report import Problem, RowReport
from samestep.errors import UsageError

EMPTY = [Problem(f"a.csv:{line}", "text is empty: fill it in") for line in (3, 5, 8, 9)]
ROLE = [Problem("b.csv:2", "turn 1: role is 'bot': rename it"), Problem("b.csv:7", "turn 30: role is 'x': rename it")]


def test_all_kinds_of_faults_are_refused_at_once():
    with pytest.raises(UsageError) as error:
        row_report.refuse([EMPTY[0], *ROLE, *EMPTY[1:]], 40)
    assert error.value.problems == [
        "a.csv:3: text is empty: fill it in (4 rows: also :5, :8, ...)",
        "b.csv:2: turn 1: role is 'bot': rename it (2 rows: also :7); --on_bad_row skip leaves out these 6 rows of 40",
    ]
    with pytest.raises(UsageError, match=r"mend it$"):  # no row would be left
        row_report.refuse([Problem("a:1", "mend it")], 1)
    row_report.refuse([], 40)
    with pytest.raises(UsageError) as error:
        row_report.refuse([Problem("a:1", "x" * number) for number in range(1, 41)], 50)
    assert len(error.value.problems) == row_report.MAX_KINDS + 1
    assert "and 20 other kinds" in error.value.problems[-1]


def test_a_report_has_all_numbers(tmp_path):
    report = RowReport(
        "chats", 1000, 990, 3, 49, EMPTY, ROLE[:1], ("messages",), {"id": 1000, "messages: name": 2}, ("a note",)
    )
    assert str(report).splitlines() == [
        "chats: 1,000 rows read, 990 used, 49 of them held out, 3 of them cut",
        "  left out: 4, text is empty: fill it in (a.csv:3, :5, :8, ...)",
        "  left out: 1, turn 1: role is 'bot': rename it (b.csv:2)",
        "  columns used: messages",
        "  NOT used: id, messages: name (2 rows)",
        "  a note",
    ]
    file = row_report.write_skipped(tmp_path, [report, report])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[1] == {"place": "a.csv:5", "reason": "text is empty: fill it in"}
    assert len(lines) == 8
    assert row_report.write_skipped(tmp_path, [report._replace(bad=())]) is None
    assert not file.exists()


def test_rows_that_repeat_others_are_counted():
    """Those of a training, those that are held out of it and trained all the same, and those with two labels."""
    rows = [("a", "1"), ("a", "1"), ("a", "1"), ("b", "1"), ("b", "2"), ("c", "1")]
    held = [("c", "1"), ("c", "1"), ("d", "1"), ("d", "2")]
    train, held_out = (
        datasets.Dataset.from_dict({"text": [t for t, _ in part], "label": [n for _, n in part]})
        for part in (rows, held)
    )
    assert row_report.describe_repeats(train, held_out, ["text", "label"], "label") == [
        "repeated: 2 rows of those to train on",
        "held out AND trained on: 2 rows, so that its evaluation is too good. Remove repeats from the data",
        "the same but for its label: 2 rows. Mend the labels",
    ]
    assert row_report.describe_repeats(train.select([3, 5]), held_out.select([2]), ["text", "label"], "label") == []
    assert row_report.describe_repeats(train.select([3, 4]), held_out.select([]), ["text", "label"]) == []


def test_rows_of_further_data_are_listed_beside_those_of_the_training(tmp_path):
    first, more = (
        SimpleNamespace(row_reports=[RowReport(name, 2, 1, bad=[Problem(f"{name}:1", "empty")])]) for name in "ab"
    )
    lines: list[str] = []
    row_report.report_rows(first, tmp_path, lines.append)
    row_report.report_rows(more, tmp_path, lines.append, is_more=True)
    row_report.report_rows(SimpleNamespace(row_reports=[RowReport("c", 1, 1)]), tmp_path, lines.append, is_more=True)
    listed = [json.loads(line)["place"] for line in (tmp_path / "skipped_rows.jsonl").read_text().splitlines()]
    assert listed == ["a:1", "b:1"]


def test_unused_columns_of_a_table():
    names = [row_report.write_unused(names) for names in (("id", 'a, "b"'), (), ("id",))]
    rows = datasets.Dataset.from_dict({"unused": names})
    assert row_report.count_unused(rows) == {"id": 2, 'a, "b"': 1}
    assert row_report.count_unused(rows.select([1])) == {}


def test_old_flags_are_read():
    """And named once by a process."""
    code = "from samestep.recipe.other_names import rename_old_flags as rename\n"
    code += "print(rename(['--on_bad_sample', 'stop', '--seed', 'stop']), rename(['--on_bad_sample=skip']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['--on_bad_row', 'refuse', '--seed', 'stop'] ['--on_bad_row=skip']\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("--on_bad_sample is --on_bad_row now, and will go in 0.2")
