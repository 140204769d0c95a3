"""Replicas that come and go: the cut follows the quorum, nothing is lost or done twice, and what they cannot do is refused."""

import datetime
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from common import all_metrics, metrics, samples_of_steps, tiny_argv
from compare import parameters, relative
from test_steps import Ragged
from torch import nn

from samestep.contrib.replication.gradients import GradientBuffer
from samestep.contrib.replication.replica_accelerator import ReplicaAccelerator
from samestep.contrib.replication.shared_folder import SharedFolder
from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data.steps import Steps
from samestep.errors import UsageError
from samestep.recipe import run_settings
from samestep.recipe.launches import find_refusal

# ------------------------------------------------------------------------------------------------------------- the cut


@pytest.mark.parametrize("deals_whole", [False, True])
def test_the_cut_follows_the_quorum(deals_whole):
    """Of 12 samples in micro-batches of at most 2; with fewer replicas there are more micro-batches, of the same size."""
    layout = solve_layout(num_processes=1, global_batch_size=12, per_device_train_batch_size=2)
    steps = Steps(Ragged(), Order(31, 12, seed=5), layout, process_index=0, deals_whole=deals_whole)
    whole = sorted(sample for samples in steps[3].samples for sample in samples)
    num_micro_batches = {}
    for num_replicas in (3, 2, 4, 1):
        parts = []
        for rank in range(num_replicas):
            steps.set_process(rank, num_replicas)
            parts.append(steps[3])
        assert sorted(sample for part in parts for samples in part.samples for sample in samples) == whole
        assert [list(map(len, part.samples)) for part in parts] == parts[0].sizes, "each knows what the others do"
        assert all(part.sizes == parts[0].sizes for part in parts)
        assert sum(part.counts for part in parts).tolist()[1] == 12
        assert max(max(sizes) for sizes in parts[0].sizes) == 2
        num_micro_batches[num_replicas] = len(parts[0].micro_batches)
    assert num_micro_batches == {3: 2, 2: 3, 4: 2, 1: 6}


def test_steps_that_were_prepared_for_another_quorum_are_prepared_anew():
    layout = solve_layout(num_processes=1, global_batch_size=7)
    steps = Steps(Ragged(), Order(31, 7, seed=5), layout, process_index=0)
    stream = steps.stream(3, 9, 0, torch.device("cpu"))
    assert len(next(stream).sizes) == 1
    steps.set_process(1, 2)
    second = next(stream)
    assert (second.step, len(second.sizes)) == (4, 2)
    steps.set_process(0, 2)
    assert next(stream).samples == steps[5].samples != second.samples


@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**20])
def test_gradients_add_up_in_one_buffer(bucket_bytes):
    """Over micro-batches, in the memory format of each parameter, and from 0 again in the next attempt.

    Buckets begin in the last backward only, each as soon as it is whole, in the order of the buffer; one whose parameter was
    not used at the end.
    """
    begun, is_last = [], []
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(12, 1)).to(memory_format=torch.channels_last)
    model[0].bias.requires_grad_(False)
    parameters, images = [nn.Parameter(torch.zeros(3)), *model.parameters()], torch.randn(4, 1, 3, 3)

    def begin_to_add_up(bucket: torch.Tensor) -> int:
        begun.append(bucket.clone())
        return len(begun)

    buffer = GradientBuffer(parameters, lambda: bool(is_last), begin_to_add_up, bucket_bytes)
    model(images).sum().backward()
    assert not begun, "a trial before the first step"
    for _ in range(2):
        begun.clear()
        is_last.clear()
        model.zero_grad(set_to_none=True)
        buffer.begin()
        for image in images.split(2):
            assert not begun
            is_last += [True] * torch.equal(image, images[2:])
            model(image).sum().backward()
        assert len(begun) == len(buffer.buckets) - 1, "the last bucket has a parameter without a gradient"
        assert buffer.finish() == list(range(1, len(buffer.buckets) + 1))
        assert torch.equal(torch.cat(begun), buffer.flat)
    assert len(buffer.buckets) == {1: 4, 40: 3, 2**20: 1}[bucket_bytes]
    gradients = [parameter.grad.clone() for parameter in buffer.parameters]
    assert all(g.stride() == p.stride() for g, p in zip(gradients, buffer.parameters, strict=True))
    true_gradients = torch.autograd.grad(model(images).sum(), buffer.parameters[:-1])
    assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(gradients[:-1], true_gradients, strict=True))
    buffer.flat.mul_(2)
    assert torch.equal(buffer.parameters[0].grad, 2 * gradients[0])


