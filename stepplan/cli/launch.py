"""Writes what an engine starts a recipe with, and hands it over: `samestep launch`."""

import dataclasses
import itertools
import re
import shlex
import subprocess
import sys

from samestep.cli.flags import read_recipe, write_file
from samestep.errors import UsageError
from samestep.recipe import run_settings
from samestep.recipe.settings import program_name, setting
from stepplan import engines
from stepplan.cli.cut import CutSettings
from stepplan.hardware import NETWORK, Hardware, parse
from stepplan.placement import Placement, TooLargeError, place, try_placement
from stepplan.rows import count_rows
from stepplan.workload import format_flags, from_command


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSettings(CutSettings):
    """Choose what starts it where"""

    on: str = setting(f"ENGINE:HARDWARE; engines: {', '.join(engines.ENGINES)}; hardware as of plan: slurm:2x8xa100-80")
    write: str | None = setting("file to write; none: it is printed", default=None)
    submit: bool = setting("hand the written file to the engine", default=False)
    image: str | None = setting("container image, for kubeflow", default=None)
    network: str | None = setting(NETWORK, default=None)


def launch(argv: list[str]) -> None:
    """Write what an engine starts a recipe with; print it, or write it to a file, and hand it over where that is asked for."""
    words = list(itertools.takewhile(lambda word: word != "--", argv))
    run_words = argv[len(words) + 1 :]
    try:
        recipe, settings, data, changes = read_recipe("launch", words, LaunchSettings)
    except UsageError as error:
        raise UsageError([_explain(problem) for problem in error.problems]) from None
    engine, hardware_name = engines.parse_target(settings.on)
    if settings.submit and settings.write is None:
        raise UsageError("--submit needs --write FILE: the file that is handed over")
    rows = count_rows(recipe) if data.num_train_samples is None else None
    count = rows.num_samples if rows else data.num_train_samples
    workload = from_command(recipe, source=words[0], changes=changes, num_train_samples=count)
    try:
        placement = place(workload, parse(hardware_name, settings.network), **settings.options)
    except TooLargeError as error:
        remedy = [program_name(), "plan", words[0], *format_flags(changes), "--on", hardware_name]
        raise UsageError(f"{error}: {shlex.join(remedy)} says what to change") from None
    # Mistakes are found here, not in the queue
    run_settings.parse([*workload.script_words, *run_words], recipe.task, "", trains_here=False)
    file = settings.write or f"{recipe.name}{engines.ENGINES[engine].suffix}"
    seconds = placement.seconds_to_end
    hours = "" if seconds is None else f", {seconds / 3600:.3g} hours in all, predicted"
    title = [f"{workload.name} on {placement.hardware}: {placement.time.total:.3g} s per step{hours}"]
    title += _find_remarks(placement, asks_for_time=engine == "slurm")
    origin = f"{program_name()} {shlex.join(['launch', *(word for word in argv if word != '--submit')])}"
    job = engines.write_job(engine, placement, run_words, title=title, origin=origin, file=file, image=settings.image)
    for remark in title[1:]:
        print(f"{file}: {remark}", file=sys.stderr)
    if settings.write is None:
        print(job, end="")
        return
    write_file("write", settings.write, job)
    command = [*engines.ENGINES[engine].submit, settings.write]
    if not settings.submit:
        is_for_each = engine == "torchrun"  # on one machine the store, on each other one an agent
        how = "Its first lines say how to start it" if is_for_each else f"Hand it over: {shlex.join(command)}"
        print(f"{settings.write} is written. {how}")
        return
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        raise UsageError(
            f"submit needs {command[0]}, which is not installed here: run {shlex.join(command)} where it is"
        ) from None
    except subprocess.CalledProcessError as error:
        raise UsageError(
            f"{shlex.join(command)} ended with exit code {error.returncode}: see its message above"
        ) from None


def _explain(problem: str) -> str:
    """Say of an unknown flag that is one of the script's where those stand."""
    match = re.match(r"unknown flag --(\w+)", problem)
    if match is None or match[1] not in {field.name for field in dataclasses.fields(run_settings.RunSettings)}:
        return problem
    return f"--{match[1]} is a flag of the script: such flags come last, behind -- (... -- --{match[1]} VALUE)"


def _find_remarks(placement: Placement, *, asks_for_time: bool) -> list[str]:
    """Find what to know before machines are waited for: what the device needs, that one of them is
    faster than all, that the job asks for no time."""
    hardware, remarks = placement.hardware, list(placement.hardware.device.notes)
    single = Hardware(hardware.device, hardware.num_devices)
    alone = try_placement(lambda: placement.workload, single) if hardware.num_nodes > 1 else None
    if alone is not None and alone.time.total <= placement.time.total:
        remarks.append(
            f"one machine is faster: {single} takes {alone.time.total:.3g} s per step, predicted, and {hardware} "
            f"{placement.time.total:.3g} s, over a network of {hardware.network_gb_per_s:g} GB/s (--network says another)"
        )
    if asks_for_time and placement.seconds_to_end is None:
        remarks.append(
            "no --time is asked for, as nobody knows the number of samples: add --num_train_samples N, or sbatch --time"
        )
    return remarks
