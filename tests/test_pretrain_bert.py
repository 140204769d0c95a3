"""The script as a user meets it: its outputs, its flags, and every mistake as one clear line with exit code 2."""

import json
import subprocess
import sys
from functools import partial

import matplotlib.image
import pytest
from common import ROOT, TINY, all_metrics, evaluations, fresh_accelerator, metrics
from rooms import PAGES, read_card
from transformers import AutoTokenizer, BertForPreTraining

from samestep.errors import UsageError, exit_code

EPOCHS = "--global_batch_size 64 --max_train_steps none --num_train_epochs 1.5 --epoch_end keep --validation_fraction 0"
SMALL = "--global_batch_size 8 --per_device_train_batch_size 4"


def test_what_a_run_leaves_behind(train, capsys, real_figures):
    output_dir = train("run", SMALL + " --eval_steps 5 --checkpointing_steps 4 --logging_steps 3")
    printed = capsys.readouterr().out
    names = {path.name for path in output_dir.iterdir()}
    assert names == {
        *PAGES,
        *(
            ".lock",
            "all_results.json",
            "config.json",
            "metrics.jsonl",
            "model.safetensors",
            "recipe.yaml",
            "settings.json",
        ),
        *("tokenizer.json", "tokenizer_config.json", "checkpoint-4", "checkpoint-8", "checkpoint-10"),
    }
    lines = all_metrics(output_dir)
    order = [("eval" if "eval_loss" in line else "step", line["step"]) for line in lines]
    steps = [("step", step) for step in range(1, 11)]
    assert order == [("eval", 0), *steps[:5], ("eval", 5), *steps[5:], ("eval", 10)]
    first = [
        "step",
        "epoch",
        "loss",
        "mlm_loss",
        "nsp_loss",
        "learning_rate",
        "grad_norm",
        "samples",
        "tokens",
        "seconds",
    ]
    assert list(lines[1]) == first
    results = json.loads((output_dir / "all_results.json").read_text())
    assert results["eval_loss"] == lines[-1]["eval_loss"]
    assert results["tokens_per_second"] > 0
    for name in ("eval_mlm_loss", "eval_mlm_accuracy", "eval_nsp_accuracy", "tokens_per_second", f"Wrote {output_dir}"):
        assert name in printed
    assert "BertForPreTraining.from_pretrained" in read_card(output_dir)
    assert matplotlib.image.imread(output_dir / "loss.png").std() > 0.01