# ---------------------------------------------------------------------------------------------------------- the folder

NAMES = ("metrics.jsonl", "samples.jsonl")


def folder_of(path: Path, *records: dict) -> SharedFolder:
    folder = SharedFolder(path, NAMES)
    for record in records:
        folder.add("samples.jsonl" if "samples" in record else "metrics.jsonl", record)
    return folder


def test_each_line_is_written_once_whoever_writes(tmp_path):
    """The first replica dies after it has written some lines, in the middle of one; the second one writes what is missing."""
    lines = [{"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 2.1}, {"step": 2, "loss": 1.9}]
    places = [(1, 0), (1, 1), (2, 0), (2, 1)]
    ledger = [{"step": step, "process": rank, "micro_step": 0, "samples": [rank]} for step, rank in places]
    first, second = folder_of(tmp_path, *lines[:2], *ledger[:2]), folder_of(tmp_path, *lines, *ledger)
    first.write(is_writer=True)
    second.write(is_writer=False)
    assert not first.lines["metrics.jsonl"]
    assert len(second.lines["metrics.jsonl"]) == 1, "it knows what is in the file"
    assert all_metrics(tmp_path) == lines[:2]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    second.write(is_writer=True)
    assert all_metrics(tmp_path) == lines
    assert [json.loads(line) for line in (tmp_path / "samples.jsonl").open()] == ledger
    first.add("metrics.jsonl", lines[2])  # it has slept, and still takes itself for the first
    first.add("samples.jsonl", ledger[2] | {"process": 5})  # or has taken the step without the second
    first.write(is_writer=True)
    second.add("metrics.jsonl", lines[2])  # which it has seen in the file
    second.write(is_writer=True)
    assert all_metrics(tmp_path) == lines
    assert [json.loads(line) for line in (tmp_path / "samples.jsonl").open()] == ledger


def test_a_folder_is_shared_by_one_run_only(tmp_path):
    """By all its replicas, and by no other run; who comes first may find an earlier run in it, and who comes later may not."""

    def refuse():
        raise UsageError("earlier run")

    def try_in_a_process(meeting_point: str, begins: bool = False, asks_day: bool = False) -> str:
        """Join in another process, for which alone locks count; return what went wrong, or whether the run was begun."""
        read, write = os.pipe()
        if not os.fork():
            try:
                other = SharedFolder(tmp_path, NAMES)
                other.join(meeting_point, refuse)
                if asks_day:
                    os.write(write, other.date.encode())
                if begins:
                    os.write(write, str(other.begin_session(lambda is_again: None)).encode())
            except UsageError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            answer = file.read()
        os.wait()
        return answer

    assert try_in_a_process("http://a:1") == "earlier run"
    folder = SharedFolder(tmp_path, NAMES)
    folder.join("http://a:1", lambda: None)
    assert folder.date == datetime.date.today().isoformat()
    folder.files[".lock"].truncate(0)
    print("http://a:1\n2026-03-01", file=folder.files[".lock"], flush=True)  # as if it had joined on that day
    assert try_in_a_process("http://a:1", asks_day=True) == "2026-03-01", "the day of the first replica"
    assert try_in_a_process("http://a:1") == "", "a replica that is started again, in the folder of its run"
    assert "in use by another run (http://a:1)" in try_in_a_process("http://b:1")
    prepared = []
    assert folder.begin_session(prepared.append)
    folder.take_part()
    assert try_in_a_process("http://a:1", begins=True) == "False", "the run is under way"
    assert (prepared, folder.is_done) == ([False], False)
    assert folder.try_to_end()
    folder.end(is_done=True)
    assert folder.is_done
    folder.close()
    assert try_in_a_process("http://b:1") == "earlier run"


def test_a_run_whose_replicas_have_all_ended_is_begun_again(tmp_path):
    """By one that was started while they lived, and joins a moment too late."""
    folder, prepared = SharedFolder(tmp_path, NAMES), []
    folder.join("http://a:1", lambda: None)
    assert folder.begin_session(prepared.append)
    assert folder.begin_session(prepared.append), "nobody has said that it has the weights"
    assert prepared == [False, True]
    folder.close()


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "2", "process": 0}',
        '{"process": 0, "micro_step": 1}',
        "[2]",
        '{"step": 2, "process": {"a": 1}}',
        "\0\0",
    ],
)
def test_a_line_of_another_kind_is_named_and_the_file_stays(line, tmp_path):
    records = [{"step": step, "process": 0, "micro_step": 0, "samples": [step]} for step in (1, 2, 3)]
    first = folder_of(tmp_path, records[0])
    first.write(is_writer=True)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(line + "\n")
    before = (tmp_path / "samples.jsonl").read_bytes()
    with pytest.raises(UsageError, match=r"samples\.jsonl, line 2: .*: mend the line"):
        folder_of(tmp_path, *records).write(is_writer=True)
    first.add("samples.jsonl", records[1])
    with pytest.raises(UsageError, match=r"samples\.jsonl, line 2: "):
        first.write(is_writer=True)
    assert (tmp_path / "samples.jsonl").read_bytes() == before


