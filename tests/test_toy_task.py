"""A task of one's own needs one registration: it is trained, cut, resumed and refused like those of the package."""

import json
import sys
from pathlib import Path

import pytest
from common import ROOT, fresh_accelerator, metrics

from samestep.data.steps import check_data, describe_source
from samestep.errors import UsageError
from samestep.recipe.catalog import TASKS
from samestep.recipe.settings import setting
from samestep.training.run import Run

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


def test_samples_that_lack_something_are_named(script, tmp_path):
    """All that is missing at once, before a model is made; and a log does not print every sample."""

    class Bare(list):
        def draw(self, epoch, sample_id):
            return self[sample_id]

        def collate(self, points):
            return {}

    with pytest.raises(UsageError, match=r"a Bare, have no max_length, fingerprints, longest: docs/your-own-task\.md"):
        check_data((Bare(), None))
    assert describe_source(Bare([1.5] * 2000)) == "2,000 samples"
    assert describe_source(script.build(None)[0]) == "61 points"
    fresh_accelerator()
    run = Run(["--recipe", RECIPE, "--output_dir", str(tmp_path)], "curve_fitting", description="")
    with pytest.raises(UsageError, match="have no max_length"):
        run.load_data(lambda recipe, num_workers: (Bare([1]), None))
    run.accelerator.end_training()


@pytest.mark.parametrize("rule", [lambda value: value > 1, "must be odd", (lambda value: True, "must be odd")])
def test_a_rule_of_another_form_is_refused_where_it_is_written(rule):
    with pytest.raises(TypeError, match=r"the rule of 'its size' must be a Check\(words, function\)"):
        setting("its size", rule)


def test_its_mistakes_are_said_as_others(script, tmp_path):
    fresh_accelerator()
    with pytest.raises(UsageError, match="learning_rate is -1"):
        script.main(["--recipe", RECIPE, "--learning_rate", "-1", "--output_dir", str(tmp_path)])
    with pytest.raises(UsageError, match="is for the task bert_pretraining, this script trains curve_fitting"):
        script.main(["--recipe", "bert_small_cpu", "--output_dir", str(tmp_path)])
