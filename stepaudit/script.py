"""Runs a program under several layouts, and compares its steps: `python -m stepaudit`."""

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stepaudit.causes import Finding
from stepaudit.decisions import judge
from stepaudit.errors import UsageError, nearest
from stepaudit.judge import Comparison, find_faults
from stepaudit.launchers import read_launcher
from stepaudit.lint.reading import lint_file
from stepaudit.mesh import VARIABLE, count_data_parts, count_processes, read_mesh
from stepaudit.recording import Recording
from stepaudit.resume import compare_resumed
from stepaudit.table import fold_lines, table
from stepaudit.unvaried import explain_copies, explain_unvaried

BATCH, WINDOW = "per_device_train_batch_size", "gradient_accumulation_steps"
FOLDER = "{folder}"  # in flags: replaced by a folder for the program's output
# Seconds that a run may take, if it is not said: the first one, and any; a later one as many times as the slowest has taken.
MAX_SECONDS, MIN_SECONDS, SLOWER = 600, 120, 20
FAILURE_CODE = 3  # exit code of an audit that has failed itself
MAX_PROCESSES = 64
MAX_PROGRAM_BYTES = 2**24
REASONS = {
    "full": "in float32, to tell rounding from a fault",
    "train": "with parameters that move, to see what the program decides by numbers",
    "plain": "in steps of one large batch that the audit makes",
}
PLAIN = "plain"
PACKAGES = ("torch", "numpy", "cloudpickle")
RunProgram = Callable[..., list[Recording]]
"""Runs and records a program: see `record`, which is one."""
USAGE = """[--vary "FLAG=VALUE,..." ...] [--processes 1,2] [--mesh dp=2,tp=2] [--per_process FLAG]
         [--resume "FLAG=VALUE,..."] [--stop 3]
         [--against plain] [--steps 8] [--timeout 600] [--tolerance 1e-5] [--json] -- PROGRAM.py [ARGS ...]"""
DESCRIPTION = """Runs a training program unchanged, once per layout, with hooks in torch, and compares the gradients of its
steps: plain PyTorch, Accelerate, transformers' Trainer, Lightning. What differs is named with its cause.
Exit code: 0 exact, 1 not exact, 2 bad usage, 3 the audit itself failed."""
EPILOG = """examples:
  {prog} --vary "{batch}=16,{window}=1" \\
    --vary "{batch}=4,{window}=4" --processes 1,2 -- train.py --flags of yours
  {prog} --vary "{batch}=4,{window}=4" \\
    --processes 1,2 --resume "resume_from_checkpoint={{folder}}/last" -- train.py --output_dir {{folder}}
  {prog} --vary "-b=8,key:optim.accum=1" --vary "-b=2,key:optim.accum=4" --steps 4 --json -- train.py"""


class _Parser(argparse.ArgumentParser):
    """Parses flags as argparse does, but refuses shortened flags, and says each problem in one line."""

    def parse(self, argv: list[str]) -> argparse.Namespace:
        argv = list(argv)
        while "--vary" in argv[:-1]:  # argparse takes a value that begins with a dash, -b=8, for a flag
            index = argv.index("--vary")
            argv[index : index + 2] = [f"--vary={argv[index + 1]}"]
        flags, unknown_words = self.parse_known_args(argv)
        if unknown_words:
            word, valid = unknown_words[0][:60], re.findall(r"--\w+", USAGE)
            hint = f"{nearest(word.split('=')[0], valid)}; " if word.startswith("-") else ""
            raise UsageError(f"{self.prog}: unexpected {word!r}: {hint}the program and its flags come after --")
        return flags

    def error(self, message: str) -> None:
        raise UsageError(f"{self.prog}: {message}; see {self.prog} --help")


class AuditError(RuntimeError):
    """Says that the audit itself has failed: nothing is known of the program."""


