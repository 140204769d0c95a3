"""What benchmarks share that train our script beside trainers of others: turns, the same samples, rates, memory and the page.

A benchmark describes itself by a `Comparison`, and calls `main`. Its programs are those of a file in benchmarks/peers/, which
takes FOLDER STAMPS PRECISION and the words of a program, writes a stamp at the end of every step (peers/clock.py), and
STAMPS.base, the resident memory when its model has been built. `ours` and `floor` get the script and its flags behind.
"""

import argparse
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import harness
from harness import Program, peak_memory, running_time, spread, table

PEERS = harness.ROOT / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

import clock
import torch
from clock import Stamp

from samestep.recipe.catalog import load

STEPS = 2, 4  # before the first round, and of each round
MOST_LOAD = 1.0  # programs that ran in the minute before, in the mean, above which results say so
LOSS_TOLERANCE = {"no": 1e-4, "bf16": 1e-2}
OWN = ("ours", "floor")
PRECISIONS = ("no", "bf16")


class Workload(NamedTuple):
    """Which recipe is trained, and by whom.

    Attributes:
        values: of the recipe; WORK in them is the folder of the data.
        programs: titles.
        precisions: of the launch.
    """

    values: dict[str, Any]
    programs: tuple[str, ...] = OWN
    precisions: tuple[str, ...] = PRECISIONS


class Comparison(NamedTuple):
    """What a benchmark compares.

    Attributes:
        name: of its results.
        title: of its page.
        unit: of rates, for people.
        workloads: by name.
        programs: title -> its words after the precision; the first two are `OWN`.
        peers: file in benchmarks/peers/.
        prepare: writes what the programs share into the folder of a workload, and says what the samples are like; `first_steps`
            are the units of our first steps.
        write_data: writes the data into the folder above.
        describe: words for the samples of a row.
        packages: whose versions matter.
        other_order: titles of programs whose steps hold other samples.
        other_loss: titles of programs whose loss is not the mean over a step's targets.
    """

    name: str
    title: str
    unit: str
    workloads: dict[str, Workload]
    programs: dict[str, tuple[str, ...]]
    peers: str
    prepare: Callable[[Path], dict[str, Any]]
    write_data: Callable[[Path], None]
    describe: Callable[[dict[str, Any]], str]
    packages: tuple[str, ...]
    other_order: tuple[str, ...] = ()
    other_loss: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def start(comparison: Comparison, title: str, folder: Path, precision: str, threads: int) -> Program:
    """Start a program that trains the workload of a folder; its stamps are in TITLE.stamps there."""
    file = PEERS / comparison.peers
    words = [str(folder), str(folder / f"{title}.stamps"), precision, *comparison.programs[title]]
    if title in OWN:
        recipe = folder / "recipe.yaml"
        words += [str(harness.ROOT / "scripts" / load(str(recipe)).parts.script), "--recipe", str(recipe)]
        words += ["--output_dir", str(folder / title), "--overwrite_output_dir", "--num_generations", "0"]
        config = "1xh200.yaml" if torch.cuda.is_available() else "cpu.yaml"
        words = [*harness.launch(file, precision, config), *words]
    else:
        words = [sys.executable, str(file), *words]
    return Program(words, folder.parent, folder / f"{title}.log", threads)


def rates(
    stamps: list[Stamp], turns: list[tuple[float, float]], num_rounds: int, steps: tuple[int, int] = STEPS
) -> list[float]:
    """Compute the units per second of each round, stops left out.

    Args:
        steps: before the first round, and of each round.

    >>> stamps = [Stamp(float(time), 10, 0.0) for time in (1, 2, 3, 4, 5, 6, 17, 18, 19)]
    >>> rates(stamps, [(0.0, 6.0), (16.0, 20.0)], 1)
    [10.0]
    """
    result = []
    for number in range(num_rounds):
        first, end = (steps[0] + place * steps[1] for place in (number, number + 1))
        times = [running_time(turns, stamps[place - 1].time) for place in (first, end)]
        result.append(sum(stamp.units for stamp in stamps[first:end]) / (times[1] - times[0]))
    return result


