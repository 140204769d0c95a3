"""What the parts of benchmarks/proof_gpu.py share: tasks, and trainings of tiny models on the device.

A part is a module with

- TITLE and ABOUT: its head in the page, and what it shows;
- `list_tasks(is_tiny, has_gpu)`: its tasks;
- `compute(item, is_tiny)`: computes the row of an item, in a process of its own;
- `is_good(row)`: whether that is what was promised;
- `markdown(rows)`: its tables, of rows by the names of their items.

Only `compute` may touch the device: memory of a process that waits is missing to those that are measured.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("child.py")
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
"""Environment of what is computed on the CPU."""
PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
"""Names in tables -> those of Accelerate."""
FULL_FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Environment in which products and convolutions of float32 are not computed in TF32, as cuDNN would."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Items that one process computes, one after the other.

    Attributes:
        part: name of the module.
        items: names of rows.
        environment: of the process, beside that of the program.
        seconds: after which the process hangs.
        is_alone: whether nothing else may run: memory and time are measured.
    """

    part: str
    items: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 300
    is_alone: bool = False


def line(error: BaseException) -> str:
    """Write an error in one line."""
    return " ".join(str(error).split())[:300].replace("|", "/") or type(error).__name__


def verdict(row: Mapping[str, Any], is_good: bool) -> str:
    """Say in a cell what came of an item."""
    if text := row.get("failed") or row.get("refused"):
        return f"{'failed' if 'failed' in row else 'refused'}: {text}"
    return "yes" if is_good else "**no**"


# ---------------------------------------------------------------------------------------------------------------------
# Trainings


@functools.cache
def _work() -> Path:
    """Make this process's folder, which the caller's temporary folder holds."""
    return Path(tempfile.mkdtemp(prefix="proof-"))


@functools.cache
def corpus() -> Path:
    """Write the text that tiny models learn."""
    from common import write_corpus

    return write_corpus(_work())


@functools.cache
def _script(program: str) -> Any:
    from common import load_script

    return load_script(program)


@contextlib.contextmanager
def output_folder(name: str) -> Iterator[Path]:
    """Make the path of a run's folder, which is removed at the end."""
    folder = _work() / name
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def has_gpu() -> bool:
    """Tell whether this process computes on a GPU."""
    import torch

    return torch.cuda.is_available()


def free() -> None:
    """Give back what earlier computations of this process left on the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def train(
    program: str, flags: str, folder: Path, precision: str, speed: str = "safe", kernel: str | None = None
) -> None:
    """Train a tiny model in this process, as `accelerate launch` would on one device.

    Args:
        program: of scripts/.
        flags: beside those of its tiny model.
        folder: output folder.
        precision: no, bf16 or fp16.
        speed: of --speed.
        kernel: that the model must have; None: as `speed` says.
    """
    from common import fresh_accelerator, tiny_argv

    from samestep.training import kernels

    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    if not has_gpu():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    argv = tiny_argv(program, corpus(), folder, flags)
    argv[argv.index("safe")] = speed
    fresh_accelerator()
    choose = kernels.choose_kernel
    if kernel is not None:
        kernels.choose_kernel = lambda *arguments: arguments[-1][kernel]()
    try:
        _script(program).main(argv)
    finally:
        kernels.choose_kernel = choose
        free()


def make_environment(num_processes: int, precision: str, is_sharded: bool, on_gpu: bool) -> dict[str, str]:
    """Make what Accelerate tells the processes of a launch, on one GPU or on the CPU."""
    from common import launch_environment

    name = "fsdp2_8xa100" if is_sharded and on_gpu else "fsdp2_2xcpu" if is_sharded else "2xcpu"
    words = ["--num_processes", str(num_processes), "--mixed_precision", precision]
    environment = launch_environment(ROOT / "accelerate_configs" / f"{name}.yaml", *words)
    return {name: value for name, value in environment.items() if not on_gpu or name not in NO_GPU}


def train_on(num_processes: int, program: str, flags: str, folder: Path, precision: str, is_sharded: bool) -> None:
    """Train a tiny model in processes of their own: on one GPU, which they share, or on the CPU.

    Processes that share a GPU talk over gloo, as NCCL wants a GPU for each. Sharded weights need NCCL: one process.

    Raises:
        RuntimeError: a process failed; the message has the end of what it printed.
    """
    from common import tiny_argv

    environment = (
        os.environ | {"OMP_NUM_THREADS": "1"} | make_environment(num_processes, precision, is_sharded, has_gpu())
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}", "--max_restarts=0"]
    call = ["train", program, *tiny_argv(program, corpus(), folder, flags)]
    done = subprocess.run(
        [sys.executable, *launcher, str(CHILD), *call], env=environment, capture_output=True, text=True, timeout=240
    )
    if done.returncode:
        lines = [text for text in (done.stdout + done.stderr).splitlines() if "Error" in text or "ERROR" in text]
        raise RuntimeError(" ".join(lines[:3]) or done.stderr[-300:])


def run_rank(program: str, argv: list[str]) -> None:
    """Train in a process that `train_on` started."""
    import torch

    if torch.cuda.is_available() and int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count():
        share_device()
    _script(program).main(argv)


def share_device() -> None:
    """Let this process talk over gloo, and compute on the first device whatever its rank."""
    from samestep.training import launch

    launch.InitProcessGroupKwargs = functools.partial(launch.InitProcessGroupKwargs, backend="gloo")
    os.environ["LOCAL_RANK"] = "0"  # by which Accelerate numbers the device of its barriers and of DDP


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's steps."""
    return [row for row in _read_metrics(folder) if "loss" in row]


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of what happened in a run."""
    return [row for row in _read_metrics(folder) if "event" in row]


def _read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def read_tensors(folder: Path, part: str = "model") -> dict[str, Any]:
    """Read the tensors of a run's newest checkpoint by their names."""
    from samestep.training.checkpoint import checkpoints, read

    return dict(sorted(read(checkpoints(folder)[-1], part).items()))


def distance(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Compute |a - b| / |b| over all tensors of two models, in float64."""
    squares = [0.0, 0.0]
    for name, tensor in theirs.items():
        true = tensor.double()
        squares[0] += float((ours[name].double() - true).square().sum())
        squares[1] += float(true.square().sum())
    return math.sqrt(squares[0] / squares[1])
