"""Runs many programs without the wait for imports: forked from a process that has imported all and computed nothing.

`Server` is the caller's end: it runs `main` of a module, by default the audit's, which records as `stepaudit.script.record`
does. Run as a program, this file is the other end, which several callers may share.
"""

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from ports import hold_port
from waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[2]
CRASHES = {-signal.SIGABRT, -signal.SIGSEGV}
"""Ends of a process after which a run is done again once: gloo corrupted the heap under FSDP2, once in about 100 runs."""
AUDITED = (
    "accelerate", "datasets", "lightning", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "transformers", "transformers.trainer",
)  # fmt: skip
"""Libraries that programs of audited/ import."""
NO_GPU = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
FIRST_CALL = 60  # seconds after which a server ends to which nobody has connected


class Server:
    """Starts runs, one at a time; a context manager.

    Args:
        module: module whose `main(folder, *words)` each process calls, and which ends it.
        libraries: what else to import before any process is forked.
        is_cpu: whether Accelerate is told that there is no GPU; launch files tell it in `run`'s environment.
        address: socket of a process that is shared by all that name it, started by the first of them; what it has imported is
            what that one named. None: a process of its own.
    """

    def __init__(
        self,
        module: str = "stepaudit.program",
        libraries: tuple[str, ...] = AUDITED,
        is_cpu: bool = True,
        address: str | None = None,
    ):
        self.module, self.libraries, self.is_cpu, self.address = module, libraries, is_cpu, address

    def __enter__(self) -> "Server":
        self.folder = None if self.address else tempfile.TemporaryDirectory(prefix="fork-server-")
        self.socket = _connect(self.address or f"{self.folder.name}/socket", [self.module, *self.libraries])
        self.answers = self.socket.makefile()
        return self

    def __exit__(self, *_) -> None:
        self.answers.close()
        self.socket.close()
        if self.folder:
            self.folder.cleanup()

    def beside(self, module: str, is_cpu: bool) -> "Server":
        """Make a server of another module through the same connection, to be closed by this one."""
        other = Server(module, self.libraries, is_cpu, self.address)
        other.socket, other.answers = self.socket, self.answers
        return other

    def record(
        self,
        program: list[str],
        variation,
        num_steps: int = 0,
        timeout: float = PATIENCE,
        mode: str = "",
        announce=None,
    ) -> list:
        """Record what each process did; for `mode` see `stepaudit.script.record`. Nothing is announced.

        Raises RuntimeError with the end of the program's output where it fails.
        """
        from stepaudit.processes import load

        with tempfile.TemporaryDirectory(prefix="audit-") as folder:
            steps = f"{num_steps}:{mode}" if mode else str(num_steps)
            words = [folder, steps, *program, *variation.argv]
            self.run(words, variation.num_processes, timeout, variation.environment)
            return [] if mode == "kill" else load(Path(folder), 1, variation.num_processes)[0]

    def run(
        self,
        words: list[str],
        num_processes: int,
        timeout: float = PATIENCE,
        environment: dict[str, str] | None = None,
        module: str | None = None,
        can_repeat: bool = True,
    ) -> None:
        """Call main(*words) in each process; the first word is the folder of the logs. Raises as `record`.

        Args:
            words: folder, and what `main` takes besides.
            num_processes: over gloo, if there are several.
            timeout: in seconds, after which processes that wait are killed.
            environment: of the processes, beside the server's own and what torchrun tells them.
            module: whose `main` is called, if not the server's.
            can_repeat: whether a run that crashed can be done again, whatever it left.
        """
        environment = (NO_GPU if self.is_cpu else {}) | (environment or {})
        request = {"words": words, "num_processes": num_processes, "timeout": timeout, "environment": environment}
        request |= {"module": module or self.module, "cwd": os.getcwd()}  # which relative paths among the words mean
        codes = self._ask(request)
        if can_repeat and num_processes > 1 and CRASHES & set(codes):
            codes = self._ask(request)
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            log = (Path(words[0]) / f"log-{rank}").read_text(errors="replace").strip().splitlines()[-12:]
            raise RuntimeError(
                f"{' '.join(words[1:])}, process {rank} of {num_processes} ended with {codes[rank]}:\n" + "\n".join(log)
            )

    def _ask(self, request: dict) -> list[int]:
        self.socket.sendall(f"{json.dumps(request)}\n".encode())
        if not (answer := self.answers.readline()):
            raise RuntimeError("the fork server has ended")
        return json.loads(answer)


