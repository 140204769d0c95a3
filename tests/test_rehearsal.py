"""--rehearse: a whole run in small, in a folder of its own; and runs on CPUs that their memory does not hold."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from common import PLANNED, ROOT

from samestep.errors import UsageError
from samestep.recipe import rehearsal
from samestep.recipe import run_settings as run
from samestep.recipe.recipe import catalog_names, load
from samestep.training import host_memory


@pytest.mark.parametrize("name", catalog_names())
def test_a_rehearsal_changes_the_model_only(name):
    """Its step is the recipe's: same order, optimizer, schedule, lengths, and batch but where sequences are long."""
    recipe, settings = load(name), f"--recipe {name} --rehearse"
    small, _ = run.parse(settings.split(), recipe.task, "")
    shape = {*getattr(recipe, "shape", recipe.architecture), "architecture", "normalization", "freeze_embeddings"}
    shape |= {"model_name_or_path", "tokenizer_name"}
    shape -= {"vocab_size", "num_labels", "image_height", "image_width"}
    changed = {field for field, value in vars(small).items() if value != getattr(recipe, field)}
    lengths = {getattr(recipe, field, 0) for field in ("block_size", "max_seq_length")}
    if recipe.global_batch_size * max(lengths) > 2**15:
        assert small.global_batch_size * max(lengths) <= 2**16
        changed.discard("global_batch_size")
    assert changed <= shape
    if name in PLANNED:
        assert small.parts.find("shape")(small).num_parameters < 20e6
    assert rehearsal.describe_changes(recipe, small).count("(not ") >= len(changed)


def test_a_rehearsal_goes_through_a_whole_run(tmp_path, corpus):
    """Two steps, a checkpoint, the third step after resuming, the results; the last line's command is the real run."""
    flags = f"--recipe bert_small_cpu --train_file {corpus} --vocab_size 600 --max_seq_length 32 --output_dir {tmp_path}/mine"
    command = [sys.executable, str(ROOT / "scripts/pretrain_bert.py"), *flags.split(), "--rehearse"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("rehearsed: ")
    assert f" in {tmp_path}/mine-rehearsal, " in last
    words = shlex.split(last.split("the real run is: ")[1])
    assert words[-len(flags.split()) :] == flags.split()
    assert "from_pretrained" not in done.stdout
    folder = tmp_path / "mine-rehearsal"
    assert not (tmp_path / "mine").exists()
    assert {"checkpoint-2", "checkpoint-3", "all_results.json", "model.safetensors"} <= {
        p.name for p in folder.iterdir()
    }
    assert re.findall(r"steps (\d) to (\d) of (\d)", done.stdout) == [("0", "2", "3"), ("2", "3", "3")]


def test_a_failed_session_ends_the_rehearsal(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text("import sys; print('said'); sys.exit(7 if 'true' in sys.argv else 0)")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "program.py")])
    recipe = load("bert_small_cpu")
    assert rehearsal.rehearse(["--rehearse"], recipe, recipe.rehearsed(), str(tmp_path / "mine")) == 7


class _Cpu:
    """As much of an Accelerator as the check of memory looks at."""

    num_processes, mixed_precision, distributed_type = 1, "bf16", "NO"
    device, torch_device_mesh = type("Device", (), {"type": "cpu"}), None

    def print(self, text: str) -> None:
        print(text)


@pytest.fixture
def free(monkeypatch):
    """Give the machine so many free bytes."""
    monkeypatch.setattr(host_memory, "broadcast_object_list", lambda values: values)
    return lambda size: monkeypatch.setattr(host_memory, "read_free_bytes", lambda: size)


def test_what_memory_does_not_hold_is_refused_on_a_cpu(free):
    recipe = load("bert_large_phase1")

    def choose(flags: str = "") -> int | None:
        settings = run.parse(["--recipe", recipe.name, *flags.split()], recipe.task, "")[1]
        return host_memory.choose_batch_size(_Cpu(), recipe, settings)

    states = 16 * 336_226_108
    free(100 * states)
    assert (choose(), choose("--per_device_train_batch_size 7")) == (None, 7)
    free(None)
    assert choose() is None
    free(2 * states)
    chosen = choose()
    assert 1 <= chosen < recipe.global_batch_size
    free(round(1.3 * states))
    assert 1 <= choose() < chosen
    with pytest.raises(UsageError, match=r"needs .* GB .* give a smaller --per_device_train_batch_size, --rehearse"):
        choose("--per_device_train_batch_size 200")
    free(states // 2)
    with pytest.raises(UsageError, match=r"one sample, by its plan, .* free: give --rehearse"):
        choose()


def test_free_memory_is_read():
    size = host_memory.read_free_bytes()
    assert size is None or 2**20 < size < 2**50
