"""Measure this machine, CPU or GPUs, and write a device file for `python -m recipes plan RECIPE --on 2xmine.yaml`.

    make bench NAME=device FLAGS='--output mine.yaml'
    python benchmarks/device.py --output mine.yaml [--processes 2]

A device is what one process has: a GPU, or its part of the CPU's cores and memory. All processes measure at the same time,
as they train, so that what they share (memory bandwidth, power) is shared. Everything is the median of several runs.

- Products: 2 m n k operations over seconds. Usual are those of a layer with 768 features (CPU) or 4096 (GPU) in forward and
  backward; the peak is the best of them and of a large square product.
- Memory: bytes read and written by a copy and by a sum of two arrays that no cache holds; the better of the two.
- Link: seconds of all-reduces by gloo (CPU) or NCCL (GPUs), fitted by latency and bandwidth of `timing.ring`. One process
  has no link to measure: its values are assumed, and the file says so.

stepplan/timing.py takes parts of what a file says: `reachable_fp32` of the float32 peak and `reachable_link` of the link. Both
were fitted to vendors' numbers, which are peaks. Here they are measured, so they are written divided by these parts: what
is predicted for a large float32 product and for a ring is then what was measured. The traffic between products was fitted
to peaks of the memory, too: with a measured bandwidth, some percent below the peak, it is predicted somewhat too slow.
"""

import argparse
import datetime
import math
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from samestep.errors import UsageError, exit_code
from samestep.printing import format_count
from stepplan.hardware import load_device
from stepplan.timing import CALIBRATION

RUNS = 7  # medians are of so many
SHORTEST = 0.1  # seconds that a run takes at the least
TYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LARGE = {"cpu": 2048, "cuda": 8192}  # m = n = k of the large product
USUAL = {"cpu": (2048, 768), "cuda": (8192, 4096)}  # tokens in a forward, features
ELEMENTS = {"cpu": 2**26, "cuda": 2**28}  # float32 numbers of an array that no cache holds
REDUCED = [2**10 * 4**power for power in range(1, 9)]  # bytes: 4 KiB to 64 MiB
ASSUMED_LINK = {"cpu": ("loopback", 5, 50), "cuda": ("PCIe 4.0 x16", 31, 10)}  # name, GB/s, microseconds
WATTS_PER_CORE = 4  # of servers with 64 to 96 cores and 280 to 360 W
FEATURES = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512-BF16",
    "avx512f": "AVX512",
    "avx2": "AVX2",
}  # the first that is there
DIGITS = 4

Point = tuple[int, float]
"""Bytes and seconds of an all-reduce."""
Measure = Callable[[Callable[[], object], torch.device], float]
"""Measures the seconds of a call on a device."""


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic


def flops(m: int, n: int, k: int) -> int:
    """Count the operations of [m, k] @ [k, n], a multiply-add as two."""
    return 2 * m * n * k


def layer_shapes(tokens: int, features: int) -> list[tuple[int, int, int]]:
    """List (m, n, k) of a layer's products: a projection, the feed-forward layer, and the gradients of their weights."""
    wide = 4 * features
    return [
        (tokens, features, features),
        (tokens, wide, features),
        (tokens, features, wide),
        (features, features, tokens),
        (wide, features, tokens),
    ]


