"""Test common claims about gradient accumulation: run the experiments, judge, write studies/claims/claims.md.

    make claims
    python studies/claims/study.py --list
    python studies/claims/study.py --only second_moment images --seeds 5

Every experiment and seed writes a file of its own in studies/claims/results/, whole or not at all. A file whose settings,
code and torch are those of now is not computed again, so that a run that was interrupted goes on. The document is written from
all files that there are, and says what is missing.
"""

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import inspect
import json
import multiprocessing
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HOME = Path(__file__).parent
sys.path[:0] = [str(HOME), str(HOME.parents[1] / "benchmarks")]

import arithmetic
import asynchronous_claims
import betas
import moments
import numpy
import quadratic
import report
import second_order
import small_batches
import systems
import torch
import training_claims
import transformers
from harness import format_results, write_part
from report import PICTURES
from verdicts import Experiment

README, DOCS = HOME / "README.md", HOME.parents[1] / "docs"
PAGES = ("asynchronous",)
"""Experiments whose verdicts are a part of the page of that name in docs/, too."""
MODULES = (
    arithmetic,
    quadratic,
    second_order,
    moments,
    systems,
    small_batches,
    training_claims,
    betas,
    asynchronous_claims,
)
EXPERIMENTS = {each.name: each for module in MODULES for each in module.EXPERIMENTS}


