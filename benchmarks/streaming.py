"""What a stream does: its order over moves and kills, how fast it begins, how much memory it needs, what it delivers.

    make bench NAME=streaming

- Order: 10^9 drawn rows in 1,000 shards, 64 virtual streams. A training of 16 samples per step moves between 1 and 7 real
  processes, each of which prepares its part of the steps, as `--streaming` does. In half of the sessions one process kills
  itself by SIGKILL in the middle of a step; the others are killed wherever they are. The next session, on another number of
  processes, goes on from the last checkpoint. The SHA-256 of the rows of all samples is compared with that of one process that
  was never disturbed. A sample that was read again must have been the same row.
- Start: seconds from the fork of a process to its first step, at the beginning and from each checkpoint; torch is imported.
- Memory: private memory that a process has when its session ends, more than when it began.
- Speed: one process reads and tokenizes shards of documents into blocks of `gpt2_small_cpu`, and that model computes forward
  and backward of the same steps. Both alternate, so that a machine whose speed changes is the same for both.
"""

import hashlib
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from loader import compute, network

from samestep._internals.libc import stop_malloc_returning_memory
from samestep.contrib.streaming.samples import build
from samestep.contrib.streaming.shards import Shard
from samestep.contrib.streaming.steps import StreamSteps, merge_marks
from samestep.contrib.streaming.streams import ENDLESS, DrawnShards, Source, StreamOrder, Streams
from samestep.cut.layout import solve_layout
from samestep.data import documents
from samestep.data.tokenizer import train_byte_level_bpe
from samestep.recipe.catalog import load

NUM_SHARDS, NUM_ROWS = 1000, 10**6
"""Shards, and rows of each."""
BATCH, EVERY, MOST = 16, 2, 7
"""Samples of a step, steps between two checkpoints, processes at most."""
REPEATED = 40
"""Times that the documents of Python's documentation are written to the shards."""


