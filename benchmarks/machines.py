"""What a run survives on machines that die, freeze, come and go: does it end as an undisturbed one, how soon does it go on?

    make bench NAME=machines

Three machines are three scripts of `python -m recipes launch RECIPE --on torchrun:3x1xcpu` on this one, which meet over
127.0.0.1 at a fourth, the store. In each run something happens at a random step:

- worker: the training process of a machine gets SIGKILL.
- agent: torchrun's agent gets it, its worker not.
- agent and worker: both.
- dropped socket: a worker loses all its connections.
- machine: the script, its agent and its worker; a new machine comes 2 seconds later.
- store: the machine where the others meet, and a machine that trains; both come back after 2 seconds.
- frozen worker: a worker gets SIGSTOP, for ever.
- frozen machine: all processes of a machine get SIGSTOP, and SIGCONT 25 seconds later.
- late starters: one machine begins, one comes at a random step, another one later.
- 1, 3, 2, 3 machines: one begins, two come, one dies, one comes.

Every run must end within its time; each step must have been taken once, with the samples of an undisturbed run of one process,
and its loss to 1e-5 (in float64), or, in every other run, with `--reproducible`, the same bits: losses, and weights at the end.
To the next finished step: from the signal to the first line that a new generation of workers writes in metrics.jsonl.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HELPERS = ROOT / "tests" / "helpers"
sys.path.insert(0, str(HELPERS))

import harness
from common import TINIES, write_corpus
from lost_connections import DROP

LISTENING = """import lost_connections

