"""`python -m recipes audit-script`: runs a program under several layouts, and compares the steps that it takes."""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from recipes.audit.judge import HARMLESS, alone, compare
from recipes.audit.processes import load, run
from recipes.audit.recording import Recording
from recipes.audit.table import table
from recipes.errors import UsageError

USAGE = """python -m recipes audit-script --vary "FLAG=VALUE,..." [--vary ...] [--processes 1,2] [--steps 8]
                                      [--tolerance 1e-5] [--timeout 600] [--json] -- PROGRAM.py ARGS"""
BATCH, WINDOW = "per_device_train_batch_size", "gradient_accumulation_steps"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UsageError(f"audit-script: {message}\nusage: {USAGE}")


@dataclasses.dataclass(frozen=True)
class Variation:
    """How the program is run once."""

    flags: dict[str, str]
    num_processes: int

    def __str__(self) -> str:
        names = {BATCH: "b", WINDOW: "k"}
        parts = [f"{names.get(name, name)} {value}" for name, value in self.flags.items()]
        return ", ".join([*parts, f"N {self.num_processes}"])

    @property
    def argv(self) -> list[str]:
        return [f"--{name.lstrip('-')}={value}" for name, value in self.flags.items()]


def variations(vary: list[str], processes: list[int]) -> list[Variation]:
    """Every variation on every number of processes, with the same global batch: k is divided by N, or b where k cannot be.

    >>> [str(v) for v in variations(["per_device_train_batch_size=8,gradient_accumulation_steps=1"], [1, 2])]
    ['b 8, k 1, N 1', 'b 4, k 1, N 2']
    """
    problems, found = [], []
    for text in vary:
        flags = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
        if len(flags) != len(text.split(",")):
            problems.append(f'--vary is {text!r}, not FLAG=VALUE,FLAG=VALUE: for example "{BATCH}=8,{WINDOW}=1"')
            continue
        for num_processes in processes:
            divided = next(
                (n for n in (WINDOW, BATCH) if flags.get(n, "").isdigit() and not int(flags[n]) % num_processes), None
            )
            if num_processes == 1 or not flags.keys() & {WINDOW, BATCH}:
                found.append(Variation(flags, num_processes))
            elif divided is None:
                problems.append(
                    f"--vary {text!r} on {num_processes} processes: neither k nor b can be divided by {num_processes}"
                )
            else:
                found.append(Variation(flags | {divided: str(int(flags[divided]) // num_processes)}, num_processes))
    if problems:
        raise UsageError(problems)
    return found


def record(program: list[str], variation: Variation, num_steps: int, timeout: float) -> list[Recording]:
    """Run `program` once, and return what each process did.

    Raises:
        UsageError: it failed, or took no step.
    """
    what = f"{program[0]} ({variation})"
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        words = ["-m", "recipes.audit.program", folder, str(num_steps), *program, *variation.argv]
        run([sys.executable, *words], variation.num_processes, what, timeout)
        (recordings,) = load(Path(folder), 1, variation.num_processes)
    if not recordings[0].steps:
        raise UsageError(f"{what} ended without a step of an optimizer of torch.optim")
    return recordings


def audit_script(argv: list[str]) -> int:
    """The command. Returns the exit code: 0 exact, 1 not exact.

    Raises:
        UsageError: bad flags, a program that fails.
    """
    parser = _Parser(prog="python -m recipes audit-script", usage=USAGE, description=__doc__.split(":", 1)[1].strip())
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="FLAG=VALUE,...",
        help="flags of one run; the first is the reference",
    )
    parser.add_argument(
        "--processes", default="1", help="numbers of processes, with commas; the first belongs to the reference"
    )
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run; 0: all")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative error that is rounding")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    own, program = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    flags = parser.parse_args(own)
    if not program:
        raise UsageError(f"audit-script: the program is missing behind --\nusage: {USAGE}")
    if not Path(program[0]).is_file():
        raise UsageError(f"audit-script: {program[0]} is not a file")
    if not all(number.isdigit() and int(number) > 0 for number in flags.processes.split(",")):
        raise UsageError(f"--processes is {flags.processes}, not numbers with commas: for example 1,2")
    wrong = {"steps": flags.steps < 0, "tolerance": not 0 <= flags.tolerance < 1, "timeout": not flags.timeout > 0}
    rules = {"steps": "0 (all) or more", "tolerance": "0 or more and below 1", "timeout": "more than 0 seconds"}
    if any(wrong.values()):
        raise UsageError(
            f"--{n} is {getattr(flags, n)}, must be {rules[n]}" for n, is_wrong in wrong.items() if is_wrong
        )
    runs = variations(flags.vary, [int(number) for number in flags.processes.split(",")])
    if len(runs) < 2:
        raise UsageError(
            f"audit-script: one run has nothing to be compared with: give another --vary, or --processes 1,2\nusage: {USAGE}"
        )
    recordings = []
    for variation in runs:
        if not flags.json:
            print(f"{program[0]}: {variation}", file=sys.stderr, flush=True)
        recordings.append(record(program, variation, flags.steps, flags.timeout))
    in_itself = alone(recordings[0])
    comparisons = [compare(recordings[0], other, flags.tolerance) for other in recordings[1:]]
    is_exact = all(of.is_exact for of in comparisons) and all(of.cause in HARMLESS for of in in_itself)
    if flags.json:
        rows = [
            {"layout": str(variation)} | _for_json(dataclasses.asdict(comparison)) | {"is_exact": comparison.is_exact}
            for variation, comparison in zip(runs[1:], comparisons, strict=True)
        ]
        answer = {"is_exact": is_exact, "tolerance": flags.tolerance, "reference": str(runs[0])}
        print(json.dumps(answer | {"findings": [dataclasses.asdict(of) for of in in_itself], "comparisons": rows}))
    else:
        print(table(runs, in_itself, comparisons))
        print(f"{'exact' if is_exact else 'NOT exact'} (tolerance {flags.tolerance:g})")
    return 0 if is_exact else 1


def _for_json(row: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN: null where a step is not compared."""
    numbers = {name: row[name] for name in ("errors", "ratios", "cosines", "loss_errors", "update_errors")}
    return row | {name: [x if math.isfinite(x) else None for x in values] for name, values in numbers.items()}
