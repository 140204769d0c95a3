"""Streams: samples that depend on the recipe and the shards alone, on any number of processes, after kills, over bad lines."""

import gzip
import hashlib
import io
import json
import random
import tarfile

import fsspec
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from common import fresh_accelerator
from fsspec.implementations.memory import MemoryFileSystem

from samestep import exact_steps
from samestep.contrib.streaming.dataset import StreamDataset, stream
from samestep.contrib.streaming.shards import (
    BadRow,
    FileReader,
    RangeFile,
    Retries,
    Shard,
    cut_shards,
    find_hub_shards,
    find_shards,
)
from samestep.contrib.streaming.steps import StreamSteps, merge_marks
from samestep.contrib.streaming.streams import ENDLESS, DrawnShards, Source, StreamOrder, Streams
from samestep.cut.layout import solve_layout
from samestep.errors import UsageError

AT_ONCE = Retries(first_wait=0.0)


def draw_streams(num_shards=20, size=7, num_streams=6, buffer_size=4, seed=3, **source):
    shards = [Shard(f"s{number}", size) for number in range(num_shards)]
    return Streams([Source(shards, DrawnShards(), **source)], seed, num_streams, buffer_size)


def list_places(streams, numbers):
    return [streams.draw(number).places[0] for number in numbers]


class Rows:
    """A `SampleSource` of a stream, which notes the rows that it reads."""

    max_length, is_even = 1, True

    def __init__(self, streams):
        self.streams, self.read = streams, {}

    def __len__(self):
        return 1

    def draw(self, epoch, sample_id):
        self.read[sample_id] = self.streams.draw(sample_id).places[0]
        return self.read[sample_id]

    def collate(self, samples):
        return {"counts": torch.tensor([len(samples)])}

    def longest(self):
        return None


def make_steps(streams, process, num_processes, batch=10, cap=3):
    layout = solve_layout(num_processes=num_processes, global_batch_size=batch, per_device_train_batch_size=cap)
    return StreamSteps(Rows(streams), StreamOrder(ENDLESS, batch, 0), layout, process_index=process)


def test_an_epoch_of_the_streams_has_every_row_once():
    """Whole epochs of all streams: as many samples of each stream as its shards have rows."""
    streams = draw_streams()
    rows = [taken for stream in streams.streams[0] for taken in (stream.take() for _ in range(count_rows(stream)))]
    places = [taken.places[0] for taken in rows]
    assert sorted(places) == sorted(f"s{number}:{row}" for number in range(20) for row in range(7))
    again = [taken.places[0] for stream in streams.streams[0] for taken in (stream.take() for _ in range(9))]
    assert again != places[: len(again)]  # another permutation


def count_rows(stream):
    return 7 * len(range(stream.rows.number, 20, stream.rows.num_streams))


def test_a_seed_is_an_order_and_samples_of_neighbours_are_of_different_shards():
    first, again, other = (list_places(draw_streams(seed=seed), range(60)) for seed in (3, 3, 4))
    assert first == again != other
    assert len({place.partition(":")[0] for place in first[:6]}) == 6


def test_any_sample_can_be_drawn_in_any_order():
    whole = list_places(draw_streams(), range(400))
    streams = draw_streams()
    rng = random.Random(0)
    numbers = [rng.randrange(400) for _ in range(150)]
    assert list_places(streams, numbers) == [whole[number] for number in numbers]


def test_moves_and_kills_change_no_sample():
    """1 to 7 processes, a move after every few steps, by the places of a checkpoint that JSON has carried."""
    whole = list_places(draw_streams(), range(10 * 60))
    rng, state, step, noted = random.Random(1), {}, 0, {}
    while step < 60:
        num_processes, last = rng.randint(1, 7), min(60, step + rng.randint(1, 5))
        marks, readers = [], []
        for process in range(num_processes):
            streams = draw_streams()
            streams.seek({int(number): mark for number, mark in json.loads(json.dumps(state)).items()})
            steps = make_steps(streams, process, num_processes)
            for number in range(step, last):
                data = steps[number]
            steps[last]  # prepared ahead of the kill
            marks.append(data.marks)
            readers.append({number for number in steps.source.read if number < 10 * last})
            noted |= {number: place for number, place in steps.source.read.items() if number < 10 * last}
        assert sum(map(len, readers)) == 10 * (last - step)  # no process reads what is another's
        state, step = merge_marks(marks), last
        assert all(sum(mark[:1]) <= 10 * step for mark in state.values())
    assert [noted[number] for number in range(600)] == whole


