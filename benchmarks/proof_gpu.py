"""Proves the recipes on one NVIDIA GPU: what trains, what is exact, what was planned, how fast it is. One command, no network.

    make proof-gpu                      # at most 25 minutes on one H100 or H200; writes docs/gpu.md
    python benchmarks/proof_gpu.py --seconds 560          # stop after so long, and go on with the same command
    python benchmarks/proof_gpu.py --only programs         # one part
    python benchmarks/proof_gpu.py --tiny                 # a rehearsal, on a CPU, too: small shapes, no measurement

Needs torch (2.11 at the oldest), transformers (5.17), accelerate (1.15) and numpy, and what benchmarks/proof/requirements.txt
lists, of which wheels can be brought along. No data and no model is loaded from a hub.

The parts are modules of benchmarks/proof/, the most valuable first. Each item, one row of a table, is computed in a process
that appends its row to OUTPUT.jsonl as soon as it is there: the command can be ended at any moment, and goes on with what is
missing, then with what failed. Rows of another device or of other versions of the libraries do not count. Items that measure
no time or memory run side by side.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
sys.path[:0] = [str(BENCHMARKS), str(ROOT), str(ROOT / "tests" / "helpers")]

import harness
import torch
from proof import equivalence, memory, planner, programs, reproducible, speed, trainers
from proof.tasks import CHILD, Task

from samestep.errors import UsageError, exit_code

MODULES = (programs, equivalence, reproducible, planner, speed, trainers, memory)
PARTS = {module.__name__.rpartition(".")[2]: module for module in MODULES}
PAGE = ROOT / "docs" / "gpu.md"
SECONDS = 1500
PACKAGES = ("torch", "transformers", "accelerate", "numpy")
REQUIREMENTS = BENCHMARKS / "proof" / "requirements.txt"
OPTIONAL = ("bitsandbytes", "trl")
"""Packages of REQUIREMENTS without which some rows are refused, and the others are computed."""
NO_ROWS = """\
# One GPU

No GPU has computed this page yet: on a machine with one, `make proof-gpu` does, in at most 25 minutes.
"""
MOST_JOBS = 6
TICK = 0.05


def check_packages(requirements: Path = REQUIREMENTS) -> None:
    """Check that all is installed that the parts need, and a file lists.

    Raises:
        UsageError: it names what is missing, and the file that lists it.
    """
    lines = requirements.read_text(encoding="utf-8").splitlines()
    names = [re.split("[=<>]", text)[0] for text in lines if not text.startswith("#")]
    installed = {each.name.lower().replace("_", "-") for each in importlib.metadata.distributions()}
    if missing := [name for name in names if name not in installed and name not in OPTIONAL]:
        raise UsageError(
            f"the proof needs {', '.join(missing)}, which are not installed: pip install -r "
            f"{os.path.relpath(requirements, ROOT)} (it says how without a network)"
        )


# ---------------------------------------------------------------------------------------------------------------------
# What there is already


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the lines of earlier sessions. What is no row, as a line that was cut off, is left out: it is computed again."""
    if not file.exists():
        return []
    rows = []
    for text in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(text)
            rows += [row] if isinstance(row, dict) and type(row.get("session")) is int else []
    return rows


def describe_session(is_tiny: bool, command: str) -> dict[str, Any]:
    """Say on what this session computes."""
    has_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if has_gpu else "the CPU"
    about = harness.about(command, PACKAGES)
    return about | {"tiny": is_tiny, "device": device, "cuda": torch.version.cuda if has_gpu else None}


def identify(about: dict[str, Any]) -> tuple:
    """Return what must be the same for rows to belong together."""
    return about["tiny"], about["device"], tuple(sorted(about["versions"].items()))


