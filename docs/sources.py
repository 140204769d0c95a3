"""Makes the tables of docs/sources.md from docs/sources.yaml: what the texts name, its state here, and the command.

docs/reference.py answers `make docs`.
"""

import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import yaml

LIST = Path(__file__).resolve().parent / "sources.yaml"
STATES = {"works": "works", "part": "in part", "study": "study", "absent": "not here"}
"""State in the list -> words on the page."""
WIDTH = 128


class Row(NamedTuple):
    """Holds what a text names.

    Attributes:
        texts: keys of the texts that name it, the first one shows it.
        state: a key of STATES.
        command: a key of the list's commands; None: there is none.
        what: the system, method, number or procedure.
        how: the way it works, or the reason why not.
    """

    texts: tuple[str, ...]
    state: str
    command: str | None
    what: str
    how: str


def read() -> dict[str, Any]:
    """Read the list, its rows as `Row`."""
    values = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    rows = [Row(tuple(texts.split()), *rest) for texts, *rest in values["rows"]]
    return values | {"rows": rows}


def count_states() -> str:
    """Write how many rows are in each state."""
    rows = read()["rows"]
    counts = [f"{sum(row.state == state for row in rows)} {words}" for state, words in STATES.items()]
    return f"{len(rows)} rows: {', '.join(counts)}.\n"


def rows() -> str:
    """Write a table for each text: what it names first, the state, the way or the reason, and the number of the command."""
    values = read()
    numbers = {key: number for number, key in enumerate(values["commands"], 1)}
    lines = []
    for key, title in values["texts"].items():
        lines += ["", *textwrap.wrap(f"**{title}**", WIDTH, break_on_hyphens=False, break_long_words=False), ""]
        lines += ["| it names | here | how, or why not | command |", "|---|---|---|---|"]
        for row in values["rows"]:
            if row.texts[0] == key:
                command = f"[{numbers[row.command]}](#commands)" if row.command else ""
                lines.append(f"| {row.what} | {STATES[row.state]} | {row.how} | {command} |")
    return "\n".join(lines[1:])


def commands() -> str:
    """Write the commands, each below its number."""
    lines = ["```"]
    for number, command in enumerate(read()["commands"].values(), 1):
        wrapped = textwrap.wrap(command, WIDTH - 8, break_on_hyphens=False, break_long_words=False)
        lines += [f"# {number}", " \\\n  ".join(wrapped)]
    return "\n".join([*lines, "```"])
