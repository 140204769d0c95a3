"""Writes the generated parts of recipe-fields.md and python-api.md, from the fields and the docstrings: `make docs`."""

import dataclasses
import importlib
import inspect
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

import samestep
import stepaudit
from samestep.recipe.recipe import TASKS, Recipe

DOCS = Path(__file__).resolve().parent
TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
BEGIN, END = "<!-- {}: begin -->\n", "<!-- {}: end -->\n"


def name_type(hint: Any) -> str:
    """Name the type of a field in words."""
    if typing.get_origin(hint) is types.UnionType:
        return " or ".join(map(name_type, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"list of {name_type(typing.get_args(hint)[0])}s"
    return TYPES[hint]


def first_sentence(item: Any) -> str:
    """Return the first sentence of a docstring, on one line."""
    text = re.split(r"(?<=\.)\s", " ".join(inspect.getdoc(item).split("\n\n")[0].split()))[0]
    return f"{text.rstrip('.:')}."


def fields() -> str:
    """Write a table for each class of recipes, the most general first: what its tasks share, then what each adds."""
    classes = dict.fromkeys(cls for task in TASKS.values() for cls in reversed(task.__mro__) if issubclass(cls, Recipe))
    lines = []
    for cls in sorted(classes, key=lambda cls: len(cls.__mro__)):
        tasks = [name for name, task in TASKS.items() if issubclass(task, cls)]
        lines += [
            f"## {cls.__name__}",
            "",
            f"{first_sentence(cls)} Tasks: {', '.join(f'`{task}`' for task in tasks)}.",
            "",
        ]
        lines += ["| field | type | rule | meaning |", "|---|---|---|---|"]
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in inspect.get_annotations(cls):
                check, mark = field.metadata["check"], "" if field.metadata["decides"] else " *"
                rule = re.sub("^must (be )?", "", check.rule) if check else ""
                cells = (f"`{field.name}`{mark}", name_type(hints[field.name]), rule, field.metadata["help"])
                lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def names() -> str:
    """List the public names of both packages, each with its first sentence."""
    lines = []
    for package in (samestep, stepaudit):
        lines += [f"## {package.__name__}", "", "| name | |", "|---|---|"]
        for name in sorted(package.__all__, key=str.lower):
            item = getattr(importlib.import_module(package.__name__), name)
            text = first_sentence(item) if callable(item) else f"Names: {', '.join(item)}."
            lines.append(f"| `{name}` | {text.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


PARTS = {"recipe-fields.md": ("fields", fields), "python-api.md": ("names", names)}


def write(page: str) -> str:
    """Return a page with its generated part written anew."""
    name, make = PARTS[page]
    begin, end = BEGIN.format(name), END.format(name)
    head, rest = (DOCS / page).read_text(encoding="utf-8").split(begin)
    return head + begin + "\n" + make() + end + rest.split(end)[1]


if __name__ == "__main__":
    for page in PARTS:
        (DOCS / page).write_text(write(page), encoding="utf-8")
        print(f"wrote docs/{page}", file=sys.stderr)
