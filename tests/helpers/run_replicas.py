"""Runs of several replicas (--fault_tolerance step) in forked processes, and what happens to them: kills, sleeps and the like.

Tests call `main` through a fork server; a benchmark uses `Scene` in a process that has imported all and computed nothing.
"""

import contextlib
import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import lost_connections
from blank import draw_nothing
from common import ROOT, launch_environment
from ports import hold_port
from waiting import PATIENCE, until

from samestep.errors import exit_code

SIGNAL_IN_STEP = "SIGNAL_IN_STEP"
"""Variable that holds a step and a signal, which a replica sends itself there: after its backwards, before the reduction. Of
several processes the last one does."""


def load_scripts() -> dict:
    """Load the programs, by name; the first call takes seconds, and is made before any process is forked."""
    from run_layouts import SCRIPTS

    return SCRIPTS


def read_lines(path: Path) -> list[dict]:
    """Read the whole lines of a file that somebody is writing."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]
    return []


def fork(call: Callable[[], Any], log: Path, environment: dict[str, str]) -> int:
    """Call something in a new process, whose output goes to the end of `log`."""
    return forked.fork(lambda: exit_code(call), log, environment, "ab")


def serve_lighthouse(port: int, join_timeout: float) -> None:
    """Be a lighthouse for ever."""
    os.environ["RUST_LOG"] = "error"
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=1,
        join_timeout_ms=int(1000 * join_timeout),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=1000,
    )
    print(lighthouse.address(), flush=True)
    while True:
        signal.pause()


def train(program: str, argv: list[str], digests: Path) -> int:
    """Train as a script does; at the end write a digest of the parameters that this replica has to `digests`/PID."""
    from samestep.contrib.replication import replicas
    from samestep.training import digest

    lost_connections.listen()
    draw_nothing()
    take_charge, reduce = replicas.Replicas.take_charge, replicas.Replicas.reduce
    step, signal_number = map(int, os.environ.get(SIGNAL_IN_STEP, "0 0").split())

    def signal_itself(self, data, *arguments, **keywords):
        if data.step + 1 == step:
            os.kill(os.getpid(), signal_number)
        return reduce(self, data, *arguments, **keywords)

    def note(self) -> bool:
        tensors = self.state.list_tensors().items()
        text = "\n".join(f"{name} {digest.digest_tensor(tensor)}" for name, tensor in tensors)
        (digests / str(os.getpid())).write_text(text)
        return take_charge(self)

    replicas.Replicas.take_charge, replicas.Replicas.reduce = note, signal_itself
    return load_scripts()[program].main(argv)


def train_together(
    num_processes: int, launch: dict[str, str], call: Callable[[], Any], log: Path, environment: dict[str, str]
) -> int:
    """Be the launcher of a replica of several processes: when one of them ends badly, all end, as with torchrun.

    Args:
        num_processes: of the replica.
        launch: variables that the launch file brings.
        call: what each process does.
        log: for what they print.
        environment: of the last one; SIGNAL_IN_STEP is not for the others.
    """
    os.setpgid(0, 0)  # so that a signal can go to all of them
    others = environment | {SIGNAL_IN_STEP: "0 0"}
    pids = []
    codes: dict[int, int] = {}
    with hold_port() as port:
        for rank, variables in enumerate(forked.make_environments(num_processes, port)):
            own = environment if rank + 1 == num_processes else others
            pids.append(fork(call, log, own | launch | variables))
        signal.signal(lost_connections.DROP, signal.SIG_IGN)
        while len(codes) < num_processes:
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
            for other in set(pids) - codes.keys() if codes[pid] else ():
                os.kill(other, signal.SIGKILL)
    return max(map(abs, codes.values()))


class Scene:
    """One run: a lighthouse and its replicas, each a process that can be killed, stopped, and started again.

    Args:
        program: script.
        argv: its arguments, with --fault_tolerance step.
        folder: of the logs, and of the digests.
        output_dir: of the run.
        join_timeout: seconds for which the lighthouse waits for replicas that live and do not come.
        num_processes: of a replica; those of several are children of its process.
        launch: variables that the launch file of a replica of several processes brings.
    """

    def __init__(
        self,
        program: str,
        argv: list[str],
        folder: Path,
        output_dir: Path,
        join_timeout: float = 3.0,
        num_processes: int = 1,
        launch: dict[str, str] | None = None,
    ):
        self.program, self.argv, self.folder, self.output_dir = program, argv, folder, output_dir
        self.num_processes, self.launch = num_processes, launch or {}
        self.join_timeout = join_timeout
        folder.mkdir(parents=True, exist_ok=True)
        self.held = contextlib.ExitStack()
        self.port = self.held.enter_context(hold_port())
        self.replicas: dict[int, int] = {}  # number -> pid, of those that were started last under this number
        self.codes: dict[int, int] = {}  # pid -> exit code
        self.start_lighthouse()

    def start_lighthouse(self) -> None:
        self.lighthouse = fork(
            lambda: serve_lighthouse(self.port, self.join_timeout), self.folder / "log-lighthouse", {}
        )

    def kill_lighthouse(self) -> None:
        os.kill(self.lighthouse, signal.SIGKILL)
        os.waitpid(self.lighthouse, 0)

    def start(self, number: int, flags: str = "", signal_in_step: str = "0 0") -> None:
        """Start a replica, or start it again."""
        lighthouse = f"http://127.0.0.1:{self.port}"
        environment = {"TORCHFT_LIGHTHOUSE": lighthouse, "CUDA_VISIBLE_DEVICES": "-1", SIGNAL_IN_STEP: signal_in_step}
        argv, log = [*self.argv, *flags.split()], self.folder / f"log-{number}"

        def call() -> int:
            return train(self.program, argv, self.folder)

        def call_together() -> int:
            return train_together(self.num_processes, self.launch, call, log, environment)

        self.replicas[number] = fork(call if self.num_processes == 1 else call_together, log, environment)

    def find_first_process(self, number: int) -> int:
        """Find process 0 of a replica."""
        pid = self.replicas[number]
        if self.num_processes == 1:
            return pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def signal(self, pid: int, signal_number: int) -> None:
        """Send a signal to all processes of a replica."""
        (os.kill if self.num_processes == 1 else os.killpg)(pid, signal_number)

    def send(self, number: int, signal_number: int) -> None:
        """Send a signal to a replica, and wait for its end if that kills it."""
        pid = self.replicas[number]
        self.signal(pid, signal_number)
        if signal_number == signal.SIGKILL:
            os.waitpid(pid, 0)
            del self.replicas[number]

    def find_ended(self) -> list[int]:
        """List the replicas that have ended."""
        self._reap()
        return [number for number, pid in self.replicas.items() if pid in self.codes]

    def wait_until(self, condition: Callable[[], Any], subject: str) -> Any:
        """Wait for a condition; return what it returns."""
        try:
            return until(lambda: (self._reap(), condition())[1], subject)
        except TimeoutError as error:
            raise TimeoutError(f"{error}:\n{self.tail()}") from None

    def lines(self) -> list[dict]:
        return read_lines(self.output_dir / "metrics.jsonl")

    def wait_for_step(self, step: int) -> None:
        """Wait until metrics.jsonl has a step."""
        self.wait_until(lambda: any(line["step"] >= step for line in self.lines()), f"step {step}")

    def finish(self, seconds: float = PATIENCE) -> dict[int, int]:
        """Wait until all replicas have ended; their exit codes by number. Those that have not are killed."""
        with contextlib.suppress(TimeoutError):
            until(lambda: not self._reap(), "end", seconds)
        for pid in set(self.replicas.values()) - self.codes.keys():
            self.signal(pid, signal.SIGABRT)
            self.codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            self.kill_lighthouse()
        self.held.close()
        return {number: self.codes[pid] for number, pid in self.replicas.items()}

    def _reap(self) -> bool:
        """Note the ends of replicas; tell whether any is left."""
        for pid in set(self.replicas.values()) - self.codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        return bool(set(self.replicas.values()) - self.codes.keys())

    def digests(self) -> list[str]:
        """Read the parameters' digests of the replicas that came to the end."""
        return [path.read_text() for path in sorted(self.folder.iterdir()) if path.name.isdigit()]

    def tail(self) -> str:
        """Return the end of what each process printed."""
        logs = sorted(self.folder.glob("log-*"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs)


def main(folder: str, program: str, argv: str, is_sharded: str = "") -> None:
    """Let two replicas train, for test_replicas.py. --min_replicas is 2, so that one waits for the other and the run is short.

    Args:
        folder: of logs and digests.
        program: script.
        argv: its arguments, in JSON.
        is_sharded: not empty: each replica is two processes that divide the weights.
    """
    from samestep.contrib.replication import connection

    connection.SECONDS_OF_QUORUM = 3.0
    words = json.loads(argv)
    scene_of = functools.partial(
        Scene, program, words, Path(folder) / "scene", Path(words[words.index("--output_dir") + 1])
    )
    if is_sharded:
        launch = launch_environment(ROOT / "accelerate_configs" / "fsdp2_2xcpu.yaml")
        scene = scene_of(num_processes=2, launch=launch)
        lose_a_process(scene)
    else:
        scene = scene_of()
        lose_a_replica_and_the_lighthouse(scene)
    codes = scene.finish()
    if any(codes.values()):
        print(codes, scene.tail())
        os._exit(1)
    os._exit(0)


def lose_a_process(scene: Scene) -> None:
    """Kill a process in the middle of a step, whose replica ends, and start the replica again."""
    scene.start(1, signal_in_step=f"6 {signal.SIGKILL:d}")
    scene.start(2)
    first = scene.replicas[1]
    scene.wait_until(lambda: scene.codes.get(first) == signal.SIGKILL, "death in step 6")
    scene.start(1)


def lose_a_replica_and_the_lighthouse(scene: Scene) -> None:
    """Kill the first replica in the middle of a step, and start it again; then the lighthouse."""
    scene.start(1, signal_in_step=f"6 {signal.SIGKILL:d}")
    scene.start(2, signal_in_step=f"14 {signal.SIGSTOP:d}")
    first, second = scene.replicas.values()
    scene.wait_until(lambda: scene.codes.get(first) == -signal.SIGKILL, "death in step 6")
    scene.start(1)
    scene.wait_until(lambda: Path(f"/proc/{second}/stat").read_text().split()[2] == "T", "stop in step 14")
    scene.kill_lighthouse()
    scene.send(2, signal.SIGCONT)
    scene.wait_until(lambda: "the lighthouse" in (scene.folder / "log-2").read_text(), "word of the lighthouse's death")
    scene.start_lighthouse()
