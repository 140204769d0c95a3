"""Help and mistakes in flags: answered before torch is imported, by names that other programs taught people."""

import dataclasses
import os
import subprocess
import sys

import pytest
from common import ROOT

from samestep.errors import UsageError
from samestep.recipe import other_names
from samestep.recipe import run_settings as run
from samestep.recipe.catalog import TASKS, load
from stepplan.cli.plan import PlanSettings

FLAGS = {
    name: {f.name for c in (cls, cls.parts.find("settings")) for f in dataclasses.fields(c)}
    for name, cls in TASKS.items()
}
ALL_FLAGS = set().union(*FLAGS.values()) | {field.name for field in dataclasses.fields(PlanSettings)} | {"seq_len"}


def test_every_synonym_is_a_flag_somewhere():
    for name, flags in other_names.SYNONYMS.items():
        assert set(flags.split()) <= ALL_FLAGS, name
        assert name not in flags.split() or len(flags.split()) > 1, name
    everywhere = set.intersection(*FLAGS.values())
    assert not everywhere & (other_names.SYNONYMS.keys() | other_names.ELSEWHERE.keys()), "flags of every script"


HABITS = """bf16 fp16 mixed_precision lr optim resume config use_lora num_train_epochs per_device_eval_batch_size save_steps
eval_steps logging_steps warmup_steps deepspeed fsdp gradient_checkpointing block_size max_length do_train do_eval
evaluation_strategy max_steps batch_size epochs dataset model""".split()


@pytest.mark.parametrize("task", ["bert_pretraining", "gpt2_pretraining", "text_classification"])
def test_habits_are_answered(task):
    """Each is a flag, stands for flags that are there, or is decided elsewhere; none is answered by a guess."""
    for name in HABITS:
        hint = other_names.explain(name, FLAGS[task])
        assert name in FLAGS[task] or hint, name
        if hint and hint.startswith("did you mean"):
            flags = hint.removeprefix("did you mean ").rstrip("?").split(" or ")
            assert {flag.removeprefix("--") for flag in flags} <= FLAGS[task], hint


@pytest.mark.parametrize(
    ("flag", "guess"),
    [
        ("--overwrite_output", "--overwrite_output_dir"),
        ("--zz", None),
        ("--opt", None),
        ("--rs", None),
        ("--lrs", None),
    ],
)
def test_a_guess_is_near(flag, guess):
    with pytest.raises(UsageError) as error:
        run.parse([*"--recipe bert_small_cpu".split(), flag, "1"], "bert_pretraining", "")
    (problem,) = error.value.problems
    assert ("did you mean" in problem, f"{guess}?" in problem) == (guess is not None, guess is not None), problem


@pytest.mark.parametrize("recipe", [cls.parts.script for cls in TASKS.values()])
def test_help_and_mistakes_need_no_torch(recipe, tmp_path):
    """With a torch that cannot be imported; the help shows the values of the recipe."""
    for name in ("torch", "transformers", "accelerate", "datasets"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    task = next(name for name, cls in TASKS.items() if cls.parts.script == recipe)
    name = next(
        n
        for n in (
            *("bert_base", "gpt2_124m", "finetune_small_cpu", "sft_small_cpu", "resnet_digits_cpu", "captcha_cpu"),
            *("embeddings_small_cpu", "seq2seq_small_cpu"),
        )
        if load(n).task == task
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    env.pop("RANK", None)

    def ask(*flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "scripts" / recipe), "--recipe", name, *flags]
        return subprocess.run(command, capture_output=True, text=True, env=env)

    shown = ask("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"(recipe: {load(name).learning_rate})" in " ".join(shown.stdout.split())
    wrong = ask("--learning_rat", "1")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1), wrong.stderr


def test_a_missing_file_of_data_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    env.pop("RANK", None)
    flags = f"--recipe finetune_reviews_cpu --train_file gone.csv --validation_file {tmp_path}/away.csv"
    command = [sys.executable, str(ROOT / "scripts" / "finetune_classifier.py"), *flags.split()]
    ended = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        f"ERROR: data file gone.csv: no such file in {tmp_path}. Check the path.",
        f"ERROR: data file {tmp_path}/away.csv: no such file. Check the path.",
    ]


def test_help_of_every_command_needs_no_torch(tmp_path):
    for name in ("torch", "transformers", "accelerate", "datasets"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    program = """
import sys
from samestep.cli import main
for words in ("", "list", "plan", "plan bert_base", "scale", "scale gpt2_124m", "compare", "show-data", "audit-script"):
    sys.argv = ["recipes", *words.split(), "--help"]
    try:
        assert main() is None
    except SystemExit as error:
        assert not error.code, words
"""
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage:") == 9