def fingerprint(experiment: Experiment, seed: int) -> str:
    """Of all that decides a result: settings, seed, code, torch."""
    code = [_code(inspect.getsource(module)) for module in experiment.sources]
    whole = json.dumps([experiment.name, experiment.settings, seed, torch.__version__, *code], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _code(source: str) -> str:
    """What a module computes, without its comments and texts between statements."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [each for each in body if not _is_text(each)]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def seeds_of(experiment: Experiment, num_seeds: int) -> list[int]:
    return list(range(num_seeds if experiment.seeded else 1))


def file_of(experiment: Experiment, seed: int, folder: Path) -> Path:
    return folder / f"{experiment.name}-{seed}.json"


def stored(experiment: Experiment, seed: int, folder: Path) -> dict[str, Any] | None:
    """What was computed before by the same settings and code, or None."""
    found = read(experiment, seed, folder)
    return found if found is not None and found["fingerprint"] == fingerprint(experiment, seed) else None


def read(experiment: Experiment, seed: int, folder: Path) -> dict[str, Any] | None:
    """What was computed before, by whatever code, or None."""
    try:
        found = json.loads(file_of(experiment, seed, folder).read_text(encoding="utf-8"))
        return found if {"fingerprint", "result"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def compute(experiment: Experiment, seed: int, folder: Path) -> dict[str, Any]:
    """Measure, and write the file whole or not at all."""
    start = time.perf_counter()
    result = experiment.measure(experiment.settings, seed)
    found = {
        "experiment": experiment.name,
        "seed": seed,
        "fingerprint": fingerprint(experiment, seed),
        "seconds": round(time.perf_counter() - start, 2),
        "about": {
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
            "python": platform.python_version(),
            "versions": {module.__name__: module.__version__ for module in (torch, transformers, numpy)},
        },
        "settings": experiment.settings,
        "result": result,
    }
    path = file_of(experiment, seed, folder)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(format_results(found) + "\n", encoding="utf-8")
    part.replace(path)
    return found


def compute_named(name: str, quick: bool, seed: int, folder: Path, num_threads: int) -> tuple[str, int, float]:
    """`compute` in a process of its own."""
    torch.set_num_threads(num_threads)
    return name, seed, compute(experiments_for(quick)[name], seed, folder)["seconds"]


def experiments_for(quick: bool) -> dict[str, Experiment]:
    """All, with tiny settings if they are only tried."""
    return {
        name: dataclasses.replace(each, settings=each.settings | each.quick) if quick else each
        for name, each in EXPERIMENTS.items()
    }


def compute_all(todo: list[tuple[str, int]], arguments: argparse.Namespace) -> None:
    """Compute experiments and seeds, the longest first, in `jobs` processes that share the cores."""
    todo = sorted(todo, key=lambda each: -EXPERIMENTS[each[0]].minutes)
    threads = max(1, torch.get_num_threads() // arguments.jobs)
    calls = [(name, arguments.quick, seed, arguments.results, threads) for name, seed in todo]
    with contextlib.ExitStack() as stack:
        if arguments.jobs == 1:
            finished = (compute_named(*call) for call in calls)
        else:
            fresh = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(arguments.jobs, mp_context=fresh))
            finished = (done.result() for done in as_completed([pool.submit(compute_named, *call) for call in calls]))
        for name, seed, seconds in finished:
            print(f"{name}, seed {seed}: {seconds:.1f} s", file=sys.stderr, flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the experiments, and about how long they take")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=EXPERIMENTS, help="run these")
    parser.add_argument("--seeds", type=int, default=5, help="of every experiment with random numbers, 2 or more")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cores")
    parser.add_argument("--fresh", action="store_true", help="compute again what is there")
    parser.add_argument(
        "--write", action="store_true", help="only write what all results say, those of older code, too"
    )
    parser.add_argument("--quick", action="store_true", help="tiny settings, to try the program; numbers mean nothing")
    parser.add_argument("--results", type=Path, default=HOME / "results", help="folder")
    parser.add_argument("--document", type=Path, default=HOME / "claims.md", help="pictures/ goes beside it")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 2:
        parser.error(f"--seeds is {arguments.seeds}: a spread takes 2 or more")
    if arguments.jobs < 1:
        parser.error(f"--jobs is {arguments.jobs}: it takes 1 or more")
    if arguments.quick and parser.get_default("document") == arguments.document:
        parser.error("--quick does not write studies/claims/claims.md: give --document and --results")
    return arguments


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    experiments = experiments_for(arguments.quick)
    if arguments.list:
        for each in experiments.values():
            seeds = f"{arguments.seeds} seeds x " if each.seeded else ""
            print(f"{each.name:16} {seeds + f'{each.minutes:.1f} minutes':24} {each.title}")
        return
    arguments.results.mkdir(parents=True, exist_ok=True)
    units = [(name, seed) for name, each in experiments.items() for seed in seeds_of(each, arguments.seeds)]

    def have(name: str, seed: int) -> dict[str, Any] | None:
        return (read if arguments.write else stored)(experiments[name], seed, arguments.results)

    wanted = [unit for unit in units if not arguments.only or unit[0] in arguments.only]
    if not arguments.write:
        compute_all([unit for unit in wanted if arguments.fresh or have(*unit) is None], arguments)
    found = {name: [have(of, seed) for of, seed in units if of == name] for name in experiments}
    found = {name: None if None in files else files for name, files in found.items()}
    write(experiments, found, arguments.document)
    if arguments.document == HOME / "claims.md":
        before, rest = README.read_text(encoding="utf-8").split(report.BEGIN)
        table = report.BEGIN + report.believed(experiments, found) + report.END
        README.write_text(before + table + rest.split(report.END)[1], encoding="utf-8")
        for name in PAGES:
            if found[name] is not None:
                write_part(DOCS / f"{name}.md", name, report.part(experiments[name], found[name]))


def write(experiments: dict[str, Experiment], found: dict[str, list[dict] | None], document: Path) -> None:
    """The document and its pictures."""
    pictures = document.parent / PICTURES
    for name, files in found.items():
        if files is not None and experiments[name].draw is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            drawn = experiments[name].draw([of["result"] for of in files])
            for file, picture in zip(experiments[name].pictures, drawn, strict=True):
                (pictures / file).write_bytes(picture)
    document.parent.mkdir(parents=True, exist_ok=True)
    document.write_text(report.markdown(experiments, found), encoding="utf-8")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1:])
