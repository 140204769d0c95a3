"""How far the documented loops of benchmarks/loops/ are from the exact step: the numbers that follow from their arithmetic."""

import sys
import types

import pytest
from cases import keep
from common import ROOT, fresh_accelerator

from stepaudit.judge import compare
from stepaudit.record import Recorder
from stepaudit.recording import Recording
from stepaudit.script import BATCH, WINDOW, Variation

LOOPS = ROOT / "benchmarks" / "loops"
MODELS = ("gpt2", "bert_mlm", "bert_pretraining", "bert_classifier", "resnet")
TOLERANCE = 1e-6


@pytest.fixture
def run(monkeypatch):
    """Give run(loop, model, b, k), which records a loop in this process."""
    monkeypatch.syspath_prepend(str(LOOPS))

    def record_here(loop: str, model: str, b: int, k: int) -> list[Recording]:
        fresh_accelerator()
        file = LOOPS / f"{loop}.py"
        monkeypatch.setattr(sys, "argv", [loop, "--model", model, f"--{BATCH}", str(b), f"--{WINDOW}", str(k)])
        module = types.ModuleType("__main__")
        module.__file__ = str(file)
        recorder = Recorder()
        with recorder:
            exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
        return [recorder.recording]

    return record_here


@pytest.mark.parametrize("model", keep(MODELS, ["gpt2", "bert_pretraining"]))
def test_the_reference_is_the_models_own_loss_of_the_whole_batch(run, model):
    comparison = compare(run("exact", model, 32, 1), run("divided_by_k", model, 32, 1), TOLERANCE)
    assert len(comparison.errors) == 3
    assert max(comparison.errors) < TOLERANCE


@pytest.mark.parametrize("model", keep(MODELS, ["bert_pretraining", "resnet"]))
def test_the_exact_loop_is_exact_unless_batches_are_normalized(run, model):
    comparison = compare(run("exact", model, 32, 1), run("exact", model, 8, 4), TOLERANCE)
    assert (max(comparison.errors) < 1e-12) == comparison.is_exact == (model != "resnet")


def test_trainer_takes_k_times_the_classifiers_gradient(run):
    comparison = compare(
        run("exact", "bert_classifier", 32, 1), run("transformers_trainer", "bert_classifier", 8, 4), TOLERANCE
    )
    assert comparison.errors[0] == pytest.approx(3.0, abs=TOLERANCE)
    assert [finding.cause for finding in comparison.findings] == ["ignores_num_items"]


def test_accelerate_divides_the_last_window_by_k(run):
    comparison = compare(run("exact", "gpt2", 32, 1), run("accelerate_documented", "gpt2", 8, 4), TOLERANCE)
    assert comparison.errors[0] == pytest.approx(0.095, abs=0.005)
    assert comparison.errors[-1] == pytest.approx(0.56, abs=0.01)
    (tail,) = [finding for finding in comparison.findings if finding.cause == "tail"]
    assert (tail.where, tail.evidence) == ("step 3", "2 micro-batches are divided by 4")


@pytest.mark.parametrize(
    ("loop", "model", "causes"),
    [
        ("accelerate_documented", "bert_pretraining", {"mean_of_means", "tail"}),  # no weights fit: two counts
        ("accelerate_documented", "resnet", {"batch_norm", "tail"}),
        ("transformers_trainer", "resnet", {"ignores_num_items", "batch_norm"}),
        ("transformers_trainer", "gpt2", {"shifted_labels"}),  # which explains the factor
    ],
)
def test_all_causes_are_named(run, loop, model, causes):
    findings = compare(run("exact", model, 32, 1), run(loop, model, 8, 4), TOLERANCE).findings
    assert {finding.cause for finding in findings} - {"logged_loss"} == causes
    if "mean_of_means" in causes:
        assert findings[0].evidence == "targets of the micro-batches: 54+8, 56+8, 38+8, 36+8"


def test_lightning_takes_the_steps_that_accelerate_takes(run):
    comparison = compare(
        run("accelerate_documented", "gpt2", 8, 4), run("lightning_documented", "gpt2", 8, 4), TOLERANCE
    )
    assert len(comparison.errors) == 3
    assert comparison.is_exact


@pytest.mark.distributed
@pytest.mark.parametrize(("b", "k", "error", "num_repeated"), [(16, 1, 1.0, 19), (4, 4, 7.0, 3)])
def test_trainer_on_two_processes(run, server, b, k, error, num_repeated):
    """k N times the gradient; and 77 samples are evened out with the first ones."""
    program = [str(LOOPS / "transformers_trainer.py"), "--model", "bert_classifier"]
    recordings = server.record(program, Variation({BATCH: str(b), WINDOW: str(k)}, 2))
    comparison = compare(run("exact", "bert_classifier", 32, 1), recordings, TOLERANCE)
    assert comparison.errors[0] == pytest.approx(error, abs=TOLERANCE)
    evidence = {finding.cause: finding.evidence for finding in comparison.findings}
    assert evidence.keys() == {"ignores_num_items", "duplicated"}
    assert evidence["duplicated"].startswith(f"{num_repeated} more than once: 0, 1, 2")
