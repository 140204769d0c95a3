"""What runs and checkpoints survive, and what that costs.

    make chaos

- Kills: tiny models with dropout train on one and on two processes and save in the foreground or in the background. SIGKILL
  ends all processes of a run at a random moment: while it starts, trains, or saves. The same command is started again, until it
  finishes. Runs that save in the background do so on a slow disk, so that steps change what is being written if they can. After
  every kill each checkpoint that verifies must hold what an undisturbed run saved at that step, bit by bit, and
  the newest one must not be older than before. At the end, weights, metrics (without times) and samples must be the same.
- Damages: of several checkpoints the newest ones are damaged at random. `latest` must take the newest whole one; to name a
  damaged one, and `latest` when none is whole, must be an error of one line.
- Costs: what a save takes from training, in the foreground and in the background; to verify one, and to go on.
"""

import collections
import contextlib
import dataclasses
import io
import itertools
import json
import os
import random
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import accelerate
import harness
import torch
from common import task_of, tiny_argv
from fork_server import Server
from safetensors.torch import load_file

from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data.steps import Steps
from samestep.errors import UsageError
from samestep.recipe import run_settings as run
from samestep.recipe.run_fields import TIMES
from samestep.training import checkpoint

STEPS, EVERY = 40, 3
FLAGS = (
    f"--max_train_steps {STEPS} --checkpointing_steps {EVERY} --global_batch_size 8 --per_device_train_batch_size 3 "
    "--eval_steps 7 --logging_steps 4 --record_samples --ddp_timeout 60"
)
DROPOUT = {
    "pretrain_bert": "--hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1",
    "pretrain_gpt2": "--resid_pdrop 0.1 --embd_pdrop 0.1 --attn_pdrop 0.1",
}
# About 25 million parameters, 512 tokens per step; saves that do not touch each other.
LARGER = (
    "--recipe gpt2_small_cpu --n_embd 512 --n_layer 7 --n_head 8 --vocab_size 4096 --global_batch_size 4 --max_train_steps 31 "
    "--checkpointing_steps 5 --checkpoints_total_limit 1 --num_warmup_steps 5 --validation_fraction 0.01"
)

# ---------------------------------------------------------------------------------------------------------------------
# Kills


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is killed."""

    program: str
    num_processes: int
    is_asynchronous: bool

    def __str__(self) -> str:
        processes = "1 process" if self.num_processes == 1 else f"{self.num_processes} processes"
        return f"{self.program}, {processes}, saves in the {'background' if self.is_asynchronous else 'foreground'}"

    def argv(self, corpus: Path, output_dir: Path, flags: str = "") -> list[str]:
        flags = f"{FLAGS} {DROPOUT[self.program]} {flags}" + " --async_checkpointing" * self.is_asynchronous
        return tiny_argv(self.program, corpus, output_dir, flags)


KINDS = [
    Kind(program, num_processes, is_asynchronous)
    for num_processes in (1, 2)
    for is_asynchronous in (False, True)
    for program in ("pretrain_bert", "pretrain_gpt2")
]


def same_tensors(ours: Path, theirs: Path) -> bool:
    """Whether two files hold the same tensors, bit by bit."""
    a, b = load_file(ours), load_file(theirs)
    bits = (a[name].flatten().view(torch.uint8).equal(b[name].flatten().view(torch.uint8)) for name in a)
    return a.keys() == b.keys() and all(a[n].shape == b[n].shape and a[n].dtype == b[n].dtype for n in a) and all(bits)


def whole_checkpoints(output_dir: Path) -> list[Path]:
    """List the checkpoints that verify, oldest first."""
    whole = []
    for folder in checkpoint.checkpoints(output_dir):
        with contextlib.suppress(checkpoint.DamagedCheckpoint):
            checkpoint.verify(folder)
            whole.append(folder)
    return whole


def differences(output_dir: Path, reference: Path) -> list[str]:
    """List what is in the accepted checkpoints of a run and not in the reference's."""
    return [
        f"{folder.name}/{name} is not the undisturbed run's"
        for folder in whole_checkpoints(output_dir)
        for name in ("model.safetensors", "optimizer.safetensors")
        if not same_tensors(folder / name, reference / folder.name / name)
    ]


