"""What becomes of runs that lose replicas (--fault_tolerance step), and what the protocol costs when they lose none.

    make chaos
    make bench NAME=fault_tolerance FLAGS="--only overhead"

- Chaos: three replicas train a tiny model with dropout, over loopback. In each run one kind of thing happens to them, several
  times at random steps: replicas are killed (SIGKILL), hang for longer than their timeout and wake up again (SIGSTOP, SIGCONT),
  lose their connections, or start late; the lighthouse is killed and started again. Replicas that have ended are started again
  by the same command. At the end every step must be in metrics.jsonl once, with the loss of an undisturbed run of one process
  to 1e-5 and with its samples, each once; the replicas must have the same parameters, bit by bit; and none may hang. Seconds
  until steps go on: from what happened to the end of the longest pause between two steps that follows. For a lighthouse that is
  from its new start. Runs that are in the results already are not run again: `--fresh` forgets them.
- Sharded: the same with replicas of two processes each, which divide the weights (FSDP2). What happens to a replica happens to
  both; when they lose their connections, the replica ends.
- Overhead: BERT of 4 layers x 256 on two replicas, and on two processes with DistributedDataParallel, in turns: medians of a
  step.
"""

import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
if __name__ == "__main__":  # before anything reads it; processes are forked from this one
    HOME = tempfile.TemporaryDirectory(prefix="replicas-")
    os.environ.update(
        HF_HOME=HOME.name,
        HF_HUB_OFFLINE="1",
        HF_DATASETS_DISABLE_PROGRESS_BARS="1",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="-1",
        ACCELERATE_USE_CPU="true",
        PYTHONWARNINGS="ignore",
    )

import harness
from common import launch_environment, metrics, samples_of_steps, tiny_argv, write_corpus
from forked import make_environments
from lost_connections import DROP
from ports import hold_port
from run_replicas import Scene, fork, load_scripts

NUM_REPLICAS, STEPS = 3, 60
REPLICA_TIMEOUT = 2.0
TOLERANCE = 1e-5
BOUND_OF_SECONDS, BOUND_OF_OVERHEAD = 3.0, 0.03
PROGRAMS = {
    "pretrain_bert": "--hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1",
    "pretrain_gpt2": "--resid_pdrop 0.1 --embd_pdrop 0.1 --attn_pdrop 0.1",
}
FLAGS = (
    f"--max_train_steps {STEPS} --global_batch_size 16 --per_device_train_batch_size 4 --logging_steps 1 --record_samples "
    "--eval_steps 25"
)
REPLICA_FLAGS = f"--fault_tolerance step --replica_timeout {REPLICA_TIMEOUT:.0f} --ddp_timeout 60"
BERT = (
    "--recipe bert_small_cpu --num_hidden_layers 4 --max_train_steps 40 --per_device_train_batch_size 8 --logging_steps 1 "
    "--validation_fraction 0 --speed safe"
)
WARM_UP = 10  # steps

# ---------------------------------------------------------------------------------------------------------------------
# Chaos


class Watch:
    """Notes when each step appears in metrics.jsonl."""

    def __init__(self, scene: Scene):
        self.scene, self.times, self.is_over = scene, [], False
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.is_over:
            num_steps = sum("loss" in line for line in self.scene.lines())
            self.times += [harness.clock()] * (num_steps - len(self.times))
            time.sleep(0.003)

    def seconds_until_steps_go_on(self, begin: float, end: float) -> float:
        """Find the end of the longest pause between steps in which `begin` lies, or which follows it until `end`."""
        pauses = [pair for pair in itertools.pairwise(self.times) if pair[1] > begin and pair[0] < end]
        return max(pauses, key=lambda pair: pair[1] - pair[0])[1] - begin


def first_replica(scene: Scene) -> int:
    """Find the replica that writes: torchft sorts replicas by their names, HOST-PID."""
    return min(scene.replicas, key=lambda number: f"{scene.find_first_process(number)}:")


def kill(scene: Scene, rng: random.Random, choose: Callable[[Scene], list[int]]) -> Callable[[], object]:
    victims = choose(scene)
    for number in victims:
        scene.signal(scene.replicas[number], signal.SIGKILL)
    for number in victims:
        scene.send(number, signal.SIGKILL)
    return lambda: [scene.start(number) for number in victims]


