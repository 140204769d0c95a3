"""The lint as a hook of a newcomer's repository, and the steps of the action, as GitHub would run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from common import ROOT

PROGRAM = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(0)
samples, model = torch.randn(32, 4), torch.nn.Linear(4, 1)
loader = torch.utils.data.DataLoader(samples, batch_size=args.batch_size)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, x in enumerate(loader):
    (model(x).square().mean() / args.accum).backward()
    if (i + 1) % args.accum == 0 or i + 1 == len(loader):
        {inside}optimizer.step()
        optimizer.zero_grad()
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)"
GREEN = PROGRAM.format(inside=f"{CLIP}; ")
RED = PROGRAM.format(inside="").replace("backward()\n", f"backward()\n    {CLIP}\n")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def run(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "GITHUB_"))}
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env=bare | {"PATH": PATH} | environment)


@pytest.fixture
def repository(tmp_path):
    """Make a newcomer's repository, whose hook calls ours as `pre-commit` does: its entry in a clone, the files behind."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["id"], hook["language"]) == ("stepaudit-lint", "script")
    assert {"name", "entry", "types_or"} <= hook.keys()
    run("git", "init", "-q", folder=tmp_path)
    for key, value in {"user.name": "a", "user.email": "a@b.c", "commit.gpgsign": "false"}.items():
        run("git", "config", key, value, folder=tmp_path)
    staged = "git diff --cached --name-only --diff-filter=ACM -- '*.py' '*.ipynb'"
    file = tmp_path / ".git" / "hooks" / "pre-commit"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{staged} | xargs '{ROOT / hook['entry']}'\n")
    file.chmod(0o755)
    return tmp_path


def commit(folder: Path, text: str) -> subprocess.CompletedProcess:
    (folder / "train.py").write_text(text)
    run("git", "add", "train.py", folder=folder)
    return run("git", "commit", "-m", "a", folder=folder)


def test_a_red_commit_is_refused_and_a_green_one_accepted(repository):
    refused = commit(repository, RED)
    assert refused.returncode != 0
    assert "train.py:14:5: SA201" in refused.stdout + refused.stderr
    assert run("git", "rev-parse", "HEAD", folder=repository).returncode != 0, "nothing is committed"
    accepted = commit(repository, GREEN)
    assert accepted.returncode == 0, accepted.stderr
    assert run("git", "log", "--oneline", folder=repository).stdout.count("\n") == 1


def fill(text: str, inputs: dict[str, str]) -> str:
    """Put values in the place of ${{ ... }}, as GitHub does."""
    for name, value in inputs.items():
        text = text.replace(f"${{{{ inputs.{name} }}}}", value)
    text = text.replace("${{ github.action_path }}", str(ROOT))
    assert "${{" not in text
    return text


def run_action(folder: Path, **given: str) -> tuple[list[int], str, dict[str, str]]:
    """Run the shell steps of action.yml in a folder; return exit codes, the log, and the files that GitHub reads."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert action["runs"]["using"] == "composite"
    inputs = {name: value["default"] for name, value in action["inputs"].items()} | given
    assert given.keys() <= action["inputs"].keys()
    codes, log = [], ""
    files = {name: str(folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for step in action["runs"]["steps"]:
        if "run" in step:
            variables = {name: fill(value, inputs) for name, value in step["env"].items()}
            ended = run("bash", "-eo", "pipefail", "-c", step["run"], folder=folder, **variables, **files)
            codes.append(ended.returncode)
            log += ended.stdout + ended.stderr
    return codes, log, {name: Path(file).read_text() if Path(file).exists() else "" for name, file in files.items()}


AUDIT = {"script": "train.py", "vary": "batch_size=8,accum=1\nbatch_size=2,accum=4\n", "steps": "2"}


@pytest.mark.slow
def test_the_action_on_a_red_program(tmp_path):
    (tmp_path / "train.py").write_text(RED)
    codes, log, files = run_action(tmp_path, lint="train.py", **AUDIT)
    assert codes == [1, 1]
    assert "::error file=train.py,line=14,col=5,title=SA201 clipping inside the window::what has been" in log
    assert "::error file=train.py,title=changed_between::" in log
    assert "%0Ado: " in log
    assert files["GITHUB_OUTPUT"] == "exact=false\n"
    assert "**SA201**" in files["GITHUB_STEP_SUMMARY"]
    assert "### stepaudit: not exact" in files["GITHUB_STEP_SUMMARY"]
    report = tmp_path / "stepaudit-report"
    assert json.loads((report / "lint.sarif").read_text())["runs"][0]["results"][0]["ruleId"] == "SA201"
    assert not json.loads((report / "audit.json").read_text())["is_exact"]
    badge = json.loads((report / "badge.json").read_text())
    assert badge == {"schemaVersion": 1, "label": "same step", "message": "not exact", "color": "red"}


@pytest.mark.slow
def test_the_action_on_a_green_program(tmp_path):
    (tmp_path / "train.py").write_text(GREEN)
    codes, log, files = run_action(tmp_path, lint="train.py", **AUDIT)
    assert codes == [0, 0]
    assert "::error" not in log
    assert files["GITHUB_OUTPUT"] == "exact=true\n"
    badge = json.loads((tmp_path / "stepaudit-report" / "badge.json").read_text())
    assert (badge["message"], badge["color"]) == ("exact", "brightgreen")


@pytest.mark.slow
def test_the_action_without_an_audit_or_with_one_that_fails(tmp_path):
    (tmp_path / "train.py").write_text("import nosuch\n")
    codes, _, files = run_action(tmp_path)
    assert (codes, files["GITHUB_OUTPUT"]) == ([0, 0], "")
    codes, log, files = run_action(tmp_path, lint="", **AUDIT)
    assert codes == [0, 2]
    assert "No module named 'nosuch'" in log
    assert "### stepaudit: audit failed" in files["GITHUB_STEP_SUMMARY"]
    assert json.loads((tmp_path / "stepaudit-report" / "badge.json").read_text())["color"] == "lightgrey"


def test_steps_of_others_have_a_version():
    steps = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"]
    assert all(step["uses"].partition("@")[2].startswith("v") for step in steps if "uses" in step)
