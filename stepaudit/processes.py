"""Takes steps in several processes together, over gloo."""

import contextlib
import copy
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from stepaudit import waiting
from stepaudit.errors import UsageError
from stepaudit.recording import Recording

TIMEOUT = 300  # seconds for all cuts of one number of processes
END = 12  # lines of a log that failed
FRAME = re.compile(r'\s*File "([^"]+)", line \d+')


def run(
    command: list[str],
    num_processes: int,
    title: str,
    timeout: float,
    variables: Mapping[str, str] | None = None,
    stacks: Path | None = None,
    announce: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Run a command in `num_processes` processes, in the environment that torchrun gives; the first failure ends all of them.

    Args:
        title: names the command in messages.
        timeout: in seconds.
        variables: of the environment, besides.
        stacks: folder into which the processes write their stacks (`waiting.py`).
        announce: is told where they are, after 30 seconds, and whenever twice the time has gone.
        clock: returns seconds.

    Returns:
        The end of the first process's output.

    Raises:
        UsageError: a process failed (with the end of its output), or the command took longer than `timeout` seconds.
    """
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"} | dict(variables or {})
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if not torch.cuda.is_available():
        environment.setdefault("ACCELERATE_USE_CPU", "true")
    holder = socket.socket()
    if num_processes > 1:
        # Bound until all have ended, and not listening: the store of process 0 may bind the port beside it, nobody else gets it
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":  # where such a socket is in the way
            holder.close()
        environment |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes), "GROUP_RANK": "0"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "audit"}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    with holder, tempfile.TemporaryDirectory(prefix="audit-") as folder, contextlib.ExitStack() as stack:
        logs, processes = [Path(folder) / str(rank) for rank in range(num_processes)], []
        for rank, log in enumerate(logs):
            process_environment = environment | (
                {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_processes > 1 else {}
            )
            output = stack.enter_context(log.open("w"))
            processes.append(
                subprocess.Popen(command, env=process_environment, stdout=output, stderr=subprocess.STDOUT)
            )
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        start, next_report = clock(), waiting.FIRST_REPORT
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            seconds = clock() - start
            if seconds > min(next_report, timeout):
                places = waiting.describe_stacks(stacks, num_processes) if stacks else ""
                if seconds > timeout:
                    rule = "does a process wait, or is more time needed (--timeout)?"
                    raise UsageError(
                        ": ".join(filter(None, [f"{title} took longer than {timeout:g} seconds", places, rule]))
                    )
                announce(f"{title} is running, {seconds:.0f} s so far: {places or 'no process has computed yet'}")
                next_report *= 2
            time.sleep(0.02)
        if any(codes):
            failed = [rank for rank, code in enumerate(codes) if code]
            rank = min(failed, key=lambda rank: logs[rank].stat().st_mtime_ns)  # the others lost their connection to it
            place = f" (process {rank} of {num_processes})" if num_processes > 1 else ""
            end = f", ended by signal {-codes[rank]}" if codes[rank] < 0 else ""  # without a word of its own
            raise UsageError(f"{title} failed{place}{end}:\n  {_read_end(logs[rank])}")
        return _read_end(logs[0])


def _read_end(log: Path) -> str:
    """Read the last lines of a log, and before them the last line of the program in the traceback, if it stands higher up."""
    lines = log.read_text(errors="replace").strip().splitlines()
    end = lines[-END:]
    places = [number for number, line in enumerate(lines) if (m := FRAME.match(line)) and waiting.is_of_program(m[1])]
    if places and places[-1] < len(lines) - END:
        end = [*lines[places[-1] : places[-1] + 2], "  ...", *end[3:]]
    return "\n  ".join(end)


def take_steps(subject: Any, cuts: list, num_processes: int) -> list[list[Recording]]:
    """Take the steps of every cut in processes that talk over gloo. Functions need not be importable: they are sent.

    Args:
        subject: a `step.Subject`.

    Returns:
        For each cut the recordings of all processes.
    """
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        subject_and_cuts = dataclasses.replace(subject, model=copy.deepcopy(subject.model).cpu()), cuts
        (Path(folder) / "subject").write_bytes(_pickle(subject_and_cuts))
        (Path(folder) / "path").write_text(json.dumps(sys.path))
        command = [sys.executable, "-c", "from stepaudit import processes; processes.work()", folder]
        run(command, num_processes, f"the audit on {num_processes} processes", TIMEOUT, stacks=Path(folder))
        return load(Path(folder), len(cuts), num_processes)


def load(folder: Path, num_runs: int, num_processes: int) -> list[list[Recording]]:
    """Load the recordings that `num_processes` processes wrote for each run: RUN-RANK.npz."""
    runs, ranks = range(num_runs), range(num_processes)
    return [[Recording.load(folder / f"{number}-{rank}.npz") for rank in ranks] for number in runs]


def _pickle(value: Any) -> bytes:
    """Pickle a value; functions and classes of modules that another process cannot import go by value."""
    modules_by_name = {
        name: module for name, module in sys.modules.items() if name == getattr(module, "__name__", "") != "__main__"
    }
    packages = {name.partition(".")[0] for name in modules_by_name}
    local_packages = {
        package for package in packages if not any(finder.find_spec(package, None) for finder in sys.meta_path)
    }
    local_modules = [module for name, module in modules_by_name.items() if name.partition(".")[0] in local_packages]
    with contextlib.ExitStack() as stack:
        for module in local_modules:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        return cloudpickle.dumps(value)


def work() -> None:
    """Do the work of one process: the environment tells its rank, FOLDER the subject and the cuts."""
    folder, code = Path(sys.argv[1]), 0
    try:
        waiting.write_stacks(folder, int(os.environ["RANK"]))
        sys.path[:] = json.loads((folder / "path").read_text())
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.distributed.init_process_group("gloo")
        subject, cuts = cloudpickle.loads((folder / "subject").read_bytes())
        rank = torch.distributed.get_rank()
        for number, cut in enumerate(cuts):
            subject.take_steps(cut, subject.loop, rank).save(folder / f"{number}-{rank}.npz")
        torch.distributed.barrier()
    except Exception:
        sys.stderr.write(traceback.format_exc())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # models wrapped for several processes must not be destroyed after the process group