def kill_one(scene: Scene, rng: random.Random) -> Callable[[], object]:
    return kill(scene, rng, lambda scene: [rng.choice(list(scene.replicas))])


def kill_first(scene: Scene, rng: random.Random) -> Callable[[], object]:
    return kill(scene, rng, lambda scene: [first_replica(scene)])


def kill_two(scene: Scene, rng: random.Random) -> Callable[[], object]:
    return kill(scene, rng, lambda scene: rng.sample(list(scene.replicas), 2))


def hang(scene: Scene, rng: random.Random) -> Callable[[], object]:
    number = rng.choice(list(scene.replicas))
    scene.send(number, signal.SIGSTOP)
    return lambda: scene.send(number, signal.SIGCONT)


def lose_connections(scene: Scene, rng: random.Random) -> Callable[[], object]:
    scene.send(rng.choice(list(scene.replicas)), DROP)
    return lambda: [scene.start(number) for number in scene.find_ended()]  # of several processes: they lost each other


def kill_lighthouse(scene: Scene, rng: random.Random) -> Callable[[], object]:
    scene.kill_lighthouse()
    time.sleep(rng.uniform(0.2, 2))
    scene.start_lighthouse()
    return lambda: None


def nothing(scene: Scene, rng: random.Random) -> Callable[[], object]:
    return lambda: None


# What happens; how often in a run; how many replicas start late.
KINDS: dict[str, tuple[Callable, int, int]] = {
    "a replica killed": (kill_one, 3, 0),
    "the first replica, which writes, killed": (kill_first, 3, 0),
    "two of three killed at once": (kill_two, 2, 0),
    "a replica hangs and wakes up": (hang, 2, 0),
    "a replica loses its connections": (lose_connections, 3, 0),
    "replicas start late": (nothing, 1, 2),
    "the lighthouse killed": (kill_lighthouse, 2, 0),
}