def private_bytes() -> int:
    """Read the private memory of this process."""
    return (
        sum(map(int, re.findall(r"^Private_\w+:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M))) * 1024
    )


# ---------------------------------------------------------------------------------------------------------------------
# Order


class Rows:
    """A `SampleSource` of a stream: each sample is the place of a row, and kills this process where that was asked for."""

    max_length, is_even = 1, True

    def __init__(self, streams: Streams, dies_at: int | None):
        self.streams, self.dies_at, self.read = streams, dies_at, {}

    def __len__(self) -> int:
        return 1

    def draw(self, epoch: int, sample_id: int) -> str:
        if self.dies_at is not None and sample_id >= self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.read[sample_id] = self.streams.draw(sample_id).places[0]
        return self.read[sample_id]

    def collate(self, samples: list) -> dict[str, torch.Tensor]:
        return {"counts": torch.tensor([len(samples)])}


def make_streams() -> Streams:
    shards = [Shard(f"s{number}", NUM_ROWS) for number in range(NUM_SHARDS)]
    return Streams([Source(shards, DrawnShards())], 42)


def prepare(
    folder: Path, rank: int, num_processes: int, first: int, last: int, dies_at: int | None, began: float
) -> None:
    """Prepare this process's part of steps; note the rows and places of each."""
    before = private_bytes()
    streams = make_streams()
    state = json.loads((folder / "state.json").read_text())
    streams.seek({int(number): mark for number, mark in state.items()})
    layout = solve_layout(num_processes=num_processes, global_batch_size=BATCH, per_device_train_batch_size=BATCH)
    source: Any = Rows(streams, dies_at)
    steps = StreamSteps(source, StreamOrder(ENDLESS, BATCH, 42), layout, process_index=rank)
    start = None
    for step in range(first, last):
        data = steps[step]
        start = start or harness.clock() - began
        line = {
            "step": step,
            "rows": source.read,
            "marks": data.marks,
            "start": start,
            "bytes": private_bytes() - before,
        }
        partial = folder / f"{step}.{rank}.partial"
        partial.write_text(json.dumps(line))
        partial.rename(folder / f"{step}.{rank}.json")
        source.read = {}


def run_session(folder: Path, num_processes: int, first: int, last: int, victim: int | None, dies_at: int) -> list[int]:
    """Run processes, to the end or until the victim has killed itself; return their exit codes."""
    for file in folder.glob("*.*.*"):
        file.unlink()
    pids = []
    for rank in range(num_processes):
        began = harness.clock()
        if not (pid := os.fork()):
            try:
                prepare(folder, rank, num_processes, first, last, dies_at if rank == victim else None, began)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    codes = dict.fromkeys(pids, 0)
    if victim is not None:
        codes[pids[victim]] = os.waitstatus_to_exitcode(os.waitpid(pids[victim], 0)[1])
        for pid in pids:
            if pid != pids[victim]:
                os.kill(pid, signal.SIGKILL)
    for place, pid in enumerate(pids):
        if place != victim:
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return list(codes.values())


def measure_order(folder: Path, num_moves: int) -> dict[str, Any]:
    """Train over moves and kills; compare the rows with those of an undisturbed process."""
    folder.mkdir()
    rng, step, noted, sessions, differing = random.Random(0), 0, {}, [], 0
    (folder / "state.json").write_text("{}")
    for move in range(num_moves):
        num_processes, last = rng.randint(1, MOST), step + rng.randint(3, 12)
        # A process that reads the stream of a sample of the middle of a step, of every move with an odd number
        dies_at = rng.randrange(BATCH * (step + 1), BATCH * last)
        victim = dies_at % 64 % num_processes if move % 2 else None
        codes = run_session(folder, num_processes, step, last, victim, dies_at)
        expected = [0] * num_processes if victim is None else [*codes[:victim], -signal.SIGKILL, *codes[victim + 1 :]]
        if codes != expected or 1 in codes:
            raise RuntimeError(f"session {move} ended with {codes}")
        lines = [json.loads(file.read_text()) for file in folder.glob("*.*.json")]
        for line in lines:
            for number, place in line["rows"].items():
                differing += noted.setdefault(int(number), place) != place
        done = step
        while sum(line["step"] == done for line in lines) == num_processes:
            done += 1
        done -= done % EVERY if victim is not None else 0  # the last checkpoint
        if done > step:
            marks = [line["marks"] for line in lines if line["step"] == done - 1]
            parts = [{int(number): mark for number, mark in part.items()} for part in marks]
            state = json.loads((folder / "state.json").read_text())
            state |= merge_marks(parts)
            (folder / "state.json").write_text(json.dumps(state))
        starts = [line["start"] for line in lines]
        sessions.append(
            {
                "processes": num_processes,
                "first": step,
                "killed": victim is not None,
                "steps": max(0, done - step),
                "start": max(starts, default=None),
                "mb": max((line["bytes"] for line in lines), default=0) / 1e6,
            }
        )
        step = max(step, done)
    whole = make_streams()
    undisturbed = [whole.draw(number).places[0] for number in range(BATCH * step)]
    return {
        "steps": step,
        "samples": len(undisturbed),
        "differing": differing,
        "sha": hash_rows([noted.get(number, "") for number in range(BATCH * step)]),
        "undisturbed_sha": hash_rows(undisturbed),
        "sessions": sessions,
    }


def hash_rows(places: list[str]) -> str:
    return hashlib.sha256("\n".join(places).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Speed


def cut(recipe: Any) -> StreamSteps:
    """Make the steps of a streamed recipe on one process."""
    layout = solve_layout(num_processes=1, global_batch_size=BATCH, per_device_train_batch_size=BATCH)
    return StreamSteps(build(recipe)[0], StreamOrder(ENDLESS, BATCH, recipe.seed), layout, process_index=0)


def read_alone(recipe: Any, num_steps: int, began: float) -> dict[str, Any]:
    """Read steps without a model: seconds to the first one, memory that the stream adds."""
    before = private_bytes()
    steps = cut(recipe)
    _ = steps[0]
    start, seconds = harness.clock() - began, time.process_time()
    for step in range(1, num_steps):
        _ = steps[step]
    rows = sum(len(stream._buffer) for streams in steps.source.streams.streams for stream in streams)
    return {"start": start, "start_seconds_cpu": seconds, "mb": (private_bytes() - before) / 1e6, "buffered": rows}


def fork(file: Path, call: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
    """Call a function of the moment at which its process began, in a process of its own; return what it returned."""
    began = harness.clock()
    if not (pid := os.fork()):
        try:
            file.write_text(json.dumps(call(began)))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(f"the process of {file.stem} failed")
    return json.loads(file.read_text())


def measure_speed(folder: Path, num_steps: int, rounds: int, precision: str) -> dict[str, Any]:
    """Measure samples per second that a stream delivers, and that the model takes, by rounds; and the stream's memory."""
    texts = documents.load_rows(train_file=None, dataset_name="builtin/python_docs").rows
    train_byte_level_bpe(texts, 4096).save_pretrained(folder / "tokenizer")
    rows = [json.dumps({"text": text}) + "\n" for text in texts["text"]] * REPEATED
    (folder / "shards").mkdir()
    for number in range(64):
        (folder / "shards" / f"{number}.jsonl").write_text("".join(rows[number::64]), encoding="utf-8")
    changes = {
        "dataset_name": None,
        "train_file": [str(folder / "shards")],
        "tokenizer_name": str(folder / "tokenizer"),
    }
    recipe = load("gpt2_small_cpu", changes | {"streaming": True, "validation_fraction": 0.0})
    alone = fork(folder / "alone.json", lambda began: read_alone(recipe, num_steps * rounds, began))
    steps = cut(recipe)
    source = steps.source
    model, weights = network(recipe, source, precision), torch.tensor(list(recipe.loss_weights.values()))
    delivered, taken, step = [], [], 1
    for _ in range(rounds + 1):  # the first one warms up
        began = harness.clock()
        data = [steps[number] for number in range(step, step + num_steps)]
        loaded = harness.clock()
        for part in data[:4]:
            compute(model, part, weights, precision)
        delivered.append(BATCH * num_steps / (loaded - began))
        taken.append(BATCH * 4 / (harness.clock() - loaded))
        step += num_steps
    return alone | {
        "shards_mb": sum(file.stat().st_size for file in (folder / "shards").iterdir()) / 1e6,
        "delivered": delivered[1:],
        "taken": taken[1:],
        "ratios": harness.ratios(delivered, taken)[1:],
    }


def main() -> None:
    parser = harness.flags("streaming", __doc__, rounds=7, work=True)
    parser.add_argument("--moves", type=harness.positive, default=30, help="sessions, of which half are killed [30]")
    parser.add_argument("--steps", type=harness.positive, default=100, help="of a round [100]")
    parser.add_argument("--precision", choices=harness.PRECISIONS, default=harness.PRECISION)
    arguments = parser.parse_args()
    load_average = f"{os.getloadavg()[0]:.0f} on {len(os.sched_getaffinity(0))} cores"
    torch.set_num_threads(1)
    stop_malloc_returning_memory()
    with harness.open_work_folder(arguments.work) as folder:
        order = measure_order(folder / "order", arguments.moves)
        print({name: value for name, value in order.items() if name != "sessions"}, file=sys.stderr)
        speed = measure_speed(folder, arguments.steps, arguments.rounds, arguments.precision)
        print(speed, file=sys.stderr)
    precision = "bf16" if arguments.precision == "bf16" else "float32"
    more = {"rows": NUM_SHARDS * NUM_ROWS, "moves": arguments.moves, "precision": precision, "load": load_average}
    about = harness.about("make bench NAME=streaming", ("torch", "transformers", "tokenizers"), threads=1, **more)
    results = {"about": about, "order": order, "speed": speed}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict) -> str:
    order, speed, about = results["order"], results["speed"], results["about"]
    sessions = order["sessions"]
    is_same = order["sha"] == order["undisturbed_sha"] and not order["differing"]
    starts = [session["start"] for session in sessions if session["start"] is not None]
    counts = sorted({session["processes"] for session in sessions})
    rows = [
        ["rows", f"{about['rows']:,}", "10^9"],
        ["sessions, on processes", f"{len(sessions)}, {counts[0]} to {counts[-1]}", "30, 1 to 7"],
        ["sessions that SIGKILL ended", sum(session["killed"] for session in sessions), ""],
        ["samples of the training", f"{order['samples']:,}", ""],
        ["samples that were another row when they were read again", order["differing"], "0"],
        ["SHA-256 of the samples", f"{order['sha'][:16]}: {'the' if is_same else 'NOT the'} undisturbed one's", "one"],
        ["seconds to the first step, most", f"{max(starts):.2f}", "2"],
        ["private MB that a process adds, most", f"{max(session['mb'] for session in sessions):.1f}", "100"],
    ]
    documents = [
        [
            "seconds to the first step, of which the process computes",
            f"{speed['start']:.2f}, {speed['start_seconds_cpu']:.2f}",
            "2",
        ],
        ["rows in its buffers, private MB that it adds", f"{speed['buffered']:,}, {speed['mb']:.0f}", ""],
        ["blocks per second that one process reads and tokenizes", harness.spread(speed["delivered"], ",.0f"), ""],
        ["blocks per second that gpt2_small_cpu takes", harness.spread(speed["taken"], ",.0f"), ""],
        ["read / taken", harness.spread(speed["ratios"], ".1f"), "5"],
    ]
    body = (
        f"Drawn rows, by real processes:\n\n{harness.table('what | measured | asked', rows)}\n"
        f"Documents, {speed['shards_mb']:.0f} MB in 64 shards of JSON lines, by one process with one thread, forward and "
        f"backward in {about['precision']}; medians (smallest to largest) of {len(speed['ratios'])} rounds:\n\n"
        f"{harness.table('what | measured | asked', documents)}\n"
        f"When it began, the machine had a load of {about['load']}.\n"
    )
    return harness.page("Streams", "streaming.py", about, body)


if __name__ == "__main__":
    main()
