"""Reads a launcher's command in front of a program: the audit starts the processes itself, with the environment of torchrun."""

import dataclasses
import os
import re
from pathlib import Path

from stepaudit.errors import UsageError

# First words of a command -> what they are called.
LAUNCHERS = {
    ("accelerate", "launch"): "accelerate launch",
    ("torchrun",): "torchrun",
    ("python", "-m", "torch.distributed.run"): "torch.distributed.run",
    ("python", "-m", "torch.distributed.launch"): "torch.distributed.launch",
    ("python", "-m", "accelerate.commands.launch"): "accelerate launch",
    ("deepspeed",): "deepspeed",
    ("python",): "python",
}
NUMBER_FLAGS = ("nproc_per_node", "num_processes", "num_gpus")
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Environment of a single process, which DeepSpeed does not begin without. A port of 0 is any that is free."""
VARIABLES = {"mixed_precision": "ACCELERATE_MIXED_PRECISION"}  # flag of accelerate launch -> its environment variable
CONFIG_FLAG = "config_file"


@dataclasses.dataclass(frozen=True)
class Launched:
    """Meaning of a launcher's command.

    Attributes:
        program: file, and words of its command line.
        num_processes: that it would start; None if it does not say.
        variables: of the environment, which it would set.
        launcher: its name; empty without a launcher.
        unread_flags: flags of the launcher that the audit leaves out.
    """

    program: list[str]
    num_processes: int | None = None
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    launcher: str = ""
    unread_flags: list[str] = dataclasses.field(default_factory=list)


def read_launcher(words: list[str]) -> Launched:
    """Read the program, and what a launcher in front of it says of the processes.

    Args:
        words: PROGRAM.py ARGS, or LAUNCHER FLAGS PROGRAM.py ARGS.

    Raises:
        UsageError: a launcher without a program, or with a configuration file that cannot be read.

    >>> read_launcher(["train.py", "--lr", "1"]).program
    ['train.py', '--lr', '1']
    """
    first = re.sub(r"^python[\d.]*$", "python", os.path.basename(words[0])) if words else ""
    named = [first, *words[1:]]
    head = next((head for head in LAUNCHERS if tuple(named[: len(head)]) == head), None)
    if head is None:
        return Launched(words)
    launcher, rest = LAUNCHERS[head], words[len(head) :]
    place = next((number for number, word in enumerate(rest) if word.endswith(".py") and os.path.isfile(word)), None)
    if place is None:
        raise UsageError(f"{launcher} is given without a program that is a file: write {launcher} PROGRAM.py ARGS")
    flags = _read_flags(rest[:place])
    settings = _read_config(flags[CONFIG_FLAG]) if flags.get(CONFIG_FLAG) else {}
    settings |= flags
    numbers = [settings[name] for name in NUMBER_FLAGS if settings.get(name, "").isdecimal()]
    if numbers and int(numbers[0]) < 1:
        name = next(name for name in NUMBER_FLAGS if settings.get(name) == numbers[0])
        raise UsageError(f"--{name} of {launcher} is {numbers[0]}, must be 1 or more")
    own_variables = ALONE if launcher == "deepspeed" else {}
    known = {*NUMBER_FLAGS, *VARIABLES, CONFIG_FLAG}
    return Launched(
        program=rest[place:],
        num_processes=int(numbers[0]) if numbers else None,
        variables=own_variables | {v: settings[name] for name, v in VARIABLES.items() if settings.get(name)},
        launcher=launcher,
        unread_flags=[word for word in rest[:place] if word.startswith("-") and _normalize(word)[0] not in known],
    )


def _read_flags(words: list[str]) -> dict[str, str]:
    """Read --NAME VALUE and --NAME=VALUE; a flag in front of another flag has an empty value."""
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("-"):
            name, value = _normalize(word)
            flags[name] = value
        elif name:
            flags[name] = flags[name] or word
    return flags


def _normalize(word: str) -> tuple[str, str]:
    """Split --NAME=VALUE into the name, with underscores, and the value, empty if there is none."""
    name, _, value = word.lstrip("-").partition("=")
    return name.replace("-", "_"), value


def _read_config(path: str) -> dict[str, str]:
    """Read the settings NAME: VALUE of the outermost level of Accelerate's configuration file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise UsageError(f"--{CONFIG_FLAG} {path} cannot be read: {reason}") from None
    return {name: value.strip("'\"") for name, value in re.findall(r"^(\w+): *(\S+) *$", text, re.MULTILINE)}