def _connect(address: str, modules: list[str]) -> socket.socket:
    """Connect to the server at an address; start it, if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            connection.connect(address)
            return connection
        _start(address, modules)

        def has_connected() -> bool:
            with contextlib.suppress(OSError):
                connection.connect(address)
                return True
            return False

        until(has_connected, "fork server")
        return connection


def _start(address: str, modules: list[str]) -> None:
    home = Path(address).with_name("home")  # outlives that of the caller, who may end before others
    environment = os.environ | {
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": os.environ.get("TESTS_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "audited"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
    }
    subprocess.Popen([sys.executable, __file__, address, *modules], stdin=subprocess.DEVNULL, env=environment)


# ---------------------------------------------------------------------------------------------------------------------
# The other end


def serve(address: str, *modules: str) -> None:
    """Serve each caller in a process of its own, which is forked when it connects; end when none is left."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(address)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    os.dup2(2, 1)
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):  # whoever needs it says so
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the recorder looks for modules and optimizers among all objects
    pids: set[int] = set()
    while True:
        if select.select([listener], [], [], 1 if pids else FIRST_CALL)[0]:
            connection = listener.accept()[0]
            if not (pid := os.fork()):
                listener.close()
                _answer(connection)
                os._exit(0)
            connection.close()
            pids.add(pid)
        while pids and (ended := os.waitpid(-1, os.WNOHANG)[0]):
            pids.remove(ended)
        if not pids:
            return


def _answer(connection: socket.socket) -> None:
    with connection, connection.makefile() as requests:
        for line in requests:
            connection.sendall(f"{json.dumps(_run(**json.loads(line)))}\n".encode())


def _run(
    module: str, words: list[str], num_processes: int, timeout: float, environment: dict[str, str], cwd: str
) -> list[int]:
    """Run processes and return their exit codes by rank; the first failure ends all."""
    main, codes = importlib.import_module(module).main, {}

    def call() -> int | None:
        os.chdir(cwd)
        return main(*words)

    with hold_port() as port:
        environments = make_environments(num_processes, port)
        logs = [Path(words[0]).absolute() / f"log-{rank}" for rank in range(num_processes)]
        pids = [fork(call, *pair) for pair in zip(logs, [environment | env for env in environments], strict=True)]

        def is_over() -> bool:
            for pid in set(pids) - codes.keys():
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            return len(codes) == num_processes or any(codes.values())

        with contextlib.suppress(TimeoutError):
            until(is_over, "end", timeout)
        for pid in set(pids) - codes.keys():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            codes[pid] = 0 if any(codes.values()) else -signal.SIGKILL
    return [codes[pid] for pid in pids]


def make_environments(num_processes: int, port: int) -> list[dict[str, str]]:
    """Make the environment variables that torchrun gives each process: none, if it is the only one.

    Args:
        num_processes: of the group.
        port: on which the first one listens for the others; see `hold_port`.
    """
    if num_processes == 1:
        return [{}]
    size = str(num_processes)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    common |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "audit"}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]


def fork(call: Callable[[], int | None], log: Path, environment: dict[str, str], mode: str = "wb") -> int:
    """Call something in a new process, whose output goes into `log`; it ends with what the call returns, or 1."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = None
    try:
        with open(os.devnull, "rb") as nothing, open(log, mode) as output:
            for opened, target in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(opened.fileno(), target)
        sys.stdout.reconfigure(line_buffering=True)
        faulthandler.enable()
        os.environ.update(environment)
        code = call()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1 if code is None else code)


if __name__ == "__main__":
    serve(*sys.argv[1:])