def differences_at_the_end(output_dir: Path, reference: Path) -> list[str]:
    problems = differences(output_dir, reference)
    if not whole_checkpoints(output_dir) or whole_checkpoints(output_dir)[-1].name != f"checkpoint-{STEPS}":
        problems.append("the last checkpoint is missing")
    if not same_tensors(output_dir / "model.safetensors", reference / "model.safetensors"):
        problems.append("the final weights differ")
    if _untimed_metrics(output_dir) != _untimed_metrics(reference):
        problems.append("metrics.jsonl differs")
    if (output_dir / "samples.jsonl").read_bytes() != (reference / "samples.jsonl").read_bytes():
        problems.append("samples.jsonl differs")
    return problems


def _untimed_metrics(output_dir: Path) -> list[dict]:
    lines = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
    times = ("seconds", *TIMES)
    return [{name: value for name, value in line.items() if name not in times} for line in lines]


class Victim:
    """Runs of one kind, killed and started again.

    Args:
        server: starts them.
        kind: of run.
        work: folder of all.
        corpus: what they learn.
        rng: decides the moments.
        expected: an undisturbed run in the foreground, which one in the background must equal.
    """

    def __init__(
        self,
        server: Server,
        kind: Kind,
        work: Path,
        corpus: Path,
        rng: random.Random,
        expected: Path | None = None,
    ):
        self.server, self.kind, self.work, self.corpus, self.rng = server, kind, work, corpus, rng
        self.name = f"{kind.program}-{kind.num_processes}-{'background' if kind.is_asynchronous else 'foreground'}"
        self.reference, self.output_dir = work / f"{self.name}-reference", work / f"{self.name}-victim"
        # The first run fills the datasets' cache; the second is timed.
        self.undisturbed = [self._session(self.reference, flags) for flags in ("", "--overwrite_output_dir")][-1]
        self.problems: list[str] = []
        if self.undisturbed["codes"] != [0] * kind.num_processes:
            raise RuntimeError(f"an undisturbed run failed: {kind}\n{self._output()}")
        self.kills: list[dict] = []
        self.num_runs = 0
        if expected is not None:
            self._note(differences_at_the_end(self.reference, expected), "undisturbed")

    def _session(self, output_dir: Path, flags: str, kill: dict | None = None) -> dict:
        return self.server.session(
            "train_on_a_slow_disk" if self.kind.is_asynchronous else "train",
            *(self.kind.program, self.kind.argv(self.corpus, output_dir, flags)),
            log=self.work / f"{self.name}.log",
            num_processes=self.kind.num_processes,
            output_dir=str(output_dir),
            kill=kill,
        )

    def _output(self) -> str:
        return "\n".join(
            (self.work / f"{self.name}.log.{rank}").read_text(errors="replace")[-3000:]
            for rank in range(self.kind.num_processes)
        )

    def spend(self, num_kills: int) -> None:
        """Kill `num_kills` times, as many runs as it takes; let the last one finish."""
        num_left = num_kills
        while True:
            output_dir, step, is_running = self.output_dir, 0, True
            self.num_runs += 1
            shutil.rmtree(output_dir, ignore_errors=True)
            while is_running:
                kill = self._plan(step) if num_left else None
                times = {path.name: path.stat().st_mtime_ns for path in output_dir.glob(".checkpoint-*.partial")}
                result = self._session(output_dir, "--checkpoints_total_limit 3 --resume_from_checkpoint latest", kill)
                if result["killed"]:
                    num_left -= 1
                    partials = {p.name: p.stat().st_mtime_ns for p in output_dir.glob(".checkpoint-*.partial")}
                    step = self._handle_kill(output_dir, step, kill, bool(partials.items() - times.items()))
                else:
                    is_running = False
                    self._handle_end(output_dir, result)
            if not num_left:
                return

    def _plan(self, step: int) -> dict:
        """Plan a kill: six of ten are inside a save, one in ten while the run starts, the others while it trains and ends."""
        draw, rng, whole = self.rng.random(), self.rng, self.undisturbed
        rest = (STEPS - step) / STEPS
        if draw < 0.6:
            count = rng.randint(1, max(1, round(rest * STEPS / EVERY)))
            return {
                "event": "save",
                "count": count,
                "seconds": rng.uniform(0, statistics.median(whole["saves"] or [0.01])),
            }
        if draw < 0.7:
            return {"event": "start", "seconds": rng.uniform(0, whole["training"])}
        return {"event": "training", "seconds": rng.uniform(0, rest * (whole["seconds"] - whole["training"]))}

    def _handle_kill(self, output_dir: Path, step: int, kill: dict, was_saving: bool) -> int:
        """Check what a kill left; the newest checkpoint's step."""
        whole = whole_checkpoints(output_dir)
        newest = checkpoint.verify(whole[-1]).step if whole else 0
        problems = differences(output_dir, self.reference)
        if newest < step:
            problems.append(f"the newest checkpoint is of step {newest}, and was of step {step} before")
        self.kills.append(kill | {"was_saving": was_saving, "accepted": len(whole), "step": newest})
        self._note(problems, f"kill {len(self.kills)} ({kill})")
        return newest

    def _handle_end(self, output_dir: Path, result: dict) -> None:
        if result["codes"] == [0] * self.kind.num_processes:
            self._note(differences_at_the_end(output_dir, self.reference), f"end of run {self.num_runs}")
        else:
            outcome = "hangs" if result["timed_out"] else f"ended with {result['codes']}"
            copy = self.work / f"{self.name}-failed-{self.num_runs}"
            shutil.copytree(output_dir, copy)
            self._note([f"it {outcome}:\n{self._output()}"], f"run {self.num_runs} after {len(self.kills)} kills")

    def _note(self, problems: list[str], place: str) -> None:
        for problem in problems:
            self.problems.append(f"{self.kind}, {place}: {problem}")
            print(self.problems[-1], file=sys.stderr, flush=True)

    def row(self) -> dict:
        return {
            "kind": str(self.kind),
            "kills": len(self.kills),
            "while_saving": sum(kill["was_saving"] for kill in self.kills),
            "while_starting": sum(kill["event"] == "start" for kill in self.kills),
            "runs_finished": self.num_runs,
            "checkpoints_compared": sum(kill["accepted"] for kill in self.kills),
            "failed_checks": len(self.problems),
        }


