"""Checkpoints in a store that fails: nothing is lost, nothing half copied looks whole, and an empty disk goes on from there."""

import hashlib
import json
import os
import random
import shutil
import threading

import fsspec
import pytest
from compare import same_weights, untimed_metrics
from fsspec.implementations.memory import MemoryFileSystem
from waiting import PATIENCE, until

from samestep.contrib.copies import checkpoint_store
from samestep.contrib.copies.checkpoint_store import CheckpointStore
from samestep.errors import RunError, UsageError

FLAGS = "--global_batch_size 8 --checkpointing_steps 2 --checkpoints_total_limit 2"


class Flaky(MemoryFileSystem):
    """A store in memory whose requests fail, which cuts files off, and which goes in the middle of writes or removals."""

    protocol = "flaky"
    store, pseudo_dirs = {}, [""]  # of its own
    rng, failures, cuts, writes, most_writes = random.Random(0), 0.0, 0.0, [], None
    cut_reads, removals, most_removals = 0, 0, None

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def _request(self) -> None:
        is_gone = self.most_writes is not None and len(self.writes) >= self.most_writes
        if is_gone or self.rng.random() < self.failures:
            raise OSError("503 Slow Down")

    def put_file(self, path, target, **keywords):
        self._request()
        super().put_file(path, target, **keywords)
        self.writes.append(target)
        if self.rng.random() < self.cuts:
            super().pipe_file(target, super().cat_file(target)[:-1])

    def pipe_file(self, path, value, **keywords):
        self._request()
        self.writes.append(path)
        super().pipe_file(path, value[:-1] if self.rng.random() < self.cuts else value, **keywords)

    def cat_file(self, path, *arguments, **keywords):
        self._request()
        return super().cat_file(path, *arguments, **keywords)

    def get_file(self, path, target, **keywords):
        self._request()
        super().get_file(path, target, **keywords)
        if self.cut_reads:
            Flaky.cut_reads -= 1
            os.truncate(target, os.path.getsize(target) - 1)

    def rm_file(self, path):
        if self.removals == self.most_removals:
            raise OSError("503 Slow Down")
        Flaky.removals += 1
        super().rm_file(path)

    def open(self, path, mode="rb", **keywords):
        self._request()
        return super().open(path, mode, **keywords)

    def find(self, path, *arguments, **keywords):
        self._request()
        return super().find(path, *arguments, **keywords)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(autouse=True)
def store_is_new(monkeypatch):
    Flaky.store.clear()
    Flaky.rng, Flaky.failures, Flaky.cuts, Flaky.writes, Flaky.most_writes = random.Random(0), 0.0, 0.0, [], None
    Flaky.cut_reads, Flaky.removals, Flaky.most_removals = 0, 0, None
    monkeypatch.setattr(checkpoint_store, "LONGEST_WAIT", 0.001)


@pytest.fixture
def folder(tmp_path):
    """Make what the store takes for a checkpoint."""

    def make(step: int, files=("a.safetensors", "state.json")):
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        for name in files:
            (path / name).write_bytes(f"{name} {step}".encode() * 1000)
        digests = {name: {"sha256": hashlib.sha256((path / name).read_bytes()).hexdigest()} for name in files}
        (path / "manifest.json").write_text(json.dumps({"files": digests}))
        return path

    return make


def names(url: str = "flaky://bucket/run") -> list[str]:
    return CheckpointStore(url).list_checkpoints()


def test_an_empty_disk_goes_on_from_a_store_that_fails(train, tmp_path):
    """One request of ten fails, one file of ten arrives cut off: the run ends as one that was never interrupted."""
    Flaky.failures = 0.1
    Flaky.cuts = 0.1
    whole = train("whole", FLAGS)
    more = " --checkpoint_store flaky://bucket/run --async_checkpointing --resume_from_checkpoint latest"
    run = train("run", FLAGS + more + " --stop_after_step 5")
    copies = names()
    assert copies[-1] == "checkpoint-5"
    on_disk = {path.name for path in run.glob("checkpoint-*")}
    assert set(copies) <= on_disk, "deleted as on the disk; one that waited too long was left out"
    for name in copies:
        for path in (run / name).iterdir():
            assert Flaky.store[f"/bucket/run/{name}/{path.name}"].getvalue() == path.read_bytes()
    shutil.rmtree(run)
    train("run", FLAGS + more)
    assert untimed_metrics(run) == untimed_metrics(whole), "lines before the checkpoint, too"
    assert same_weights(run, whole)
    assert names()[-1] == "checkpoint-10"


