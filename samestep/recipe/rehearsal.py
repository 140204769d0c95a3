"""Rehearses a recipe with a small model: data, tokenizer, schedule and steps, a checkpoint, and going on from it.

Each process of the launch runs the program twice, in processes of their own that inherit its environment: one session takes the
first steps and saves, the next one resumes as after an interruption, and ends the training. torch is not imported here.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.recipe.reading import read_json
from samestep.recipe.recipe import Recipe
from samestep.recipe.settings import drop_flags

NUM_STEPS = 3
"""Steps of a rehearsal: two, then one after resuming."""
START = "start"
"""Folder of the small model that a rehearsal starts from, if it is of the kind that the recipe fine-tunes."""
SESSION = "SAMESTEP_REHEARSAL"
"""Variable of the environment that a session of a rehearsal has."""
SESSIONS = (
    f"--overwrite_output_dir true --resume_from_checkpoint none --stop_after_step {NUM_STEPS - 1}",
    "--overwrite_output_dir false --resume_from_checkpoint latest --stop_after_step none",
)
EVERY_SESSION = (
    "--speed safe --report_to none --push_to_hub false --fault_tolerance none --min_replicas 1 --replica_timeout 60"
)


def rehearse(argv: Sequence[str], recipe: Recipe, small: Recipe, output_dir: str | None) -> int:
    """Run the program with flags `argv` in two sessions. Called by every process of the launch.

    Args:
        argv: flags of the program, --rehearse among them.
        recipe: the recipe; `small`: the same with the model of a rehearsal.
        output_dir: folder of the real run, beside which the rehearsal's folder OUTPUT_DIR-rehearsal is left; None: a temporary
            folder, deleted at the end.

    Returns:
        Exit code of the session that failed; 0: none did, and the last line names the command of the real run.

    Raises:
        UsageError: processes on several machines, without output_dir.
    """
    start = time.monotonic()
    with _open_folder(output_dir) as folder:
        for number, flags in enumerate(SESSIONS):
            more = [*EVERY_SESSION.split(), *flags.split(), "--output_dir", folder]
            if code := _run_session([sys.executable, sys.argv[0], *argv, *more], number):
                return code
        place = "" if output_dir is None else f" in {folder}"
        model = describe_model(Path(folder), recipe, small)
    if os.environ.get("RANK", "0") == "0":
        print(
            f"rehearsed: data, tokenizer, schedule, {NUM_STEPS} steps of {small.global_batch_size} samples, a checkpoint and "
            f"going on from it, in {time.monotonic() - start:.0f} s{place}, with {model}. "
            f"The real run is: {shlex.join(drop_flags(find_command(argv), ['rehearse']))}",
            flush=True,
        )
    return 0


def describe_model(folder: Path, recipe: Recipe, small: Recipe) -> str:
    """Say what model a rehearsal in a folder trained: a small one of the real one's kind, or one that `small` describes."""
    if not (folder / START / "config.json").exists():
        return describe_changes(recipe, small)
    name: Any = getattr(recipe, "model_name_or_path", None)
    config = read_json(folder / START / "config.json", "config.json")
    return f"a small {config.get('model_type')} of random weights in place of {name}: the same kinds of layers, few and narrow"


def describe_changes(recipe: Recipe, small: Recipe) -> str:
    """Name the fields in which a rehearsal differs, each with its value in the recipe."""
    changes = {name: value for name, value in vars(small).items() if value != getattr(recipe, name)}
    texts = [f"{name} {value} (not {getattr(recipe, name)})" for name, value in changes.items()]
    return ", ".join(texts) or "the model as it is"


@contextlib.contextmanager
def _open_folder(output_dir: str | None) -> Iterator[str]:
    if output_dir is not None:
        yield f"{output_dir.rstrip('/')}-rehearsal"
        return
    world, local = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world != local:
        raise UsageError(
            f"rehearse is set, and {world} processes on several machines need one folder: give --output_dir, in a place that "
            "all of them see"
        )
    is_first = os.environ.get("RANK", "0") == "0"
    # All processes of a launch have the same parent; a single one may share its parent with another rehearsal
    owner = f"{os.getppid()}" if world != "1" else f"{os.getpid()}"
    folder = Path(tempfile.gettempdir(), f"rehearsal-{owner}")
    if is_first:
        folder.mkdir(mode=0o700)  # an error if it is there: nobody else's folder is used
    try:
        yield str(folder)
    finally:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)


def _run_session(command: list[str], number: int) -> int:
    """Run a session to its end, and return its exit code; requests to stop are passed on."""
    environment = os.environ | {SESSION: str(number)}
    if "RANK" in environment:  # as after a restart: the processes of this session meet under keys of their own
        environment["TORCHELASTIC_RESTART_COUNT"] = str(number)
    process = subprocess.Popen(command, env=environment)
    handlers = {
        signal.SIGINT: lambda *_: None,  # a terminal sends it to the session, too
        signal.SIGTERM: lambda *_: process.terminate(),
    }
    previous = {name: signal.signal(name, handler) for name, handler in handlers.items()}
    try:
        code = process.wait()
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)
    return code if code >= 0 else 128 - code


def find_command(argv: Sequence[str]) -> list[str]:
    """Find the command that was typed: that of the launcher, if this process's parent is one, else the program's."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8").split("\0")[:-1]
    except (OSError, ValueError):
        words = []
    if sys.argv[0] in words and words[-len(argv) :] == list(argv):
        is_console = len(words) > 1 and Path(words[1]).name in ("accelerate", "torchrun")
        return [Path(words[1]).name, *words[2:]] if is_console else words
    return ["python", sys.argv[0], *argv]
