"""Predicted communication beside real runs: DDP over a small GPT-2 on 1 to 4 processes that talk over gloo.

    make bench NAME=scaling

What is checked is `timing.all_reduce` and what `timing.step_time` makes of it: buckets of 25 MiB, hidden behind the backward
but the last, once per step or in every micro-batch. Computation is not predicted: its seconds are measured, with the same
number of processes at work and no communication. So

    predicted step(N) = measured computation(N) + predicted exposed communication(N)

Latency and bandwidth are fitted to all-reduces of two processes, of other sizes than the buckets; three and four processes
are predicted from them. Every process has one thread. Where there are fewer cores than processes they share them.

Two links. Loopback: messages are copied by the cores that compute, so that little is hidden, and more processes share what
copies. Throttled: each process in a network namespace of its own, sending through a token bucket that its core only waits
for, as for a network card. The namespaces end with their processes, and nothing of the machine's own network is changed.
It needs Linux with `unshare`, `ip` and `tc`, and no privileges where users may make namespaces.

All cases take turns, round by round, so that a change of the machine's speed meets all of them; times are those of the
slowest process, numbers are medians over rounds.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import harness
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from device import fit_ring, loopback, num_cores
from harness import table
from torch.nn.parallel import DistributedDataParallel

from stepplan import timing
from stepplan.hardware import Hardware, load_device

PROCESSES = (1, 2, 3, 4)
MICRO_STEPS = (1, 4)  # k
LAYERS, VOCABULARY = 6, 4096
SAMPLES, LENGTH = 2, 64  # of a micro-batch
FITTED = [2**power for power in (14, 18, 20, 22, 25)]  # bytes of the all-reduces of two processes that are fitted
CHECKED = [3 * 2**18, 3 * 2**21, 20 * 2**20]  # and of those that are predicted; the last is nearly the model's bucket
CALLS = 3  # of an all-reduce in a round
MBIT = 2000  # of the throttled links, per process and direction
NAMESPACE = "unshare --map-root-user --net --mount sh -c".split()
SET_UP = f"""set -e
mount -t tmpfs tmpfs /run
ip link add switch type bridge
ip link set switch up
for rank in {" ".join(str(rank) for rank in range(max(PROCESSES)))}; do
    ip netns add rank$rank
    ip link add port$rank type veth peer name card netns rank$rank
    ip link set port$rank master switch up
    ip -n rank$rank address add 10.0.0.$((rank + 1))/24 dev card
    ip -n rank$rank link set card up
    tc -n rank$rank qdisc add dev card root tbf rate {MBIT}mbit burst 80kb latency 50ms
done
"""
CLONE_NEWNET = 0x40000000
KINDS = {"once": "once per step", "every": "every micro-batch"}


# ---------------------------------------------------------------------------------------------------------------------
# Measuring, in every process


def build_model() -> transformers.GPT2LMHeadModel:
    """Build a GPT-2 with random parameters, without dropout. Most parameters are in layers: buckets fill along the backward."""
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=512,
        n_layer=LAYERS,
        n_head=8,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


def cases(rank: int, n: int) -> dict[str, Callable[[], None]]:
    """Make everything that is timed on the first n processes, by name. Called by all processes, for it makes a group."""
    group = dist.new_group(list(range(n)))
    if rank >= n:
        return {}
    model = DistributedDataParallel(
        build_model(), process_group=group, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(rank))

    zeros = torch.zeros(max(FITTED) // 4)

    def step(k: int, reduced: set[int]) -> None:
        """Take k micro-batches, those in `reduced` with communication."""
        for micro_step in range(k):
            model.require_backward_grad_sync = micro_step in reduced
            model(input_ids=tokens, labels=tokens).loss.backward()

    def reduce(data: torch.Tensor) -> None:
        for _ in range(CALLS):
            dist.all_reduce(data, group=group)

    calls = {"computed 1": lambda: step(1, set()), "once 1": lambda: step(1, {0})}
    if n > 1:
        for k in MICRO_STEPS[1:]:
            calls[f"computed {k}"] = lambda k=k: step(k, set())
            calls[f"once {k}"] = lambda k=k: step(k, {k - 1})
            calls[f"every {k}"] = lambda k=k: step(k, set(range(k)))
        for size in [*FITTED, *CHECKED]:
            calls[f"all-reduce {size}"] = lambda size=size: reduce(zeros[: size // 4])

    def timed(call: Callable[[], None]) -> float:
        model.zero_grad(set_to_none=False)
        dist.barrier(group)
        return harness.seconds(call)

    return {name: lambda call=call: timed(call) for name, call in calls.items()}


def measure_process(rank: int, is_throttled: bool, rounds: int, folder: str) -> None:
    """Measure on one of the processes, and write its seconds, one number a round for every case, into the folder."""
    if is_throttled:
        with open(f"/run/netns/rank{rank}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    # As samestep/training/launch.py says: Accelerate knows no other name for it.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting_point",
        rank=rank,
        world_size=max(PROCESSES),
        timeout=timedelta(minutes=10),
    )
    calls_by_size = {n: cases(rank, n) for n in PROCESSES}
    seconds = {f"{n} {name}": [] for n, calls in calls_by_size.items() for name in calls}
    for calls in calls_by_size.values():
        for _ in range(2 if calls else 0):
            calls["once 1"]()  # the first connects, and lets DDP arrange its buckets
    for _ in range(rounds):
        for n, calls in calls_by_size.items():
            for name, call in calls.items():
                seconds[f"{n} {name}"].append(call())
    Path(folder, f"{rank}.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def measure(is_throttled: bool, rounds: int) -> dict[str, list[float]]:
    """Measure the seconds of the slowest process: "N CASE" -> a number for every round. Throttled: call it after SET_UP."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes read it when they import torch
    os.environ["GLOO_SOCKET_IFNAME"] = "card" if is_throttled else loopback()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure_process, (is_throttled, rounds, folder), nprocs=max(PROCESSES))
        results = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(max(PROCESSES))]
    return {
        case: [max(values) for values in zip(*(result[case] for result in results if case in result), strict=True)]
        for case in results[0]
    }