def test_places_only_save_time():
    """Without them the same samples come; with them a stream of 10^9 rows goes on at once, and no row is read again."""
    streams = draw_streams(1000, 10**6, 64, 16)
    far = list_places(streams, range(5_000, 5_064))
    marks = streams.list_marks()
    resumed, reader = draw_streams(1000, 10**6, 64, 16), Counting()
    resumed.sources[0] = object.__new__(Source)
    resumed = Streams([Source([Shard(f"s{n}", 10**6) for n in range(1000)], reader)], 3, 64, 16)
    resumed.seek(marks)
    ahead = list_places(resumed, range(5_064, 5_128))
    assert ahead == list_places(streams, range(5_064, 5_128))
    assert reader.num_rows <= 2 * 64 * 16
    assert far == list_places(draw_streams(1000, 10**6, 64, 16), range(5_000, 5_064))


class Counting(DrawnShards):
    def __init__(self):
        self.num_rows = 0

    def __call__(self, shard, offset):
        for row in super().__call__(shard, offset):
            self.num_rows += 1
            yield row


def test_more_processes_than_streams():
    streams = [draw_streams(num_streams=2) for _ in range(5)]
    steps = [make_steps(each, process, 5) for process, each in enumerate(streams)]
    read = {}
    for each in steps:
        each[0], each[1]
        assert not read.keys() & each.source.read.keys()
        read |= each.source.read
    assert [read[number] for number in range(20)] == list_places(draw_streams(num_streams=2), range(20))


