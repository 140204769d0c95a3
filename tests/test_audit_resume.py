"""The audit kills and resumes a program, and says where it does not go on as it would have."""

import json

import numpy as np
import pytest
import torch

from stepaudit import script
from stepaudit.errors import UsageError
from stepaudit.judge import compare
from stepaudit.recording import MicroStep, Recording, Step
from stepaudit.resume import compare_resumed
from stepaudit.script import Variation, audit_script

PROGRAM = '''
"""A toy that saves after every step, and resumes; FAULT is what it forgets."""
import argparse, os, torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--k", type=int)
parser.add_argument("--output_dir")
parser.add_argument("--resume")
parser.add_argument("--fault", default="")
flags = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
x = torch.randn(64, 3)
data = [(x[i], x[i].sum() + i % 3) for i in range(64)]
order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
step = 0
if flags.resume:
    saved = torch.load(flags.resume)
    step = saved["step"]
    if flags.fault != "parameters":
        model.load_state_dict(saved["model"])
    if flags.fault != "optimizer":
        optimizer.load_state_dict(saved["optimizer"])
first = 0 if flags.fault == "order" else step
rest = order[first * flags.batch * flags.k:]
loader = DataLoader(data, batch_sampler=[rest[i:i + flags.batch] for i in range(0, len(rest), flags.batch)])
for number, (inputs, targets) in enumerate(loader, 1):
    ((model(inputs).squeeze(1) - targets) ** 2).mean().div(flags.k).backward()
    if number % flags.k == 0:
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()},
                   os.path.join(flags.output_dir, "last.pt"))
'''
VARY = ["--vary", "batch=8,k=1", "--vary", "batch=4,k=2"]
RESUME = ["--resume", "resume={folder}/last.pt", "--stop", "3", "--steps", "2"]


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "toy.py"
    file.write_text(PROGRAM)
    return str(file)


@pytest.mark.parametrize(
    ("fault", "vary", "cause"),
    [("", VARY, None), ("order", VARY[:2], "resume_samples"), ("optimizer", VARY[:2], "resume_state")],
)
def test_a_program_that_is_killed_and_resumed(program, server, capsys, fault, vary, cause):
    """Under the same layout and another one: the same samples, gradients and updates as undisturbed."""
    words = [*vary, *RESUME, "--json", "--", program, "--output_dir", "{folder}", "--fault", fault]
    code = audit_script(words, run_program=server.record)
    answer = json.loads(capsys.readouterr().out)
    comparisons = answer["comparisons"]
    assert len(comparisons) == len(vary) // 2
    assert answer["reference"] == "batch 8, k 1, N 1, undisturbed"
    assert comparisons[-1]["layout"].endswith("resumed")
    if cause is None:
        assert code == 0
        assert all(len(c["errors"]) == 2 and max(c["errors"]) < 1e-5 and not c["findings"] for c in comparisons)
        return
    assert code == 1
    (finding,) = comparisons[0]["findings"]
    assert finding["cause"] == cause
    assert "resumed after step 3" in finding["where"]
    if fault == "order":
        assert finding["evidence"] == "the samples of step 1: the order begins anew"


def make_run(num_steps: int, first: int = 0, weights: float = 0.0) -> Recording:
    """Make a recording whose parameters move by 1 in every step, and whose step t has the samples 2 t and 2 t + 1."""
    steps = []
    for t in range(first, first + num_steps):
        gradient = np.array([1.0 + t, 2.0])
        micro_step = MicroStep(gradient, True, False, False, part=gradient, loss=1.0, samples=[2 * t, 2 * t + 1])
        steps.append(Step(gradient, gradient, np.array([1.0, 0.0]), [0.1], 1, [micro_step]))
    return Recording(
        names=["w"],
        shapes=[[2]],
        sizes=[2],
        model="Toy",
        weights=np.array([weights, 0.0]),
        has_moved=True,
        steps=steps,
    )


def test_the_step_is_found_by_the_parameters():
    """An older checkpoint is no fault."""
    for step in (3, 2):
        comparison = compare_resumed([make_run(6)], [make_run(2, step, step)], 3, 2, 1e-5)
        assert comparison.is_exact
        assert len(comparison.errors) == 2
    (finding,) = compare_resumed([make_run(6)], [make_run(2, 2, 2.3)], 3, 2, 1e-5).findings
    assert (finding.cause, finding.evidence) == ("resume_weights", "0.3 steps from those after step 2, the nearest")
    for first, causes in ((3, ["resume_weights"]), (0, ["resume_weights"]), (4, ["resume_weights", "resume_samples"])):
        findings = compare_resumed([make_run(6)], [make_run(2, first, 0.0)], 3, 2, 1e-5).findings
        assert [finding.cause for finding in findings] == causes
    assert findings[0].evidence.endswith("nothing was loaded")


def test_rates_that_begin_anew_are_named():
    resumed = make_run(2, 3, 3.0)
    resumed.steps[0].learning_rates = [0.3]
    (finding,) = compare_resumed([make_run(6)], [resumed], 3, 2, 1e-5).findings
    assert finding.cause == "resume_state"
    assert compare([make_run(6)], [make_run(6)], 1e-5).is_exact


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*RESUME[:1], "resume=last.pt"], r"no {folder}. Write it where the program takes the folder"),
        ([*RESUME[:1], "{folder}"], "--vary is '{folder}', not FLAG=VALUE"),
        ([*RESUME[:2], "--stop", "0"], "--stop is 0, must be 1 step or more"),
    ],
)
def test_bad_usage(program, argv, message):
    with pytest.raises(UsageError, match=message):
        audit_script([*VARY[:2], *argv, "--", program])


def test_a_kill_comes_when_the_next_step_begins(program, tmp_path):
    """What the program saves after a step is there by then; a program without a next step is not killed."""
    words, layout = [program, "--output_dir", str(tmp_path)], Variation({"batch": "8", "k": "1"}, 1)
    assert script.record(words, layout, 2, 90, "kill") == []
    assert torch.load(tmp_path / "last.pt")["step"] == 2
    with pytest.raises(UsageError, match=r"--stop is 8, and .* takes 8 steps"):
        script.record(words, layout, 8, 90, "kill")