def test_the_saved_model_is_the_trained_one(train):
    """from_pretrained reads it, and on the held-out documents it has the loss that the run reported."""
    output_dir = train("run", SMALL)
    model = BertForPreTraining.from_pretrained(output_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    encoded = tokenizer("the value of [MASK]", "it is returned", return_tensors="pt")
    assert model(**encoded).prediction_logits.shape == (1, encoded["input_ids"].shape[1], 600)
    again = train("again", SMALL + f" --model_name_or_path {output_dir} --max_train_steps 1 --learning_rate 1e-12")
    assert evaluations(again)[0]["eval_loss"] == pytest.approx(evaluations(output_dir)[-1]["eval_loss"], rel=1e-6)


def test_the_evaluation_counts_every_held_out_sample_once(train):
    values = []
    for size in (1, 3, 32):
        output_dir = train(
            f"eval{size}", SMALL + f" --dtype float64 --per_device_eval_batch_size {size} --max_train_steps 1"
        )
        values.append(evaluations(output_dir)[0])
    for value in values[1:]:
        assert value == pytest.approx(values[0], rel=1e-12)


def test_the_rate_is_set_from_the_step(train):
    output_dir = train("cosine", SMALL + " --lr_scheduler_type cosine --num_warmup_steps 2 --lr_scaling_rule none")
    rates = [line["learning_rate"] for line in metrics(output_dir)]
    assert rates[:3] == pytest.approx([2.5e-3, 5e-3, 5e-3])
    assert rates[6] == pytest.approx(2.5e-3)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_epochs_workers_trackers_and_no_held_out_documents(train):
    output_dir = train(
        "run",
        f"{EPOCHS} --dataloader_num_workers 1 --report_to tensorboard",
    )
    lines = metrics(output_dir)
    assert lines[-1]["epoch"] >= 1.5
    assert len({line["samples"] for line in lines}) == 2
    assert list(output_dir.rglob("events.out.tfevents*"))
    assert not any("eval" in line for line in (output_dir / "metrics.jsonl").read_text().splitlines())
    alone = train(
        "alone",
        "--global_batch_size 64 --max_train_steps none --num_train_epochs 1.5 --epoch_end keep --validation_fraction 0",
    )
    assert [line["loss"] for line in metrics(alone)] == [line["loss"] for line in lines]


def test_bf16_stays_near_fp32(train, monkeypatch):
    """The precision is the launch file's; it changes the rounding, not the step."""
    exact = metrics(train("fp32", SMALL))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    rounded = metrics(train("bf16", SMALL))
    assert [line["loss"] for line in rounded] == pytest.approx([line["loss"] for line in exact], rel=5e-3)
    assert rounded[0]["loss"] != exact[0]["loss"]


def test_it_learns(train):
    output_dir = train(
        "longer", "--global_batch_size 16 --max_train_steps 150 --mlm_probability 0.3 --lr_scaling_rule none"
    )
    first, last = evaluations(output_dir)
    assert last["eval_mlm_loss"] < first["eval_mlm_loss"] - 0.8


def test_text_files_and_validation_files(train, corpus, tmp_path):
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    for number in range(3):
        blocks = [" ".join(text.split()) for text in texts[number::3]]
        (tmp_path / f"part{number}.txt").write_text("\n\n".join(blocks))
    flags = f"--train_file {tmp_path}/part[01].txt --validation_file {tmp_path}/part2.txt --txt_documents blocks"
    assert len(metrics(train("txt", f"{SMALL} {flags}"))) == 10


def bad(tmp_path):
    """Map bad flags to a part of the one line that they must give."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "sentence.txt").write_text("One sentence only.")
    data = f"--train_file {tmp_path}"
    return {
        f"{data}/missing.txt": "missing.txt",
        f"{data}/empty.txt": "empty.txt",
        f"{data}/sentence.txt": "document",
        f"{data}/sentence.txt --validation_fraction 0": "sentence pairs need at least 2",
        "--global_batch_size 0": "global_batch_size is 0, must be from 1 to",
        "--learning_rate -1": "learning_rate is -1.0, must be greater than 0",
        "--recipe bert_smal_cpu": "did you mean bert_small_cpu",
        "--lerning_rate 1": "unknown flag --lerning_rate: did you mean --learning_rate",
        "--global_batch_size 32 --per_device_train_batch_size 8 --gradient_accumulation_steps 3": "4 micro-batches of at",
        f"--resume_from_checkpoint {tmp_path}": "is not a checkpoint",
        "--num_warmup_steps 99": "num_warmup_steps",
        "--per_device_train_tokens 20": "per_device_train_tokens is 20, but a sample can have 48",
        "--tokenizer_name nowhere": "tokenizer nowhere cannot be loaded",
        "--model_name_or_path nowhere": "nowhere cannot be loaded",
        "--dataset_name builtin/nothing": "builtin/python_docs",
        "--output_dir /proc/nowhere": "cannot be made",
        "--epoch_end drop --global_batch_size 100000 --lr_scaling_rule none": "exceeds",
        "--report_to trackio": "pip install trackio",
    }


def test_a_mistake_is_one_clear_line_and_exit_code_2(script, corpus, tmp_path, capfd):
    for number, (flags, message) in enumerate(bad(tmp_path).items()):
        fresh_accelerator()
        defaults = [*TINY, "--train_file", str(corpus), "--output_dir", str(tmp_path / f"run{number}")]
        if "--dataset_name" in flags:
            defaults = [*TINY, "--output_dir", str(tmp_path / f"run{number}")]
        code = exit_code(partial(script.main, [*defaults, *flags.split()]))
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ERROR")]
        assert code == 2, flags
        assert len(lines) == 1, (flags, lines)
        assert message in lines[0], (flags, lines[0])


def test_a_mistake_loses_nothing_of_an_earlier_run(train, tmp_path):
    output_dir = train("run", SMALL + " --max_train_steps 2")
    times = {path: path.stat().st_mtime_ns for path in output_dir.rglob("[!.]*")}
    for flags in (
        "",
        "--overwrite_output_dir --train_file missing.txt",
        "--overwrite_output_dir --num_warmup_steps 99",
    ):
        with pytest.raises(UsageError):
            train("run", f"{SMALL} {flags}")
        assert {path: path.stat().st_mtime_ns for path in output_dir.rglob("[!.]*")} == times


def test_a_loss_without_a_target_is_refused(train):
    """Its weight 0 says that this is meant."""
    with pytest.raises(
        UsageError, match="the training data have no target of the loss mlm, which would be 0 in every step"
    ):
        train("none", "--mlm_probability 0 --max_train_steps 1")
    train("meant", "--mlm_probability 0 --mlm_loss_weight 0 --max_train_steps 1")


def test_a_kernel_with_its_own_noise_is_named(train, capsys):
    flags = SMALL + " --attention_probs_dropout_prob 0.1 --max_train_steps 1"
    train("run", flags + " --attn_implementation sdpa")
    assert "attention dropout with attn_implementation sdpa" in capsys.readouterr().out
    train("without", flags)
    assert "noise" not in capsys.readouterr().out


def test_from_the_shell(tmp_path):
    """The real program: one line, no traceback, exit code 2."""
    command = [sys.executable, str(ROOT / "scripts" / "pretrain_bert.py"), "--recipe", "bert_small_cpu"]
    done = subprocess.run([*command, "--learning_rate", "-1"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ERROR: recipe bert_small_cpu: learning_rate is -1.0, must be greater than 0")
    assert len(done.stderr.splitlines()) == 1