lost_connections.listen()
"""
"""What each process of a machine does when Python starts (`sitecustomize`)."""

KINDS = (
    *("worker", "agent", "agent and worker", "dropped socket", "machine", "store", "frozen worker", "frozen machine"),
    *("late starters", "1, 3, 2, 3 machines"),
)
LATE = KINDS[-2:]
NUM_MACHINES, STEPS, EVERY, DDP_TIMEOUT = 3, 400, 20, 15
BOUND = 1e-5
"""Of the relative difference of a loss."""
FLAGS = (
    f"--checkpointing_steps {EVERY} --checkpoints_total_limit 3 --logging_steps 1 --record_samples --eval_steps 200 "
    f"--speed safe --ddp_timeout {DDP_TIMEOUT}"
).split()
RECIPE_FLAGS = [*TINIES["pretrain_gpt2"][2:], *f"--max_train_steps {STEPS} --global_batch_size 12".split()]
PATIENCE = 400.0
"""Seconds for anything to happen; also the machine may be busy with other work."""


class TimedOut(Exception):
    """Raised when something did not happen in time."""


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition is true; raise TimedOut after so many seconds."""
    deadline = harness.clock() + seconds
    while not condition():
        if harness.clock() > deadline:
            raise TimedOut(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """List a process and all that it started, it first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(
                int(entry.name)
            )
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop(0))
        queue += parents.get(found[-1], [])
    return found


def send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Machine:
    """One of the machines: the script that `launch` wrote, in a session of its own."""

    def __init__(self, script: Path, port: int, log: Path, *words: str):
        startup = script.parent / "startup"
        startup.mkdir(exist_ok=True)
        (startup / "sitecustomize.py").write_text(LISTENING)
        environment = os.environ | {
            "MAIN": "127.0.0.1",
            "ADDRESS": "127.0.0.1",
            "PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_MIXED_PRECISION": "no",
            "PYTHONPATH": os.pathsep.join(map(str, (startup, ROOT, HELPERS))),
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self.log = log
        self.process = subprocess.Popen(
            ["bash", str(script), *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log.open("a"),
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def pids(self) -> list[int]:
        """The script, torchrun's agent, its worker, as far as they are there."""
        return descendants(self.process.pid)

    @property
    def has_worker(self) -> bool:
        return len(self.pids) > 2

    def kill(self) -> None:
        send(signal.SIGKILL, self.pids)
        self.process.wait()


class Cluster:
    """Machines around one output folder.

    Args:
        folder: of logs, the script, the output.
        words: of the recipe and of the run.
        num_machines: that begin.
    """

    def __init__(self, folder: Path, corpus: Path, flags: Sequence[str], num_machines: int = NUM_MACHINES):
        self.folder, self.output_dir, self.script = folder, folder / "run", folder / "job.sh"
        folder.mkdir(parents=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        write_script(self.script, corpus, self.output_dir, flags)
        self.store = self._start("store")
        self.machines = [self._start() for _ in range(num_machines)]
        self.num_machines = num_machines

    def _start(self, *words: str) -> Machine:
        number = len(list(self.folder.glob("*.log")))
        return Machine(self.script, self.port, self.folder / f"{words[0] if words else 'machine'}-{number}.log", *words)

    def add(self) -> None:
        self.machines.append(self._start())

    def restart_store(self) -> None:
        self.store = self._start("store")

    @property
    def step(self) -> int:
        """Newest step in metrics.jsonl."""
        lines = read_lines(self.output_dir / "metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    @property
    def generation(self) -> int:
        """Changes when new workers take metrics.jsonl, which they write anew up to their checkpoint."""
        with contextlib.suppress(OSError):
            return (self.output_dir / "metrics.jsonl").stat().st_ino
        return 0

    def wait_for_new_step(self, generation: int, seconds: float = PATIENCE) -> float:
        """Wait for the first step of a new generation of workers; return the seconds that it took."""
        begin = harness.clock()
        wait_for(lambda: self.generation != generation or self.is_finished, seconds, "a new generation of workers")
        size = (self.output_dir / "metrics.jsonl").stat().st_size
        wait_for(
            lambda: (self.output_dir / "metrics.jsonl").stat().st_size > size or self.is_finished, seconds, "a step"
        )
        return harness.clock() - begin

    @property
    def is_finished(self) -> bool:
        return (self.output_dir / "all_results.json").exists()

    def close(self) -> None:
        for machine in [*self.machines, self.store]:
            machine.kill()
        for entry in Path("/proc").iterdir():  # workers whose agents are dead
            with contextlib.suppress(OSError, ValueError):
                if str(self.output_dir).encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                    send(signal.SIGKILL, [int(entry.name)])

    def tail(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


def read_lines(path: Path) -> list[dict]:
    """Read whole lines of a file that is being written."""
    lines = []
    with contextlib.suppress(OSError):
        for text in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return lines


def write_script(file: Path, corpus: Path, output_dir: Path, flags: Sequence[str]) -> None:
    """Write the script of the machines, as users do."""
    words = ["launch", "gpt2_small_cpu", "--on", f"torchrun:{NUM_MACHINES}x1xcpu", "--write", str(file), *RECIPE_FLAGS]
    words += ["--train_file", str(corpus), "--", "--output_dir", str(output_dir), *FLAGS, *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "recipes", *words], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    text = file.read_text()
    if "--reproducible" in flags:  # the plan's cap of a micro-batch is what this flag sets
        text = text.replace(text[text.index(" --per_device_train_batch_size") :].split("\n")[0].rstrip("\\"), " ")
    file.write_text(text)


def strike(cluster: Cluster, kind: str, rng: random.Random) -> float:
    """Do what a kind says; return the seconds to the next finished step."""
    machine, generation = rng.choice(cluster.machines), cluster.generation
    _, agent, worker, *_ = machine.pids
    if kind in ("worker", "agent", "agent and worker"):
        send(signal.SIGKILL, {"worker": [worker], "agent": [agent], "agent and worker": [agent, worker]}[kind])
    elif kind == "dropped socket":
        send(DROP, [worker])
    elif kind == "machine":
        machine.kill()
        cluster.machines.remove(machine)
        time.sleep(2)
        cluster.add()
        return 2 + cluster.wait_for_new_step(generation)
    elif kind == "store":
        cluster.store.kill()
        machine.kill()
        cluster.machines.remove(machine)
        time.sleep(2)
        cluster.restart_store()
        cluster.add()
        return 2 + cluster.wait_for_new_step(generation)
    elif kind == "frozen worker":
        send(signal.SIGSTOP, [worker])
    elif kind == "frozen machine":
        pids = machine.pids
        send(signal.SIGSTOP, pids)
        seconds = cluster.wait_for_new_step(generation)
        time.sleep(max(0.0, 25 - seconds))
        send(signal.SIGCONT, pids)
        return seconds
    elif kind == "late starters":
        cluster.add()
        seconds = cluster.wait_for_new_step(generation)
        generation = cluster.generation
        wait_for(lambda: cluster.step > STEPS // 2 or cluster.is_finished, PATIENCE, "half of the steps")
        cluster.add()
        cluster.wait_for_new_step(generation)
        return seconds
    elif kind == "1, 3, 2, 3 machines":
        cluster.add()
        cluster.add()
        seconds = cluster.wait_for_new_step(generation)
        for change in ("one dies", "one comes"):
            step = cluster.step + STEPS // 10
            wait_for(lambda step=step: cluster.step > step or cluster.is_finished, PATIENCE, f"step {step}")
            generation = cluster.generation
            if change == "one dies":
                cluster.machines.pop().kill()
            else:
                cluster.add()
            cluster.wait_for_new_step(generation)
        return seconds
    return cluster.wait_for_new_step(generation)


def differences(output_dir: Path, reference: Path, is_reproducible: bool) -> list[str]:
    """List what differs between a run and an undisturbed one."""
    problems = []
    ours, theirs = (
        [line for line in read_lines(folder / "metrics.jsonl") if "loss" in line] for folder in (output_dir, reference)
    )
    if [line["step"] for line in ours] != list(range(1, STEPS + 1)):
        problems.append(
            f"{len(ours)} lines of steps, {len({line['step'] for line in ours})} different ones, must be {STEPS}"
        )
    pairs = list(zip(ours, theirs, strict=False))
    largest = max((abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs), default=1.0)
    if largest > (0 if is_reproducible else BOUND):
        problems.append(f"a loss differs by {largest:.1e}")
    if samples_by_step(output_dir) != samples_by_step(reference):
        problems.append("the samples of a step differ")
    if is_reproducible:
        contents = [(folder / "model.safetensors").read_bytes() for folder in (output_dir, reference)]
        if contents[0] != contents[1]:
            problems.append("the final weights differ")
    return problems


def samples_by_step(output_dir: Path) -> dict[int, list]:
    """Collect the samples of each step, over all processes and micro-batches; a sample that is used twice is there twice."""
    steps: dict[int, list] = {}
    for line in read_lines(output_dir / "samples.jsonl"):
        steps.setdefault(line["step"], []).extend(zip(line["epochs"], line["samples"], strict=True))
    return {step: sorted(samples) for step, samples in steps.items()}


def count_processes(output_dir: Path) -> list[int]:
    """List the numbers of processes that took the steps, one after the other: [3, 2, 3]."""
    processes: dict[int, set[int]] = {}
    for line in read_lines(output_dir / "samples.jsonl"):
        processes.setdefault(line["step"], set()).add(line["process"])
    return [number for number, _ in itertools.groupby(len(processes[step]) for step in sorted(processes))]


def make_reference(folder: Path, corpus: Path, flags: Sequence[str]) -> Path:
    """Train undisturbed, on one process."""
    output_dir = folder / "run"
    words = [str(ROOT / "scripts" / "pretrain_gpt2.py"), "--recipe", "gpt2_small_cpu", *RECIPE_FLAGS]
    words += ["--train_file", str(corpus), "--output_dir", str(output_dir), *FLAGS, *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True)
    with (folder / "log").open("w") as log:
        subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True, stdout=log, stderr=log)
    return output_dir


MODES = {"float64": ["--dtype", "float64"], "reproducible": ["--reproducible", "4"]}


def run_once(work: Path, number: int, kind: str, mode: str, corpus: Path, reference: Path, rng: random.Random) -> dict:
    """Make one run and disturb it: a row of results."""
    folder = work / f"{number:02}-{kind.replace(' ', '-')}"
    begin, row, problems = harness.clock(), {"run": number, "kind": kind, "mode": mode}, []
    cluster = Cluster(folder, corpus, MODES[mode], 1 if kind in LATE else NUM_MACHINES)
    try:
        first = rng.randint(STEPS // 10, STEPS // 3)
        wait_for(
            lambda: cluster.step >= first and all(m.has_worker for m in cluster.machines), PATIENCE, f"step {first}"
        )
        row["step"] = cluster.step
        row["load"] = os.getloadavg()[0]
        row["seconds_to_next_step"] = strike(cluster, kind, rng)
        wait_for(lambda: all(machine.has_ended for machine in cluster.machines), PATIENCE, "the end of all machines")
        codes = [machine.process.returncode for machine in cluster.machines]
        if any(codes):
            problems.append(f"exit codes {codes}")
        problems += differences(cluster.output_dir, reference, mode == "reproducible")
        row["processes"] = count_processes(cluster.output_dir)
    except TimedOut as error:
        problems.append(str(error))
    finally:
        if problems:
            (folder / "tail").write_text(cluster.tail())
        cluster.close()
    row |= {"seconds": harness.clock() - begin, "problems": problems}
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> int:
    parser = harness.flags("machines", __doc__, only=KINDS, work=True)
    parser.add_argument("--runs", type=harness.positive, default=24, help="in turns over the kinds [24]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--go_on", action="store_true", help="after the runs that the results hold already, of the same seed"
    )
    arguments = parser.parse_args()
    with harness.open_work_folder(arguments.work) as work:
        os.environ["HF_HOME"] = str(work / "cache")
        corpus = write_corpus(work)
        references = {mode: make_reference(work / mode, corpus, flags) for mode, flags in MODES.items()}
        rows = []
        if arguments.go_on and (before := harness.read(arguments.output)):
            if before["about"]["seed"] != arguments.seed:
                sys.exit(f"the results are of seed {before['about']['seed']}: give --seed {before['about']['seed']}")
            rows = before["rows"]
        for number in range(len(rows), arguments.runs):
            kind, mode = arguments.only[number % len(arguments.only)], list(MODES)[number // len(arguments.only) % 2]
            rng = random.Random(f"{arguments.seed} {number}")
            rows.append(run_once(work, number, kind, mode, corpus, references[mode], rng))
            if not rows[-1]["problems"] and arguments.work is None:
                shutil.rmtree(next(work.glob(f"{number:02}-*")))
            facts = {"runs": number + 1, "seed": arguments.seed, "steps": STEPS, "every": EVERY}
            about = harness.about("make bench NAME=machines", ("torch", "accelerate"), 1, **facts)
            results = {"about": about, "rows": rows}
            harness.write(arguments.output, results, markdown(results), is_last=number + 1 == arguments.runs)
    return 1 if any(row["problems"] for row in rows) else 0


COLUMNS = (
    "what happens | runs | ended as undisturbed ones | processes, one number after the other | "
    "seconds to the next finished step"
)


def markdown(results: dict) -> str:
    about, rows = results["about"], results["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))

    def describe(group: list[dict]) -> list:
        seconds = [row["seconds_to_next_step"] for row in group if "seconds_to_next_step" in row]
        as_undisturbed = sum(not row["problems"] for row in group)
        processes = dict.fromkeys(", ".join(map(str, row.get("processes", []))) for row in group)
        return [len(group), as_undisturbed, "; ".join(processes), harness.spread(seconds, ".1f") if seconds else "-"]

    table = [[kind, *describe([row for row in rows if row["kind"] == kind])] for kind in kinds]
    kills = [row for row in rows if "frozen" not in row["kind"] and row["kind"] not in LATE]
    seconds = [row["seconds_to_next_step"] for row in kills if "seconds_to_next_step" in row]
    loads = [row["load"] for row in rows if "load" in row]
    load = f" The machine's load was {harness.spread(loads, '.0f')}." if loads else ""
    problems = "".join(f"- run {row['run']}, {row['kind']}: {text}\n" for row in rows for text in row["problems"])
    median = f"{statistics.median(seconds):.1f} s" if seconds else "-"
    return harness.page(
        "Machines that die",
        "machines.py",
        about,
        f"{len(rows)} runs of {about['steps']} steps on up to three machines (agents on one host), a checkpoint every "
        f"{about['every']} steps; a frozen process is noticed after {DDP_TIMEOUT} s (`--ddp_timeout`), and gets SIGKILL after "
        "30 s more. Seconds: median, smallest and largest.\n\n"
        f"{harness.table(COLUMNS, table)}\n"
        f"After a kill, median of all: {median}.{load}\n\n## What went wrong\n\n{problems or 'Nothing.'}\n",
    )


if __name__ == "__main__":
    sys.exit(main())
