"""Stop and go on: bit-identical on the same layout, the same steps on another, and never from a wrong checkpoint."""

import shutil
from functools import partial

import pytest
import torch
from common import all_metrics, metrics, samples_of_steps
from safetensors.torch import load_file
from test_equivalence import check

from recipes import checkpoint
from recipes.errors import UsageError

STOP = " --checkpointing_steps 3 --stop_after_step 7"
DROPOUT = " --hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1"


def without_time(output_dir) -> list[dict]:
    return [{name: v for name, v in line.items() if name != "seconds"} for line in all_metrics(output_dir)]


def same_weights(a, b) -> bool:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (a, b))
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_resumed_on_the_same_layout_is_bit_identical(train):
    """Dropout on, twice resumed (once from a checkpoint inside an epoch), evaluations and the ledger included."""
    flags = "--global_batch_size 10 --per_device_train_batch_size 3 --eval_steps 4 --record_samples" + DROPOUT
    whole = train("whole", flags)
    parts = train("parts", flags + STOP)
    assert [path.name for path in checkpoint.checkpoints(parts)] == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]
    assert not (parts / "all_results.json").exists(), "it is not finished"
    train("parts", flags + " --resume_from_checkpoint latest --stop_after_step 8")
    train("parts", flags + " --resume_from_checkpoint latest")
    assert without_time(parts) == without_time(whole)
    assert (parts / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert same_weights(parts, whole)
    assert same_weights(parts / "checkpoint-10", whole / "checkpoint-10")


def test_a_killed_run_goes_on_from_its_last_checkpoint(train):
    """Lines of steps after the checkpoint, and a line cut off by the kill, are written again, once."""
    whole = train("whole", "--global_batch_size 8")
    killed = train("killed", "--global_batch_size 8" + STOP)
    shutil.rmtree(killed / "checkpoint-7")
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "epoch": 0.')
    (killed / ".checkpoint-8.partial").mkdir()
    train("killed", "--global_batch_size 8 --resume_from_checkpoint latest")
    assert without_time(killed) == without_time(whole)
    assert same_weights(killed, whole)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_resumed_on_another_layout_takes_the_same_steps(train, dtype):
    flags = f"--global_batch_size 10 --dtype {dtype} --per_device_train_batch_size "
    whole = train("whole", flags + "10")
    train("parts", flags + "10" + STOP)
    check(train("parts", flags + "3 --resume_from_checkpoint latest"), whole, dtype)


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_resumed_on_another_number_of_processes(train, train_on):
    """1 -> 2 processes and 2 -> 1; on the same 2 processes, with dropout, bit-identical."""
    flags, goes_on = (
        "--global_batch_size 10 --dtype float64 --per_device_train_batch_size 3",
        " --resume_from_checkpoint ",
    )
    whole = train("whole", flags)
    stopped = train("stopped", flags + STOP)
    folder = train_on(
        2,
        {
            "one_to_two": flags + goes_on + str(stopped / "checkpoint-7"),
            "two_to_one": flags + STOP,
            "whole_two": flags + DROPOUT,
            "parts_two": flags + DROPOUT + STOP,
        },
    )
    first_lines = "".join(line for line in (stopped / "metrics.jsonl").open())
    resumed = (folder / "one_to_two" / "metrics.jsonl").read_text()
    (folder / "one_to_two" / "metrics.jsonl").write_text(first_lines + resumed)
    check(folder / "one_to_two", whole, "float64")
    check(train("two_to_one", flags + goes_on + "latest"), whole, "float64")
    train_on(2, {"parts_two": flags + DROPOUT + goes_on + "latest"})
    assert without_time(folder / "parts_two") == without_time(folder / "whole_two")
    assert same_weights(folder / "parts_two", folder / "whole_two")


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_resumed_sharded_or_not(train, train_on):
    """One process -> two with FSDP2, and back: the files are the same, whatever wrote them."""
    flags = "--global_batch_size 10 --dtype float64 --per_device_train_batch_size 3 --eval_steps 7"
    train = partial(train, program="pretrain_gpt2")
    whole, stopped = train("whole", flags), train("pretrain_gpt2/stopped", flags + STOP)
    resume = " --resume_from_checkpoint "
    runs = {"pretrain_gpt2/sharded": flags + STOP, "pretrain_gpt2/stopped": flags + resume + "latest"}
    folder = train_on(2, runs, "fsdp2_2xcpu") / "pretrain_gpt2"
    check(folder / "stopped", whole, "float64")
    check(train("pretrain_gpt2/sharded", flags + resume + "latest"), whole, "float64")
    states = [
        torch.load(path / "checkpoint-10" / "optimizer.pt", weights_only=True) for path in (folder / "stopped", whole)
    ]
    sizes = [{n: v["exp_avg"].shape for n, v in state["optimizer"]["state"].items()} for state in states]
    assert sizes[0] == sizes[1]
    assert stopped == folder / "stopped"


def test_a_finished_run_can_be_resumed_without_harm(train):
    done = train("done", "--global_batch_size 8")
    before, weights = without_time(done), (done / "model.safetensors").read_bytes()
    saved = (done / "checkpoint-10").stat().st_ino
    train("done", "--global_batch_size 8 --resume_from_checkpoint latest")
    assert without_time(done) == before
    assert (done / "model.safetensors").read_bytes() == weights
    assert (done / "checkpoint-10").stat().st_ino == saved, "the checkpoint is not written anew"


def test_only_the_newest_checkpoints_are_kept(train):
    output_dir = train("limited", "--global_batch_size 8 --checkpointing_steps 2 --checkpoints_total_limit 2")
    assert [path.name for path in checkpoint.checkpoints(output_dir)] == ["checkpoint-8", "checkpoint-10"]
    assert not list(output_dir.glob(".checkpoint*"))


def test_a_failed_save_leaves_the_earlier_checkpoint(train, monkeypatch):
    output_dir = train("failing", "--global_batch_size 8 --stop_after_step 3")
    before = {path.name: path.read_bytes() for path in (output_dir / "checkpoint-3").iterdir()}
    monkeypatch.setattr(checkpoint.torch, "save", lambda *arguments: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        train("failing", "--global_batch_size 8 --resume_from_checkpoint latest --stop_after_step 5")
    assert [path.name for path in checkpoint.checkpoints(output_dir)] == ["checkpoint-3"]
    assert {path.name: path.read_bytes() for path in (output_dir / "checkpoint-3").iterdir()} == before


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
    refuse("holds no checkpoint", "--resume_from_checkpoint latest", tmp_path / "new")
    refuse("is not a checkpoint: give latest", f"--resume_from_checkpoint {tmp_path / 'nowhere'}")
    refuse("it holds checkpoint-2: name one of them", f"--resume_from_checkpoint {stopped}")
    refuse(
        "another recipe: learning_rate 0.005 there, 0.002 here", "--resume_from_checkpoint latest --learning_rate 2e-3"
    )
    refuse("another recipe: max_train_steps 10 there, 20 here", "--resume_from_checkpoint latest --max_train_steps 20")
    refuse("trained on other data", f"--resume_from_checkpoint latest --train_file {other}")
    state = stopped / "checkpoint-2" / "state.json"
    text = state.read_text()
    for damage in ("", "{}", "[]", text[:-20], text.replace('"files": {', '"files": 3, "x": {')):
        state.write_text(damage)
        refuse("is damaged", "--resume_from_checkpoint latest")
    state.write_text(text)
    weights = stopped / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refuse(r"is damaged \(missing or of another size: model.safetensors\)", "--resume_from_checkpoint latest")
    train("stopped", flags + " --overwrite_output_dir")
    assert [line["step"] for line in metrics(stopped)] == [1, 2]


@pytest.mark.parametrize("policy", ["carry", "keep", "drop"])
def test_every_sample_is_used_once_per_epoch(train, policy):
    """The ledger of a real run over two epochs of 337 pairs, in batches of 64: 10.5 steps, or 12, or 10."""
    flags = f"--global_batch_size 64 --per_device_train_batch_size 9 --record_samples --max_train_steps 12 --epoch_end {policy}"
    output_dir = train("ledger", flags)
    steps = samples_of_steps(output_dir)
    num_samples = 1 + max(sample for samples in steps.values() for _, sample in samples)
    for epoch in range(2):
        used = [sample for samples in steps.values() for e, sample in samples if e == epoch]
        assert len(used) == len(set(used)) == (num_samples // 64 * 64 if policy == "drop" else num_samples)
    assert [line["samples"] for line in metrics(output_dir)] == [len(steps[step]) for step in range(1, 13)]
    assert [len(steps[step]) for step in (1, 6)] == [64, num_samples % 64 if policy == "keep" else 64]


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_the_same_samples_per_step_on_1_2_and_3_processes(train, train_on):
    flags = "--global_batch_size 31 --per_device_train_batch_size 4 --record_samples --max_train_steps 12"
    one = samples_of_steps(train("one", flags))
    two = samples_of_steps(train_on(2, {"two": flags}) / "two")
    three = samples_of_steps(train_on(3, {"three": flags}) / "three")
    assert one == two == three
    assert all(len(set(samples)) == 31 for samples in one.values())