def select(lines: list[dict[str, Any]], about: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Find the newest row of each item, of sessions like this one."""
    alike = {line["session"] for line in lines if "about" in line and identify(line["about"]) == identify(about)}
    return {(line["part"], line["item"]): line for line in lines if "item" in line and line["session"] in alike}


def is_done(row: dict[str, Any] | None) -> bool:
    """Tell whether an item need not be computed again: another session may do what failed, or was refused and should not be."""
    return row is not None and (PARTS[row["part"]].is_good(row) or not {"failed", "refused"} & row.keys())


# ---------------------------------------------------------------------------------------------------------------------
# Processes


@dataclasses.dataclass
class Child:
    """A process that computes the items of a task.

    Attributes:
        task: with the items that are not computed yet.
        process: of a group of its own.
        log: what it prints.
        deadline: after which it hangs.
    """

    task: Task
    process: subprocess.Popen
    log: TextIO
    deadline: float


class Runner:
    """Computes tasks in processes; a context manager that ends them.

    Args:
        file: to which they append rows.
        session: number of this session in it.
        is_tiny: whether shapes are small.
        jobs: most processes at a time.
        end: moment after which all are ended.
        child: the program of a process.
        clock: reads the seconds.
    """

    def __init__(
        self,
        file: Path,
        session: int,
        is_tiny: bool,
        jobs: int,
        end: float,
        child: Path = CHILD,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.file, self.session, self.is_tiny, self.jobs, self.end = file, session, is_tiny, jobs, end
        self.child, self.clock = child, clock
        self.children: list[Child] = []
        self.logs = file.with_name(f"{file.stem}-logs")

    def __enter__(self) -> "Runner":
        self.folder = tempfile.TemporaryDirectory(prefix="proof-gpu-")
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            self._kill(child)
        self.folder.cleanup()

    def run(self, waiting: list[Task]) -> Iterator[None]:
        """Compute tasks in their order until time is up; give way whenever a row was written or a process has ended."""
        size = 0
        while (waiting or self.children) and self.clock() < self.end:
            while waiting and self._has_room(waiting[0]):
                self._start(waiting.pop(0))
            time.sleep(TICK)
            for child in [child for child in self.children if self._has_ended(child)]:
                self.children.remove(child)
                if rest := self._find_rest(child):
                    waiting.insert(0, rest)
            if self.file.exists() and self.file.stat().st_size != size:
                size = self.file.stat().st_size
                yield

    def _has_room(self, task: Task) -> bool:
        is_alone = task.is_alone or any(child.task.is_alone for child in self.children)
        return len(self.children) < (1 if is_alone else self.jobs)

    def _start(self, task: Task) -> None:
        words = [task.part, str(self.file), str(self.session), "tiny" if self.is_tiny else "full", *task.items]
        environment = os.environ | {
            "HF_HOME": f"{self.folder.name}/home",
            "TMPDIR": self.folder.name,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        if not task.is_alone:  # several at a time
            environment["OMP_NUM_THREADS"] = "1"
        log = (self.logs / f"{task.part}-{len(list(self.logs.iterdir()))}.log").open("w", encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, str(self.child), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment | dict(task.environment),
            start_new_session=True,
        )
        self.children.append(Child(task, process, log, self.clock() + task.seconds))

    def _has_ended(self, child: Child) -> bool:
        if child.process.poll() is not None:
            return True
        if self.clock() > child.deadline:
            self._kill(child)
            return True
        return False

    def _kill(self, child: Child) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()
        child.log.close()

    def _find_rest(self, child: Child) -> Task | None:
        """Find the items that a process left. If it ended without a word on the first of them, that one has failed."""
        rows = [row for row in read_rows(self.file) if row.get("session") == self.session and "item" in row]
        computed = {row["item"] for row in rows if row["part"] == child.task.part}
        rest = [item for item in child.task.items if item not in computed]
        self._kill(child)  # what it started, too
        if rest and rest[0] == child.task.items[0]:
            code = child.process.returncode
            why = (
                f"took more than {child.task.seconds:.0f} s" if self.clock() > child.deadline else f"ended with {code}"
            )
            row = {"part": child.task.part, "item": rest.pop(0), "session": self.session}
            append(self.file, row | {"failed": f"{why}: see {child.log.name}"})
        return dataclasses.replace(child.task, items=tuple(rest)) if rest else None


def append(file: Path, row: dict[str, Any]) -> None:
    """Append a line to the rows."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


def find_missing(tasks: list[Task], rows: dict[tuple[str, str], dict[str, Any]]) -> list[Task]:
    """List what is to be done: first what was never computed, then what failed, each in the order of the parts."""

    def keep(task: Task, wanted: set[str]) -> list[Task]:
        items = tuple(item for item in task.items if item in wanted)
        return [dataclasses.replace(task, items=items)] if items else []

    result = []
    for has_failed in (False, True):
        for task in tasks:
            wanted = {item for item in task.items if ((task.part, item) in rows) == has_failed}
            result += keep(task, {item for item in wanted if not is_done(rows.get((task.part, item)))})
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The page


def markdown(about: dict[str, Any], tasks: list[Task], rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Make the page of the rows, in the order of the tasks."""
    sections, totals = [], []
    for number, (part, module) in enumerate(PARTS.items(), 1):
        items = [item for task in tasks if task.part == part for item in task.items]
        own = {item: rows[part, item] for item in items if (part, item) in rows}
        num_good = sum(module.is_good(row) for row in own.values())
        title = f"[{number}. {module.TITLE}](#{_anchor(number, module.TITLE)})"
        totals.append([title, len(items), num_good, len(items) - len(own)])
        body = module.markdown(own) if own else "Not computed yet.\n"
        sections.append(f"## {number}. {module.TITLE}\n\n{_fill(module.ABOUT)}\n\n{body}")
    note = "**Tiny shapes: a rehearsal of the program, no measurement.**\n\n" if about["tiny"] else ""
    cuda = f" CUDA {about['cuda']}." if about["cuda"] else ""
    head = harness.table("part | items | as promised | missing", totals)
    return harness.page(
        f"One GPU: {about['device']}" if about["cuda"] else f"One device: {about['device']}",
        "proof_gpu.py",
        about,
        f"{note}{head}\n{chr(10).join(sections)}\n{about['device']}.{cuda}\n",
    )


def _anchor(number: int, title: str) -> str:
    words = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -")
    return f"{number}-{words.replace(' ', '-')}"


def _fill(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 128, break_on_hyphens=False, break_long_words=False)


# ---------------------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"end all after so long [{SECONDS}]")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts [all]")
    parser.add_argument("--items", default="", help="items with this in their name [all]")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on a CPU, too: a rehearsal")
    parser.add_argument("--output", type=Path, help="rows and page, without a suffix")
    parser.add_argument("--jobs", type=int, help="most processes at a time [half of the cores, at most 6]")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available() and not arguments.tiny:
        raise UsageError("no CUDA device is there, which the proof is about: --tiny rehearses it on a CPU")
    check_packages()
    output = arguments.output or (ROOT / "runs" / "proof-gpu-tiny" if arguments.tiny else harness.RESULTS / "gpu")
    file = output.with_suffix(".jsonl")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise UsageError(
            f"--output {output} cannot be written ({error.strerror}): give a path in another folder"
        ) from None
    page = output.with_suffix(".md") if arguments.tiny or arguments.output else PAGE
    about = describe_session(arguments.tiny, "make proof-gpu" + (" FLAGS=--tiny" if arguments.tiny else ""))
    lines = read_rows(file)
    session = 1 + max((line["session"] for line in lines), default=0)
    every = [task for module in PARTS.values() for task in module.list_tasks(arguments.tiny, torch.cuda.is_available())]
    chosen = [
        dataclasses.replace(task, items=items)
        for task in every
        if task.part in arguments.only and (items := tuple(item for item in task.items if arguments.items in item))
    ]
    if not chosen:
        raise UsageError(f"--items {arguments.items!r} is part of no item's name in {', '.join(arguments.only)}")
    waiting, start = find_missing(chosen, select(lines, about)), time.monotonic()
    append(file, {"session": session, "about": about})
    cores = os.cpu_count() or 2
    jobs = arguments.jobs or max(1, min(MOST_JOBS, cores // 2))

    def write() -> dict[tuple[str, str], dict[str, Any]]:
        rows = select(read_rows(file), about)
        page.write_text(markdown(about, every, rows), encoding="utf-8")
        return rows

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    known: dict = {}
    runner = Runner(file, session, arguments.tiny, jobs, start + arguments.seconds)
    with contextlib.suppress(KeyboardInterrupt), runner:
        for _ in runner.run(waiting):
            rows = write()
            for key, row in rows.items():
                if row["session"] == session and key not in known:
                    _say(time.monotonic() - start, *key, row)
            known = rows
    rows = write()
    return summarize(chosen, rows, page)


def _say(seconds: float, part: str, item: str, row: dict[str, Any]) -> None:
    what = row.get("failed") or row.get("refused") or ("as promised" if PARTS[part].is_good(row) else "NOT as promised")
    print(f"{seconds:5.0f} s  {part}: {item}: {what}", flush=True)


def summarize(tasks: list[Task], rows: dict[tuple[str, str], dict[str, Any]], page: Path) -> int:
    """Say what is missing and what is wrong; return the exit code."""
    keys = [(task.part, item) for task in tasks for item in task.items]
    missing = [key for key in keys if key not in rows]
    wrong = [key for key in keys if key in rows and not PARTS[key[0]].is_good(rows[key])]
    print(f"{len(keys) - len(missing)} of {len(keys)} items computed, {len(wrong)} not as promised: {page}")
    for part, item in wrong:
        print(
            f"  {part}: {item}: {rows[part, item].get('failed') or rows[part, item].get('refused') or 'beyond its bounds'}"
        )
    if missing:
        print(f"{len(missing)} items are missing: the same command goes on with them")
    return 1 if wrong or missing else 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
