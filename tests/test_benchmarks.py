"""Every benchmark starts and takes its flags; most of them, in their shortest form, end with results and a page."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
from cases import thorough
from common import ROOT
from run_benchmarks import list_benchmarks

SHORT = """
    accumulation --rounds 1 --micro_steps 1
    advise --only finetune_small_cpu --seeds 1 --races 1 --flags "--max_train_steps 40"
    audited --only "TRL DPOTrainer"
    batch_norm --rounds 1
    chat_grid --only cells --shapes llama --dtypes float64 --tuned full
    chats --only sft_512 --precisions no --rounds 1 --programs ours floor
    choices --only pretrain_gpt2 --precisions no
    cifar10 --only digits --seeds 1 --num_images 256
    communication --only exact power_sgd --seeds 1 --steps 12
    doctor --only judge
    embeddings --only ragged --batches 8 --rounds 1
    exact_trainers --only BertForMultipleChoice reward
    fault_tolerance --only chaos --fresh --runs 1
    image_text --only qwen2_5_vl_1024 --precisions no --rounds 1 --programs ours floor
    images --only resnet_digits_cpu --rounds 1 --steps 8
    language_models
    loader --only gpt2_small_cpu --rounds 1 --rows 1000
    machines --only worker --runs 1
    memory --only bert_small_cpu
    modern --only gpt --seeds 1 --flags "--max_train_steps 20 --num_warmup_steps 2"
    muon --only cost --rounds 1
    noise --only cost --rounds 1 --precisions no
    noise_scale --only coverage --num_runs 1 --num_measurements 2 --problems even --layouts 0
    own_loops --only "ExactTrainer beside Trainer, BERT's two terms" --rounds 1
    overlap --rounds 1 --links fast --pace 0.05
    reliability --kills 1 --damages 2
    routers --only global --rounds 1 --steps 4
    scaling --rounds 1
    seq2seq --only t5_512 --precisions no --rounds 1 --programs ours floor
    sharding
    startup --only pretrain_gpt2 --rounds 1
    state --only heads --heads BertForSequenceClassification
    streaming --moves 2 --rounds 1 --steps 4
    templates --num_drawn 2
    timing
    """
"""Programs with flags that make them short. Others take an hour, or files of others; proof_gpu has tests of its own."""


def test_every_benchmark_says_what_it_takes(trainings, tmp_path):
    trainings.run([str(tmp_path)], 1, module="run_benchmarks")
    answers = json.loads((tmp_path / "help.json").read_text())
    assert list(answers) == list_benchmarks()
    for name, (code, output) in answers.items():
        assert code == 0, output
        assert f"make bench NAME={name}" in output or name == "bench"
        assert "--output" in output


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Copy the repository, as benchmarks write documents, too."""
    folder = tmp_path_factory.mktemp("copy") / "copy"
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", "*.egg-info")
    return shutil.copytree(ROOT, folder, ignore=ignored)


@pytest.mark.parametrize("line", [thorough(line.strip()) for line in SHORT.strip().splitlines()])
def test_a_benchmark_ends_with_results_and_a_page(copy, line):
    """Beside the earlier results, which it completes or replaces."""
    name, *flags = shlex.split(line)
    before = (copy / "benchmarks" / "results" / f"{name}.json").stat().st_mtime_ns
    command = [sys.executable, f"benchmarks/{name}.py", *flags]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (copy / "benchmarks" / "results" / f"{name}.json").stat().st_mtime_ns > before


OLD = "images reproducible batch-norm language replicas timing own-loops chat-grid noise-scale".split()
"""Ends of targets of make until 0.1, `bench-` before them."""


@pytest.mark.parametrize("target", OLD)
def test_an_old_target_says_which_benchmark_it_is(target):
    done = subprocess.run(["make", "-s", f"bench-{target}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    words = dict(word.split("=", 1) for word in shlex.split(done.stderr.split(" make bench ")[1].split(";")[0]))
    assert set(words["NAME"].split()) <= set(list_benchmarks())
    assert words.get("FLAGS", "--only overhead") == "--only overhead"
