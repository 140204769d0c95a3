"""Stop and go on: bit-identical on the same layout, the same steps on another, and never from a wrong checkpoint."""

import contextlib
import dataclasses
import json
import math
import multiprocessing.util
import os
import random
import re
import resource
import shutil
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.optimizer import patch_optimizer_step
from common import DROPOUT, fresh_accelerator, metrics, samples_of_steps, tiny_argv
from compare import check, same_weights, untimed_metrics
from faults import train_with_code
from hooks import StepCount, Watch, before
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing import event_accumulator
from torch import nn
from waiting import PATIENCE, until

from samestep.errors import RunError, UsageError, exit_code
from samestep.models import networks, resnet
from samestep.recipe import catalog as recipes
from samestep.recipe import run_settings as run
from samestep.recipe.run_settings import RunSettings
from samestep.training import checkpoint, launch, output_folder
from samestep.training.reduction import Reduction

STOP = " --checkpointing_steps 3 --stop_after_step 7"


def test_resumed_on_the_same_layout_is_bit_identical(train):
    """Dropout on, twice resumed (once from a checkpoint inside an epoch), evaluations and the ledger included."""
    flags = "--global_batch_size 10 --per_device_train_batch_size 3 --eval_steps 4 --record_samples" + DROPOUT
    whole = train("whole", flags)
    parts = train("parts", flags + STOP)
    assert [path.name for path in checkpoint.checkpoints(parts)] == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]
    assert not (parts / "all_results.json").exists(), "it is not finished"
    train("parts", flags + " --resume_from_checkpoint latest --stop_after_step 8")
    train("parts", flags + " --resume_from_checkpoint latest")
    assert untimed_metrics(parts) == untimed_metrics(whole)
    assert (parts / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert same_weights(parts, whole)
    assert same_weights(parts / "checkpoint-10", whole / "checkpoint-10")


@pytest.mark.parametrize("program", ["pretrain_bert", "pretrain_gpt2"])
def test_a_killed_run_goes_on_from_its_last_checkpoint(train, program):
    """Lines of steps after the checkpoint, and one cut off by the kill, are written again; its evaluation is kept."""
    flags = "--global_batch_size 8 --eval_steps 6"
    whole = train("whole", flags, program=program)
    killed = train("killed", flags + STOP, program=program)
    shutil.rmtree(killed / "checkpoint-7")
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "epoch": 0.')
    (killed / ".checkpoint-8.partial").mkdir()
    train("killed", flags + " --resume_from_checkpoint latest", program=program)
    assert untimed_metrics(killed) == untimed_metrics(whole)
    assert same_weights(killed, whole)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_resumed_on_another_layout_takes_the_same_steps(train, dtype):
    flags = f"--global_batch_size 10 --dtype {dtype} --per_device_train_batch_size "
    whole = train("whole", flags + "10")
    train("parts", flags + "10" + STOP)
    check(train("parts", flags + "3 --resume_from_checkpoint latest"), whole, dtype)


@pytest.mark.distributed
def test_resumed_on_1_3_2_1_and_on_the_same_two_processes(train, train_on):
    """A chain takes the same steps, in both programs: the first resumes are inside one epoch, the last in a later one. On the
    same two, each of which draws its own dropout, it is bit-identical."""
    flags = "--global_batch_size 71 --dtype float64 --record_samples --per_device_train_batch_size "
    programs, resume_flags = ("pretrain_bert", "pretrain_gpt2"), " --resume_from_checkpoint latest --stop_after_step "
    names = {program: f"{program}/chain" for program in programs}
    for program in programs:
        train(names[program], flags + "71 --stop_after_step 2", program=program)
    folder = train_on(3, {names[program]: flags + "9" + resume_flags + "4" for program in programs})
    random_flags = "--global_batch_size 10 --per_device_train_batch_size 3" + DROPOUT
    resumed = f"{random_flags} --resume_from_checkpoint {folder / 'first'}/checkpoint-7"
    on_two = {names[program]: flags + "13" + resume_flags + "8" for program in programs}
    train_on(2, on_two | {"whole": random_flags, "first": random_flags + STOP, "second": resumed})
    assert untimed_metrics(folder / "first") + untimed_metrics(folder / "second") == untimed_metrics(folder / "whole")
    assert same_weights(folder / "second", folder / "whole")
    for program in programs:
        chain = train(names[program], flags + "7" + resume_flags + "10", program=program)
        whole = train(f"{program}/whole", flags + "71", program=program)
        assert [int(line["epoch"]) for line in metrics(chain)][:4] == [0, 0, 0, 0]
        assert metrics(chain)[-1]["epoch"] > 1
        check(chain, whole, "float64")
        assert samples_of_steps(chain) == samples_of_steps(whole)
        assert all(len(set(samples)) == 71 for samples in samples_of_steps(chain).values())
        processes = [json.loads(line) for line in (chain / "samples.jsonl").open()]
        sizes = {step: 1 + max(line["process"] for line in processes if line["step"] == step) for step in (1, 3, 5, 9)}
        assert sizes == {1: 1, 3: 3, 5: 2, 9: 1}


@pytest.mark.distributed
def test_resumed_sharded_or_not(train, train_on):
    """One process -> two with FSDP2, and back; each of the two writes its own rows. In the background, too."""
    flags = "--global_batch_size 10 --dtype float64 --per_device_train_batch_size 3 --eval_steps 7"
    train = partial(train, program="pretrain_gpt2")
    whole, resume, runs = train("whole", flags), " --resume_from_checkpoint ", {}
    ways = {"": "", "background": " --async_checkpointing"}
    for way, more in ways.items():
        train(f"pretrain_gpt2/stopped{way}", flags + more + STOP)
        runs[f"pretrain_gpt2/sharded{way}"] = flags + more + STOP
        runs[f"pretrain_gpt2/stopped{way}"] = flags + more + resume + "latest"
    folder = train_on(2, runs, "fsdp2_2xcpu") / "pretrain_gpt2"
    for way, more in ways.items():
        check(folder / f"stopped{way}", whole, "float64")
        check(train(f"pretrain_gpt2/sharded{way}", flags + more + resume + "latest"), whole, "float64")
        shards = {f"{part}-0000{rank}-of-00002.safetensors" for part in ("model", "optimizer") for rank in (1, 2)}
        saved = folder / f"stopped{way}" / "checkpoint-10"
        hashed = set(json.loads((saved / "manifest.json").read_text())["files"])
        assert hashed == shards | {"recipe.yaml", "state.json"}
        assert {path.name for path in saved.iterdir()} == hashed | {"manifest.json"}
        for part in ("model", "optimizer"):
            ours, theirs = checkpoint.read(saved, part), load_file(whole / "checkpoint-10" / f"{part}.safetensors")
            assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in theirs.items()}
        sizes = [(saved / f"model-0000{rank}-of-00002.safetensors").stat().st_size for rank in (1, 2)]
        assert max(sizes) < 1.1 * min(sizes), "each owner wrote its half"