def measure_throttled(rounds: int, namespace: list[str] = NAMESPACE) -> dict[str, list[float]] | str:
    """Call `measure` in namespaces with throttled links, which a command makes; the reason, where they cannot be made."""
    try:
        tried = subprocess.run([*namespace, SET_UP], capture_output=True, text=True)
    except OSError as error:
        return f"{error.strerror}: unshare"
    if tried.returncode:
        return tried.stderr.strip().splitlines()[-1]
    with tempfile.TemporaryDirectory() as folder:
        seconds = f"{folder}/seconds.json"
        words = [sys.executable, __file__, "--rounds", str(rounds), "--throttled_into", seconds]
        subprocess.run([*namespace, SET_UP + 'exec "$@"', "sh", *words], check=True)
        return json.loads(Path(seconds).read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Predicting


def predict(
    n: int, latency: float, bandwidth: float, num_parameters: int, k: int, micro_step: float, is_every: bool
) -> tuple[float, float]:
    """Predict seconds of communication in a step of k micro-batches of `micro_step` seconds, and those that are not hidden."""
    work = timing.Work(flops=0, saved_bytes=0, num_parameters=num_parameters, num_layers=LAYERS)
    software = timing.default_software("no")
    return timing._communication(work, software, hardware(n, latency, bandwidth), k, micro_step, False, is_every, AS_IS)


AS_IS = dataclasses.replace(timing.CALIBRATION, reachable_link=1.0)  # a measured bandwidth is one that is reached


def hardware(n: int, latency: float, bandwidth: float) -> Hardware:
    """Make n devices on links of so many seconds and bytes/s."""
    link = {"link_gb_per_s": bandwidth / 1e9, "link_latency_us": latency * 1e6}
    return Hardware(dataclasses.replace(load_device("cpu"), **link), n)


def compare(seconds: dict[str, list[float]], num_parameters: int) -> dict:
    """Compare measured with predicted seconds, for one link."""
    medians = {case: statistics.median(values) for case, values in seconds.items()}

    def all_reduce(n: int, size: int) -> float:
        return medians[f"{n} all-reduce {size}"] / CALLS

    latency, bandwidth = fit_ring(2, [(size, all_reduce(2, size)) for size in FITTED])
    reduced = [
        {
            "processes": n,
            "bytes": size,
            "measured": all_reduce(n, size),
            "predicted": timing.all_reduce(hardware(n, latency, bandwidth), size, AS_IS),
            "ring": timing.ring(n, size, bandwidth, latency),
        }
        for n in PROCESSES[1:]
        for size in CHECKED
    ]
    rows = []
    for case in medians:
        n, kind, k = case.split()
        if kind not in KINDS:
            continue
        computed = medians[f"{n} computed {k}"]
        waited = zip(seconds[case], seconds[f"{n} computed {k}"], strict=True)
        total, exposed = predict(int(n), latency, bandwidth, num_parameters, int(k), computed / int(k), kind == "every")
        rows.append(
            {
                "processes": int(n),
                "k": int(k),
                "reduced": kind,
                "computed": computed,
                "communication": total,
                "exposed_predicted": exposed,
                "exposed_measured": statistics.median(whole - part for whole, part in waited),
                "step_predicted": computed + exposed,
                "step_measured": medians[case],
            }
        )
    return {"latency": latency, "bandwidth": bandwidth, "all_reduces": reduced, "steps": rows}


def error(predicted: float, measured: float) -> float:
    """Compute predicted over measured, less 1."""
    return predicted / measured - 1


# ---------------------------------------------------------------------------------------------------------------------
# The results


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _section(name: str, results: dict) -> str:
    steps = table(
        "N | k | gradients summed | computation | communication, predicted | exposed, predicted | exposed, measured | "
        "step, predicted | step, measured | error",
        [
            [
                *(str(row["processes"]), str(row["k"]), KINDS[row["reduced"]]),
                *(_milliseconds(row[name]) for name in ("computed", "communication")),
                *(_milliseconds(row[f"exposed_{name}"]) for name in ("predicted", "measured")),
                *(_milliseconds(row[f"step_{name}"]) for name in ("predicted", "measured")),
                f"{error(row['step_predicted'], row['step_measured']):+.0%}",
            ]
            for row in results["steps"]
        ],
    )
    reduced = table(
        "N | KiB | measured | predicted | error | a ring | error",
        [
            [
                *(str(row["processes"]), f"{row['bytes'] / 1024:,.0f}", _milliseconds(row["measured"])),
                *(_milliseconds(row["predicted"]), f"{error(row['predicted'], row['measured']):+.0%}"),
                *(_milliseconds(row["ring"]), f"{error(row['ring'], row['measured']):+.0%}"),
            ]
            for row in results["all_reduces"]
        ],
    )
    sizes = [
        abs(error(row["step_predicted"], row["step_measured"])) for row in results["steps"] if row["processes"] > 1
    ]
    saved = [
        f"{n}: predicted {1 / k:.0%}, measured {exposed['once'] / exposed['every']:.0%}"
        for n in PROCESSES[1:]
        for k in MICRO_STEPS[1:]
        for exposed in [
            {
                row["reduced"]: row["exposed_measured"]
                for row in results["steps"]
                if (row["processes"], row["k"]) == (n, k)
            }
        ]
    ]
    return (
        f"## {name}\n\n"
        f"Fitted to two processes: {results['bandwidth'] / 1e9:.3g} GB/s, {results['latency'] * 1e6:,.0f} microseconds.\n"
        f"Steps of several processes: median error {statistics.median(sizes):.0%}, worst {max(sizes):.0%}.\n\n"
        f"{steps}\n"
        f"Exposed once per step, of what is exposed in every micro-batch, k {MICRO_STEPS[-1]}, by N: {'; '.join(saved)}.\n\n"
        "All-reduces alone; predicted: the fastest of the four algorithms, as `timing.all_reduce` takes it.\n\n"
        f"{reduced}\n"
    )


def markdown(results: dict) -> str:
    about, links = results["about"], results["links"]
    throttled = links["throttled"]
    title = f"Throttled to {about['mbit']:,} Mbit/s per process and direction"
    second = (
        f"## {title}\n\nNot measured: this machine makes no namespaces with throttled links ({throttled}).\n\n"
        if isinstance(throttled, str)
        else _section(title, throttled)
    )
    return harness.page(
        "Predicted and measured communication",
        "scaling.py",
        about,
        "Milliseconds. Error: predicted over measured, less 1. Computation: measured, N processes at once; exposed, measured:\n"
        "a step less its computation.\n\n"
        f"{_section('Loopback', links['loopback'])}"
        f"{second}"
        f"GPT-2 of {about['num_parameters']:,} parameters, {SAMPLES} x {LENGTH} tokens in a micro-batch, fp32, one thread per "
        f"process.\nMedians of {about['rounds']} rounds.\n",
    )


def main() -> None:
    parser = harness.flags("scaling", __doc__, rounds=5)
    parser.add_argument("--throttled_into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.throttled_into:
        arguments.throttled_into.write_text(json.dumps(measure(True, arguments.rounds)))
        return

    num_parameters = sum(parameter.numel() for parameter in build_model().parameters())
    throttled = measure_throttled(arguments.rounds)
    more = {"rounds": arguments.rounds, "num_parameters": num_parameters, "mbit": MBIT}
    about = harness.about("make bench NAME=scaling", ("torch", "transformers"), num_cores(), **more)
    links = {
        "loopback": compare(measure(False, arguments.rounds), num_parameters),
        "throttled": throttled if isinstance(throttled, str) else compare(throttled, num_parameters),
    }
    results = {"about": about, "links": links}
    harness.write(arguments.output, results, markdown(results))


if __name__ == "__main__":
    main()
