"""What do the size of DistributedDataParallel's buckets, and its overlap with the backward, cost on a slow link?

    make bench NAME=overlap                                   # 8 minutes
    python benchmarks/overlap.py --rounds 1 --links fast --pace 0.1 --output short

Two processes (gloo) train 8 layers with 8 MiB of gradients in DistributedDataParallel, their buckets reduced by a hook. A link
is simulated: a thread of each process takes bucket after bucket, reduces it, and then sleeps until
`stepplan.timing.all_reduce` says it would be there, by a bandwidth and a latency (`LINKS`). So the link is the planner's, and
what is compared is the rest of its formula (`stepplan.timing.reduce_in_buckets`): how much of it the backward hides. Layers
sleep, too, as a processor that waits for an accelerator does. So other programs of the machine disturb little.

- measured: seconds of a step beyond those of the same step without a reduction, medians of steps in turns; over the seconds of
  the backward.
- planned: `reduce_in_buckets` for the same bytes, link, bucket and the backward that was measured.
- after the backward: everything is reduced at once when the backward has ended, as without overlap.

The second table asks what other buckets than torch's of 25 MiB would change on real hardware, by that formula.
"""

import dataclasses
import json
import multiprocessing
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samestep.cut.layout import solve_layout
from samestep.recipe.catalog import load
from stepplan import hardware, memory, timing

LAYERS, WIDTH = 8, 512
NUM_BYTES = 4 * LAYERS * WIDTH * WIDTH
SLEPT = 0.08
"""Seconds of the backward of a layer that sleeps; its forward takes half as long."""
LINKS = {"fast": (32.0, 5.0), "slow": (16.0, 5.0), "slower": (8.0, 5.0), "slow, late": (16.0, 50.0)}
"""Link -> MB/s, and milliseconds of latency of a message."""
BUCKETS = (1, 2, 4, 8)
"""MiB at once; a layer has 1."""
EXACT = dataclasses.replace(timing.CALIBRATION, reachable_link=1.0)
WORKLOADS = {
    "ResNet-50, 4 T4": ("resnet50_imagenet_4xt4", "4xt4", "fp16"),
    "BERT-Base, 8 3090 over PCIe": ("bert_base", "8x3090", "bf16"),
    "GPT-2 124M, 8 A100": ("gpt2_124m", "8xa100-80", "bf16"),
    "GPT-2 124M, 4 x 8 A100": ("gpt2_124m", "4x8xa100-80", "bf16"),
    "GPT-2 774M, 4 x 8 A100": ("gpt2_774m", "4x8xa100-80", "bf16"),
}
"""Title -> recipe, hardware, precision."""
MIBS = (1, 5, 25, 100)


def make_link(name: str, pace: float) -> hardware.Hardware:
    """Give the planner's description of two processes on a link; with a pace of 0.1 everything takes a tenth of its time."""
    bandwidth, latency = LINKS[name]
    device = dataclasses.replace(
        hardware.parse("1xcpu").device, link_gb_per_s=bandwidth / pace / 1e3, link_latency_us=1e3 * latency * pace
    )
    return hardware.Hardware(device, num_devices=2)


# ---------------------------------------------------------------------------------------------------------------------
# One process


class Slept(torch.autograd.Function):
    """A layer whose backward takes so many seconds without a processor; its weight's gradient is made at once."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds / 2)
        context.save_for_backward(weight)
        context.seconds = seconds
        return x + 0.0

    @staticmethod
    def backward(context: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(context.seconds)
        return upstream, torch.zeros_like(context.saved_tensors[0]), None


class Layers(nn.Module):
    """Layers that sleep."""

    def __init__(self, pace: float):
        super().__init__()
        self.seconds = SLEPT * pace
        self.weights = nn.ParameterList(nn.Parameter(torch.eye(WIDTH)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Give the mean of x [rows, WIDTH], which the layers leave as it is."""
        for weight in self.weights:
            x = Slept.apply(x, weight, self.seconds)
        return x.mean()


class Link:
    """A thread that reduces buckets one after the other, and holds each until the link would have brought it."""

    def __init__(self, name: str, pace: float):
        self.hardware, self.waiting = make_link(name, pace), queue.SimpleQueue()
        self.group = dist.new_group(backend="gloo")
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        free_at = 0.0
        while True:
            future, values, asked_at = self.waiting.get()
            dist.all_reduce(values, group=self.group)
            begun = max(asked_at, free_at)
            seconds = timing.all_reduce(self.hardware, values.nbytes, EXACT)
            free_at = max(harness.clock(), begun + seconds)
            time.sleep(max(0.0, begun + seconds - harness.clock()))
            future.set_result(values / 2)

    def reduce(self, values: Tensor) -> torch.futures.Future:
        """Begin to reduce a bucket, behind those that wait."""
        future: torch.futures.Future = torch.futures.Future()
        self.waiting.put((future, values, harness.clock()))
        return future


def make_step(pace: float, link: Link | None, mib: float | None) -> Callable[[], float]:
    """Make a step: with buckets of so many MiB; with None reduced after the backward; without a link not reduced.

    Returns:
        Takes the step, and returns its seconds.
    """
    layers = Layers(pace)
    model = DistributedDataParallel(layers, bucket_cap_mb=mib or 25, gradient_as_bucket_view=True)
    if link is not None and mib is not None:
        model.register_comm_hook(link, lambda link, bucket: link.reduce(bucket.buffer()))
    x = torch.zeros(1, WIDTH)

    def step() -> float:
        dist.barrier()
        start = harness.clock()
        if link is not None and mib is not None:
            model(x).backward()
        else:
            with model.no_sync():
                model(x).backward()
            if link is not None:
                link.reduce(torch.cat([each.grad.flatten() for each in layers.weights])).wait()
        seconds = harness.clock() - start
        model.zero_grad(set_to_none=False)
        return seconds

    return step