def test_a_finished_run_can_be_resumed_without_harm(train):
    done = train("done", "--global_batch_size 8")
    lines, weights = untimed_metrics(done), (done / "model.safetensors").read_bytes()
    saved = (done / "checkpoint-10").stat().st_ino
    train("done", "--global_batch_size 8 --resume_from_checkpoint latest")
    assert untimed_metrics(done) == lines
    assert (done / "model.safetensors").read_bytes() == weights
    assert (done / "checkpoint-10").stat().st_ino == saved, "the checkpoint is not written anew"


def test_by_the_clock_two_are_kept_and_those_of_steps_stay(train):
    """Checkpoints that --checkpointing_steps asked for, and the last of each session, are not the clock's to delete."""
    assert RunSettings(recipe="").checkpointing_minutes == 15
    train("run", "--global_batch_size 8 --checkpointing_steps 2 --stop_after_step 5")
    flags = "--global_batch_size 8 --checkpointing_minutes 1e-6 --resume_from_checkpoint latest"
    assert names(train("run", flags)) == [2, 4, 5, 9, 10]
    assert names(train("none", "--global_batch_size 8 --checkpointing_minutes none")) == [10]
    assert names(train("all", f"{flags} --checkpoints_total_limit 3")) == [8, 9, 10]


@pytest.mark.distributed
def test_the_clock_of_process_0_decides_for_all(train_on):
    folder = train_on(2, {"run": "--global_batch_size 8 --checkpointing_minutes 1e-6 --checkpoints_total_limit 20"})
    assert names(folder / "run") == list(range(1, 11))


def test_only_the_newest_checkpoints_are_kept(train):
    output_dir = train("limited", "--global_batch_size 8 --checkpointing_steps 2 --checkpoints_total_limit 2")
    assert [path.name for path in checkpoint.checkpoints(output_dir)] == ["checkpoint-8", "checkpoint-10"]
    assert not list(output_dir.glob(".checkpoint*"))


def test_wrong_checkpoints_are_refused_with_the_reason(train, corpus, tmp_path):
    flags = "--global_batch_size 8 --stop_after_step 2"
    stopped = train("stopped", flags)
    other = tmp_path / "other.txt"
    other.write_text("One two. Three four.\n\n" * 40)

    def refuse(match: str, more: str, output_dir=stopped) -> None:
        with pytest.raises(UsageError, match=match) as error:
            train("stopped", f"--global_batch_size 8 {more}", output_dir=output_dir)
        assert len(error.value.problems) == 1
        assert "\n" not in str(error.value)

    refuse("holds an earlier run: continue it with --resume_from_checkpoint latest", "")
    refuse("is not a checkpoint: give latest", f"--resume_from_checkpoint {tmp_path / 'nowhere'}")
    refuse("it holds checkpoint-2: name one of them", f"--resume_from_checkpoint {stopped}")
    refuse(
        "another recipe: learning_rate 0.005 there, 0.002 here", "--resume_from_checkpoint latest --learning_rate 2e-3"
    )
    refuse(
        "another recipe, .*: max_train_steps 10 there, 20 here", "--resume_from_checkpoint latest --max_train_steps 20"
    )
    refuse(
        r"trained on other data: documents differ, and so does the tokenizer\. Give the data that it was trained on "
        r"\(train_file .*\), unchanged and in the same order, and the same tokenizer; on other data begin "
        r"anew from its weights, --model_name_or_path .*checkpoint-2 \(fingerprints: ",
        f"--resume_from_checkpoint latest --train_file {other}",
    )
    weights = stopped / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    size = weights.stat().st_size
    refuse(
        rf"no checkpoint in {stopped} is whole \(checkpoint-2 is damaged: model.safetensors has {size} bytes, not {size + 1}\)",
        "--resume_from_checkpoint latest",
    )
    refuse("is damaged: model.safetensors has", f"--resume_from_checkpoint {stopped / 'checkpoint-2'}")
    train("stopped", flags + " --overwrite_output_dir")
    assert [line["step"] for line in metrics(stopped)] == [1, 2]


def test_latest_of_nothing_is_a_start(train, capsys):
    """What a scheduler starts again and again has one command line."""
    output_dir = train("new", "--global_batch_size 8 --resume_from_checkpoint latest --stop_after_step 2")
    assert f"No checkpoint in {output_dir} yet: from the start" in capsys.readouterr().out
    with (output_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3}')
    shutil.rmtree(output_dir / "checkpoint-2")  # killed before its first checkpoint
    train("new", "--global_batch_size 8 --resume_from_checkpoint latest --stop_after_step 4")
    assert [line["step"] for line in metrics(output_dir)] == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------------------------- damages


@pytest.fixture(scope="module")
def stopped(scripts, corpus, tmp_path_factory):
    """Train a run with checkpoints 2, 4 and 6; its folder and recipe."""
    fresh_accelerator()
    folder = tmp_path_factory.mktemp("stopped") / "run"
    flags = "--global_batch_size 8 --stop_after_step 6 --checkpointing_steps 2"
    argv = tiny_argv("pretrain_bert", corpus, folder, flags)
    scripts["pretrain_bert"].main(argv)
    return folder, run.parse(argv, "bert_pretraining", "")[0]


