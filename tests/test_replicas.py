"""Replicas that come and go: the cut follows the quorum, nothing is lost or done twice, and what they cannot do is refused."""

import concurrent.futures
import datetime
import io
import json
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from common import all_metrics, metrics, samples_of_steps, tiny_argv
from compare import parameters, relative
from test_steps import Ragged
from torch import nn
from waiting import PATIENCE

from samestep.contrib.replication.gradients import GradientBuffer
from samestep.contrib.replication.replica_accelerator import ReplicaAccelerator
from samestep.contrib.replication.replicas import Replicas
from samestep.contrib.replication.shared_folder import SharedFolder
from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data.steps import Steps
from samestep.errors import RunError, UsageError
from samestep.recipe import run_settings
from samestep.recipe.exclusions import find_refusal
from samestep.training.checkpoint import State

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


# ----------------------------------------------------------------------------------------------------------- the steps


class Meeting:
    """The other replicas, in the place of torchft's lighthouse: replicas are threads, which tell each other by turns."""

    def __init__(self, num_replicas: int):
        self.barrier, self.parts = threading.Barrier(num_replicas, timeout=PATIENCE), [None] * num_replicas

    def share(self, rank: int, part: Any) -> list[Any]:
        """Give a part; get those of all replicas, in their order."""
        self.parts[rank] = part
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


class Manager:
    """A replica's connection to a `Meeting`: those of the methods of torchft's manager that replicas use."""

    def __init__(self, meeting: Meeting, rank: int, step: int):
        self.meeting, self.rank, self.step, self.error, self.num_quorums = meeting, rank, step, None, 0

    def start_quorum(self) -> None:
        """Give those that are behind the state of the first that is not, as it comes over the network."""
        self.num_quorums += 1
        assert self.num_quorums < 10, "replicas do not come to a step"
        self.error, state, sent = None, self.replica.state, io.BytesIO()
        steps = self.meeting.share(self.rank, self.step)
        torch.save(state.get(), sent)
        received = self.meeting.share(self.rank, sent)[steps.index(max(steps))]
        if self.step < max(steps):
            state.set(torch.load(io.BytesIO(received.getvalue()), weights_only=True), max(steps))
            self.step = max(steps)

    def allreduce(self, tensor: torch.Tensor, reduce_op: Any) -> SimpleNamespace:
        tensor.copy_(sum(self.meeting.share(self.rank, tensor.clone())))
        return SimpleNamespace(wait=lambda: None)

    def should_commit(self) -> bool:
        commits = not any(self.meeting.share(self.rank, self.error))
        self.step += commits
        return commits

    def num_participants(self) -> int:
        return len(self.meeting.parts)

    def participating_rank(self) -> int:
        return self.rank

    def current_step(self) -> int:
        return self.step

    def errored(self) -> Exception | None:
        return self.error

    def report_error(self, error: Exception) -> None:
        self.error = error

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def make_replica(manager: Manager, output_dir: Path, weight: float = 1.0, b: int = 2) -> Replicas:
    """Make a replica of 12 samples per step, whose gradient of `weight` is the number of the step's tokens."""
    accelerator = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"), mixed_precision="no")
    accelerator.sync_gradients = False  # all buckets at the end
    settings = SimpleNamespace(ddp_timeout=PATIENCE, min_replicas=1, lighthouse="http://a:1", reproducible=None)
    settings.dtype = "float32"
    layout = solve_layout(num_processes=1, global_batch_size=12, per_device_train_batch_size=b)
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
    log = SimpleNamespace(recipe=SimpleNamespace(fingerprint="ours"), events=[], open_files=lambda step: None)
    log.add_event = lambda step, event, **more: log.events.append((step, event))
    log.share, log.join = dict, lambda state, step: log.events.append((step, "joined"))
    steps = Steps(Ragged(), Order(31, 12, seed=5), layout, process_index=0)
    recovery = SimpleNamespace(
        model=model, log=log, steps=steps, saver=SimpleNamespace(abandoned_folders=["checkpoint-9"])
    )
    recovery.optimizer = ReplicaAccelerator(cpu=True).prepare(optimizer)
    manager.replica = replica = Replicas(accelerator, settings, SharedFolder(output_dir, NAMES))
    replica.attach(recovery, None, State(step=manager.step), {})
    replica.connection.manager, replica.connection.is_group_new = manager, True
    return replica


def attempt(replica: Replicas, **more: bool) -> SimpleNamespace:
    """Meet the others and do the replica's part of a step; return what it was, and how it ended."""
    data, counts = replica.meet(replica.steps[replica.processes.step])
    for micro_batch in data.micro_batches:
        (replica.state.model.weight * micro_batch["lengths"].sum()).sum().backward()
    failure = replica.reduce(
        data, list(data.micro_batch_counts), **{"has_failed": False, "is_asked_to_stop": False} | more
    )
    return SimpleNamespace(data=data, counts=counts.tolist(), failure=failure)


