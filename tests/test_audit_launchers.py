"""A launcher in front of a program is read, a run that waits is described, and has a limit that follows from the other runs."""

import subprocess
import sys

import pytest
from waiting import PATIENCE, until

from stepaudit.errors import UsageError
from stepaudit.launchers import read_launcher
from stepaudit.processes import run
from stepaudit.script import MAX_SECONDS, MIN_SECONDS, Variation, _Patience, audit_script
from stepaudit.waiting import FIRST_REPORT, describe_stacks


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "fsdp.yaml").write_text("num_processes: 4\nmixed_precision: 'bf16'\n  inner: 3\nfsdp_config:\n")
    return tmp_path / "train.py"


@pytest.mark.parametrize(
    ("words", "launcher", "number", "variables", "unread"),
    [
        ("train.py --num_processes 3", "", None, {}, []),
        ("python train.py", "python", None, {}, []),
        ("/usr/bin/python3.11 -u train.py", "python", None, {}, ["-u"]),
        ("torchrun --nproc_per_node=2 --standalone train.py", "torchrun", 2, {}, ["--standalone"]),
        ("torchrun --nproc-per-node 2 train.py", "torchrun", 2, {}, []),
        ("torchrun --nproc_per_node gpu train.py", "torchrun", None, {}, []),
        ("python -m torch.distributed.run --nproc_per_node 8 train.py", "torch.distributed.run", 8, {}, []),
        (
            "accelerate launch --num_processes 2 --mixed_precision bf16 --cpu train.py",
            "accelerate launch",
            2,
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            ["--cpu"],
        ),
        (
            "accelerate launch --config_file fsdp.yaml train.py",
            "accelerate launch",
            4,
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            [],
        ),
        (
            "accelerate launch --config_file=fsdp.yaml --num_processes 1 train.py",
            "accelerate launch",
            1,
            {"ACCELERATE_MIXED_PRECISION": "bf16"},
            [],
        ),
    ],
)
def test_launchers(train, words, launcher, number, variables, unread):
    launched = read_launcher([*words.split(), "--lr", "1"])
    assert launched.program == [*(["train.py"] if launcher else words.split()), "--lr", "1"]
    assert (launched.launcher, launched.num_processes) == (launcher, number)
    assert (launched.variables, launched.unread_flags) == (variables, unread)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("torchrun --nproc_per_node 2 other.py", "torchrun is given without a program that is a file"),
        (
            "accelerate launch --num_processes 0 train.py",
            "--num_processes of accelerate launch is 0, must be 1 or more",
        ),
        ("accelerate launch --config_file none.yaml train.py", "--config_file none.yaml cannot be read: No such file"),
    ],
)
def test_mistakes_have_a_line(train, words, message):
    with pytest.raises(UsageError, match=message):
        read_launcher(words.split())


def test_the_processes_of_a_launcher_are_the_audits(train, capsys):
    """The number is the default of --processes, its precision is in the environment of each run."""
    ran = []

    def run_program(program, variation, num_steps, timeout, mode, announce):
        ran.append((program, str(variation), variation.environment))
        raise UsageError("enough")

    words = [
        "accelerate",
        "launch",
        "--num_processes",
        "2",
        "--mixed_precision",
        "bf16",
        "--cpu",
        "train.py",
        "--lr",
        "1",
    ]
    with pytest.raises(UsageError, match="enough"):
        audit_script(["--vary", "batch=4", "--per_process", "batch", "--", *words], run_program=run_program)
    assert ran == [(["train.py", "--lr", "1"], "batch 4, N 1", {"ACCELERATE_MIXED_PRECISION": "bf16"})]
    said = capsys.readouterr().err
    assert "the audit starts the processes itself, --processes 1,2; --cpu left out" in said


@pytest.mark.parametrize(
    ("timeout", "seconds", "limits"),
    [
        (None, [1, 30], [MAX_SECONDS, MIN_SECONDS, MAX_SECONDS]),
        (None, [10, 1], [MAX_SECONDS, 200, 200]),
        (5, [1, 30], [5, 5, 5]),
    ],
)
def test_limits_follow_from_the_other_runs(timeout, seconds, limits):
    now, given = [0.0], []

    def run_program(program, variation, num_steps, limit, mode, announce):
        given.append(limit)
        now[0] += seconds[len(given) - 1] if len(given) <= len(seconds) else 0
        return []

    patience = _Patience(run_program, timeout, print, clock=lambda: now[0])
    for _ in limits:
        patience(["train.py"], Variation({}, 1), 8, "")
    assert given == limits


PROGRAM = """
import sys, threading
from pathlib import Path
from stepaudit import waiting
waiting.write_stacks(Path(sys.argv[1]), 1)
def wait_for_the_others():
    threading.Event().wait()
wait_for_the_others()
"""


def test_a_process_that_waits_says_where(tmp_path):
    """The process stands in a call that does not return, and answers a signal."""
    (tmp_path / "loop.py").write_text(PROGRAM)
    process = subprocess.Popen([sys.executable, "loop.py", str(tmp_path)], cwd=tmp_path)
    try:
        until(lambda: describe_stacks(tmp_path, 2), "a stack", PATIENCE)
        assert describe_stacks(tmp_path, 2) == "process 1 is at loop.py, line 7, in wait"
    finally:
        process.kill()
        process.wait()
    assert describe_stacks(tmp_path / "none", 2) == ""


COLLECTIVE = """
import os, sys, threading
from pathlib import Path
import torch
from stepaudit import waiting
rank = int(os.environ["RANK"])
waiting.write_stacks(Path(sys.argv[1]), rank)
torch.distributed.init_process_group("gloo")
if rank == 1:
    torch.distributed.all_reduce(torch.ones(1))
threading.Event().wait()
"""


@pytest.mark.distributed
def test_a_collective_that_one_process_never_enters_is_told_and_ended(tmp_path):
    """After 30 seconds, in a line, and again when twice as many have gone; the limit ends all. The clock is the test's."""
    (tmp_path / "loop.py").write_text(COLLECTIVE)
    places = "process 0 is at loop.py, line 11, in wait; process 1 is at loop.py, line 10, in all_reduce"
    until_limit, said = [0, FIRST_REPORT + 1, FIRST_REPORT + 2, 2 * FIRST_REPORT + 1, 2 * FIRST_REPORT + 2, 601], []

    def clock() -> int:
        """Stand still until both processes wait where they wait for ever; then jump."""
        return until_limit.pop(0) if len(until_limit) == 6 or describe_stacks(tmp_path, 2) == places else 0

    words = [sys.executable, str(tmp_path / "loop.py"), str(tmp_path)]
    with pytest.raises(UsageError, match=f"the loop took longer than 600 seconds: {places}"):
        run(words, 2, "the loop", 600, None, tmp_path, said.append, clock)
    assert said == [
        f"the loop is running, {seconds} s so far: {places}" for seconds in (FIRST_REPORT + 1, 2 * FIRST_REPORT + 1)
    ]