def flip(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


DAMAGES = {
    "a bit flipped": lambda path, rng: path.write_bytes(flip(path.read_bytes(), rng)),
    "cut short": lambda path, rng: path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)]),
    "empty": lambda path, rng: path.write_bytes(b""),
    "missing": lambda path, rng: path.unlink(),
    "longer": lambda path, rng: path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 99))),
    "random": lambda path, rng: path.write_bytes(rng.randbytes(path.stat().st_size)),
    "of the step before": lambda path, rng: shutil.copy(path.parent.with_name("checkpoint-4") / path.name, path),
    "another file": lambda path, rng: shutil.copy(rng.choice([p for p in path.parent.iterdir() if p != path]), path),
    "a folder": lambda path, rng: (path.unlink(), path.mkdir()),
}


def test_every_one_of_300_damages_is_noticed(stopped, tmp_path, capsys):
    """`latest` takes the checkpoint before and says why; by its path the damaged one is refused in one line."""
    output_dir, recipe = stopped
    accelerator, rng, reasons = launch.create_accelerator(), random.Random(0), set()
    names = sorted(path.name for path in (output_dir / "checkpoint-6").iterdir())
    parts = {"manifest.json", "model.safetensors", "optimizer.safetensors", "recipe.yaml", "state.json"}
    assert set(names) == parts | {"config.json", "tokenizer.json", "tokenizer_config.json"}
    shutil.copytree(output_dir, tmp_path / "run")
    victim = tmp_path / "run" / "checkpoint-6"
    for number in range(300):
        shutil.rmtree(victim)
        shutil.copytree(output_dir / "checkpoint-6", victim)
        kind, name = list(DAMAGES)[number % len(DAMAGES)], rng.choice(names)
        content = (victim / name).read_bytes()
        DAMAGES[kind](victim / name, rng)
        if (victim / name).is_file() and (victim / name).read_bytes() == content:
            continue  # recipe.yaml is the same in every step
        path, state = checkpoint.find(accelerator, "latest", tmp_path / "run", recipe)
        assert (path.name, state.step) == ("checkpoint-4", 4), (kind, name)
        warning = capsys.readouterr().err
        assert warning.startswith("WARNING: checkpoint-6 is damaged: ")
        assert warning.count("\n") == 1
        reasons.add(warning.split(": ")[2].split(" ")[0])
        if kind != "of the step before":  # of whose manifest the other files are not
            assert warning.startswith(f"WARNING: checkpoint-6 is damaged: {name} "), "the damaged file is named"
        with pytest.raises(UsageError, match="is damaged") as error:
            checkpoint.find(accelerator, str(victim), tmp_path / "run", recipe)
        assert "\n" not in str(error.value)
    assert reasons == set(names)


def test_other_damages(stopped, tmp_path, capsys):
    """Folders renamed, swapped or of an earlier version; several at once; all."""
    output_dir, recipe = stopped
    accelerator, copy = launch.create_accelerator(), tmp_path / "run"

    def find_name() -> str:
        return checkpoint.find(accelerator, "latest", copy, recipe)[0].name

    shutil.copytree(output_dir, copy)
    (copy / "checkpoint-4").rename(copy / "checkpoint-8")
    assert find_name() == "checkpoint-6"
    assert "checkpoint-8 is damaged: it is of step 4; passed over" in capsys.readouterr().err
    (copy / "checkpoint-8" / "manifest.json").unlink()
    assert find_name() == "checkpoint-6"
    assert "manifest.json is missing: damaged, or written by an earlier version" in capsys.readouterr().err
    (copy / "checkpoint-6").rename(copy / "other")
    (copy / "checkpoint-2").rename(copy / "checkpoint-6")
    (copy / "other").rename(copy / "checkpoint-2")
    with pytest.raises(
        UsageError, match=r"no checkpoint in .* is whole \(checkpoint-8 .*; checkpoint-6 .*; checkpoint-2 .*\)"
    ):
        find_name()
    manifest = json.loads((output_dir / "checkpoint-6" / "manifest.json").read_text())
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    shutil.copytree(output_dir / "checkpoint-6", copy / "checkpoint-6", dirs_exist_ok=True)
    assert find_name() == "checkpoint-6"
    (copy / "checkpoint-6" / "manifest.json").write_text(checkpoint._manifest(content | {"format": 1}))
    with pytest.raises(UsageError, match="it has format 1, this version reads 2 and 3"):
        find_name()


def test_nothing_in_a_checkpoint_can_execute_code(stopped):
    output_dir, _ = stopped
    source = Path(checkpoint.__file__).read_text()
    assert not re.search(r"pickle|torch\.(load|save)\(|yaml\.(unsafe_|full_)?load\(", source)
    suffixes = {path.suffix for path in output_dir.glob("checkpoint-*/*")}
    assert suffixes == {".safetensors", ".yaml", ".json"}


PUBLISHED = {
    "pretrain_bert": transformers.BertForPreTraining,
    "pretrain_gpt2": transformers.GPT2LMHeadModel,
    "finetune_classifier": transformers.BertForSequenceClassification,
    "train_image_classifier": resnet.GroupNormResNet,
    "train_captcha": networks.CaptchaReader,
}


@pytest.mark.parametrize("program", PUBLISHED)
def test_from_pretrained_reads_a_checkpoint(train, program):
    """The same model as is published at the end, to the last bit, and the tokenizer."""
    done = train("run", "--max_train_steps 2", program=program)
    ours, theirs = (PUBLISHED[program].from_pretrained(folder) for folder in (done / "checkpoint-2", done))
    tensors = theirs.state_dict()
    assert ours.state_dict().keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in ours.state_dict().items())
    if program in ("pretrain_bert", "pretrain_gpt2", "finetune_classifier"):
        ours, theirs = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (done / "checkpoint-2", done))
        assert ours.get_vocab() == theirs.get_vocab()
        assert transformers.AutoConfig.from_pretrained(done / "checkpoint-2").architectures == [
            PUBLISHED[program].__name__
        ]