@pytest.mark.parametrize("content", [b"[]", b'{"is_done": "yes"}', b"\xff", b"[" * 60_000, b'{"a": ' + b"1" * 100_000])
def test_a_session_of_another_kind_is_refused(content, tmp_path):
    (tmp_path / ".session").write_bytes(content)
    folder = SharedFolder(tmp_path, NAMES)
    with pytest.raises(UsageError, match=r"\.session must be empty, or .*: delete it"):
        folder.read_session()
    folder.close()


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--fault_tolerance step --gradient_accumulation_steps 2", "gradient_accumulation_steps is 2, but k changes"),
        ("--fault_tolerance step --noise_scale_steps 3", "noise_scale_steps is 3"),
        ("--fault_tolerance step --report_to tensorboard", "report_to is tensorboard"),
        ("--fault_tolerance step --accumulation optimizer --second_moment unbiased", "accumulation is optimizer"),
        ("--min_replicas 2", "min_replicas is 2, but fault_tolerance is none"),
        ("--fault_tolerance steps", "step"),
    ],
)
def test_what_replicas_cannot_do_is_refused_by_name(flags, pattern, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:29510")
    argv = ["--recipe", "bert_small_cpu", "--output_dir", str(tmp_path), *flags.split()]
    with pytest.raises(UsageError, match=pattern) as caught:
        run_settings.parse(argv, "bert_pretraining", "")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("address", ["", "127.0.0.1:29510", "http://127.0.0.1"])
def test_a_lighthouse_has_an_address(address, monkeypatch):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
    with pytest.raises(UsageError, match=r"TORCHFT_LIGHTHOUSE is .*http://HOST:PORT"):
        run_settings.parse(["--recipe", "bert_small_cpu", "--fault_tolerance", "step"], "bert_pretraining", "")


def test_batch_normalisation_changes_before_the_commit(monkeypatch):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:29510")
    with pytest.raises(UsageError, match="normalization is batch"):
        run_settings.parse(
            "--recipe resnet_digits_cpu --fault_tolerance step --normalization batch".split(),
            "image_classification",
            "",
        )


@pytest.mark.parametrize(
    ("launch", "field"),
    [
        ({"is_sharded": True, "num_processes": 4, "num_copies": 2}, "HSDP"),
        ({"num_processes": 2}, "the launch has 2"),
        ({"mixed_precision": "fp16"}, "mixed_precision is fp16"),
    ],
)
def test_launches_that_are_no_replica(launch, field):
    assert field in find_refusal(fault_tolerance="step", **launch).reason
    assert "fault_tolerance" not in str(find_refusal(**launch))


def test_accelerate_takes_a_replica_for_the_main_process_where_it_is_told_so():
    """accelerate 1.15: `is_main_process` is a property of the class, which the subclass replaces."""
    accelerator = ReplicaAccelerator(cpu=True)
    assert accelerator.is_main_process
    accelerator.is_main_process = False
    assert not accelerator.is_main_process
    assert accelerator.num_processes == 1


# ----------------------------------------------------------------------------------------------------------- for real


def train_together(train, trainings, corpus: Path, folder: Path, num_steps: int, flags: str, *words: str) -> None:
    """Train by two replicas, into folder/replicas; each step is there once, and all is as in one undisturbed process."""
    flags += f" --max_train_steps {num_steps} --logging_steps 1 --record_samples --dtype float64"
    reference, output_dir = train("reference", flags), folder / "replicas"
    flags += " --fault_tolerance step --min_replicas 2 --replica_timeout 20"
    argv = tiny_argv("pretrain_bert", corpus, output_dir, flags)
    words = (str(folder), "pretrain_bert", json.dumps(argv), *words)
    trainings.run(list(words), 1, module="run_replicas", can_repeat=False)
    ours, theirs = metrics(output_dir), metrics(reference)
    assert [line["step"] for line in ours] == list(range(1, num_steps + 1))
    for name in ("loss", "grad_norm"):
        assert np.allclose([line[name] for line in ours], [line[name] for line in theirs], rtol=1e-11)
    assert samples_of_steps(output_dir) == samples_of_steps(reference)
    assert relative(parameters(output_dir, ""), parameters(reference, "")) < 1e-11


@pytest.mark.thorough
@pytest.mark.distributed
def test_replicas_may_divide_the_weights(train, trainings, corpus, tmp_path):
    """Two replicas of two processes each. One process is killed in a step, its replica ends, is started again, and healed."""
    flags = (
        "--global_batch_size 14 --per_device_train_batch_size 1 --eval_steps 5 --checkpointing_steps 4"  # 4, 4, 3, 3
    )
    train_together(train, trainings, corpus, tmp_path, 10, flags, "sharded")
    assert "a replica was lost or late: the step is done again" in (tmp_path / "scene" / "log-2").read_text()
    parts = [path.read_text() for path in (tmp_path / "scene").iterdir() if path.name.isdigit()]
    assert sorted(map(parts.count, set(parts))) == [2, 2], "each process of a replica has the part of its fellow"
    evaluated = [line["step"] for line in all_metrics(tmp_path / "replicas") if "eval_loss" in line]
    assert evaluated == [0, 5, 10]


@pytest.mark.distributed
def test_a_replica_is_killed_in_the_middle_and_started_again(train, trainings, corpus, tmp_path):
    """The other one waits for it, heals it, and does the step again with it; the lighthouse dies as well.

    The curve is the reference's, each step is there once, and both have the same parameters.
    """
    flags = "--global_batch_size 16 --per_device_train_batch_size 4 --eval_steps 8"
    train_together(train, trainings, corpus, tmp_path, 24, flags)
    assert {line["replicas"] for line in all_metrics(tmp_path / "replicas") if "event" in line} == {2}
    logs = {name: (tmp_path / "scene" / name).read_text() for name in ("log-1", "log-2")}
    assert "a replica was lost or late: the step is done again" in logs["log-2"]
    assert re.search(r"waits: (replicas that live do not come to )?the lighthouse http\S+", logs["log-2"])
    digests = {path.read_text() for path in (tmp_path / "scene").iterdir() if path.name.isdigit()}
    assert len(digests) == 1
    evaluated = [line["step"] for line in all_metrics(tmp_path / "replicas") if "eval_loss" in line]
    assert evaluated == [0, 8, 16, 24]