def fit_ring(p: int, points: list[Point]) -> tuple[float, float]:
    """Fit latency (s) and bandwidth (bytes/s) of `timing.ring` over p processes that meet `points` best, in relative errors.

    Least squares; the latency is 0 where it would be negative.
    """
    sizes, seconds = np.array(points, dtype=float).T
    terms = 2 * (p - 1) * np.stack([np.ones_like(sizes), sizes / p]).T / seconds[:, None]
    latency, per_byte = np.linalg.lstsq(terms, np.ones_like(seconds), rcond=None)[0]
    if latency < 0:
        latency, per_byte = 0.0, terms[:, 1].sum() / (terms[:, 1] ** 2).sum()
    return float(latency), float(1 / per_byte)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring, in every process


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Measure the median seconds of a call that all processes make at the same time; seconds of this process."""

    def run(count: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    run(1)  # allocates, chooses kernels, connects
    agreed = torch.tensor(run(1), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    count = math.ceil(SHORTEST / agreed.item())
    return statistics.median(run(count) for _ in range(RUNS))


def product_rates(dtype: torch.dtype, device: torch.device, measure: Measure = median_seconds) -> tuple[float, float]:
    """Measure FLOP/s of products: the best, and of usual shapes."""

    def rate(shapes: list[tuple[int, int, int]]) -> float:
        pairs = [
            (torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype))
            for m, n, k in shapes
        ]
        seconds = measure(lambda: [a @ b for a, b in pairs], device)
        return sum(flops(*shape) for shape in shapes) / seconds

    large, usual = rate([(LARGE[device.type],) * 3]), rate(layer_shapes(*USUAL[device.type]))
    return max(large, usual), usual


def memory_rate(device: torch.device, measure: Measure = median_seconds) -> float:
    """Measure bytes/s that a copy or a sum of large arrays reads and writes; the better one."""
    a, b, total = (torch.zeros(ELEMENTS[device.type], device=device).fill_(1) for _ in range(3))
    num_bytes = 4 * a.numel()
    copied = 2 * num_bytes / measure(lambda: b.copy_(a), device)
    summed = 3 * num_bytes / measure(lambda: torch.add(a, b, out=total), device)
    return max(copied, summed)


def all_reduce_points(sizes: list[int], device: torch.device) -> list[Point]:
    """Measure median seconds to sum so many bytes over all processes."""
    points = []
    for size in sizes:
        data = torch.zeros(size // 4, device=device)
        points.append((size, median_seconds(lambda data=data: dist.all_reduce(data), device)))
    return points


def precisions(kind: str) -> list[str]:
    """List the precisions of a launch on a CPU, or on these GPUs. A CPU has no fp16: Accelerate would train in fp32."""
    if kind == "cpu":
        return ["no", "bf16"]
    return ["no", "fp16", *(["bf16"] if torch.cuda.is_bf16_supported(including_emulation=False) else [])]


def measure_process(rank: int, processes: int, kind: str, meeting_point: str, results) -> None:
    """Measure on one of the processes, and put its numbers into the queue `results`."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=processes,
        device_id=device if kind == "cuda" else None,
    )
    result = {
        "products": {name: product_rates(TYPES[name], device) for name in precisions(kind)},
        "memory": memory_rate(device),
        "all_reduce": all_reduce_points(REDUCED, device) if processes > 1 else None,
    }
    results.put(result)
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# The machine


def loopback() -> str:
    """Find the name of the loopback interface: lo, or lo0."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def num_cores() -> int:
    """Count physical cores, which `accelerate launch` divides between the processes on a CPU."""
    return psutil.cpu_count(logical=False) or os.cpu_count()


def cpu_name() -> str:
    """Read the CPU's model and its widest instructions: 'AMD EPYC with AVX512-BF16'."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    model, flags = (re.search(rf"^{name}\s*:(.*)$", info, re.MULTILINE) for name in ("model name", "flags"))
    has = flags[1].split() if flags else []
    feature = next((f" with {words}" for flag, words in FEATURES.items() if flag in has), "")
    return (model[1].strip() if model else platform.machine()) + feature


def machine(kind: str, processes: int) -> dict:
    """Read what one process has: description, cores, MiB of memory, watts and where they come from."""
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        query = "nvidia-smi --id=0 --query-gpu=power.limit --format=csv,noheader,nounits"
        return {
            "description": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB",
            "cores": None,
            "memory_mib": properties.total_memory // 2**20,
            "watts": float(subprocess.run(query.split(), capture_output=True, text=True, check=True).stdout),
            "memory_source": "total, as the driver reports it to torch",
            "watts_source": "power limit, as nvidia-smi reports it",
        }
    cores, memory = num_cores(), psutil.virtual_memory().total
    share = cores // processes
    return {
        "description": f"{cpu_name()}, {share} of {cores} cores, {memory / processes / 2**30:.0f} GiB",
        "cores": share,
        "memory_mib": memory // processes // 2**20,
        "watts": WATTS_PER_CORE * share,
        "memory_source": f"the machine's, divided by {format_count(processes, 'process')}",
        "watts_source": f"assumed: {WATTS_PER_CORE} W per core, as servers of 64 to 96 cores with 280 to 360 W",
    }


def measure(kind: str, processes: int) -> dict:
    """Measure all numbers of the processes: medians over them, and all-reduces of the slowest.

    Raises:
        UsageError: more processes than cores or GPUs.
    """
    limit = torch.cuda.device_count() if kind == "cuda" else num_cores()
    if not 1 <= processes <= limit:
        raise UsageError(f"--processes is {processes}, must be 1 to {limit}: a GPU, or a core, for each")
    if kind == "cpu":
        os.environ["OMP_NUM_THREADS"] = str(limit // processes)  # the processes read it when they import torch
        os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure_process, (processes, kind, f"{folder}/meeting_point", results), nprocs=processes)
    records = [results.get() for _ in range(processes)]
    return {
        "products": {
            name: tuple(statistics.median(record["products"][name][index] for record in records) for index in (0, 1))
            for name in records[0]["products"]
        },
        "memory": statistics.median(record["memory"] for record in records),
        "all_reduce": [
            max(points, key=lambda point: point[1]) for points in zip(*(e["all_reduce"] for e in records), strict=True)
        ]
        if processes > 1
        else None,
    }