def test_a_checkpoint_of_the_format_before_goes_on(train):
    """Its names begin with that of the model in the module that sums losses, and it has no files of the published model."""
    flags = "--global_batch_size 8 --max_train_steps 4"
    whole = train("whole", flags)
    parts = train("parts", flags + " --stop_after_step 2")
    folder = parts / "checkpoint-2"
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    names = ("model.safetensors", "optimizer.safetensors", "recipe.yaml", "state.json")
    files = {name: checkpoint._flush_and_hash(folder / name) for name in names}
    (folder / "manifest.json").write_text(checkpoint._manifest({"format": 2, "step": 2, "files": files}))
    train("parts", flags + " --resume_from_checkpoint latest")
    assert same_weights(parts, whole)


# -------------------------------------------------------------------------------------------------- how they are written


def test_in_the_background_the_same_bytes_and_no_waiting(train):
    """A writer slower than the steps: what it writes is the state of its step, though training has gone on."""
    flags = "--global_batch_size 8 --checkpointing_steps 3" + DROPOUT
    plain = train("plain", flags)
    advanced = []

    def slow(path, *_):
        if not str(path).endswith("model.safetensors") or threading.current_thread() is threading.main_thread():
            return
        step = int(re.search(r"checkpoint-(\d+)", str(path))[1])
        if step < 10:  # beyond its own step, not beyond the present one: the next save may be waiting for this writer
            until(lambda: steps.value > step, "step while a checkpoint is written")
        advanced.append(steps.value - step)

    with StepCount() as steps, before("open", slow):
        background = train("background", flags + " --async_checkpointing")
    assert advanced[0] > 0, "training went on while checkpoint-3 was written"
    for folder in checkpoint.checkpoints(plain):
        for name in ("model.safetensors", "optimizer.safetensors", "recipe.yaml"):
            assert (folder / name).read_bytes() == (background / folder.name / name).read_bytes()
        checkpoint.verify(background / folder.name)
    shutil.rmtree(background / "checkpoint-10")
    train("background", flags + " --async_checkpointing --resume_from_checkpoint latest")
    assert untimed_metrics(background) == untimed_metrics(plain)


def test_old_ones_go_only_after_the_new_one_is_there(train):
    """Killed in any moment of writing, something whole is left."""
    folder = train("run", "--global_batch_size 8 --stop_after_step 2")
    moments = []

    def note(*_):
        whole = []
        for path in checkpoint.checkpoints(folder):
            with contextlib.suppress(checkpoint.DamagedCheckpoint):
                checkpoint.verify(path)
                whole.append(path.name)
        moments.append(whole)

    flags = "--global_batch_size 8 --resume_from_checkpoint latest --checkpointing_steps 2 --checkpoints_total_limit 1"
    with contextlib.ExitStack() as stack:
        for event in ("os.mkdir", "os.rename", "shutil.rmtree", "os.remove", "os.rmdir"):
            stack.enter_context(before(event, note))
        train("run", flags)
    assert len(moments) >= 12
    assert all(moments)
    assert [path.name for path in checkpoint.checkpoints(folder)] == ["checkpoint-10"]


def test_an_abandoned_future_is_removed_after_the_first_new_checkpoint(train):
    """Resumed from 2 though there are 4 and 6: `latest` must not go back to those once there is a new one."""
    flags = "--global_batch_size 8 --checkpointing_steps 2"
    output_dir = train("run", flags + " --stop_after_step 6")
    resume = f" --resume_from_checkpoint {output_dir / 'checkpoint-2'}"
    train("run", flags + resume + " --stop_after_step 3")
    assert [path.name for path in checkpoint.checkpoints(output_dir)] == ["checkpoint-2", "checkpoint-3"]
    train("run", flags + " --resume_from_checkpoint latest")
    assert untimed_metrics(output_dir) == untimed_metrics(train("whole", flags))


def test_what_a_killed_run_left_half_written_is_removed(train):
    output_dir = train("run", "--global_batch_size 8 --stop_after_step 2")
    (output_dir / ".checkpoint-9.partial").mkdir()
    (output_dir / ".checkpoint-9.partial" / "model.safetensors").write_bytes(b"x")
    train("run", "--global_batch_size 8 --resume_from_checkpoint latest --stop_after_step 3")
    assert not list(output_dir.glob(".checkpoint*"))


# ---------------------------------------------------------------------------------------------- every moment of a save


class Small:
    """A model of 40 parameters with its optimizer and a `Saver`, without a run around them."""

    def __init__(self, output_dir, start=0, limit=None, asynchronous=False, width=4):
        fresh_accelerator()
        self.recipe = recipes.load("bert_small_cpu", {}, task="bert_pretraining")
        self.accelerator, self.output_dir = launch.create_accelerator(), output_dir
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
        run = RunSettings(
            recipe="", output_dir=str(output_dir), checkpoints_total_limit=limit, async_checkpointing=asynchronous
        )
        reduction = Reduction(self.accelerator, self.recipe, run)
        self.saver = checkpoint.Saver(
            self.accelerator, self.recipe, run, checkpoint.Trained(self.model, self.optimizer), start, reduction
        )

    def save(self, *steps):
        for step in steps:
            self.model(torch.full((2, 4), float(step))).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.saver.save(step, 0, "")

    def find(self, resume="latest"):
        return checkpoint.find(self.accelerator, resume, self.output_dir, self.recipe)

    def load(self, folder):
        checkpoint.load(
            self.accelerator, folder, checkpoint.verify(folder), self.model, self.optimizer, data_fingerprints={}
        )


def names(output_dir) -> list[int]:
    return [int(path.name.split("-")[1]) for path in checkpoint.checkpoints(output_dir)]


class Killed(BaseException):
    """Stands for a kill: nothing handles it."""


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, None])
def test_the_limit_is_the_number_kept(tmp_path, limit):
    small = Small(tmp_path, limit=limit)
    for step in range(1, 8):
        small.save(step)
        assert names(tmp_path) == list(range(1, step + 1))[-(limit or 9) :]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", [Killed(), OSError(5, "Input/output error")], ids=["killed", "failed"])
