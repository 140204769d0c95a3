"""A sample of benchmarks/reliability.py: few kills, few damages; and its checks can fail."""

import json
import os
import random
import shutil
from pathlib import Path

import accelerate
import pytest
import torch
from cases import thorough
from common import fresh_accelerator, load_benchmark, task_of
from safetensors.torch import load_file, save_file

from samestep.recipe import run_settings as run
from samestep.training import checkpoint


@pytest.fixture(scope="module")
def reliability():
    """Load the benchmark, with runs of half as many steps."""
    benchmark = load_benchmark("reliability")
    benchmark.FLAGS = benchmark.FLAGS.replace(f"--max_train_steps {benchmark.STEPS}", "--max_train_steps 20")
    benchmark.STEPS = 20
    return benchmark


@pytest.fixture(scope="module")
def sessions(reliability):
    with reliability.Server(Path(os.environ["HF_HOME"])) as server:
        yield server


def flip_a_bit(file: Path) -> None:
    """Flip the lowest bit of one of a file's numbers."""
    tensors = load_file(file)
    tensors[min(tensors)].view(-1).view(torch.int32)[0] ^= 1
    save_file(tensors, str(file))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "num_processes", "is_asynchronous", "num_kills"),
    [thorough("pretrain_gpt2", 1, True, 2), ("pretrain_bert", 2, False, 1)],
)
def test_killed_runs_end_like_undisturbed_ones(
    reliability, sessions, corpus, tmp_path, program, num_processes, is_asynchronous, num_kills
):
    kind = reliability.Kind(program, num_processes, is_asynchronous)
    victim = reliability.Victim(sessions, kind, tmp_path, corpus, random.Random(1))
    victim.spend(num_kills)
    assert len(victim.kills) == num_kills
    assert not victim.problems

    # The same checks, of a reference that is another one.
    ours, theirs = victim.output_dir, victim.reference
    assert not reliability.differences_at_the_end(ours, theirs)
    last = checkpoint.checkpoints(ours)[-1].name
    flip_a_bit(theirs / last / "optimizer.safetensors")
    flip_a_bit(theirs / "model.safetensors")
    for name, key in (("metrics.jsonl", "tokens"), ("samples.jsonl", "process")):
        lines = [json.loads(line) for line in (theirs / name).read_text().splitlines()]
        lines[-2][key] = -1
        (theirs / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    differences = reliability.differences_at_the_end(ours, theirs)
    assert differences == [
        f"{last}/optimizer.safetensors is not the undisturbed run's",
        *("the final weights differ", "metrics.jsonl differs", "samples.jsonl differs"),
    ]
    shutil.rmtree(ours / last)
    assert "the last checkpoint is missing" in reliability.differences_at_the_end(ours, theirs)


def test_damages_are_detected(reliability, corpus, scripts, tmp_path, monkeypatch):
    """Each kind of damage four times; a `verify` that looks at names only misses most."""
    kind = reliability.Kind("pretrain_gpt2", 1, False)
    argv = kind.argv(corpus, tmp_path / "reference", "--max_train_steps 9")
    recipe, _ = run.parse(argv, task_of(kind.program), "")
    fresh_accelerator()
    scripts[kind.program].main(argv)
    fresh_accelerator()
    accelerator = accelerate.Accelerator(cpu=True)

    def damages():
        return reliability.damages(
            accelerator, recipe, tmp_path / "reference", tmp_path, 4 * len(reliability.DAMAGES), rng
        )

    rng = random.Random(0)
    rows, problems = damages()
    assert not problems
    assert [row["times"] for row in rows] == [4] * len(reliability.DAMAGES)
    assert sum(row["fell_back"] for row in rows) > len(reliability.DAMAGES)

    def lenient(folder: Path) -> checkpoint.State:
        return checkpoint.State(step=int(folder.name.split("-")[1]), recipe_fingerprint=recipe.fingerprint)

    monkeypatch.setattr(checkpoint, "verify", lenient)
    rows, problems = damages()
    assert all(row["undetected"] == 4 for row in rows)
    assert len(problems) >= 4 * len(rows)