class Race(NamedTuple):
    """What came of programs that took turns, by title.

    Attributes:
        stamps: of their steps.
        rates: units per second of each round.
        memory: GB at most, beyond those of the built model.
        peaks: GB at most of the whole process.
        first_memory: `memory` of our first start, which measures.
    """

    stamps: dict[str, list[Stamp]]
    rates: dict[str, list[float]]
    memory: dict[str, float]
    peaks: dict[str, float]
    first_memory: float


def race(
    titles: list[str],
    folder: Path,
    begin: Callable[[str], Program],
    num_rounds: int,
    steps: tuple[int, int] = STEPS,
    check: Callable[[dict[str, list[Stamp]]], None] = lambda _: None,
) -> Race:
    """Let programs take their rounds in turns.

    Args:
        titles: of the programs, whose stamps are in TITLE.stamps of the folder; the first is `ours`.
        begin: starts a program.
        steps: before the first round, and of each round.
        check: looks at the first stamps, before hours of rounds.
    """
    programs, files = {}, {title: folder / f"{title}.stamps" for title in titles}

    def run(title: str, num_steps: int) -> None:
        programs[title].run_until(lambda: len(clock.read(files[title])[1]) >= num_steps)

    def read_peak(title: str) -> float:
        return peak_memory(clock.read(files[title])[0])

    def read_memory(title: str) -> float:
        return read_peak(title) - int(Path(f"{files[title]}.base").read_text()) * 1024 / 1e9

    try:
        # At its first start our script measures its kernels, alone, and remembers them; stopped by turns it could not
        for title in ["ours", *titles]:
            if title in programs:
                first_memory = read_memory(title)
                programs[title].kill()
            files[title].unlink(missing_ok=True)
            programs[title] = begin(title)
            run(title, steps[0])
        check({title: clock.read(files[title])[1][: steps[0]] for title in titles})
        for number in range(num_rounds):
            place = number % len(titles)
            for title in titles[place:] + titles[:place]:
                run(title, steps[0] + (number + 1) * steps[1])
        stamps = {title: clock.read(files[title])[1] for title in titles}
        memory, peaks = ({title: read(title) for title in titles} for read in (read_memory, read_peak))
    finally:
        for program in programs.values():
            program.kill()
    of_rounds = {title: rates(stamps[title], programs[title].turns, num_rounds, steps) for title in titles}
    return Race(stamps, of_rounds, memory, peaks, first_memory)


def check_same(comparison: Comparison, stamps: dict[str, list[Stamp]], expected: list[int], precision: str) -> None:
    """Check that the programs that take samples in our order have our first steps' targets, and our first loss.

    Raises:
        SystemExit: one has others.
    """
    for title, series in stamps.items():
        if title in comparison.other_order:
            continue
        units = [stamp.units for stamp in series[: len(expected)]]
        if units != expected:
            sys.exit(f"{title} was trained on {units} targets in its first steps, not on {expected}")
        distance = abs(series[0].loss / stamps["ours"][0].loss - 1)
        if title not in (*OWN, *comparison.other_loss) and not distance <= LOSS_TOLERANCE[precision]:
            sys.exit(f"the first loss of {title} is {series[0].loss}, ours {stamps['ours'][0].loss}")


def measure(
    comparison: Comparison, name: str, precision: str, titles: list[str], num_rounds: int, work: Path, threads: int
) -> dict[str, Any]:
    """Measure a row of the results."""
    folder = harness.write_recipe(work / name, comparison.workloads[name].values)
    data = comparison.prepare(folder)
    expected = data.pop("first_steps")

    def check(first: dict[str, list[Stamp]]) -> None:
        check_same(comparison, first, expected[: STEPS[0]], precision)

    def begin(title: str) -> Program:
        return start(comparison, title, folder, precision, threads)

    raced = race(titles, folder, begin, num_rounds, check=check)
    check_same(comparison, raced.stamps, expected, precision)
    row = {"workload": name, "precision": precision, "data": data, "rates": raced.rates, "memory": raced.memory}
    return row | {"peaks": raced.peaks, "first_memory": raced.first_memory}


def parse(comparison: Comparison, description: str) -> argparse.Namespace:
    """Read the flags."""
    options: dict[str, Any] = {"rounds": 3, "only": comparison.workloads, "precisions": True, "threads": True}
    parser = harness.flags(comparison.name, description, **options)
    programs = list(comparison.programs)
    parser.add_argument("--programs", nargs="+", default=programs, choices=programs, help="beside ours")
    return parser.parse_args()