def kills(server: Server, work: Path, corpus: Path, num_kills: int, rng: random.Random) -> list[Victim]:
    """Kill `num_kills` times, in turns over the kinds of run."""
    victims, references = [], {}
    for place, kind in enumerate(KINDS):
        share = num_kills // len(KINDS) + (place < num_kills % len(KINDS))
        if share:
            alike = kind.program, kind.num_processes
            victim = Victim(server, kind, work, corpus, rng, references.get(alike))
            references.setdefault(alike, victim.reference)
            victim.spend(share)
            victims.append(victim)
            print(victim.row(), file=sys.stderr, flush=True)
    return victims


# ---------------------------------------------------------------------------------------------------------------------
# Damages


def _truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def _flip_a_bit(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def _append(file: Path, rng: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(rng.randbytes(rng.randint(1, 1000)))


def _any_file(change: Callable[[Path, random.Random], None]):
    return lambda folder, other, rng: change(rng.choice(sorted(folder.iterdir())), rng)


def _swap(folder: Path, other: Path, rng: random.Random) -> None:
    names = [p.name for p in sorted(folder.iterdir()) if p.read_bytes() != (other / p.name).read_bytes()]
    name = rng.choice(names)
    content, others = (folder / name).read_bytes(), (other / name).read_bytes()
    (folder / name).write_bytes(others)
    (other / name).write_bytes(content)


def _rename(folder: Path, other: Path, rng: random.Random) -> None:
    folder.rename(folder.with_name(f"checkpoint-{rng.randint(STEPS + 1, 10**6)}"))


# Each is given a checkpoint, another one (which only swapping damages), and what decides.
DAMAGES: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "a file truncated": _any_file(_truncate),
    "a bit flipped": _any_file(_flip_a_bit),
    "a file missing": _any_file(lambda file, rng: file.unlink()),
    "junk appended to a file": _any_file(_append),
    "manifest empty": lambda folder, other, rng: os.truncate(folder / "manifest.json", 0),
    "manifest missing, as in the earlier format": lambda folder, other, rng: (folder / "manifest.json").unlink(),
    "a file swapped with another checkpoint's": _swap,
    "folder renamed": _rename,
}


def damage(work: Path, originals: list[Path], kind: str, rng: random.Random) -> tuple[Path, Path | None, list[Path]]:
    """Make a new run's folder with damaged newest checkpoints: the folder, the newest whole checkpoint, the damaged ones."""
    output_dir = work / "damaged"
    shutil.rmtree(output_dir, ignore_errors=True)
    folders = [Path(shutil.copytree(folder, output_dir / folder.name)) for folder in originals]
    count = rng.choice([1, 1, 1, 2, 2, len(folders)])
    if kind.startswith("a file swapped"):
        DAMAGES[kind](folders[-1], folders[-2], rng)
        count = 2
    else:
        for folder in folders[-count:]:
            DAMAGES[kind](folder, folders[0], rng)
    whole = folders[:-count]
    damaged = [folder for folder in checkpoint.checkpoints(output_dir) if folder not in whole]
    assert len(damaged) == count
    return output_dir, whole[-1] if whole else None, damaged


def undetected(accelerator, recipe, output_dir: Path, whole: Path | None, damaged: list[Path]) -> list[str]:
    """List what `find` does wrong with damaged checkpoints."""
    problems = []
    for name in ["latest", *map(str, damaged)]:
        expected = whole if name == "latest" else None
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                folder, state = checkpoint.find(accelerator, name, output_dir, recipe)
            if expected is None or folder != expected or f"checkpoint-{state.step}" != expected.name:
                problems.append(f"{Path(name).name} took {folder and folder.name}")
        except UsageError as error:
            if expected is not None or len(error.problems) != 1 or "\n" in str(error):
                problems.append(f"{Path(name).name} raised {error}")
        except Exception as error:
            problems.append(f"{Path(name).name} raised {error!r}, which is not for people")
    return problems


def damages(
    accelerator, recipe, reference: Path, work: Path, num_damages: int, rng: random.Random
) -> tuple[list, list]:
    """Try `num_damages` damages in turns over their kinds: a row of counts for each, and what went wrong."""
    originals, rows, problems = checkpoint.checkpoints(reference)[-3:], {}, []
    for number in range(num_damages):
        kind = list(DAMAGES)[number % len(DAMAGES)]
        output_dir, whole, damaged = damage(work, originals, kind, rng)
        wrong = undetected(accelerator, recipe, output_dir, whole, damaged)
        row = rows.setdefault(kind, {"damage": kind, "times": 0, "fell_back": 0, "refused": 0, "undetected": 0})
        row["times"] += 1
        row["undetected" if wrong else "refused" if whole is None else "fell_back"] += 1
        problems += [f"damage {number + 1}, {kind}: {text}" for text in wrong]
    return list(rows.values()), problems


# ---------------------------------------------------------------------------------------------------------------------
# Costs


def save_costs(events: list[dict], every: int) -> dict:
    """Compute what saves take from training, medians over saves. The first 3 steps and the last save do not count."""
    durations, saves = {}, []
    for previous, event in itertools.pairwise(events):
        if event["what"] == "step" and event["step"] > 3:
            durations[event["step"]] = event["time"] - previous["time"], previous["is_writing"]
        if event["what"] == "saved" and event["step"] % every == 0:
            saves.append((event["step"], event["time"] - previous["time"]))
    step = statistics.median(seconds for seconds, is_writing in durations.values() if not is_writing)
    blocked = [seconds for _, seconds in saves]
    result = {"saves": len(saves), "step_seconds": step, "blocked_seconds": statistics.median(blocked)}
    during = [[durations[n] for n in range(first + 1, first + every + 1) if n in durations] for first, _ in saves]
    slower = [sum(seconds - step for seconds, is_writing in steps if is_writing) for steps in during]
    overlapped = [seconds for steps in during for seconds, is_writing in steps if is_writing]
    result["overlapped_steps"] = len(overlapped) / len(saves)
    result["slowed_seconds"] = statistics.median(slower)
    return result


class Synthetic:
    """A source of samples that are functions of their number, as many as one likes."""

    max_length = 512

    @dataclasses.dataclass(frozen=True)
    class Sample:
        sample_id: int
        length: int

    def draw(self, epoch: int, sample_id: int) -> Sample:
        return self.Sample(sample_id, 1 + sample_id % self.max_length)

    def collate(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([sample.sample_id for sample in samples], dtype=torch.int64)
        return {"ids": ids, "counts": torch.tensor([sum(sample.length for sample in samples)])}


def seconds_to_seek() -> float:
    """Measure seconds to the first step after resuming at 10^6, of 256 samples out of 10^8."""
    start = harness.clock()
    order = Order(num_samples=10**8, global_batch_size=256, seed=42)
    layout = solve_layout(num_processes=1, global_batch_size=256, per_device_train_batch_size=32)
    data = Steps(Synthetic(), order, layout, process_index=0)[10**6]
    seconds = harness.clock() - start
    assert sum(map(len, data.samples)) == 256
    return seconds


def median_seconds(call: Callable[[], object], times: int) -> float:
    return statistics.median(harness.seconds(call) for _ in range(times))


def costs(server: Server, work: Path) -> dict:
    """Measure the costs of the larger model's checkpoints."""
    every = int(LARGER.split("--checkpointing_steps ")[1].split()[0])
    result = {}
    for name, flags in (("foreground", ""), ("background", "--async_checkpointing")):
        output_dir, timeline = work / f"larger-{name}", work / f"{name}.json"
        argv = [*LARGER.split(), "--output_dir", str(output_dir), *flags.split()]
        log = work / f"larger-{name}.log"
        answer = server.session("train_timed", "pretrain_gpt2", argv, str(timeline), log=log, timeout=3000)
        if answer["codes"] != [0]:
            raise RuntimeError(Path(f"{log}.0").read_text()[-3000:])
        result[name] = save_costs(json.loads(timeline.read_text()), every)
    (folder,) = checkpoint.checkpoints(output_dir)
    gigabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
    result["parameters"] = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    result["gigabytes"] = gigabytes
    result["verify_seconds_per_gigabyte"] = median_seconds(lambda: checkpoint.verify(folder), 5) / gigabytes
    return result


# ---------------------------------------------------------------------------------------------------------------------
# All of it


def main() -> int:
    parser = harness.flags("reliability", __doc__, threads=True, work=True)
    parser.add_argument("--kills", type=harness.positive, default=60)
    parser.add_argument("--damages", type=harness.positive, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    begin = harness.clock()

    with harness.open_work_folder(arguments.work) as work:
        with Server(work / "cache") as server:
            server.session("corpus", str(work), log=work / "corpus.log")
            corpus = work / "corpus.jsonl"
            victims = kills(server, work, corpus, arguments.kills, rng)
            (work / "damages").mkdir()
            undisturbed = Victim(server, KINDS[1], work / "damages", corpus, rng)
        problems = [problem for victim in victims for problem in victim.problems]
        if sum(kill["was_saving"] for victim in victims for kill in victim.kills) < arguments.kills // 10:
            problems.append("fewer than a tenth of the kills met a save")
        accelerator = accelerate.Accelerator(cpu=True)
        argv = undisturbed.kind.argv(corpus, undisturbed.reference)
        recipe, _ = run.parse(argv, task_of(undisturbed.kind.program), "")
        rows, wrong = damages(accelerator, recipe, undisturbed.reference, work, arguments.damages, rng)
        problems += wrong
        with Server(work / "cache", arguments.threads) as server:
            measured = costs(server, work)
        measured["seek_seconds"] = seconds_to_seek()
        measured["find_seconds"] = median_seconds(
            lambda: checkpoint.find(accelerator, "latest", undisturbed.reference, recipe), 20
        )
    if measured["seek_seconds"] >= 1:
        problems.append(f"seeking took {measured['seek_seconds']:.2f} s")

    about = harness.about(
        "make chaos",
        ("torch", "accelerate", "transformers"),
        arguments.threads,
        arguments={"kills": arguments.kills, "damages": arguments.damages, "seed": arguments.seed},
        steps=STEPS,
        checkpointing_steps=EVERY,
        minutes=(harness.clock() - begin) / 60,
    )
    results = {
        "about": about,
        "kills": [victim.row() for victim in victims],
        "damages": rows,
        "costs": measured,
        "problems": problems,
        "moments": {str(victim.kind): victim.kills for victim in victims},
    }
    harness.write(arguments.output, results, markdown(results))
    return 1 if problems else 0


def markdown(results: dict) -> str:
    about, cost = results["about"], results["costs"]
    total = collections.Counter()
    for row in results["kills"]:
        total.update({name: value for name, value in row.items() if isinstance(value, int)})
    counts = (
        "kind",
        "kills",
        "while_saving",
        "while_starting",
        "runs_finished",
        "checkpoints_compared",
        "failed_checks",
    )
    kills = [[row[name] for name in counts] for row in [*results["kills"], {"kind": "**all**"} | total]]
    damage_columns = ("damage", "times", "fell_back", "refused", "undetected")
    damages = [[row[name] for name in damage_columns] for row in results["damages"]]

    def save_row(name: str) -> list[str]:
        row = cost[name]
        step = row["step_seconds"]
        seconds = [row["blocked_seconds"], row["slowed_seconds"], row["blocked_seconds"] + row["slowed_seconds"]]
        cells = [f"{value:.3f} s = {value / step:.2f} steps" for value in seconds]
        return [name, f"{step:.3f} s", *cells, f"{row['overlapped_steps']:.1f}"]

    problems = "".join(f"- {text.splitlines()[0]}\n" for text in results["problems"]) or "None.\n"
    kill_columns = "runs | kills | while saving | while starting | runs finished | checkpoints compared | checks failed"
    cost_columns = (
        "saves in the | a step | training waits | steps meanwhile are slower, in sum | both | steps meanwhile"
    )
    return harness.page(
        "Reliability",
        "reliability.py",
        about,
        f"## Killed at random moments\n\nRuns of {about['steps']} steps, a checkpoint every {about['checkpointing_steps']}. "
        "In the background: on a slow disk. While saving: the kill left a checkpoint half written or half deleted, in a hidden "
        f"folder.\n\n{harness.table(kill_columns, kills)}\n"
        "## Damaged checkpoints\n\nFell back: `latest` took the newest whole one. Refused: none was whole, an error.\n\n"
        f"{harness.table([name.replace('_', ' ') for name in damage_columns], damages)}\n"
        f"## Costs\n\nA GPT-2 of {cost['parameters'] / 1e6:.1f} million parameters, checkpoints of {cost['gigabytes']:.2f} GB; "
        f"medians of {cost['foreground']['saves']} saves.\n\n"
        f"{harness.table(cost_columns, [save_row('foreground'), save_row('background')])}\n"
        f"- To verify a checkpoint: {cost['verify_seconds_per_gigabyte']:.2f} s per GB.\n"
        f"- To find the newest of a tiny model's: {1e3 * cost['find_seconds']:.1f} ms.\n"
        f"- To the first step after step 10^6 of 256 out of 10^8 samples: {1e3 * cost['seek_seconds']:.1f} ms.\n\n"
        f"## Failed checks\n\n{problems}\n"
        f"Seed {about['arguments']['seed']}, {about['minutes']:.0f} minutes.\n",
    )


if __name__ == "__main__":
    sys.exit(main())