@pytest.mark.parametrize("restart", ["latest", "checkpoint-6", "save"])
def test_a_step_written_anew_is_never_lost(tmp_path, restart, error, asynchronous):
    """As when a run goes on from an older checkpoint: the old one is found unless the new one is in its place."""
    for num_renames in range(3):
        output_dir, renamed = tmp_path / str(num_renames), []
        Small(output_dir).save(6)
        old = (output_dir / "checkpoint-6" / "model.safetensors").read_bytes()
        small = Small(output_dir, asynchronous=asynchronous)

        def limited(_, to, *__, num_renames=num_renames, renamed=renamed):
            renamed.append(to)
            if len(renamed) == num_renames + 1:  # once: a failure of storage is not for ever
                raise error

        with contextlib.suppress(Killed, RunError), before("os.rename", limited):
            with torch.no_grad():
                small.model[0].weight.fill_(6)
            small.save(6)
            small.saver.close()
        if isinstance(error, OSError):
            assert os.listdir(output_dir) == ["checkpoint-6"]
        if restart != "save":
            path, state = Small(output_dir).find(restart if restart == "latest" else str(output_dir / restart))
            assert (path.name, state.step) == ("checkpoint-6", 6)
        Small(output_dir, start=6).save(7)
        assert sorted(os.listdir(output_dir)) == ["checkpoint-6", "checkpoint-7"]
        checkpoint.verify(output_dir / "checkpoint-6")
        is_old = (output_dir / "checkpoint-6" / "model.safetensors").read_bytes() == old
        assert is_old == (num_renames < 2)
    assert len(renamed) == 2


def test_a_deletion_cut_short_leaves_nothing_damaged(tmp_path):
    Small(tmp_path).save(1, 2, 3)
    small = Small(tmp_path, start=3, limit=1)

    def cut_short(path, *_):
        (Path(path) / "model.safetensors").unlink()
        raise Killed

    with before("shutil.rmtree", cut_short), pytest.raises(Killed):
        small.save(4)
    for folder in checkpoint.checkpoints(tmp_path):
        checkpoint.verify(folder)
    Small(tmp_path, start=4, limit=1).save(5)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