def disturb(
    kind: str, program: str, work: Path, corpus: Path, reference: Path, rng: random.Random, num_processes: int
) -> dict:
    """Let one run be disturbed, and compare what it leaves with the reference."""
    call, times, num_late = KINDS[kind]
    output_dir = work / "output"
    argv = tiny_argv(program, corpus, output_dir, f"{FLAGS} {PROGRAMS[program]} {REPLICA_FLAGS}")
    launch = launch_environment(ROOT / "accelerate_configs" / "fsdp2_2xcpu.yaml") if num_processes > 1 else None
    scene = Scene(program, argv, work / "scene", output_dir, num_processes=num_processes, launch=launch)
    begin, moments, problems, codes = harness.clock(), [], [], {}
    for number in range(NUM_REPLICAS - num_late):
        scene.start(number)
    watch = Watch(scene)
    try:
        scene.wait_for_step(1)
        for number in range(NUM_REPLICAS - num_late, NUM_REPLICAS):
            scene.wait_for_step(rng.randint(5, STEPS // 4))
            scene.start(number)
        for number in range(times):
            scene.wait_for_step(rng.randint(5, 15) + (STEPS - 20) * number // times)
            moment = harness.clock()
            undo = call(scene, rng)
            if call is kill_lighthouse:
                moment = harness.clock()
            step = max(line["step"] for line in scene.lines())
            scene.wait_for_step(min(STEPS, step + 5))
            moments.append((moment, harness.clock()))
            undo()
        codes = scene.finish()
    except (TimeoutError, ProcessLookupError) as error:
        problems.append(f"{error}")
        codes = scene.finish(1)
    watch.is_over = True
    watch.thread.join()
    if any(codes.values()) or not codes:
        problems.append(f"exit codes {codes}:\n{scene.tail()}")
    with contextlib.suppress(OSError):
        problems += compare(output_dir, reference)
    digests = scene.digests()
    if len(set(digests)) != num_processes:
        problems.append(f"{len(set(digests))} different parameters of {len(digests)} processes at the end")
    events = [line for line in scene.lines() if "event" in line]
    has_pause = call is not nothing and not problems
    return {
        "kind": kind,
        "program": program,
        "happened": times if call is not nothing else num_late,
        "done_again": sum("done again" in event["event"] for event in events),
        "seconds_until_steps_go_on": [watch.seconds_until_steps_go_on(*moment) for moment in moments]
        if has_pause
        else [],
        "seconds": harness.clock() - begin,
        "problems": problems,
    }


def compare(output_dir: Path, reference: Path) -> list[str]:
    """List what differs from the reference, beyond rounding."""
    ours, theirs, problems = metrics(output_dir), metrics(reference), []
    if [line["step"] for line in ours] != list(range(1, STEPS + 1)):
        problems.append(f"metrics.jsonl has the steps {[line['step'] for line in ours]}")
    else:
        error = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(ours, theirs, strict=True))
        if not error <= TOLERANCE:
            problems.append(f"losses differ by {error:.1e}")
    if samples_of_steps(output_dir) != samples_of_steps(reference):
        problems.append("samples were left out or taken twice")
    return problems


def in_a_process(call: Callable[[], object], log: Path) -> None:
    """Call something in a process of its own; this one computes nothing, so that it can be forked."""
    _, status = os.waitpid(fork(call, log, {}), 0)
    if status:
        raise RuntimeError(log.read_text(errors="replace")[-3000:])


def chaos(
    work: Path, num_runs: int, seed: int, rows: list[dict], write: Callable[[], object], num_processes: int = 1
) -> None:
    """Disturb `num_runs` runs, the kinds in turns, but for those that are in `rows` already; add them, and `write` each.

    Args:
        num_processes: of each replica; several divide the weights (FSDP2).
    """
    in_a_process(lambda: write_corpus(work) and None, work / "log-corpus")
    corpus, references = work / "corpus.jsonl", {}
    for program, flags in PROGRAMS.items():
        references[program] = work / f"reference-{program}"
        argv = tiny_argv(program, corpus, references[program], f"{FLAGS} {flags}")
        in_a_process(
            lambda program=program, argv=argv: load_scripts()[program].main(argv), work / f"log-reference-{program}"
        )
    for number in set(range(num_runs)) - {row["number"] for row in rows}:
        program = list(PROGRAMS)[number % 2]
        kind = list(KINDS)[number % len(KINDS)]
        rng = random.Random(f"{seed} {number}")
        folder = work / f"run-{num_processes}-{number}"
        row = disturb(kind, program, folder, corpus, references[program], rng, num_processes)
        rows.append({"number": number} | row)
        write()
        shown = {name: value for name, value in row.items() if name != "problems"}
        print(number + 1, shown, *row["problems"], file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Overhead


def median_step(output_dir: Path) -> float:
    return statistics.median(line["seconds"] for line in metrics(output_dir)[WARM_UP:])


def overhead(work: Path, rounds: int) -> dict[str, list[float]]:
    """Measure seconds of a step on two replicas, and on two processes with DDP, in turns."""
    numbers = itertools.count()

    def train_replicas() -> float:
        output_dir = work / f"overhead-{next(numbers)}"
        argv = [*BERT.split(), "--output_dir", str(output_dir), "--fault_tolerance", "step", "--min_replicas", "2"]
        scene = Scene("pretrain_bert", argv, work / f"scene-{output_dir.name}", output_dir)
        for number in range(2):
            scene.start(number)
        if any(scene.finish().values()):
            raise RuntimeError(scene.tail())
        return median_step(output_dir)

    def train_plainly() -> float:
        output_dir = work / f"overhead-{next(numbers)}"
        argv = [*BERT.split(), "--output_dir", str(output_dir)]
        common = launch_environment(ROOT / "accelerate_configs" / "2xcpu.yaml")
        logs = [work / f"log-{output_dir.name}-{rank}" for rank in range(2)]
        with hold_port() as port:
            pids = [
                fork(lambda: load_scripts()["pretrain_bert"].main(argv), log, common | own)
                for log, own in zip(logs, make_environments(2, port), strict=True)
            ]
            statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(statuses):
            raise RuntimeError(logs[0].read_text(errors="replace")[-3000:])
        return median_step(output_dir)

    return harness.in_turns({"plain": train_plainly, "replicas": train_replicas}, rounds, warm_up=1)


# ---------------------------------------------------------------------------------------------------------------------
# All of it


def main() -> int:
    parser = harness.flags("fault_tolerance", __doc__, rounds=7, only=("chaos", "sharded", "overhead"), work=True)
    parser.add_argument("--runs", type=harness.positive, default=50)
    parser.add_argument("--sharded_runs", type=harness.positive, default=14, help="of replicas of two processes [14]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="forget the results so far")
    arguments = parser.parse_args()
    load_scripts()
    results = {"runs": [], "sharded": [], "overhead": {}}
    results |= {} if arguments.fresh else harness.read(arguments.output)

    def write() -> None:
        results["about"] = harness.about(
            "make chaos", ("torch", "accelerate", "transformers", "torchft"), 1, replicas=NUM_REPLICAS, steps=STEPS
        )
        results["problems"] = find_problems(results)
        parts = {"fault-tolerance": ("fault-tolerance.md", part(results))}
        harness.write(arguments.output, results, markdown(results), is_last=False, parts=parts)

    with harness.open_work_folder(arguments.work) as work:
        if "chaos" in arguments.only:
            chaos(work, arguments.runs, arguments.seed, results["runs"], write)
        if "sharded" in arguments.only:
            chaos(work, arguments.sharded_runs, arguments.seed, results["sharded"], write, num_processes=2)
        if "overhead" in arguments.only:
            results["overhead"] = overhead(work, arguments.rounds)
    write()
    print(markdown(results))
    return 1 if results["problems"] else 0


def recoveries(runs: list[dict], word: str) -> list[float]:
    """List the seconds until steps went on, of the runs whose kind has a word."""
    return [seconds for row in runs for seconds in row["seconds_until_steps_go_on"] if word in row["kind"]]


def find_problems(results: dict) -> list[str]:
    """List what went wrong, and which bounds do not hold."""
    rows = results["runs"] + results.get("sharded", [])
    problems = [f"{row['kind']}, {row['program']}: {problem}" for row in rows for problem in row["problems"]]
    seconds = [
        value for word in ("replica killed", "writes, killed", "at once") for value in recoveries(results["runs"], word)
    ]
    if seconds and statistics.median(seconds) >= BOUND_OF_SECONDS:
        problems.append(f"steps go on {statistics.median(seconds):.1f} s after a kill, in the median")
    if results["overhead"]:
        ratio = statistics.median(harness.ratios(results["overhead"]["replicas"], results["overhead"]["plain"]))
        if ratio > 1 + BOUND_OF_OVERHEAD:
            problems.append(f"a step of replicas takes {ratio:.3f} of one with DistributedDataParallel")
    return problems


def table_of_runs(all_runs: list[dict]) -> str:
    rows = []
    for kind in dict.fromkeys(row["kind"] for row in all_runs):
        runs = [row for row in all_runs if row["kind"] == kind]
        seconds = recoveries(runs, kind)
        counts = [sum(row[name] for row in runs) for name in ("happened", "done_again")]
        rows.append(
            [
                *(kind, len(runs), *counts, harness.spread(seconds, ".2f") if seconds else "-"),
                sum(len(row["problems"]) for row in runs),
            ]
        )
    return harness.table(
        "what happens | runs | times | steps done again | seconds until steps go on | checks failed", rows
    )


def body(results: dict) -> str:
    text = (
        f"Runs of {STEPS} steps on {NUM_REPLICAS} replicas over loopback, --replica_timeout {REPLICA_TIMEOUT:.0f}; median "
        f"(smallest to largest):\n\n{table_of_runs(results['runs'])}"
    )
    if sharded := results.get("sharded"):
        text += (
            f"\nThe same with replicas of two processes that divide the weights (FSDP2):\n\n{table_of_runs(sharded)}"
        )
    if overheads := results["overhead"]:
        milliseconds = [harness.spread([1e3 * value for value in overheads[name]], ".1f") for name in overheads]
        ratio = harness.spread(harness.ratios(overheads["replicas"], overheads["plain"]), ".3f")
        table = harness.table(
            "a step of BERT, 4 layers x 256, on 2 processes | ms",
            [
                ["DistributedDataParallel", milliseconds[0]],
                ["--fault_tolerance step", milliseconds[1]],
                ["ratio", ratio],
            ],
        )
        text += f"\nWhen nothing happens, in {len(overheads['plain'])} turns:\n\n{table}"
    return text


def part(results: dict) -> str:
    """Make the part of docs/fault-tolerance.md that is measured."""
    return harness.part("fault_tolerance.py", results["about"], body(results))


def markdown(results: dict) -> str:
    problems = "".join(f"- {text.splitlines()[0]}\n" for text in results["problems"]) or "None.\n"
    page = f"{body(results)}\n## Failed checks\n\n{problems}"
    return harness.page("Fault tolerance within a step", "fault_tolerance.py", results["about"], page)


if __name__ == "__main__":
    sys.exit(main())
