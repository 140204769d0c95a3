"""Digests of the first steps of every CPU recipe, to the bit: a change that moves one rounding is seen.

    python tests/test_golden.py          # notes the digests of this kind of machine in golden.json, after an intended change

Kernels differ between kinds of machine, and Python's documentation, which the recipes train on, between versions of Python: on
a kind that is not noted the test is skipped.
"""

import json
import platform
import sys
import tempfile
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent / "helpers"))

import pytest
from common import all_metrics, fresh_accelerator, load_script

from samestep.training import run
from samestep.training.digest import machine_kind

FILE = Path(__file__).with_name("golden.json")
KIND = f"{machine_kind()}, Python {platform.python_version()}"
# A start of random weights, as no test trains the model that the recipe starts from.
RANDOM = (
    "--model_name_or_path none --architecture llama --vocab_size 512 --hidden_size 64 --num_hidden_layers 2 "
    "--num_attention_heads 4 --num_key_value_heads 2 --intermediate_size 128 --max_position_embeddings 256 "
    "--tie_word_embeddings true --initializer_range 0.08"
)
# Recipe -> its script, and flags; fewer images and chats, as all are drawn before the first step.
RECIPES = {
    "bert_small_cpu": ("pretrain_bert", "--reproducible 4"),
    "gpt2_small_cpu": ("pretrain_gpt2", "--reproducible 4"),
    "finetune_small_cpu": ("finetune_classifier", "--reproducible 4"),
    "resnet_digits_cpu": ("train_image_classifier", "--reproducible 16"),
    "captcha_cpu": ("train_captcha", "--reproducible 32 --num_train_samples 600 --num_validation_samples 10"),
    "sft_small_cpu": ("finetune_causal_lm", "--reproducible 8 --num_train_samples 200 --num_validation_samples 10"),
    "dpo_small_cpu": (
        "finetune_causal_lm",
        f"--reproducible 8 --num_train_samples 100 --num_validation_samples 10 {RANDOM}",
    ),
}
NUM_STEPS = 2


def digest_first_steps(recipe: str, folder: Path) -> list[str]:
    """Train a recipe's first steps, without evaluations, which change nothing; return the digest after each."""
    program, flags = RECIPES[recipe]
    fresh_accelerator()
    flags += f" --recipe {recipe} --digest_steps 1 --stop_after_step {NUM_STEPS} --output_dir {folder}"
    with mock.patch.object(run.Run, "evaluates_before", return_value=False):
        load_script(program).main(flags.split())
    return [line["digest"] for line in all_metrics(folder)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_first_steps(recipe, tmp_path):
    golden = json.loads(FILE.read_text()).get(KIND, {}).get(recipe)
    if golden is None:
        pytest.skip(f"no digests of {recipe} on {KIND}: python tests/test_golden.py notes them")
    assert digest_first_steps(recipe, tmp_path / "run") == golden


if __name__ == "__main__":
    digests = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as work:
        digests[KIND] = {recipe: digest_first_steps(recipe, Path(work) / recipe) for recipe in RECIPES}
    FILE.write_text(json.dumps(digests, indent=2, sort_keys=True) + "\n")
