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
    assert "336,226,108 parameters; with gradients and moments 5.380 GB (5.010 GiB) in float32" in out


def test_plan_of_memory(monkeypatch, capsys):
    line = "plan gpt2_xl_8xa100 --num_processes 8 --per_device_train_batch_size 4"
    code, out, _ = run(monkeypatch, capsys, line)
    assert code == 0
    assert "1,557,611,200 parameters" in out
    assert "10.28 GFLOP per token" in out
    assert "at most 524,288 tokens per step" in out
    assert "40.3 GB (1e9 bytes) per process, planned: parameters 6.2, gradients 6.2, moments 12.5" in out
    assert out.endswith("(mixed_precision bf16)\n")
    totals = []
    for flags in ("", " --mixed_precision no", " --gradient_checkpointing", " --sharded"):
        answer = json.loads(run(monkeypatch, capsys, f"{line} --json{flags}")[1])
        items = answer["memory"]
        totals.append(items.pop("total"))
        assert totals[-1] == sum(items.values())
    assert answer["tokens_per_step"] * answer["flops_per_token"] == 512 * answer["flops_per_sample"]
    assert (answer["num_parameters"], answer["mixed_precision"], answer["sharded"]) == (1_557_611_200, "bf16", True)
    assert [round(total / 1e9, 1) for total in totals] == [40.3, 45.9, 30.2, 18.9]
    _, out, _ = run(monkeypatch, capsys, f"{line} --sharded --gradient_checkpointing true --mixed_precision fp16")
    assert out.endswith("(mixed_precision fp16, gradient_checkpointing, sharded)\n")
    assert "MB (1e6 bytes) per process" in run(monkeypatch, capsys, "plan bert_small_cpu")[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan", "it needs a recipe"),
        ("plan nothing", "unknown recipe"),
        ("plan bert_base --num_processes 0", "num_processes is 0"),
        ("plan bert_base --num_procs 2", "did you mean --num_processes"),
        ("plan bert_base --mixed_precision fp8", "must be one of no, bf16, fp16"),
        ("lits", "did you mean list"),
    ],
)
def test_mistakes(monkeypatch, capsys, line, message):
    code, _, err = run(monkeypatch, capsys, line)
    assert code == 2
    assert message in err
