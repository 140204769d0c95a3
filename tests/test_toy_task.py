"""A task of one's own needs one registration: it is trained, cut, resumed and refused like those of the package."""

import json
import sys
from pathlib import Path

import pytest
from common import ROOT, fresh_accelerator, metrics

from samestep.errors import UsageError
from samestep.recipe.catalog import TASKS

FOLDER = ROOT / "tests" / "toy_task"
RECIPE = str(FOLDER / "curve.yaml")


@pytest.fixture
def script(monkeypatch):
    """Load the program; its task is registered while a test lasts."""
    monkeypatch.syspath_prepend(str(FOLDER))
    sys.modules.pop("train_curve", None)
    import train_curve

    yield train_curve
    del TASKS["curve_fitting"]


def train(script, folder: Path, *flags: str) -> list[dict]:
    fresh_accelerator()
    argv = ["--recipe", RECIPE, "--output_dir", str(folder), "--speed", "safe", "--dtype", "float64", *flags]
    assert script.main(argv) == 0
    return metrics(folder)


def test_a_toy_task_is_trained_by_one_registration(script, tmp_path):
    assert sum(bool(line.strip()) for line in (FOLDER / "train_curve.py").read_text().splitlines()) <= 60
    whole = train(script, tmp_path / "whole")
    cut = train(script, tmp_path / "cut", "--per_device_train_batch_size", "5", "--stop_after_step", "50")
    cut = train(script, tmp_path / "cut", "--per_device_train_batch_size", "7", "--resume_from_checkpoint", "latest")
    assert len(whole) == len(cut) == 200
    for ours, theirs in zip(cut, whole, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
        assert ours["samples"] == theirs["samples"] == 24
    last = json.loads((tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval_loss"] < 0.05 < whole[0]["loss"]


def test_its_mistakes_are_said_as_others(script, tmp_path):
    fresh_accelerator()
    with pytest.raises(UsageError, match="learning_rate is -1"):
        script.main(["--recipe", RECIPE, "--learning_rate", "-1", "--output_dir", str(tmp_path)])
    with pytest.raises(UsageError, match="is for the task bert_pretraining, this script trains curve_fitting"):
        script.main(["--recipe", "bert_small_cpu", "--output_dir", str(tmp_path)])