def time_backward(pace: float) -> float:
    """Time the backward of a step alone."""
    loss = Layers(pace)(torch.zeros(1, WIDTH))
    return harness.seconds(loss.backward)


def run(rank: int, names: list[str], rounds: int, pace: float, folder: str) -> None:
    """Measure all links and buckets as one of two processes; the first writes what it saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    calls: dict[str, Callable[[], float]] = {"alone": make_step(pace, None, None)}
    for name in names:
        link = Link(name, pace)
        for mib in (*BUCKETS, None):
            calls[f"{name}|{mib or 'after'}"] = make_step(pace, link, mib)
    calls["backward"] = lambda: time_backward(pace)
    seconds = harness.in_turns(calls, rounds, warm_up=2)  # DDP builds its buckets anew after the first step
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# All


def measure(names: list[str], rounds: int, pace: float, folder: str) -> list[dict[str, Any]]:
    """Measure on two processes: a row for each link and size."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run, args=(rank, names, rounds, pace, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"a process ended with {[process.exitcode for process in processes]}")
    seconds = json.loads((Path(folder) / "seconds.json").read_text())
    backward = statistics.median(seconds["backward"])
    rows = []
    for call in seconds:
        name, bar, size = call.partition("|")
        if not bar:
            continue
        mib = None if size == "after" else float(size)
        more = [a - b for a, b in zip(seconds[call], seconds["alone"], strict=True)]
        total, exposed = timing.reduce_in_buckets(
            make_link(name, pace),
            NUM_BYTES,
            backward if mib else 0.0,
            EXACT,
            mib * 2**20 if mib else float("inf"),
        )
        row = {"link": name, "mib": mib, "backward": backward, "link_seconds": total}
        rows.append(row | {"measured": [each / backward for each in more], "planned": exposed / backward})
        print(row, statistics.median(rows[-1]["measured"]), rows[-1]["planned"], file=sys.stderr)
    return rows


def plan_buckets() -> list[dict[str, Any]]:
    """Predict the time of a step with other buckets, over that with 25 MiB."""
    rows = []
    for title, (recipe, place, precision) in WORKLOADS.items():
        model, on = memory.model_from_recipe(load(recipe)), hardware.parse(place)
        software = timing.default_software(precision)
        work, b = timing.count_work(model, precision), 32
        layout = solve_layout(
            num_processes=on.num_processes, per_device_train_batch_size=b, gradient_accumulation_steps=1
        )
        usual = timing.step_time(work, layout, on, precision, software)
        computing = usual.products + usual.attention + usual.memory_traffic + usual.weights + usual.launches
        row: dict[str, Any] = {"workload": title, "b": b, "exposed": usual.exposed_communication / usual.total}
        for mib in MIBS:
            num_bytes = software.gradient_bytes * work.trained
            _, exposed = timing.reduce_in_buckets(on, num_bytes, timing.BACKWARD * computing, bucket_bytes=mib * 2**20)
            row[str(mib)] = 1 + (exposed - usual.exposed_communication) / usual.total
        rows.append(row)
    return rows


def main() -> None:
    parser = harness.flags("overlap", __doc__, rounds=9)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS), metavar="LINK")
    parser.add_argument("--pace", type=float, default=1.0, help="factor of all times, to try the program")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments.links, arguments.rounds, arguments.pace, folder)
    about = harness.about("make bench NAME=overlap", ("torch",), threads=1, rounds=arguments.rounds)
    results = {"about": about, "rows": rows, "plans": plan_buckets()}
    harness.write(arguments.output, results, parts={"overlap": ("overlap.md", part(results))})


def part(results: dict[str, Any]) -> str:
    return harness.part("overlap.py", results["about"], describe(results))


def describe(results: dict[str, Any]) -> str:
    rows = []
    for row in results["rows"]:
        bandwidth, latency = LINKS[row["link"]]
        rows.append(
            [
                *(f"{bandwidth:g} MB/s, {latency:g} ms", f"{row['link_seconds'] / row['backward']:.2f}"),
                f"{row['mib']:g} MiB" if row["mib"] else "after the backward",
                *(harness.spread(row["measured"], ".2f"), f"{row['planned']:.2f}"),
                f"{statistics.median(row['measured']) - row['planned']:+.2f}",
            ]
        )
    columns = "link | on the link | buckets | measured | planned | difference"
    errors = [abs(statistics.median(row["measured"]) - row["planned"]) for row in results["rows"]]
    plans = [
        [row["workload"], row["b"], f"{row['exposed']:.1%}", *(f"{row[str(mib)]:.3f}" for mib in MIBS)]
        for row in results["plans"]
    ]
    heads = ["workload", "samples per device", "of a step is waiting", *(f"{mib} MiB" for mib in MIBS)]
    return (
        "Seconds that a step waits for the link, over those of the backward: median (smallest to largest) of "
        f"{results['about']['rounds']} steps. The median difference between measured and planned is "
        f"{statistics.median(errors):.2f} of a backward, the largest {max(errors):.2f}.\n\n"
        f"{harness.table(columns, rows)}\nBy the planner, time of a step with other buckets over that with 25 MiB, k = 1:\n\n"
        f"{harness.table(heads, plans)}"
    )


if __name__ == "__main__":
    main()