@dataclasses.dataclass(frozen=True)
class Variation:
    """Describes one run of the program.

    Attributes:
        flags: name -> value. The name decides the form: `batch` or `--batch` gives --batch=4, `-b` gives -b 4, `key:batch`
            gives batch=4, `env:BATCH` sets the environment variable.
        variables: of the environment, of every run: they are not shown.
        mesh: what the processes are, as of `--mesh`; empty for the reference of such layouts; None: nothing is said.
    """

    flags: dict[str, str]
    num_processes: int
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    mesh: str | None = None

    def __str__(self) -> str:
        names = {BATCH: "b", WINDOW: "k"}
        parts = [f"{names.get(name, name)} {value}" for name, value in self.flags.items()]
        return ", ".join([*parts, self.mesh or f"N {self.num_processes}"])

    @property
    def argv(self) -> list[str]:
        """Words of the command line after the program.

        >>> Variation({"batch": "4", "--k": "2", "-b": "4", "key:data.batch": "4", "env:BATCH": "4"}, 1).argv
        ['--batch=4', '--k=2', '-b', '4', 'data.batch=4']
        """
        words = []
        for name, value in self.flags.items():
            if name.startswith("-") and not name.startswith("--"):
                words += [name, value]
            elif not name.startswith("env:"):
                key = name.removeprefix("key:")
                words.append(f"{key}={value}" if key != name else f"--{name.lstrip('-')}={value}")
        return words

    @property
    def environment(self) -> dict[str, str]:
        flags = {name.removeprefix("env:"): value for name, value in self.flags.items() if name.startswith("env:")}
        return self.variables | flags | ({} if self.mesh is None else {VARIABLE: self.mesh})