# ---------------------------------------------------------------------------------------------------------------------
# The file


def rounded(value: float) -> float:
    """Round to the digits that a file holds."""
    return float(f"{value:.{DIGITS}g}")


def device_values(kind: str, processes: int, has: dict, measured: dict, origin: str) -> dict:
    """Make the fields of the device file.

    Args:
        kind: cpu or cuda.
        processes: that measured at the same time.
        has: what `machine` says.
        measured: what `measure` says.
        origin: "measured by ..." for the sources.
    """
    single = measured["products"]["no"][1]
    faster = {name: rates for name, rates in measured["products"].items() if name != "no" and rates[1] > single}
    peak, usual = max(faster.values(), default=measured["products"]["no"])
    together = f"with {processes} processes at work" if processes > 1 else "alone"
    tokens, features = USUAL[kind]
    sources = [
        f"fp32_tflops: {origin}: {single / 1e12:.4g} in products of {tokens:,} tokens and {features} features, {together}; "
        f"divided by the {CALIBRATION.reachable_fp32} that stepplan/timing.py takes of it",
        f"memory_mib: {has['memory_source']}",
        f"memory_gb_per_s: measured likewise: a copy or sum of {ELEMENTS[kind] * 4 // 2**20} MiB, read and written",
    ]
    if faster:
        names = ", ".join(f"{name}_tflops" for name in sorted(faster))
        sources.append(f"{names}: measured likewise: the best product")
        sources.append("reachable: measured likewise: the products that float32 is measured by")
    else:
        sources.append("reachable: of float32: no 16-bit products are faster")
    if processes > 1:
        latency, bandwidth = fit_ring(processes, measured["all_reduce"])
        link = "NCCL" if kind == "cuda" else "loopback, gloo"
        link_gb_per_s, link_latency_us = bandwidth / 1e9 / CALIBRATION.reachable_link, latency * 1e6
        sources.append(
            f"link_gb_per_s, link_latency_us: measured likewise: {bandwidth / 1e9:.4g} GB/s, a ring fitted to {len(REDUCED)} "
            f"all-reduces of 4 KiB to 64 MiB; divided by the {CALIBRATION.reachable_link} that stepplan/timing.py takes of it"
        )
    else:
        link, link_gb_per_s, link_latency_us = ASSUMED_LINK[kind]
        sources.append("link_gb_per_s, link_latency_us: assumed: a single process has no link to measure")
    sources.append(f"watts: {has['watts_source']}")
    values = {
        "description": has["description"],
        "cores": has["cores"],
        "memory_mib": has["memory_mib"],
        "fp32_tflops": rounded(single / 1e12 / CALIBRATION.reachable_fp32),
        **{f"{name}_tflops": rounded(faster[name][0] / 1e12) if name in faster else None for name in ("fp16", "bf16")},
        "reachable": min(0.999, rounded(usual / peak)),
        "memory_gb_per_s": rounded(measured["memory"] / 1e9),
        "link": link,
        "link_gb_per_s": rounded(link_gb_per_s),
        "link_latency_us": rounded(link_latency_us),
        "watts": has["watts"],
        "sources": sources,
    }
    return {name: value for name, value in values.items() if name != "cores" or value is not None}


def write(values: dict, path: Path) -> None:
    """Write the file and read it as `plan` does.

    Raises:
        UsageError: it breaks a rule of device files.
    """
    head = "# Written by benchmarks/device.py, which says how it measures.\n"
    if "cores" in values:
        head += (
            f"# A device is what one process has. 1x{path.stem}: one process, OMP_NUM_THREADS={values['cores']}. "
            f"2x{path.stem}: two of them on one machine.\n"
        )
    path.write_text(head + yaml.safe_dump(values, sort_keys=False, width=math.inf), encoding="utf-8")
    load_device(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the device file, NAME.yaml")
    parser.add_argument("--processes", type=int, help="devices that the machine has [its GPUs; of a CPU: 2]")
    arguments = parser.parse_args()
    if arguments.output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--output {arguments.output} must end in .yaml")

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    processes = arguments.processes
    if processes is None:
        processes = torch.cuda.device_count() if kind == "cuda" else min(2, num_cores())
    command = f"python benchmarks/device.py --output {arguments.output.name} --processes {processes}"
    origin = f"measured by benchmarks/device.py with torch {torch.__version__} on {datetime.date.today()} ({command})"
    measured = measure(kind, processes)
    write(device_values(kind, processes, machine(kind, processes), measured, origin), arguments.output)
    print(arguments.output.read_text())
    for size, seconds in measured["all_reduce"] or []:
        print(f"all-reduce of {size / 1024:10,.0f} KiB: {seconds * 1e3:10.3f} ms")


if __name__ == "__main__":
    sys.exit(exit_code(main))