def test_what_is_half_copied_is_no_checkpoint(folder):
    """Whatever write is the last before the connection goes for ever: the checkpoint before it is the newest."""
    store = CheckpointStore("flaky://bucket/run", patience=0.01)
    store.copy(folder(2))
    writes, later = len(Flaky.writes), folder(4)
    assert Flaky.writes[-1].endswith("checkpoint-2/manifest.json")
    for place in range(1, writes + 1):
        Flaky.writes.clear()
        Flaky.most_writes = place
        with pytest.raises(OSError, match="503"):
            store.copy(later)
        Flaky.most_writes = None
        assert names() == ["checkpoint-2"], place
    assert Flaky.writes[-1].endswith("manifest.json"), "the last write of all"
    store.copy(later)
    assert names() == ["checkpoint-2", "checkpoint-4"]


def test_a_copy_with_other_bytes_is_made_again(folder):
    cuts = iter([1.0] * 2 + [0.0] * 1000)
    Flaky.cuts = property(lambda self: next(cuts))
    store = CheckpointStore("flaky://bucket/run")
    store.copy(folder(2))
    assert Flaky.writes.count("/bucket/run/checkpoint-2/a.safetensors") == 3
    assert names() == ["checkpoint-2"]


def test_a_copy_that_is_half_deleted_is_no_checkpoint(folder):
    store = CheckpointStore("flaky://bucket/run", patience=0.01)
    for step in (2, 4):
        store.copy(folder(step))
    store.delete(["checkpoint-2"])
    Flaky.most_removals = 1
    store.delete_doomed()
    assert "/bucket/run/checkpoint-2/state.json" in Flaky.store, "the connection went before it"
    assert names() == ["checkpoint-4"]


def test_a_file_that_arrives_with_other_bytes_is_brought_again(folder, tmp_path):
    store, original = CheckpointStore("flaky://bucket/run"), folder(2)
    store.copy(original)
    Flaky.cut_reads = 2
    store.bring("checkpoint-2", tmp_path / "brought")
    for path in original.iterdir():
        assert (tmp_path / "brought" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["../other", "sub/other", "/other", "."])
def test_a_store_names_no_file_outside_the_checkpoint(folder, tmp_path, name):
    """Whoever can write to it could have any file of this machine replaced."""
    store = CheckpointStore("flaky://bucket/run")
    store.copy(folder(2))
    store.files.pipe_file(
        "/bucket/run/checkpoint-2/manifest.json", json.dumps({"files": {name: {"sha256": ""}}}).encode()
    )
    store.files.pipe_file("/bucket/run/other", b"not wanted")
    with pytest.raises(OSError, match="is no name of a file"):
        store.bring("checkpoint-2", tmp_path / "run" / "brought")
    assert list((tmp_path / "run").rglob("*")) == [tmp_path / "run" / "brought"]


def test_copies_are_made_in_the_background_and_none_is_deleted_on_the_way(folder, monkeypatch):
    """The newest that waits replaces one that waits; those that are needed are named."""
    gate, copied = threading.Event(), []

    class Gated(CheckpointStore):
        def copy(self, path, lines):
            gate.wait(PATIENCE)
            copied.append(path.name)

    store = Gated("flaky://bucket/run")
    store.add(folder(2))
    until(lambda: store.busy is not None, "copy in the background")
    store.add(folder(4))
    store.add(folder(6))
    assert store.held_names == {"checkpoint-2", "checkpoint-6"}
    gate.set()
    store.close()
    assert copied == ["checkpoint-2", "checkpoint-6"]
    assert store.held_names == set()


def test_a_store_that_has_gone(folder, capfd):
    store = CheckpointStore("flaky://bucket/run", patience=0.01)
    Flaky.most_writes = 0
    store.add(folder(2))
    with pytest.raises(RunError, match=r"checkpoint-2 could not be copied to flaky://bucket/run \(503 Slow Down\)"):
        store.close()
    assert "Training goes on" in capfd.readouterr().err
    with pytest.raises(UsageError, match="checkpoint_store is flaky://bucket/run, which cannot be read: 503"):
        CheckpointStore("flaky://bucket/run", patience=0.01).list_checkpoints()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("bucket/run", "checkpoint_store is 'bucket/run', must begin with a protocol"),
        ("nothing://bucket", "checkpoint_store is nothing://bucket, which cannot be used: Protocol not known"),
        ("flaky://bucket/run", r"holds an earlier run \(its checkpoint-2\): continue it"),
    ],
)
def test_what_cannot_be_a_store(train, folder, url, message):
    CheckpointStore("flaky://bucket/run").copy(folder(2))
    with pytest.raises(UsageError, match=message):
        train("run", FLAGS + f" --checkpoint_store {url}")
