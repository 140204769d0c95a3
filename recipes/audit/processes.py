"""Steps that several processes take together, over gloo."""

import contextlib
import copy
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from recipes.audit.recording import Recording
from recipes.errors import UsageError

TIMEOUT = 300  # seconds for all cuts of one number of processes


def take_steps(subject: Any, cuts: list, num_processes: int) -> list[list[Recording]]:
    """Of each cut the recordings of all processes, which talk over gloo. Functions need not be importable: they are sent."""
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="audit-") as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        (Path(folder) / "subject").write_bytes(
            _sent((dataclasses.replace(subject, model=copy.deepcopy(subject.model).cpu()), cuts))
        )
        free.close()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
            "WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
        command = [sys.executable, "-c", "from recipes.audit import processes; processes.work()", folder]
        with contextlib.ExitStack() as stack:
            logs = [Path(folder) / f"{rank}.log" for rank in range(num_processes)]
            processes = []
            for rank, log in enumerate(logs):
                own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                output = stack.enter_context(log.open("w"))
                processes.append(subprocess.Popen(command, env=own, stdout=output, stderr=output))
                stack.callback(processes[-1].wait)
                stack.callback(processes[-1].kill)
            deadline = time.monotonic() + TIMEOUT
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                if time.monotonic() > deadline:
                    raise UsageError(f"{num_processes} processes took longer than {TIMEOUT} seconds (a process waits?)")
                time.sleep(0.02)
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            last = "\n  ".join(logs[rank].read_text().strip().splitlines()[-12:])
            raise UsageError(f"process {rank} of {num_processes} failed:\n  {last}")
        return [
            [Recording.load(Path(folder) / f"{number}-{rank}.npz") for rank in range(num_processes)]
            for number in range(len(cuts))
        ]


def _sent(value: Any) -> bytes:
    """Pickled; functions and classes of modules that another process cannot import, by value."""
    named = {
        name: module for name, module in sys.modules.items() if name == getattr(module, "__name__", "") != "__main__"
    }
    tops = {name.partition(".")[0] for name in named}
    hidden = {top for top in tops if not any(finder.find_spec(top, None) for finder in sys.meta_path)}
    own = [module for name, module in named.items() if name.partition(".")[0] in hidden]
    with contextlib.ExitStack() as stack:
        for module in own:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        return cloudpickle.dumps(value)


def work() -> None:
    """What one of the processes does: the environment and FOLDER say which."""
    folder, code = Path(sys.argv[1]), 0
    try:
        torch.distributed.init_process_group("gloo")
        subject, cuts = cloudpickle.loads((folder / "subject").read_bytes())
        rank = torch.distributed.get_rank()
        for number, cut in enumerate(cuts):
            subject.take_steps(cut, subject.loop, rank).save(folder / f"{number}-{rank}.npz")
        torch.distributed.barrier()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # models wrapped for several processes must not be destroyed after the process group
