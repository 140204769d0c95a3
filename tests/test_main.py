"""`python -m recipes`: answers and mistakes."""

import json
import sys

import pytest

from recipes import __main__ as program
from recipes.errors import exit_code
from recipes.recipe import catalog_names


def run(monkeypatch, capsys, line: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["recipes", *line.split()])
    code = exit_code(program.main)
    return code, *capsys.readouterr()


def test_list(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == catalog_names()


def test_plan(monkeypatch, capsys):
    line = "plan bert_base --num_processes 3 --per_device_train_batch_size 43 --global_batch_size 512 --json"
    code, out, _ = run(monkeypatch, capsys, line)
    answer = json.loads(out)
    assert (code, answer["shares"], answer["gradient_accumulation_steps"]) == (0, [171, 171, 170], 4)
    assert answer["learning_rate"] == pytest.approx(1e-4 * 2**0.5)
    code, out, _ = run(monkeypatch, capsys, "plan bert_large_3090 --per_device_train_batch_size 8")
    assert (code, "4 micro-step(s) of at most 8" in out) == (0, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan", "it needs a recipe"),
        ("plan nothing", "unknown recipe"),
        ("plan bert_base --num_processes 0", "num_processes is 0"),
        ("plan bert_base --num_procs 2", "did you mean --num_processes"),
        ("lits", "did you mean list"),
    ],
)
def test_mistakes(monkeypatch, capsys, line, message):
    code, _, err = run(monkeypatch, capsys, line)
    assert code == 2
    assert message in err