def attempt_together(*replicas: Replicas, **more: tuple[bool, ...]) -> list[SimpleNamespace]:
    """Let replicas attempt a step, each in a thread; `more` are arguments of `attempt`, a value for each."""
    meeting, errors = replicas[0].connection.manager.meeting, []

    def attempt_or_leave(rank: int) -> SimpleNamespace | None:
        try:
            return attempt(replicas[rank], **{name: values[rank] for name, values in more.items()})
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()  # so that nobody waits for it

    with concurrent.futures.ThreadPoolExecutor(len(replicas)) as pool:
        ended = list(pool.map(attempt_or_leave, range(len(replicas))))
    for first in errors:  # later ones follow from it
        raise first
    return ended


@pytest.fixture
def two(tmp_path):
    """Make two replicas that are as far as each other: two(OPTIONS OF make_replica, ...)."""

    def make(first: dict | None = None, second: dict | None = None, steps: tuple[int, int] = (0, 0)) -> list[Replicas]:
        meeting = Meeting(2)
        managers = [Manager(meeting, rank, step) for rank, step in enumerate(steps)]
        return [
            make_replica(manager, tmp_path, **more or {})
            for manager, more in zip(managers, (first, second), strict=True)
        ]

    return make


def weights_of(*replicas: Replicas) -> list[float]:
    return [replica.state.model.weight.item() for replica in replicas]


def test_replicas_commit_a_step_together(two):
    replicas = two()
    one, other = attempt_together(*replicas, is_asked_to_stop=(True, False))
    assert (one.failure, other.failure) == (None, None)
    tokens, samples = one.counts
    assert samples == 12
    assert [replica.state.model.weight.grad.item() for replica in replicas] == [tokens] * 2, (
        "of both, with one reduction"
    )
    assert [sum(replica.all_sums).tolist() for replica in replicas] == [[tokens, 12.0]] * 2
    assert [replica.processes.step for replica in replicas] == [1, 1]
    assert [replica.everybody_stops for replica in replicas] == [False, False], "one of them goes on"
    attempt_together(*replicas, is_asked_to_stop=(True, True))
    assert [replica.everybody_stops for replica in replicas] == [True, True]


def test_no_replica_takes_a_step_for_which_one_of_them_lacks_memory(two):
    replicas = two()
    ended = attempt_together(*replicas, has_failed=(False, True))
    assert [end.failure for end in ended] == ["memory", "memory"]
    assert [replica.processes.step for replica in replicas] == [0, 0]
    first, again = ended[0], attempt_together(*replicas)[0]
    assert (again.data.step, again.data.samples, again.failure) == (0, first.data.samples, None)
    assert replicas[0].state.model.weight.grad.item() == again.counts[0], "of the second attempt alone"


def test_replicas_have_micro_batches_of_the_size_that_all_of_them_hold(two):
    one, other = attempt_together(*two({"b": 3}, {"b": 1}))
    assert [len(samples) for end in (one, other) for samples in end.data.samples] == [1] * 12
    assert one.counts == other.counts


def test_a_replica_that_is_behind_becomes_as_the_others(two):
    """With the lines that are in no file yet: the replica that has them may end before it has written them."""
    ahead, behind = replicas = two({"weight": 3.0}, {"weight": 1.0}, steps=(2, 0))
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.9}]
    for line in lines:
        ahead.folder.add("metrics.jsonl", line)
    behind.folder.add("metrics.jsonl", {"step": 1, "loss": 7.0})
    ahead.state.optimizer.state[ahead.state.model.weight]["momentum_buffer"] = torch.full((1, 1), 0.25)
    one, other = attempt_together(*replicas)
    assert (one.data.step, other.data.step) == (2, 2)
    assert weights_of(*replicas) == [3.0, 3.0]
    assert behind.state.optimizer.state[behind.state.model.weight]["momentum_buffer"].item() == 0.25
    assert behind.state.log.events[0] == (2, "joined")
    assert behind.state.recovery.saver.abandoned_folders == [], "the run's checkpoints, which are no earlier run's"
    behind.folder.write(is_writer=True)
    assert all_metrics(behind.folder.output_dir) == lines


def test_replicas_that_took_a_step_apart_become_the_same(two):
    """A new lighthouse knew nobody: the same step, rounded differently. The first replica's is kept."""
    replicas = two({"weight": 1.0}, {"weight": 1.0 + 1e-6}, steps=(1, 1))
    one, other = attempt_together(*replicas)
    assert (one.data.step, other.data.step) == (1, 1)
    assert weights_of(*replicas) == [1.0, 1.0]


def test_replicas_with_other_samples_are_no_replicas_of_a_run(two):
    """As of two versions of this program, which draw another order."""
    replicas = two()
    replicas[1].steps.order = Order(31, 12, seed=6)
    with pytest.raises(RunError, match="step 1: the replicas' parts are not each sample of the step once"):
        attempt_together(*replicas)


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
        ({"num_processes": 2, "is_sharded": False}, "the launch has 2"),
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