@pytest.mark.parametrize("restart", ["saves again", "ends"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("place", ["before", "renamed"])
def test_a_kill_before_the_deletion_leaves_no_more_than_the_limit(tmp_path, restart, asynchronous, place):
    """Killed when the new one has its name and the old one is there, or has been moved aside: the next save deletes it, or,
    if that was the last one, the end of the run that is resumed there."""
    Small(tmp_path, limit=1).save(1)
    small = Small(tmp_path, start=1, limit=1, asynchronous=asynchronous)

    name, event = ("checkpoint-1", "os.rename") if place == "before" else (".checkpoint-1.partial", "shutil.rmtree")

    def kill(path, *_):
        if Path(path).name == name:
            raise Killed

    with before(event, kill), contextlib.suppress(Killed):
        small.save(2)
        small.saver.close()
    assert sorted(os.listdir(tmp_path)) == sorted([name, "checkpoint-2"])
    small = Small(tmp_path, start=2, limit=1, asynchronous=asynchronous)
    if restart == "saves again":
        small.save(3)
    small.saver.close()
    assert os.listdir(tmp_path) == ["checkpoint-3" if restart == "saves again" else "checkpoint-2"]


def test_folders_with_similar_names_are_never_deleted(tmp_path, capfd):
    """The user's own, and checkpoints of other programs; such a one in the place of a new one is said."""
    theirs = ["checkpoint-002", "checkpoint-1-best", "checkpoint-٣", ".checkpoint-mine.partial", ".checkpoint-x.old"]
    for name in [
        *theirs,
        "checkpoint-4",
        "checkpoint-7",
        "checkpoint-90",
    ]:  # the last three as of transformers' Trainer
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_text(name)
    names = set(os.listdir(tmp_path))
    small = Small(tmp_path, start=4, limit=1)
    small.save(5, 6, 7)
    with pytest.raises(RunError, match="checkpoint-7 is there, and no checkpoint of this program: move it away"):
        small.saver.close()
    assert "WARNING" in capfd.readouterr().err
    assert set(os.listdir(tmp_path)) == names | {"checkpoint-6"}
    assert all((tmp_path / name / "pytorch_model.bin").read_text() == name for name in names)


def test_all_is_on_disk_before_it_has_its_name(tmp_path):
    """Flushed: each file and the folder before the rename, the folder above after it; deleted: after that."""
    Small(tmp_path).save(1)
    events = []

    def note_flush(path, mode, flags):
        if mode is None and not flags & os.O_NONBLOCK and "delete" not in events:  # for `os.fsync`
            events.append(Path(path).name)

    with (
        before("open", note_flush),
        before("os.rename", lambda _, to, *__: events.append(f"-> {Path(to).name}")),
        before("shutil.rmtree", lambda *_: events.append("delete")),
    ):
        Small(tmp_path, start=1, limit=1).save(2)
    files = sorted(path.name for path in (tmp_path / "checkpoint-2").iterdir())
    assert sorted(events[:5]) == files
    assert events[5:] == [
        ".checkpoint-2.partial",
        "-> checkpoint-2",
        tmp_path.name,
        "-> .checkpoint-1.partial",
        "delete",
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_storage_that_fails_for_a_while(tmp_path, capfd, asynchronous):
    """What fails is said with the step, the reason and what is left; a later success makes it good."""
    small = Small(tmp_path / "run", asynchronous=asynchronous)
    (tmp_path / "run").write_text("a file where the folder should be")
    small.save(1)
    with pytest.raises(RunError, match=r"^checkpoint-1 could not be written .*Not a directory.*there is none$"):
        small.saver.close()
    (tmp_path / "run").unlink()
    small = Small(tmp_path / "run", asynchronous=asynchronous)
    small.save(1)
    small.saver._wait()
    (tmp_path / "run" / ".checkpoint-9.partial").write_text("not a folder")
    for error in (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError(), PermissionError(13, "no")):
        with Watch(torch.Tensor.clone, raising(error)) if asynchronous else before("os.mkdir", raising(error)):
            small.save(names(tmp_path / "run")[-1] + 1)
        assert names(tmp_path / "run") == [1]
        small.saver.step = 1
    small.save(3)
    small.saver.close()
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 4
    assert all("could not be written" in line and line.endswith("Training goes on") for line in warnings)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-1", "checkpoint-3"]


def raising(error):
    def function(*arguments, **keywords):
        raise error

    return function


def test_training_cannot_change_what_is_being_written(tmp_path):
    """The writer begins only after every live tensor has been overwritten."""
    Small(tmp_path / "plain").save(1)
    num_threads = threading.active_count()
    small, begin = Small(tmp_path / "run", asynchronous=True), threading.Event()
    small.saver.thread.submit(begin.wait, PATIENCE)  # before all that it will write
    small.save(1)
    assert not names(tmp_path / "run"), "save returns before anything is written"
    with torch.no_grad():
        for tensor in (
            *small.model.parameters(),
            *(t for state in small.optimizer.state.values() for t in state.values()),
        ):
            tensor.fill_(7)
    second = threading.Thread(target=small.saver.save, args=(2, 0, ""))
    second.start()
    second.join(0.3)
    assert second.is_alive(), "the next save waits, so that there is one copy at a time"
    begin.set()
    second.join()
    small.saver.close()
    assert small.saver.trained.model is small.saver.trained.optimizer is None, "they must not outlive the process group"
    assert threading.active_count() == num_threads
    for path in (tmp_path / "plain" / "checkpoint-1").iterdir():
        assert path.read_bytes() == (tmp_path / "run" / "checkpoint-1" / path.name).read_bytes(), path.name


def test_the_interpreter_waits_for_what_is_being_written(tmp_path):
    """Also when training fails: here nothing is written before the process is about to end."""

    def fail() -> None:
        write, ends = checkpoint.Saver._write, threading.Event()
        checkpoint.Saver._write = lambda *arguments: (ends.wait(), write(*arguments))
        multiprocessing.util.Finalize(None, ends.set, exitpriority=0)
        Small(tmp_path, asynchronous=True).save(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # for the traceback
        raise ValueError

    process = multiprocessing.get_context("fork").Process(target=fail)
    process.start()
    process.join()
    assert process.exitcode == 1
    checkpoint.verify(tmp_path / "checkpoint-1")


def test_resuming_gives_back_every_bit(tmp_path):
    """Of parameters, optimizer states and the fp16 scaler, which no step has been scaled by yet."""
    saved, resumed = Small(tmp_path), Small(tmp_path / "other")
    for small in (saved, resumed):
        small.accelerator.scaler = small.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=3.3)
        inner = small.optimizer.optimizer
        small.optimizer._accelerate_step_called, small.optimizer._optimizer_original_step_method = False, inner.step
        small.optimizer._optimizer_patched_step_method = patch_optimizer_step(small.optimizer, inner.step)
    saved.accelerator.scaler.scale(saved.model(torch.ones(2, 4)).sum()).backward()
    saved.optimizer.step()
    saved.saver.save(1, 0, "")
    folder, _ = saved.find()
    shutil.copy(folder / "model.safetensors", folder / "model-00002-of-00002.safetensors")  # of no concern: not listed
    resumed.load(folder)
    assert resumed.accelerator.scaler.state_dict() == saved.accelerator.scaler.state_dict()
    for ours, theirs in zip(resumed.model.parameters(), saved.model.parameters(), strict=True):
        assert ours.equal(theirs)
        states = resumed.optimizer.state[ours], saved.optimizer.state[theirs]
        assert states[0].keys() == states[1].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(states[0][key].equal(states[1][key]) for key in states[0])


def test_another_models_tensors_are_refused_in_one_line(tmp_path):
    small = Small(tmp_path)
    small.save(1)
    with pytest.raises(UsageError, match=r"another model: 0.bias \[4\] there, \[5\] here; 0.weight") as error:
        Small(tmp_path, width=5).load(tmp_path / "checkpoint-1")
    assert "\n" not in str(error.value)
    state = checkpoint.verify(tmp_path / "checkpoint-1")
    for name in ("model.safetensors", "optimizer.safetensors"):
        content = load_file(tmp_path / "checkpoint-1" / name)
        save_file(dict(list(content.items())[1:]), tmp_path / "checkpoint-1" / name)
        with pytest.raises(UsageError, match=r"is not there, \[4\] here|is not there, \[\] here"):
            checkpoint.load(small.accelerator, tmp_path / "checkpoint-1", state, small.model, small.optimizer, {})
        save_file(content, tmp_path / "checkpoint-1" / name)
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(UsageError, match="put it where every process sees it"):
        checkpoint.load(small.accelerator, tmp_path / "checkpoint-1", state, small.model, small.optimizer, {})


def test_what_cannot_be_by_chance_is_no_traceback_either(tmp_path, monkeypatch):
    """Manifests and states of wrong types with right checksums, files that cannot be opened."""
    small = Small(tmp_path)
    small.save(1)
    folder, junk = tmp_path / "checkpoint-1", [None, True, -1, 1.5, "", [], {}, [[]], {"size": "1"}, "../state.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksum"]
    state = json.loads((folder / "state.json").read_text())

    def refuse(match=None):
        with pytest.raises(checkpoint.DamagedCheckpoint, match=match):
            checkpoint.verify(folder)

    def write(content):
        (folder / "manifest.json").write_text(checkpoint._manifest(content))

    for value in junk:
        for key in manifest:
            write(manifest | {key: value})
            refuse()
        for name in manifest["files"]:
            write(manifest | {"files": manifest["files"] | {name: value}})
            refuse(name)
    for key in manifest:
        write({name: value for name, value in manifest.items() if key != name})
        refuse()
    sharded = {f"{part}-0000{owner}-of-00002.safetensors": {} for part in ("model", "optimizer") for owner in (1, 2)}
    others = {name: manifest["files"][name] for name in ("recipe.yaml", "state.json")}
    for wrong in (manifest["files"] | {"../x": {}}, others, others | dict(list(sharded.items())[1:])):
        write(manifest | {"files": wrong})
        refuse("manifest.json lacks entries")
    write(manifest | {"files": others | sharded})
    refuse("safetensors is missing")
    for name in ("model.safetensors", "optimizer.safetensors"):  # right hashes of what never was a file of tensors
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(b"?" * 100)
        hashed = {"size": 100, "sha256": checkpoint._sha256(folder / name)}
        write(manifest | {"files": manifest["files"] | {name: hashed}})
        refuse("it was written wrongly")
        (folder / name).write_bytes(content)
    kinds = {name: type(value) for name, value in dataclasses.asdict(checkpoint.State()).items() if value is not None}
    for value in junk:
        for key in kinds:
            if type(value) is not kinds[key]:
                (folder / "state.json").write_text(json.dumps(state | {key: value}))
                hashed = {"size": (folder / "state.json").stat().st_size}
                hashed["sha256"] = checkpoint._sha256(folder / "state.json")
                write(manifest | {"files": manifest["files"] | {"state.json": hashed}})
                refuse()
    wrong = {
        "step": [2**53, -1],
        "num_skipped": [-1, 10**400],
        "run_id": ["x" * 2000],
        "data_fingerprints": [{"texts": 1}],
    }
    wrong["scaler"] = [{"scale": 0.0}, {"scale": math.inf}, []]
    wrong["exact_sum"] = [{"exponent": 10**4}, {"exponent": 0.5}, {"exponent": None, "machine": math.nan}, 3]
    measured = {"stages": [[0, 4]], "measurements": [[1, 1.0, 2.0]], "since": 0}
    stages = [[], [[8, 4]], [[0, 4], [0, 8]], [[0, 0]], [[0]], 4, [[0, 4], [2**53, 8]]]
    wrong["growth"] = [measured | {"stages": value} for value in stages]
    wrong["growth"] += [
        measured | {"measurements": value} for value in (None, [[1, 2]], [[1, "a", 2]], [[1, 2, math.nan]])
    ]
    wrong["growth"] += [measured | {"since": value} for value in (-1, "1", None)]

    def write_state(record):
        (folder / "state.json").write_text(json.dumps(record))
        hashed = {"size": (folder / "state.json").stat().st_size, "sha256": checkpoint._sha256(folder / "state.json")}
        write(manifest | {"files": manifest["files"] | {"state.json": hashed}})

    for key, values in wrong.items():
        for value in values:
            write_state(state | {key: value})
            refuse(f"{key} is ")
    write_state(state | {"growth": measured, "exact_sum": {"exponent": -3, "machine": "x"}, "scaler": {}})
    assert checkpoint.verify(folder).growth == measured
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    write(manifest)
    checkpoint.verify(folder)
    for deep in (
        "[" * 100_000,
        '{"a":' * 100_000,
        "NaN",
        "1" * 9999,
        "{}",
        '"',
        "\ud800".encode(errors="surrogatepass"),
    ):
        (folder / "manifest.json").write_bytes(deep if isinstance(deep, bytes) else deep.encode())
        refuse("manifest.json is damaged")
    write(manifest)
    for name in (*manifest["files"], "manifest.json"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        os.mkfifo(folder / name)  # opening it would wait for ever
        refuse(f"{name} is not a file")
        (folder / name).unlink()
        (folder / name).symlink_to(name)
        refuse(f"{name} (is missing|cannot be read)")
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    checkpoint.verify(folder)
    monkeypatch.setattr(checkpoint, "checkpoints", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(UsageError, match=r"latest, which cannot be read: .*Permission denied"):
        small.find()
    folder.rename(tmp_path / "moved")
    folder.write_text("a file where the folder should be")
    refuse("manifest.json is missing")


@pytest.mark.parametrize(
    "text",
    [
        # Each line is nine of the line before: written out, they are more than any memory holds
        "a0: &a0 x\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)),
        "seed: &s 0\nglobal_batch_size: *s\n",
        "- 1\n",
        "seed: 1\nseed: 2\n",
        "a: " + "[" * 5000,
        "#" * 2**17,
    ],
)
def test_a_recipe_that_others_put_into_a_checkpoint_is_read_strictly(tmp_path, text):
    """The manifest has been made anew, so that the folder is whole."""
    small = Small(tmp_path)
    small.save(1)
    folder = tmp_path / "checkpoint-1"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksum"]
    state = json.loads((folder / "state.json").read_text()) | {"recipe_fingerprint": "0" * 16}
    for name, content in (("recipe.yaml", text), ("state.json", json.dumps(state))):
        (folder / name).write_text(content)
        manifest["files"][name] = {"size": len(content), "sha256": checkpoint._sha256(folder / name)}
    (folder / "manifest.json").write_text(checkpoint._manifest(manifest))
    state = checkpoint.verify(folder)
    with pytest.raises(UsageError, match=r"checkpoint-1 is damaged: recipe\.yaml .*Resume from an older one") as error:
        small.find()
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match=r"checkpoint-1 is damaged: recipe\.yaml "):
        checkpoint.read_earlier_recipe(folder, state, small.recipe)


@pytest.mark.distributed
@pytest.mark.parametrize("more", ["", " --async_checkpointing"])
def test_two_processes_agree_on_damage_and_on_a_full_disk(train, trainings, corpus, tmp_path, more):
    """Both pass over the same checkpoint, neither waits for a save that failed, and the error is said once."""
    output_dir = train("run", "--global_batch_size 8 --checkpointing_steps 2 --stop_after_step 6")
    (output_dir / "checkpoint-6" / "optimizer.safetensors").write_bytes(b"")
    flags = "--global_batch_size 8 --checkpointing_steps 3 --resume_from_checkpoint latest" + more
    full = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # bytes that a file can have"
    )
    codes, said = train_with_code(trainings, full, tiny_argv("pretrain_bert", corpus, output_dir, flags), tmp_path)
    assert codes[0] == 1
    (error,) = [line for line in said.splitlines() if line.startswith("ERROR: ")]
    assert re.match(r"ERROR: checkpoint-10 could not be written to .*; the newest is checkpoint-4", error)
    assert said.count("checkpoint-6 is damaged: optimizer.safetensors has 0 bytes") == 1
    assert [line["step"] for line in metrics(output_dir)] == list(range(1, 11))
    assert names(output_dir) == [2, 4, 6]


def test_a_failure_is_forgotten_when_a_later_save_succeeds(train, capsys):
    def fail_once(path, *_):
        if Path(path).name == ".checkpoint-4.partial":
            raise OSError(28, "No space left on device")

    with before("os.mkdir", fail_once):
        output_dir = train("run", "--global_batch_size 8 --checkpointing_steps 4")
    assert "WARNING: checkpoint-4 could not be written" in capsys.readouterr().err
    assert [path.name for path in checkpoint.checkpoints(output_dir)] == ["checkpoint-8", "checkpoint-10"]


@pytest.mark.parametrize("more", ["", " --async_checkpointing"])
def test_a_full_disk_does_not_end_training(train, capfd, more):
    """Files cannot grow: training goes to its end, the earlier checkpoint stays, and the exit code says it."""
    flags = "--global_batch_size 8 --checkpointing_steps 2"
    output_dir = train("run", flags + " --stop_after_step 2")
    contents = {path.name: path.read_bytes() for path in (output_dir / "checkpoint-2").iterdir()}
    capfd.readouterr()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # bytes that a file can have
    try:
        code = exit_code(lambda: train("run", flags + " --resume_from_checkpoint latest" + more))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    errors = capfd.readouterr().err
    assert code == 1, errors
    assert [int(step) for step in re.findall(r"WARNING: checkpoint-(\d+) could not be written", errors)] == [
        4,
        6,
        8,
        10,
    ]
    (error,) = [line for line in errors.splitlines() if line.startswith("ERROR")]
    assert re.match(
        r"ERROR: checkpoint-10 could not be written to .* \(.*File too large.*\); the newest is checkpoint-2", error
    )
    assert "Traceback" not in errors
    assert [line["step"] for line in metrics(output_dir)] == list(range(1, 11))
    assert [path.name for path in output_dir.glob("*checkpoint-*")] == ["checkpoint-2"], "nothing half written is left"
    assert {path.name: path.read_bytes() for path in (output_dir / "checkpoint-2").iterdir()} == contents
    train("run", flags + " --resume_from_checkpoint latest")
    assert untimed_metrics(output_dir) == untimed_metrics(train("whole", flags))


def test_metrics_that_cannot_be_written_are_written_later(train, capsys):
    """A disk that is full for a while loses no line."""
    calls = []

    def fill(path, mode, _):
        if str(path).endswith("metrics.jsonl") and mode == "a":
            calls.append(path)
            if 3 <= len(calls) <= 6:
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
                os.write(descriptor, b'{"half')
                os.close(descriptor)
                raise OSError(28, "No space left on device")

    with before("open", fill):
        ours = train("run", "--global_batch_size 8 --logging_steps 2")
    assert "metrics.jsonl cannot be written (No space left on device); trying again later" in capsys.readouterr().err
    assert len(calls) > 6
    assert untimed_metrics(ours) == untimed_metrics(train("plain", "--global_batch_size 8"))


def test_trackers_go_on_with_their_run(train, monkeypatch):
    """The same run id in every session, and no steps twice."""
    settings, original = [], Accelerator.init_trackers

    def note(self, name, config=None, init_kwargs=None):
        settings.append(init_kwargs)
        original(self, name, config=config, init_kwargs=init_kwargs)

    monkeypatch.setattr(Accelerator, "init_trackers", note)
    flags = "--global_batch_size 8 --report_to tensorboard --checkpointing_steps 3"
    folder = train("run", flags + " --stop_after_step 5")
    shutil.rmtree(folder / "checkpoint-5")
    train("run", flags + " --resume_from_checkpoint latest")
    assert [kwargs["tensorboard"] for kwargs in settings] == [{"purge_step": 1}, {"purge_step": 4}]
    run_id = checkpoint.verify(folder / "checkpoint-3").run_id
    for kwargs in settings:
        assert kwargs["wandb"] == {"id": run_id, "name": "run", "resume": "allow"}
        assert kwargs["trackio"] == {"name": f"run-{run_id}", "resume": "allow"}
    assert {path.parent for path in folder.rglob("*tfevents*")} == {folder / "tensorboard"}, "one run, one folder"
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 11))
    assert [event.step for event in events.Scalars("eval/mlm_accuracy")] == [0, 10]
    assert {tag.partition("/")[0] for tag in events.Tags()["scalars"]} == {"train", "eval"}
    assert events.Tags()["tensors"] == ["recipe/text_summary"]


# -------------------------------------------------------------------------------------------------------- the folder


def test_a_second_run_in_the_folder_is_refused(train):
    """While a process holds it; not after that process is gone, however it went."""
    output_dir = train("run", "--global_batch_size 8 --stop_after_step 2")
    context = multiprocessing.get_context("fork")
    held = context.Event()
    holder = context.Process(target=lambda: (output_folder._lock(output_dir), held.set(), signal.pause()), daemon=True)
    holder.start()
    try:
        assert held.wait(PATIENCE)
        with pytest.raises(UsageError, match=rf"is in use by another run \(process {holder.pid} on .*\): wait for it"):
            train("run", "--global_batch_size 8 --resume_from_checkpoint latest")
    finally:
        holder.kill()
        holder.join()
    train("run", "--global_batch_size 8 --resume_from_checkpoint latest")


@pytest.mark.parametrize("policy", ["carry", "keep", "drop"])
def test_every_sample_is_used_once_per_epoch(train, policy):
    """The ledger of a real run over two epochs of 337 pairs, in batches of 64: 10.5 steps, or 12, or 10."""
    flags = f"--global_batch_size 64 --per_device_train_batch_size 9 --record_samples --max_train_steps 12 --epoch_end {policy}"
    output_dir = train("ledger", flags)
    steps = samples_of_steps(output_dir)
    num_samples = 1 + max(sample for samples in steps.values() for _, sample in samples)
    for epoch in range(2):
        ids = [sample for samples in steps.values() for e, sample in samples if e == epoch]
        assert len(ids) == len(set(ids)) == (num_samples // 64 * 64 if policy == "drop" else num_samples)
    assert [line["samples"] for line in metrics(output_dir)] == [len(steps[step]) for step in range(1, 13)]
    assert [len(steps[step]) for step in (1, 6)] == [64, num_samples % 64 if policy == "keep" else 64]
