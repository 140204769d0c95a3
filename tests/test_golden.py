"""Digests of the first steps of every CPU recipe, to the bit: a change that moves one rounding is seen.

    python tests/test_golden.py          # notes the digests of this kind of machine in golden.json, after an intended change

Kernels differ between kinds of machine, and Python's documentation, which the recipes train on, between versions of Python. On
a kind that is not noted each recipe is compared with itself, and a warning says so: an undisturbed run with one that was
stopped and resumed, and one process with two.
"""

import json
import os
import platform
import sys
import tempfile
import warnings
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent / "helpers"))

import pytest
from common import ROOT, all_metrics, data_flags, launch_environment
from forked import Server

from samestep.training.digest import machine_kind

FILE = Path(__file__).with_name("golden.json")
SIMULATED = [
    f", {name}={os.environ[name]}" for name in ("ONEDNN_MAX_CPU_ISA", "TESTS_NUM_THREADS") if name in os.environ
]
KIND = f"{machine_kind()}, Python {platform.python_version()}{''.join(SIMULATED)}"
# A start of random weights, as no test trains the model that the recipe starts from.
RANDOM = (
    "--model_name_or_path none --architecture llama --vocab_size 512 --hidden_size 64 --num_hidden_layers 2 "
    "--num_attention_heads 4 --num_key_value_heads 2 --intermediate_size 128 --max_position_embeddings 256 "
    "--tie_word_embeddings true --initializer_range 0.08"
)
# Recipe -> its script, micro-batch, and flags: fewer images and chats, as all are drawn before the first step.
RECIPES = {
    "bert_small_cpu": ("pretrain_bert", 4, ""),
    "gpt2_small_cpu": ("pretrain_gpt2", 4, ""),
    "finetune_small_cpu": ("finetune_classifier", 4, ""),
    "resnet_digits_cpu": ("train_image_classifier", 16, ""),
    "captcha_cpu": ("train_captcha", 32, "--num_train_samples 600 --num_validation_samples 10"),
    "sft_small_cpu": ("finetune_causal_lm", 8, "--num_train_samples 200 --num_validation_samples 10"),
    "dpo_small_cpu": ("finetune_causal_lm", 8, f"--num_train_samples 100 --num_validation_samples 10 {RANDOM}"),
}
ALWAYS = {"resnet_digits_cpu", "sft_small_cpu"}
"""Recipes that are compared with themselves on every kind of machine, so that these comparisons are tested, too."""
NUM_STEPS = 2


def train(
    server: Server, recipe: str, folder: Path, runs: dict[str, str], num_processes: int = 1
) -> dict[str, list[str]]:
    """Train a recipe's first steps, NAME -> flags, one run after the other; return the digest after each step by name.

    What follows a "/" in a name is no part of it: two runs of one name are in one folder.
    """
    program, _, flags = RECIPES[recipe]
    calls = []
    for name, more in runs.items():
        words = (
            f"{flags} {more} --recipe {recipe} --speed safe --digest_steps 1 --output_dir {folder / name.split('/')[0]}"
        )
        calls.append([program, *(words if "--stop" in more else f"{words} --stop_after_step {NUM_STEPS}").split()])
    environment = launch_environment(ROOT / "accelerate_configs" / ("cpu.yaml" if num_processes == 1 else "2xcpu.yaml"))
    server.run([str(folder), json.dumps(calls)], num_processes, environment=environment, module="run_golden")
    lines = {name.split("/")[0]: all_metrics(folder / name.split("/")[0]) for name in runs}
    return {name: [line["digest"] for line in lines[name] if "digest" in line] for name in lines}


def digest_first_steps(server: Server, recipe: str, folder: Path) -> list[str]:
    """Return the digests of a recipe's first steps."""
    return train(server, recipe, folder, {"whole": f"--reproducible {RECIPES[recipe][1]}"})["whole"]


def compare_with_itself(server: Server, recipe: str, folder: Path, corpus: Path) -> None:
    """Compare runs that need no noted digests, in steps of four samples: the usual way, and --reproducible."""
    data = " ".join(data_flags(RECIPES[recipe][0], corpus))
    flags = f"{data} --global_batch_size 4"
    usual, exact = f"{flags} --per_device_train_batch_size 2", f"{flags} --reproducible 2"
    runs = {
        "once": usual,
        "again": f"{usual} --stop_after_step 1",
        "again/": f"{usual} --resume_from_checkpoint latest",
    }
    alone = train(server, recipe, folder, runs | {"one": exact})
    together = train(server, recipe, folder, {"two": exact}, 2)
    assert len(alone["once"]) == len(alone["one"]) == NUM_STEPS
    assert alone["again"][0] == alone["once"][0], "the same run twice"
    assert alone["again"] == alone["once"], "a run that was stopped, and resumed"
    assert together["two"] == alone["one"]


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", RECIPES)
def test_first_steps(recipe, trainings, corpus, tmp_path):
    golden = json.loads(FILE.read_text()).get(KIND, {}).get(recipe)
    if golden is not None:
        assert digest_first_steps(trainings, recipe, tmp_path) == golden
    else:
        warnings.warn(
            f"no digests of {KIND} in golden.json: first steps are compared with themselves; "
            "python tests/test_golden.py notes digests",
            stacklevel=1,
        )
    if golden is None or recipe in ALWAYS:
        compare_with_itself(trainings, recipe, tmp_path, corpus)


if __name__ == "__main__":
    digests = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as work, Server("run_golden", ()) as forks:
        digests[KIND] = {recipe: digest_first_steps(forks, recipe, Path(work) / recipe) for recipe in RECIPES}
    FILE.write_text(json.dumps(digests, indent=2, sort_keys=True) + "\n")
