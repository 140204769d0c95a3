"""What all benchmarks share: flags, one clock, measuring in turns, versions and machine, results as JSON and Markdown.

A benchmark is a module with its workloads, a `main` that measures them, and `markdown(results)`, which makes results/NAME.md of
results/NAME.json. Nothing but the standard library is imported here until it is needed: start-up is measured, too.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PRECISIONS = ("no", "bf16")
CPUINFO = Path("/proc/cpuinfo")
PRECISION = "bf16" if CPUINFO.exists() and "avx512_bf16" in CPUINFO.read_text(encoding="utf-8") else "no"
"""In which this CPU computes fastest: bf16 where it has instructions for it."""
clock = time.perf_counter
"""Gives seconds, the same ones to all processes of a machine (Linux)."""


# ---------------------------------------------------------------------------------------------------------------------
# Flags


def positive(text: str) -> int:
    """Read a number of things. Raises ArgumentTypeError below 1."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def flags(
    name: str,
    description: str,
    *,
    rounds: int | None = None,
    only: Iterable[str] | None = None,
    precisions: bool = False,
    threads: bool = False,
    work: bool = False,
) -> argparse.ArgumentParser:
    """Make a parser with --output and the usual flags that a benchmark has.

    Args:
        name: of the results, without a suffix.
        description: docstring of the program.
        rounds: default of --rounds; None: it has none.
        only: what --only can choose from; None: it has none. The default is all.
        precisions: whether it has --precisions.
        threads: whether it has --threads; the default is torch's.
        work: whether it has --work, for `open_work_folder`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / name, help="results, without a suffix")
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=positive, default=rounds, help=f"all that is compared, in turns [{rounds}]"
        )
    if only is not None:
        names = list(only)
        parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    if precisions:
        parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    if work:
        parser.add_argument("--work", type=Path, help="an empty folder, to keep what runs leave; none: a temporary one")
    if threads:
        import torch

        parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="of every program")
    return parser


@contextlib.contextmanager
def open_work_folder(folder: Path | None) -> Iterator[Path]:
    """Make the folder of --work, or a temporary one; give its absolute path."""
    with contextlib.ExitStack() as stack:
        path = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path.mkdir(parents=True, exist_ok=True)
        yield path.resolve()


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def seconds(call: Callable[[], object]) -> float:
    """Time a call."""
    start = clock()
    call()
    return clock() - start


def mean_step_seconds(seconds: Sequence[float], turn: float) -> float:
    """Compute the mean seconds of a step, without steps that a stop interrupted, which last a turn of another program longer.

    Args:
        seconds: of each step.
        turn: of another program, in seconds.

    Raises:
        ValueError: steps are too long for such turns: too many are interrupted.

    >>> mean_step_seconds([0.4, 0.6, 2.5, 0.5], turn=2)
    0.5
    """
    median = statistics.median(seconds)
    if median > turn / 2:
        raise ValueError(f"steps of {median:.2f} s need longer turns than {turn:g} s")
    return statistics.mean(second for second in seconds if second < median + turn / 2)


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int, warm_up: int = 0) -> dict[str, list[Any]]:
    """Make each call in every round, and list what it returns: a machine whose speed changes is the same for all.

    The order rotates, A B C, B C A, ..., for what runs first may find other caches. Rounds of warm-up are not listed.

    >>> calls = []
    >>> in_turns({"a": lambda: calls.append("a") or 1.0, "b": lambda: calls.append("b") or 2.0}, rounds=2, warm_up=1)
    {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    >>> "".join(calls)
    'abbaab'
    """
    names, results = list(calls), {name: [] for name in calls}
    for number in range(warm_up + rounds):
        place = number % len(names)
        for name in names[place:] + names[:place]:
            results[name].append(calls[name]())
    return {name: values[warm_up:] for name, values in results.items()}


def launch(program: str | Path, precision: str = "no", config: str = "cpu.yaml", *more: str) -> list[str]:
    """Give the words that launch a program as users do; `more` are flags of `accelerate launch`."""
    words = [sys.executable, "-m", "accelerate.commands.launch", *more, "--config_file"]
    return [*words, str(ROOT / "accelerate_configs" / config), "--mixed_precision", precision, str(program)]


def launch_on(program: str | Path, num_processes: int, *more: str) -> list[str]:
    """Give the words that launch a program on N processes, in float32."""
    flags = ["--num_processes", str(num_processes)] if num_processes > 2 else []
    return launch(program, "no", "cpu.yaml" if num_processes == 1 else "2xcpu.yaml", "--quiet", *flags, *more)


def run(words: Sequence[str | Path], threads: int | None = None, **environment: str | Path) -> str:
    """Run a program to its end, quietly; what it printed. Ends this program with its last words where it fails.

    Args:
        threads: OMP_NUM_THREADS; None: as it is.
        environment: variables beside those that are set.
    """
    words, given = list(map(str, words)), {name: str(value) for name, value in environment.items()}
    given |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": str(ROOT)}
    given |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    ended = subprocess.run(words, env=os.environ | given, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{ended.stderr[-3000:]}")
    return ended.stdout


def train_once(words: Sequence[str], folder: Path, made: str, threads: int, kept: Iterable[str] = ()) -> dict[str, Any]:
    """Train to the end, unless that was done before; all_results.json.

    Args:
        words: of the program, without --output_dir.
        folder: of the run, of which checkpoints and weights are removed.
        made: what the run depends on, as text: another one is trained anew.
        kept: names of what is not removed.
    """
    stamp = folder.with_suffix(".command")
    if not (stamp.exists() and stamp.read_text() == made and (folder / "all_results.json").exists()):
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        run([*words, "--output_dir", folder], threads)
        stamp.write_text(made)
        heavy = {path for pattern in ("checkpoint-*", "*.safetensors", "best") for path in folder.glob(pattern)}
        for path in heavy - {folder / name for name in kept}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return json.loads((folder / "all_results.json").read_text())


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's steps."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "loss" in line]


class Program:
    """A program in a process group of its own, stopped until its turn: programs that are compared share the machine's moods.

    Args:
        words: its command.
        folder: where it runs.
        log: what it prints.
        threads: OMP_NUM_THREADS.
    """

    def __init__(self, words: list[str], folder: Path, log: Path, threads: int):
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        environment["PYTHONUNBUFFERED"] = "1"  # what it has printed is in the log although it is killed
        self.words, self.log, self.turns = words, log, []
        self.process = subprocess.Popen(
            words, cwd=folder, stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        os.killpg(self.process.pid, signal.SIGSTOP)

    def turn(self, seconds: float | None) -> None:
        """Let the program run for `seconds`, or to its end."""
        start = clock()
        os.killpg(self.process.pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        if not self.done:
            os.killpg(self.process.pid, signal.SIGSTOP)
        self.turns.append((start, clock()))
        if self.process.returncode:
            sys.exit(f"{' '.join(self.words)} failed:\n{self.log.read_text()[-3000:]}")

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Let the program run without a stop until `is_reached` returns true."""
        start = clock()
        os.killpg(self.process.pid, signal.SIGCONT)
        while not is_reached():
            if self.done:
                sys.exit(f"{' '.join(self.words)} has ended:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)
        os.killpg(self.process.pid, signal.SIGSTOP)
        self.turns.append((start, clock()))

    @property
    def done(self) -> bool:
        return self.process.poll() is not None

    @property
    def seconds(self) -> float:
        """Seconds in which the program ran."""
        return sum(end - start for start, end in self.turns)

    def kill(self) -> None:
        """End the program at once, stopped or not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_in_turns(programs: Iterable[Program], seconds: float) -> None:
    """Give each program a turn of so many seconds, again and again, until all have ended."""
    running = list(programs)
    while running:
        for program in running:
            if not program.done:  # one that was ending when its turn was over may have ended since
                program.turn(seconds)
        running = [program for program in running if not program.done]


def train_seconds(folder: Path, turn: float) -> float:
    """Sum the seconds of a run's steps; those that a stop interrupted, or that measured noise, count as the mean of others.

    Args:
        folder: of the run, whose metrics.jsonl is read.
        turn: see `mean_step_seconds`.
    """
    steps = read_steps(folder)
    seconds = [line["seconds"] for line in steps if "grad_signal" not in line]
    return len(steps) * mean_step_seconds(seconds, turn)


def running_time(turns: list[tuple[float, float]], moment: float) -> float:
    """Sum the seconds in which a program had run up to a moment."""
    return sum(min(end, moment) - begin for begin, end in turns if begin < moment)


def peak_memory(process: int) -> float:
    """Read the largest resident memory that a process ever had, in GB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024 / 1e9


# ---------------------------------------------------------------------------------------------------------------------
# Results


def about(command: str, packages: Iterable[str], threads: int | None = None, **more: Any) -> dict[str, Any]:
    """Say how results came about: the command, date, machine, versions, and what a benchmark adds.

    Args:
        command: that makes them.
        packages: whose versions may matter.
        threads: of every program; None: torch's.
    """
    import torch

    threads = threads or torch.get_num_threads()
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {threads} threads, {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
        **more,
    }


def provenance(about: dict[str, Any]) -> str:
    """Say when, on what machine and with what versions, as far as results tell it."""
    parts = [about[name] for name in ("date", "machine") if name in about]
    parts += [f"Python {about['python']}"] if "python" in about else []
    return ", ".join(parts + [f"{name} {number}" for name, number in about.get("versions", {}).items()])


def read_other_rows(output: Path, group: str, key: str, measured: Iterable[str]) -> list[dict[str, Any]]:
    """Read the rows of a group of earlier results, without rows that are measured anew.

    Args:
        output: results, without a suffix.
        group: name of the list of rows.
        key: field of a row that names what it measured.
        measured: names that are measured anew.
    """
    again = set(measured)
    return [row for row in read(output).get(group, []) if row[key] not in again]


def write_recipe(folder: Path, values: dict[str, Any]) -> Path:
    """Make a folder of a workload, with its recipe.yaml; WORK in its values is the folder above."""
    folder.mkdir(exist_ok=True)
    text = yaml.safe_dump(values).replace("WORK", str(folder.parent))
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return folder


def format_results(results: Any, depth: int = 0) -> str:
    """Write results as JSON with a line for each row: what holds no list and no dictionary, or is three levels deep.

    >>> print(format_results({"rows": [{"a": 1, "b": [2, 3]}, {"a": 4}], "steps": 5}))
    {
      "rows": [
        {"a": 1, "b": [2, 3]},
        {"a": 4}
      ],
      "steps": 5
    }
    """
    items = results.values() if isinstance(results, dict) else results if isinstance(results, list) else ()
    if depth >= 2 or not any(isinstance(item, dict | list) and item for item in items):
        return json.dumps(results)
    space = "  " * (depth + 1)
    if isinstance(results, dict):
        lines = [f"{space}{json.dumps(key)}: {format_results(item, depth + 1)}" for key, item in results.items()]
    else:
        lines = [f"{space}{format_results(item, depth + 1)}" for item in results]
    opening, closing = "{}" if isinstance(results, dict) else "[]"
    return opening + "\n" + ",\n".join(lines) + "\n" + "  " * depth + closing


def read(output: Path) -> dict[str, Any]:
    """Read earlier results; none are empty."""
    file = output.with_suffix(".json")
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(
    output: Path,
    results: dict[str, Any],
    page: str | None = None,
    is_last: bool = True,
    parts: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    """Write OUTPUT.json, OUTPUT.md where there is a page, and parts of documents where OUTPUT is where results are kept.

    Args:
        is_last: print page or parts, as nothing more is measured.
        parts: name of a part -> file in docs/, and text; see `write_part`.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(format_results(results) + "\n", encoding="utf-8")
    if page is not None:
        output.with_suffix(".md").write_text(page, encoding="utf-8")
    for name, (document, text) in (parts or {}).items():
        if output.parent == RESULTS:
            write_part(ROOT / "docs" / document, name, text)
        page = page or text
    if is_last:
        print(page)


def write_part(document: Path, name: str, text: str) -> None:
    """Replace what stands between the markers of a generated part of a document.

    Args:
        document: Markdown with the lines <!-- NAME: begin --> and <!-- NAME: end -->.
        name: of the part.
        text: whole lines.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    head, rest = document.read_text(encoding="utf-8").split(begin)
    document.write_text(head + begin + text + end + rest.split(end)[1], encoding="utf-8")


def page(title: str, program: str, about: dict[str, Any], body: str) -> str:
    """Make a page of results.

    Args:
        title: its head.
        program: file in benchmarks/, whose docstring says what is measured.
        about: see `about`.
        body: Markdown, whole lines.
    """
    source = provenance(about)
    return (
        f"# {title}\n\nGenerated by `{about['command']}` (benchmarks/{program}, which says what is measured); do not edit.\n\n"
        f"{body}" + (f"\n{source}.\n" if source else "")
    )


def part(program: str, about: dict[str, Any], body: str) -> str:
    """Make the generated part of a document, for `write_part`. Takes what `page` takes, but a title."""
    command = f"`{about['command']}` (benchmarks/{program}, which says what is measured)"
    source = provenance(about)
    return f"{body}\nGenerated by {command}." + (f" {source}.\n" if source else "\n")


def table(columns: str | Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Make a Markdown table; the heads of its columns are a list, or a text with " | " between them.

    >>> print(table("a | b", [[1, "x"]]), end="")
    | a | b |
    |---|---|
    | 1 | x |
    """
    heads = columns.split(" | ") if isinstance(columns, str) else list(columns)
    head, *lines = [f"| {' | '.join(map(str, cells))} |\n" for cells in [heads, *rows]]
    return "".join([head, "|---" * len(heads) + "|\n", *lines])


def spread(values: Iterable[float], form: str) -> str:
    """Show median, smallest and largest.

    >>> spread([3.0, 1.0, 2.0], ".1f")
    '2.0 (1.0 to 3.0)'
    """
    values = list(values)
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> list[float]:
    """Divide values round by round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]