def test_mixtures_are_exact():
    sources = [
        Source([Shard(f"{name}{n}", 50) for n in range(9)], DrawnShards(), name, weight)
        for name, weight in (("a", 0.5), ("b", 0.3), ("c", 0.2))
    ]
    streams = Streams(sources, 0, 4, 8)
    assert streams.shares == (5, 3, 2)
    places = list_places(streams, range(1000))
    for first in range(0, 1000, 10):
        assert sorted(place[0] for place in places[first : first + 10]) == list("aaaaabbbcc")
    assert len({tuple(place[0] for place in places[first : first + 10]) for first in range(0, 1000, 10)}) > 50
    assert len(set(places[: 1000 * 3 // 10])) == 300  # no row twice before an epoch of its source is done
    assert list_places(Streams(sources, 0, 4, 8), range(999, 500, -7)) == places[999:500:-7]
    with pytest.raises(UsageError, match="round them"):
        Streams([Source([Shard("a", 1)], DrawnShards(), weight=weight) for weight in (0.123457, 1.0)], 0)


# ---------------------------------------------------------------------------------------------------------------------
# files


@pytest.fixture
def bucket():
    """A bucket in memory, of which every tenth request fails, in one of three ways."""
    MemoryFileSystem.store.clear()
    FlakyBucket.requests = 0
    fsspec.register_implementation("flakybucket", FlakyBucket)
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()


class FlakyBucket(MemoryFileSystem):
    protocol = "flakybucket"
    requests = failed = 0
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("flakybucket://", "memory://"))

    def _may_fail(self):
        FlakyBucket.requests += 1
        return random.Random(FlakyBucket.requests).random() < 0.1

    def cat_file(self, path, start=None, end=None, **more):
        if self._may_fail():
            FlakyBucket.failed += 1
            if FlakyBucket.requests % 3 == 0:
                return super().cat_file(path, start=start, end=end)[:-1]  # an answer that breaks off
            raise [ConnectionError("503 slow down"), TimeoutError("no answer")][FlakyBucket.requests % 2]
        return super().cat_file(path, start=start, end=end, **more)

    def find(self, path, **more):
        if self._may_fail():
            raise ConnectionError("503 slow down")
        return super().find(path, **more)


def test_a_bucket_that_fails_loses_nothing(bucket):
    rows = [{"text": f"row {number} " + "é" * (number % 900)} for number in range(800)]
    for shard in range(8):
        data = "".join(json.dumps(row) + "\n" for row in rows[shard::8]).encode()
        bucket.pipe_file(f"/b/{shard}.jsonl", data)
    streamed = stream("flakybucket://b", num_streams=8, shuffle_buffer_size=8, retries=AT_ONCE)
    seen = [streamed[number]["text"] for number in range(800)]
    assert sorted(seen) == sorted(row["text"] for row in rows)
    good = stream("memory://b", num_streams=8, shuffle_buffer_size=8)
    assert seen == [good[number]["text"] for number in range(800)]
    small = RangeFile("flakybucket://b/0.jsonl", len(bucket.cat_file("/b/0.jsonl")), AT_ONCE)
    failed = FlakyBucket.failed
    assert b"".join(iter(lambda: small.read(100), b"")) == bucket.cat_file("/b/0.jsonl")
    assert FlakyBucket.failed > failed + 10


def test_a_bucket_that_is_gone_ends_the_run_and_leaves_nothing_out(bucket):
    bucket.pipe_file("/b/0.jsonl", b'{"text": "a"}\n' * 100)
    streamed = stream("memory://b", on_bad_row="skip", num_streams=1, retries=Retries(3, 0.0))
    bucket.rm("/b/0.jsonl")
    with pytest.raises(UsageError, match=r"shard memory://.*b/0.jsonl cannot be read: "):
        streamed[0]
    with pytest.raises(UsageError, match="after 3 tries: 503"):
        Retries(3, 0.0).ask(lambda: exec("raise ConnectionError('503')"), "x")


@pytest.fixture
def folder(tmp_path):
    rows = [{"text": f"row {number}\nof two lines", "other": number} for number in range(300)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "plain.jsonl").write_text(lines)
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as file:
        file.write(lines)
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table.parquet", row_group_size=70)
    (tmp_path / "texts.txt").write_text("\n\n".join(row["text"] for row in rows) + "\n")
    return tmp_path


@pytest.mark.parametrize("name", ["plain.jsonl", "packed.jsonl.gz", "table.parquet", "texts.txt"])
def test_rows_of_all_kinds_go_on_from_any_offset(folder, name):
    (shard,) = find_shards(str(folder / name))
    read = FileReader(["text"])
    rows = list(read(shard, 0))
    assert [row["text"] for _, _, row in rows] == [f"row {number}\nof two lines" for number in range(300)]
    assert len({place for _, place, _ in rows}) == 300
    for number in (0, 1, 63, 64, 69, 70, 71, 250, 299):
        assert list(read(shard, rows[number][0])) == rows[number + 1 :]
    parts = [Shard(*shard[:2], *pair) for pair in ((0, 100), (100, 101), (101, 140), (140, None))]
    if name in ("plain.jsonl",):
        assert [row for part in parts for row in read(part, 0)] == rows
    if name == "table.parquet":
        assert [part.start for part in cut_shards([shard], 3)] == [0, 70, 210]
        assert [row for part in cut_shards([shard], 3) for row in read(part, 0)] == rows


def test_files_of_lines_are_cut_where_they_are_fewer_than_streams(tmp_path):
    lines = [json.dumps({"text": "x" * (number % 3000)}) for number in range(3000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    parts = cut_shards(find_shards(str(tmp_path / "a.jsonl")), 64)
    assert len(parts) == 4
    rows = [row for part in parts for _, _, row in FileReader()(part, 0)]
    assert [json.dumps(row) for row in rows] == lines


def test_a_tar_file_has_a_sample_for_each_name(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(3):
            for suffix, data in (("txt", f"text {number}"), ("json", json.dumps({"label": number}))):
                entry = tarfile.TarInfo(f"{number}.{suffix}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data.encode()))
    (shard,) = find_shards(str(tmp_path / "a.tar"))
    rows = [row for _, _, row in FileReader()(shard, 1)]
    assert rows == [{"txt": f"text {number}", "label": number} for number in (1, 2)]


def test_damaged_rows_and_shards_are_named_and_left_out_or_end_the_run(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n[1]\n{"text": \n\xff\n{"text": "b"}\n')
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(b"".join(b'{"text": "%d"}\n' % (number**9) for number in range(3000)))
    data = (tmp_path / "b.jsonl.gz").read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(data[: len(data) // 2])
    options = {"num_streams": 1, "shuffle_buffer_size": 4}
    with pytest.raises(UsageError, match=r"a.jsonl, byte 14: a JSON list, not an object.*on_bad_row skip"):
        stream(str(tmp_path / "a.jsonl"), **options)[0]
    skipping = stream(str(tmp_path / "a.jsonl"), **options, on_bad_row="skip")
    assert sorted(skipping[number]["text"] for number in range(4)) == ["a", "a", "b", "b"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3  # once each, though two epochs have met them
    assert all(line.startswith("WARNING: left out: ") for line in lines)
    with pytest.raises(UsageError, match=r"b.jsonl.gz: damaged: "):
        stream(str(tmp_path / "b.jsonl.gz"), num_streams=1, shuffle_buffer_size=20000)[0]
    skipping = stream(str(tmp_path), num_streams=1, shuffle_buffer_size=4, on_bad_row="skip")
    seen = [skipping[number]["text"] for number in range(1600)]
    assert len(set(seen)) > 900
    marks = stream(str(tmp_path), num_streams=1, shuffle_buffer_size=4, on_bad_row="skip")
    marks.streams.seek(skipping.streams.list_marks())
    assert [marks[number]["text"] for number in range(1600, 1700)] == [
        skipping[number]["text"] for number in range(1600, 1700)
    ]
    assert "b.jsonl.gz: damaged: " in capsys.readouterr().err
    (tmp_path / "c.jsonl").write_text("\n\n")
    with pytest.raises(UsageError, match="hold no row that can be used in a whole epoch"):
        stream(str(tmp_path / "c.jsonl"), num_streams=1)[0]


def test_files_that_are_missing_or_unknown_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(UsageError) as error:
        find_shards([str(tmp_path / "no*.jsonl"), str(tmp_path / "a.csv"), str(tmp_path)])
    assert len(error.value.problems) == 3
    assert "unknown kind '.csv'" in str(error.value)
    with pytest.raises(UsageError, match="nowhere"):
        find_shards("nowhere://a")


def test_a_dataset_folder_as_of_the_hub(tmp_path):
    """Splits and configurations by README.md, as `datasets` finds them; their shards are read by ranges, no code is run."""
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    for config, split, first in (("en", "train", 0), ("en", "test", 100), ("de", "train", 200)):
        (tmp_path / config).mkdir(exist_ok=True)
        for number in range(2):
            rows = [{"text": f"row {first + 2 * row + number}", "label": row % 2} for row in range(50)]
            parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / config / f"{split}-0000{number}.parquet")
    lines = [f"- config_name: {config}\n  data_files:\n" for config in ("en", "de")]
    lines[0] += "  - split: train\n    path: en/train-*\n  - split: test\n    path: en/test-*\n"
    lines[1] += "  - split: train\n    path: de/train-*\n"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{''.join(lines)}---\n")
    (tmp_path / "en.py").write_text("raise SystemExit('code of a dataset was run')\n")
    for config, split, first, count in (("en", "train", 0, 100), ("en", "test", 100, 100), ("de", "train", 200, 100)):
        found = find_hub_shards(str(tmp_path), config, split)
        assert [shard.name.rpartition("/")[2] for shard in found] == [
            f"{split}-0000{number}.parquet" for number in (0, 1)
        ]
        rows = [row["text"] for shard in found for _, _, row in FileReader(["text"])(shard, 0)]
        assert sorted(rows) == sorted(f"row {first + number}" for number in range(count))
    with pytest.raises(UsageError, match=r"config None, split 'train'.*Check the names"):
        find_hub_shards(str(tmp_path), None)
    with pytest.raises(UsageError, match="split 'dev'"):
        find_hub_shards(str(tmp_path), "en", "dev")
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "train.csv").write_text("text\na\n")
    with pytest.raises(UsageError, match=r"unknown kind '\.csv'"):
        find_hub_shards(str(tmp_path / "table"), None)


# ---------------------------------------------------------------------------------------------------------------------
# loops of one's own


@pytest.fixture
def accelerator():
    fresh_accelerator()
    yield Accelerator(cpu=True)
    fresh_accelerator()


def collate(rows):
    points = torch.tensor(np.array(rows, np.float64)[:, None] / 100)
    return points, points.sin()


def train(accelerator, dataset, cap, first=0, last=6, model=None, **more):
    """Train in float64; return losses, weights, the steps, and the model."""
    torch.manual_seed(0)
    if model is None:
        model = accelerator.prepare(
            torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        )
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = {"global_batch_size": 10, "per_device_batch_size": cap, "num_steps": last, "first_step": first}
    steps = exact_steps(accelerator, dataset, collate, **sizes, targets=lambda batch: len(batch[0]), **more)
    losses = []
    for step in steps:
        for x, y in step:
            with accelerator.accumulate(model):
                accelerator.backward(step.loss(((model(x) - y) ** 2).sum()))
                optimizer.step()
                optimizer.zero_grad()
        losses.append(step.mean_loss().item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()]), steps, model


def test_the_steps_of_a_stream_are_the_same_for_every_cut(accelerator):
    whole, weights, *_ = train(accelerator, StreamDataset(draw_streams(size=70)), 10)
    for cap, more in ((1, {}), (3, {}), (4, {"num_workers": 1}), (7, {"length": lambda row: 1 + row % 5})):
        losses, others, *_ = train(accelerator, StreamDataset(draw_streams(size=70)), cap, **more)
        assert losses == pytest.approx(whole, rel=1e-12), (cap, more)
        assert torch.allclose(others, weights, rtol=0, atol=1e-12)
    first, _, steps, model = train(accelerator, dataset := StreamDataset(draw_streams(size=70)), 3, last=4)
    state = json.loads(json.dumps(dataset.state_dict(steps)))
    resumed = StreamDataset(draw_streams(size=70))
    resumed.load_state_dict(state)
    rest, others, *_ = train(accelerator, resumed, 5, first=4, model=model)
    assert first + rest == pytest.approx(whole, rel=1e-12)
    assert torch.allclose(others, weights, rtol=0, atol=1e-12)
    control, *_ = train(accelerator, StreamDataset(draw_streams(size=70, seed=4)), 10)
    assert control != pytest.approx(whole, rel=1e-3)


def test_a_stream_needs_a_number_of_steps(accelerator):
    with pytest.raises(UsageError, match="give num_steps"):
        train(accelerator, StreamDataset(draw_streams()), 10, last=None)


def test_one_sha_of_a_billion_rows():
    """1,000 shards of 10^6 rows, 30 moves and kills over 1 to 7 processes."""

    def digest(places):
        return hashlib.sha256("\n".join(places).encode()).hexdigest()

    def make():
        return draw_streams(1000, 10**6, 64, 32)

    rng, state, step, noted = random.Random(2), {}, 0, {}
    for _ in range(30):
        num_processes, last, marks = rng.randint(1, 7), step + rng.randint(1, 2), []
        for process in range(num_processes):
            streams = make()
            streams.seek({int(number): mark for number, mark in state.items()})
            steps = make_steps(streams, process, num_processes, batch=48)
            for number in range(step, last):
                data = steps[number]
            noted |= steps.source.read
            marks.append(data.marks)
        if rng.random() < 0.3 and step:  # killed before the checkpoint: the same steps again
            continue
        state, step = merge_marks(marks), last
    whole = list_places(make(), range(48 * step))
    assert digest([noted[number] for number in range(48 * step)]) == digest(whole)
    assert len(set(whole)) == len(whole)


def test_rows_of_a_buffer_are_packed():
    """A buffer of texts takes less than half of what they would take."""
    words = [f"word{number * 7919 % 500}" for number in range(600)]
    streams = draw_streams(num_shards=1, size=100, buffer_size=100, keep=lambda row: " ".join(words[row:]))
    assert sorted(streams.draw(number).value for number in range(100)) == sorted(
        " ".join(words[n:]) for n in range(100)
    )
    streams.draw(50)
    (stream,) = streams.streams[0]
    assert 2 * sum(len(packed) for _, packed in stream._buffer) < sum(len(" ".join(words[n:])) for n in range(100))


def test_what_is_no_row_is_a_fault_that_says_so():
    streams = draw_streams(
        convert=lambda rows: [BadRow("odd") if row % 2 else row for _, row in rows], on_bad_row="skip"
    )
    values = [streams.draw(number).value for number in range(30)]
    assert all(value % 2 == 0 for value in values)
