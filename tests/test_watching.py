"""What a run tells those who watch it: the progress bar, its early end, its pictures, its trackers, its model card."""

import time

import pytest
from common import metrics
from transformers import AutoTokenizer, pipeline

from samestep.training import report
from samestep.training import run as running

SMALL = "--global_batch_size 8 --per_device_train_batch_size 4"


def test_the_bar_starts_after_the_headers_and_does_not_count_evaluations(train, monkeypatch, capsys):
    printed, bars = [], []
    start, evaluate = report.RunLog.start, running.evaluate

    def note_start(log):
        printed.append(capsys.readouterr())
        start(log)
        bars.append(log.bar)

    def slow(*arguments):
        time.sleep(0.5)
        return evaluate(*arguments)

    monkeypatch.setattr(report.RunLog, "start", note_start)
    monkeypatch.setattr(running, "evaluate", slow)
    output_dir = train("run", SMALL + " --eval_steps 5")
    (before,), (bar,) = printed, bars
    assert "steps 0 to 10 of 10" in before.out
    assert "step/s" not in before.err
    assert "10/10" in capsys.readouterr().err
    seconds = sum(line["seconds"] for line in metrics(output_dir))
    assert bar.last_print_t - bar.start_t == pytest.approx(seconds, abs=0.4), "three evaluations of 0.5 s are left out"


@pytest.mark.parametrize(
    ("flags", "steps", "why"),
    [
        ("--stop_after_step 4", "4 of 10", "stop_after_step is 4"),
        ("--max_train_minutes 1e-6", "1 of 10", "max_train_minutes is 1e-06"),
        ("--max_train_minutes 100", None, None),
    ],
)
def test_an_early_end_is_said_with_how_to_go_on(train, capsys, flags, steps, why):
    output_dir = train("run", f"{SMALL} {flags}")
    lines = [line for line in capsys.readouterr().out.splitlines() if "--resume_from_checkpoint latest" in line]
    assert len(lines) == (steps is not None)
    if lines:
        assert all(text in lines[0] for text in (f"step {steps}", why, str(output_dir)))
        assert ("without --stop_after_step" in lines[0]) == ("stop" in flags)


@pytest.mark.parametrize(
    ("program", "task", "text", "options"),
    [
        ("finetune_classifier", "text-classification", "a wonderful film " * 200, {"truncation": True}),
        ("pretrain_bert", "fill-mask", "the [MASK] is " + "a value " * 200, {"tokenizer_kwargs": {"truncation": True}}),
        ("pretrain_gpt2", "text-generation", "the value is " * 200, {"handle_long_generation": "hole", "max_new_tokens": 9}),
    ],
)
def test_the_saved_tokenizer_knows_the_length_that_the_model_was_trained_at(train, program, task, text, options):
    length = "--block_size 24" if program == "pretrain_gpt2" else "--max_seq_length 24"
    output_dir = train("run", f"{SMALL} {length} --max_train_steps 1", program=program)
    assert AutoTokenizer.from_pretrained(output_dir).model_max_length == 24
    assert pipeline(task, model=str(output_dir))(text, **options)