def make_variations(
    vary: list[str], processes: list[int], per_process: tuple[str, ...] = (WINDOW, BATCH), meshes: Sequence[str] = ()
) -> list[Variation]:
    """Make every variation on every number of processes, with the same global batch: k is divided by N, or b where k cannot be.

    Args:
        vary: FLAG=VALUE,FLAG=VALUE for each variation.
        processes: numbers of processes.
        per_process: flags, the first divisible one of which is divided by N. A program without these flags is run as it is: its
            samples show its use of N.
        meshes: what processes are, as of `--mesh`: the flags are divided by those that have samples of their own.

    Raises:
        UsageError: a text is not FLAG=VALUE,..., or none of the flags can be divided by N.

    >>> [str(v) for v in make_variations(["per_device_train_batch_size=8,gradient_accumulation_steps=1"], [1, 2])]
    ['b 8, k 1, N 1', 'b 4, k 1, N 2']
    >>> [str(v) for v in make_variations(["batch=8"], [1], ("batch",), ["dp=2,tp=2"])]
    ['batch 8, N 1', 'batch 4, dp=2,tp=2']
    """
    axes = [read_mesh(mesh) for mesh in meshes]
    groups = [(number, number, "" if meshes else None) for number in processes]
    groups += [(count_data_parts(a), count_processes(a), mesh) for a, mesh in zip(axes, meshes, strict=True)]
    names = [_normalize_name(name) for name in per_process]
    problems, runs = [], []
    for text in vary:
        flags = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
        if len(flags) != len(text.split(",")):
            problems.append(f'--vary is {text!r}, not FLAG=VALUE,FLAG=VALUE: for example "{BATCH}=8,{WINDOW}=1"')
            continue
        for num_parts, num_processes, mesh in groups:
            divisible_names = sorted(
                (name for name in flags if _normalize_name(name) in names),
                key=lambda name: names.index(_normalize_name(name)),
            )
            numbers = {
                name: int(flags[name]) for name in divisible_names if flags[name].isdecimal() and len(flags[name]) < 10
            }
            divided_name = next((name for name, number in numbers.items() if not number % num_parts), None)
            if num_parts == 1 or not divisible_names:
                runs.append(Variation(flags, num_processes, mesh=mesh))
            elif divided_name is None:
                problems.append(
                    f"--vary {text!r} on {num_processes} processes: {' and '.join(divisible_names)} cannot be divided by "
                    f"{num_parts}: give values that can, or another flag by --per_process FLAG"
                )
            else:
                divided = {divided_name: str(int(flags[divided_name]) // num_parts)}
                runs.append(Variation(flags | divided, num_processes, mesh=mesh))
    if problems:
        raise UsageError(problems)
    return runs


def _normalize_name(name: str) -> str:
    """Return the bare name of a flag, without the signs of its form.

    >>> _normalize_name("--per-device-train-batch-size"), _normalize_name("-b"), _normalize_name("env:BATCH")
    ('per_device_train_batch_size', 'b', 'BATCH')
    """
    return name.removeprefix("key:").removeprefix("env:").lstrip("-").replace("-", "_")


def record(
    program: list[str],
    variation: Variation,
    num_steps: int,
    timeout: float,
    mode: str = "",
    announce: Callable[[str], None] = lambda text: None,
) -> list[Recording]:
    """Run a program once, and return the recording of each process.

    Args:
        program: file, and words of its command line.
        variation: flags and number of processes.
        num_steps: optimizer steps to be recorded; 0: all.
        timeout: in seconds.
        mode: empty: parameters are put back after each step; `train`: they move on; `kill`: they do, and the program is killed
            after `num_steps` steps, and nothing is recorded; `full`: what is computed in 16 bits is computed in float32;
            `plain`: each step is of one large batch that the audit makes. Several with + between.
        announce: is told where the processes are while they take long.

    Returns:
        A recording for each process; an empty list after a kill.

    Raises:
        UsageError: the program failed, or took no step.
        AuditError: the recorder failed.
    """
    from stepaudit.processes import (
        load,
        run,
    )  # here: they import torch, which help and mistakes in flags can do without
    from stepaudit.program import FAILURE_FILE

    title = f"{program[0]} ({variation})"
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        steps = f"{num_steps}:{mode}" if mode else str(num_steps)
        (output := Path(folder) / "output").mkdir()
        program, variation = _fill(program, variation, output)
        words = ["-m", "stepaudit.program", folder, steps, *program, *variation.argv]
        try:
            command, variables = [sys.executable, *words], variation.environment
            said = run(command, variation.num_processes, title, timeout, variables, Path(folder), announce)
        except UsageError as error:
            if (failure_file := Path(folder) / FAILURE_FILE).exists():
                raise AuditError(f"{title}: {failure_file.read_text()}") from error
            raise
        if mode == "kill" and not any(Path(folder).glob("*.npz")):
            return []
        (recordings,) = load(Path(folder), 1, variation.num_processes)
    if not recordings[0].steps:
        hint = ""
        if recordings[0].num_children:
            hint = (
                f"; it started {recordings[0].num_children} processes of its own, which are not recorded. Leave torchrun, "
                "accelerate launch or spawn out, and give --processes 2 to the audit"
            )
        said = f". It said at the end:\n  {said}" if said else ", and without a word"
        raise UsageError(f"{title} ended without a step of an optimizer of torch.optim{hint}{said}")
    if mode == "kill":
        raise UsageError(
            f"--stop is {num_steps}, and {title} takes {len(recordings[0].steps)} steps: one more than --stop is needed"
        )
    return recordings


def _fill(program: list[str], variation: Variation, folder: Path) -> tuple[list[str], Variation]:
    """Put a folder in the place of `FOLDER`, in the words of a program and in its flags."""
    flags = {name: value.replace(FOLDER, str(folder)) for name, value in variation.flags.items()}
    return [word.replace(FOLDER, str(folder)) for word in program], dataclasses.replace(variation, flags=flags)


def audit_script(argv: list[str], prog: str = "python -m stepaudit", run_program: RunProgram | None = None) -> int:
    """Run the command.

    Args:
        argv: flags, `--`, a program and the program's words.
        prog: name of the command in usage and messages.
        run_program: runs and records a program, as `record` does; None: `record`.

    Returns:
        The exit code: 0 exact, 1 not exact, 3 when the audit itself has failed.

    Raises:
        UsageError: bad flags, a program that fails.
    """
    try:
        return _audit_script(argv, prog, run_program or record)
    except UsageError:
        raise
    except Exception as error:  # of the audit, whatever it is: it must not look like a verdict
        if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
            raise UsageError(f"{prog} needs {error.name}, which is not installed: pip install {error.name}") from None
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        print(
            f"ERROR: the audit itself has failed, and says nothing of the program: {type(error).__name__}: {error} ({place}). "
            "Please report it, with the program",
            file=sys.stderr,
        )
        return FAILURE_CODE


def _make_parser(prog: str) -> _Parser:
    parser = _Parser(
        prog,
        f"{prog} {USAGE}",
        DESCRIPTION,
        EPILOG.format(prog=prog, batch=BATCH, window=WINDOW),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    layouts = parser.add_argument_group("Layouts, the first of which is the reference")
    layouts.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="FLAG=VALUE,...",
        help="flags of one run; once per layout. {folder} in flags and ARGS is an empty folder for its output. "
        "FLAG is given as --FLAG=VALUE, -F as -F VALUE, key:NAME as NAME=VALUE, "
        "env:NAME as an environment variable",
    )
    layouts.add_argument(
        "--processes",
        metavar="N,...",
        help="numbers of processes of each layout, with commas (default: 1, and those of a launcher in front of the program)",
    )
    layouts.add_argument(
        "--mesh",
        action="append",
        default=[],
        metavar="NAME=SIZE,...",
        help="what processes are that hold parts of one model: dp (data), tp (tensor), cp or sp (sequence), ep (experts), pp "
        "(pipeline). Neighbours differ in the last dimension. Give it once per mesh. Flags are divided by data and experts "
        "alone. A DeviceMesh of the program with names goes before it",
    )
    layouts.add_argument(
        "--per_process",
        action="append",
        default=[],
        metavar="FLAG",
        help=f"flag that is divided by the number of processes (default: {WINDOW}, or else {BATCH}); none: all flags are of "
        "all processes together",
    )
    runs = parser.add_argument_group("Runs")
    runs.add_argument(
        "--steps", type=int, default=8, metavar="INT", help="optimizer steps of each run; 0: all (default: 8)"
    )
    runs.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help=f"seconds that each run may take (default: {MAX_SECONDS}; after the first {SLOWER} times what the slowest has "
        f"taken, and at least {MIN_SECONDS})",
    )
    runs.add_argument(
        "--against",
        choices=["first", PLAIN],
        default="first",
        help="what layouts are compared with: the first one, or plain steps. Those are the first layout once more, each step "
        "of one large batch, made of what the program gives to the loss functions of torch.nn.functional. It finds what is "
        "wrong in the same way under every cut",
    )
    resuming = parser.add_argument_group("Resuming, in the place of comparing layouts")
    resuming.add_argument(
        "--resume",
        metavar="FLAG=VALUE,...",
        help="flags with which the program resumes. It is run under the first layout undisturbed, and once more, killed after "
        "--stop steps; then it is resumed under every layout",
    )
    resuming.add_argument("--stop", type=int, default=3, metavar="INT", help="steps before it is killed (default: 3)")
    verdict = parser.add_argument_group("Verdict")
    verdict.add_argument(
        "--tolerance",
        type=float,
        default=1e-5,
        metavar="FLOAT",
        help="relative error of a gradient that passes for rounding (default: 1e-5)",
    )
    verdict.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _audit_script(argv: list[str], prog: str, run_program: RunProgram) -> int:
    audit_words, words = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    flags = _make_parser(prog).parse(audit_words)
    if not words:
        raise UsageError(f"{prog}: the program is missing behind --: write -- PROGRAM.py ARGS; see {prog} --help")
    launched = read_launcher(words)
    program = launched.program
    if flags.processes is None:
        is_several = (launched.num_processes or 1) > 1 and not flags.mesh
        flags.processes = f"1,{launched.num_processes}" if is_several else "1"
    if not os.path.isfile(program[0]):
        raise UsageError(f"{prog}: {program[0]} is not a file")
    _check_flags(flags)
    if flags.per_process == ["none"]:
        per_process: tuple[str, ...] = ()
        flags.per_process.clear()
    else:
        per_process = tuple(flags.per_process) or (WINDOW, BATCH)
    varied_names = {_normalize_name(part.split("=")[0]) for text in flags.vary for part in text.split(",")}
    if unknown_names := [name for name in flags.per_process if _normalize_name(name) not in varied_names]:
        raise UsageError(
            f"--per_process {unknown_names[0]} is no flag of --vary: {nearest(_normalize_name(unknown_names[0]), varied_names)}"
        )
    runs = make_variations(flags.vary, [int(number) for number in flags.processes.split(",")], per_process, flags.mesh)
    reference_mode = _find_reference_mode(flags, runs)
    if len(runs) < 2 and not (runs and (flags.resume or reference_mode)):
        raise UsageError(f"{prog}: one run has nothing to be compared with: give another --vary, or --processes 1,2")
    if problem := _find_program_problem(program[0]):
        raise UsageError(f"{prog}: {program[0]} {problem}")
    announce = (lambda text: None) if flags.json else (lambda text: print(text, file=sys.stderr, flush=True))
    if launched.launcher:
        unread = f"; {', '.join(launched.unread_flags)} left out" if launched.unread_flags else ""
        announce(f"{launched.launcher}: the audit starts the processes itself, --processes {flags.processes}{unread}")
    runs = [dataclasses.replace(run, variables=launched.variables) for run in runs]
    run_program = _Patience(run_program, flags.timeout, announce)
    if flags.resume:
        if not any(FOLDER in word for word in [*program, flags.resume, *flags.vary]):
            raise UsageError(
                f"--resume is given, and no {FOLDER}. Write it where the program takes the folder of its checkpoints, for "
                f"example --output_dir {FOLDER}, so that each run has one of its own"
            )
        (resume,) = make_variations([flags.resume], [1])
        labels, comparisons = compare_resumed_runs(
            program,
            runs,
            resume,
            flags.stop,
            flags.steps,
            flags.tolerance,
            run_program,
            announce,
        )
        reference_findings, failures = [], []
    else:
        labels = [f"{runs[0]}, {PLAIN}"] * bool(reference_mode) + [str(variation) for variation in runs]
        reference_findings, results = compare_runs(
            program, runs, flags.steps, flags.tolerance, run_program, announce, reference_mode
        )
        failures = [result for result in results if isinstance(result, UsageError)]
        labels = [
            labels[0],
            *(label for label, r in zip(labels[1:], results, strict=True) if isinstance(r, Comparison)),
        ]
        comparisons = [result for result in results if isinstance(result, Comparison)]
    is_right = all(comparison.is_exact for comparison in comparisons) and all(
        finding.is_harmless for finding in reference_findings
    )
    is_exact = is_right and not failures
    if flags.json:
        rows = [
            {"layout": label}
            | _to_json(dataclasses.asdict(comparison))
            | {
                "findings": [_finding_to_json(finding) for finding in comparison.findings],
                "is_exact": comparison.is_exact,
            }
            for label, comparison in zip(labels[1:], comparisons, strict=True)
        ]
        answer = {"is_exact": is_exact, "tolerance": flags.tolerance, "reference": labels[0]}
        print(
            json.dumps(
                answer
                | {"findings": [_finding_to_json(finding) for finding in reference_findings], "comparisons": rows}
            )
        )
    else:
        lines = [table(labels, reference_findings, comparisons)]
        verdict = "exact" if is_exact else "exact, but for what failed" if is_right else "NOT exact"
        lines.append(f"{verdict} (tolerance {flags.tolerance:g}{_list_uncompared(comparisons)})")
        if not is_right:
            findings = [finding for comparison in comparisons for finding in comparison.findings]
            lines += _read_lines(program[0], {finding.cause for finding in [*reference_findings, *findings]})
        text = "\n".join(lines)
        print(fold_lines(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text)
    if flags.steps and any(len(comparison.errors) >= flags.steps for comparison in comparisons):
        announce(f"the first {flags.steps} steps were compared, as --steps says; --steps 0 compares all")
    if failures:  # what was compared is said before
        raise UsageError(problem for failure in failures for problem in failure.problems)
    return 0 if is_exact else 1


def _read_lines(program: str, causes: set[str]) -> Iterator[str]:
    """Say what the lines of the program show beside these causes: one fault may hide another until it is mended."""
    try:
        found = lint_file(Path(program), "", "")
    except UsageError:  # a file that is too large for the lint
        return
    faults = [fault for fault in found if not fault.is_harmless and not causes & {*fault.rule.causes}]
    if faults:
        yield "The lines of the program show more, which was not measured by itself (lint):"
    for fault in faults:
        yield f"  {fault.path}:{fault.line}: {fault.code} {fault.message}"
        yield f"    do: {fault.rule.cure}"


def _check_flags(flags: argparse.Namespace) -> None:
    """Check numbers, and meshes, of the flags."""
    if not all(number.isdecimal() and 0 < int(number[:9]) <= MAX_PROCESSES for number in flags.processes.split(",")):
        rule = f"not numbers from 1 to {MAX_PROCESSES} with commas: for example 1,2"
        raise UsageError(f"--processes is {flags.processes[:60]}, {rule}")
    violations = {
        "steps": flags.steps < 0,
        "tolerance": not 0 <= flags.tolerance < 1,
        "timeout": flags.timeout is not None and not flags.timeout > 0,
    }
    violations["stop"] = flags.stop < 1
    rules = {"steps": "0 (all) or more", "tolerance": "0 or more and below 1", "timeout": "more than 0 seconds"}
    rules["stop"] = "1 step or more"
    if any(violations.values()):
        raise UsageError(
            f"--{n} is {getattr(flags, n)}, must be {rules[n]}" for n, is_wrong in violations.items() if is_wrong
        )
    for mesh in flags.mesh:
        if not 1 < (number := count_processes(read_mesh(mesh))) <= MAX_PROCESSES:
            raise UsageError(f"--mesh {mesh[:60]} has {number} processes, must have 2 to {MAX_PROCESSES}")
    if flags.mesh and flags.resume:
        raise UsageError(
            "--mesh compares parts of a model with the whole, --resume a run with itself: leave one of them out"
        )


def _find_reference_mode(flags: argparse.Namespace, runs: list[Variation]) -> str:
    """Find how the reference is recorded, as of `record`: empty for the first layout as it is."""
    if flags.against != PLAIN:
        return ""
    if flags.resume or (runs and runs[0].num_processes > 1):
        raise UsageError(
            "--against plain makes the step of one process: leave --resume out, and let --processes begin with 1"
        )
    return PLAIN


def compare_runs(
    program: list[str],
    runs: list[Variation],
    num_steps: int,
    tolerance: float,
    record_run: Callable[[list[str], Variation, int, str], list[Recording]],
    announce: Callable[[str], None] = lambda text: None,
    reference_mode: str = "",
) -> tuple[list[Finding], list[Comparison | UsageError]]:
    """Run a program under each layout, and compare it with the first one; in float32, too, where it computes in 16 bits.

    Args:
        program: file, and words of its command line.
        runs: layouts, the reference first.
        num_steps: optimizer steps that are compared; 0: all.
        tolerance: relative error of a gradient in float32 that is rounding.
        record_run: (program, variation, number of steps, mode) -> recordings, as `record`.
        announce: is told what runs.
        reference_mode: of the reference, as of `record`; where there is one, the first layout is compared with it, too.

    Returns:
        Faults of the reference by itself; for each further layout a comparison, or why there is none.

    Raises:
        UsageError: the reference failed, or all others.
    """
    if reference_mode:
        runs = [runs[0], *runs]
    recordings: list[list[Recording]] = []
    failures: dict[int, UsageError] = {}

    def run(number: int, mode: str = "") -> list[Recording]:
        words = [word for word in (reference_mode if not number else "", mode) if word]
        again = " again" if mode else f" {number + 1} of {len(runs)}"
        if not mode and (longest := getattr(record_run, "longest", None)):
            again += f", about {longest * (len(runs) - number):.0f} s left"
        announce(", ".join([f"run{again}: {program[0]}: {runs[number]}", *(REASONS[word] for word in words)]))
        return record_run(program, runs[number], num_steps, "+".join(words))

    for number in range(len(runs)):
        try:
            recordings.append(run(number))
        except UsageError as error:
            recordings.append([])
            failures[number] = error
            if not recordings[0] or len(failures) == len(runs) - 1:
                raise

    record_again = functools.cache(run)

    def settle_run(number: int) -> Comparison:
        return judge(
            recordings[0],
            recordings[number],
            tolerance,
            lambda is_reference, mode: record_again(0 if is_reference else number, mode),
        )

    for number in range(1, len(runs)):
        first, other = runs[0], runs[number]
        is_alike = (first.num_processes, first.mesh) == (other.num_processes, other.mesh) and number not in failures
        if is_alike and (why := explain_unvaried(first.flags, recordings[0], other.flags, recordings[number])):
            failures[number] = UsageError(why)
    if len(runs) > 1 and len(failures) == len(runs) - 1:
        raise UsageError(problem for failure in failures.values() for problem in failure.problems)
    settled = [failures[number] if number in failures else settle_run(number) for number in range(1, len(runs))]
    for place, (found, other, recording) in enumerate(zip(settled, runs[1:], recordings[1:], strict=True)):
        is_plain = isinstance(found, Comparison) and found.is_exact and not other.mesh
        if is_plain and (why := explain_copies(other, runs[0].num_processes, recording)):
            settled[place] = UsageError(why)
    problems = [problem for found in settled if isinstance(found, UsageError) for problem in found.problems]
    if settled and not any(isinstance(found, Comparison) for found in settled):
        raise UsageError(problems)
    return find_faults(recordings[0]), settled


def compare_resumed_runs(
    program: list[str],
    runs: list[Variation],
    resume: Variation,
    stop: int,
    num_steps: int,
    tolerance: float,
    record_run: Callable[[list[str], Variation, int, str], list[Recording]],
    announce: Callable[[str], None] = lambda text: None,
) -> tuple[list[str], list[Comparison]]:
    """Kill and resume a program, and compare the steps after it with those of an undisturbed run.

    Args:
        program: file, and words of its command line, with `FOLDER` in the place of its output's folder.
        runs: layouts: the first one is undisturbed and killed, under each the program is resumed.
        resume: flags with which it is resumed.
        stop: steps before it is killed.
        num_steps: steps after it that are compared; 0: all.
        tolerance: relative error of a gradient that is rounding.
        record_run: (program, variation, number of steps, mode) -> recordings, as `record`.
        announce: is told what runs.

    Returns:
        A label for the undisturbed run and for each layout under which the program was resumed; a comparison for each layout.
    """

    def run(variation: Variation, folder: Path, steps: int, mode: str) -> list[Recording]:
        return record_run(*_fill(program, variation, folder), steps, mode)

    labels, comparisons = [f"{runs[0]}, undisturbed"], []
    with tempfile.TemporaryDirectory(prefix="audit-") as home:
        folders = [Path(home) / name for name in ("undisturbed", "killed", *map(str, range(len(runs))))]
        for folder in folders[:2]:
            folder.mkdir()
        announce(f"{program[0]}: {labels[0]}")
        undisturbed = run(runs[0], folders[0], num_steps and stop + num_steps, "train")
        announce(f"{program[0]}: {runs[0]}, killed after step {stop}")
        run(runs[0], folders[1], stop, "kill")
        for variation, folder in zip(runs, folders[2:], strict=True):
            labels.append(f"{variation}, resumed")
            announce(f"{program[0]}: {labels[-1]}")
            shutil.copytree(folders[1], folder)
            resumed = dataclasses.replace(variation, flags=variation.flags | resume.flags)
            recordings = run(resumed, folder, num_steps, "train")
            comparisons.append(compare_resumed(undisturbed, recordings, stop, num_steps, tolerance))
    return labels, comparisons


def _list_uncompared(comparisons: list[Comparison]) -> str:
    """Say what was not compared, in front of a semicolon each; empty if all was.

    >>> _list_uncompared([Comparison([0.0, float("nan")], [], [], [], [], "", 0.0, [], num_unfinished=3)])
    '; 1 step with other samples is not compared; 3 micro-batches are in no step'
    >>> _list_uncompared([Comparison([float("nan")], [], [], [], [], "", 0.0, [])])
    '; 1 step with other samples is not compared, so that no other fault can be seen yet: mend this one, and audit again'
    """
    others = max((sum(math.isnan(error) for error in comparison.errors) for comparison in comparisons), default=0)
    unfinished = max((comparison.num_unfinished for comparison in comparisons), default=0)
    texts = [f"; {others} step{'s' * (others > 1)} with other samples {'are' if others > 1 else 'is'} not compared"] * (
        others > 0
    )
    if any(comparison.errors and all(map(math.isnan, comparison.errors)) for comparison in comparisons):
        texts.append(", so that no other fault can be seen yet: mend this one, and audit again")
    texts += [f"; {unfinished} micro-batch{'es are' if unfinished > 1 else ' is'} in no step"] * (unfinished > 0)
    return "".join(texts)


class _Patience:
    """Runs and records programs, each within a limit that follows from how long the others took.

    Args:
        run_program: as `record`.
        timeout: of each run in seconds; None: see `MAX_SECONDS`.
        announce: is told where the processes are while they take long.
        clock: returns seconds.
    """

    def __init__(
        self,
        run_program: RunProgram,
        timeout: float | None,
        announce: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run_program, self.timeout, self.announce, self.clock = run_program, timeout, announce, clock
        self.longest: float | None = None

    @property
    def limit(self) -> float:
        """Seconds that the next run may take."""
        if self.timeout is not None:
            return self.timeout
        return MAX_SECONDS if self.longest is None else min(MAX_SECONDS, max(MIN_SECONDS, SLOWER * self.longest))

    def __call__(self, program: list[str], variation: Variation, num_steps: int, mode: str) -> list[Recording]:
        start = self.clock()
        recordings = self.run_program(program, variation, num_steps, self.limit, mode, self.announce)
        self.longest = max(self.longest or 0.0, self.clock() - start)
        return recordings


def _find_program_problem(name: str) -> str:
    """Say why Python cannot run a file; empty if it can."""
    if name.endswith(".ipynb"):
        return (
            "is a notebook: write its cells into a program (jupyter nbconvert --to script), which reads what --vary sets, "
            "for example an environment variable, env:BATCH"
        )
    try:
        if os.path.getsize(name) > MAX_PROGRAM_BYTES:
            return f"is no Python program: it has more than {MAX_PROGRAM_BYTES:,} bytes"
        compile(Path(name).read_bytes(), name, "exec")
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except SyntaxError as error:
        return f"is no Python program: line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"is no Python program: {error}"
    return ""


def _to_json(row: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN, which JSON does not know, by null: these steps are not compared."""
    numbers = {name: row[name] for name in ("errors", "ratios", "cosines", "loss_errors", "update_errors")}
    return row | {name: [x if math.isfinite(x) else None for x in values] for name, values in numbers.items()}


def _finding_to_json(finding: Finding) -> dict[str, str]:
    return dataclasses.asdict(finding) | {"remedy": finding.remedy}