def main(comparison: Comparison, description: str) -> None:
    """Measure what the flags ask for, and write the results, in which other rows stay as they are."""
    arguments = parse(comparison, description)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that stopped programs do not stay behind
    rows = harness.read_other_rows(arguments.output, "rows", "workload", [])
    program = f"benchmarks/{comparison.name}.py"
    command = re.sub(r" --output \S+", "", shlex.join(["python", program, *sys.argv[1:]]))
    about = harness.about(command, comparison.packages, arguments.threads)
    origin = {"command": about["command"], "machine": harness.provenance(about), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        os.environ["HF_HOME"] = str(work / "home")  # nothing of earlier runs is remembered
        comparison.write_data(work)
        for name in arguments.only:
            workload = comparison.workloads[name]
            for precision in (p for p in workload.precisions if p in arguments.precisions):
                titles = [title for title in workload.programs if title == "ours" or title in arguments.programs]
                row = measure(comparison, name, precision, titles, arguments.rounds, work, arguments.threads) | origin
                rows = [old for old in rows if (old["workload"], old["precision"]) != (name, precision)] + [row]
                rows.sort(key=lambda row: (list(comparison.workloads).index(row["workload"]), row["precision"] != "no"))
                results = {"rows": rows}
                harness.write(arguments.output, results, markdown(comparison, results), is_last=False)
                print(markdown(comparison, {"rows": [row]}), file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# What is written


def markdown(comparison: Comparison, results: dict[str, Any]) -> str:
    """Make the page of results."""
    rows = results["rows"]
    peers = [title for title in comparison.programs if title != "ours" and any(title in row["rates"] for row in rows)]
    speed, memory, data = [], [], []
    for row in rows:
        labels = [row["workload"], row["precision"]]
        ratios = {title: harness.ratios(row["rates"]["ours"], row["rates"][title]) for title in row["rates"]}
        cells = [spread(ratios[title], ".2f") if title in ratios else "-" for title in peers]
        speed.append([*labels, spread(row["rates"]["ours"], ",.0f"), *cells])
        cells = [_compare_memory(row, title) if title in ratios else "-" for title in peers]
        whole = [f"{row['peaks']['ours']:.2f}"] if "peaks" in row else []
        memory.append([*labels, f"{row['first_memory']:.2f}", f"{row['memory']['ours']:.2f}", *whole, *cells])
        described = [row["workload"], comparison.describe(row["data"])]
        data += [described] if described not in data else []
    heads = ["workload", "precision", "ours"]
    has_peaks = any("peaks" in row for row in rows)
    whole = ["ours, whole process"] if has_peaks else []
    commands = "".join(dict.fromkeys(f"`{row['command']}`: {row['machine']}{_warn(row)}.\n" for row in rows))
    num_rounds = " or ".join(map(str, sorted({len(row["rates"]["ours"]) for row in rows})))
    ratios_of = "ours / the other's" + ("; of the whole process" if has_peaks else "")
    return harness.page(
        comparison.title,
        f"{comparison.name}.py",
        {"command": f"make bench NAME={comparison.name}"},
        f"{comparison.unit} per second; ours / the other's, above 1 where ours is faster. Medians (smallest to largest) of "
        f"{num_rounds} rounds.\n\n"
        f"{table([*heads, *(f'ours / {title}' for title in peers)], speed)}\n"
        f"Memory from the first step on, beyond the built model's, GB ({ratios_of}):\n\n"
        f"{table([*heads[:2], 'ours, first start', 'ours', *whole, *peers], memory)}\n"
        f"{table('workload | sequences', data)}\n{commands}",
    )


def _compare_memory(row: dict[str, Any], title: str) -> str:
    """Write the memory of a program, and ours as a share of it."""
    memory, peaks = row["memory"], row.get("peaks")
    shares = [f"{memory['ours'] / memory[title]:.2f}"] + ([f"{peaks['ours'] / peaks[title]:.2f}"] if peaks else [])
    return f"{memory[title]:.2f} ({'; '.join(shares)})"


def _warn(row: dict[str, Any]) -> str:
    """Say so where other programs ran beside those that were measured."""
    return f"; UNDER LOAD, {row['load']:.0f} other programs ran: a first look" if row["load"] > MOST_LOAD else ""
