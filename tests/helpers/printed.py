"""Finds every command that this repository prints: in documents, launch files, recipes, scripts, `make` and help."""

import ast
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common import ROOT

from samestep.cli import commands
from stepaudit import script as audit

COMMANDS = {"", "sh", "bash", "console"}
"""Languages of fenced blocks that hold commands: a block without a language does."""
OTHER = {"python", "diff", "text", "yaml", "json"}
PROGRAMS = r"make|hf|python|accelerate|pip|git|samestep|accelerate-recipes|tensorboard|scripts/\w+\.py"
INLINE = re.compile(rf"(?<!`)`((?:{PROGRAMS}) [^`]+)`(?!`)")


class Printed(NamedTuple):
    """Holds a command, and where it is printed first.

    Attributes:
        words: as a shell splits them.
        text: as it is printed, its lines joined.
        origin: file and line.
        is_whole: False for a command in a sentence, which may leave words out.
    """

    words: tuple[str, ...]
    text: str
    origin: str
    is_whole: bool = True

    def __str__(self) -> str:
        return f"{self.origin}-{self.words[0]}"


def documents() -> list[Path]:
    """List the Markdown files of the repository; llms.txt is one."""
    return [
        *ROOT.glob("*.md"),
        ROOT / "llms.txt",
        *(file for name in ("docs", "studies", "benchmarks") for file in (ROOT / name).rglob("*.md")),
    ]


def split(text: str, origin: str, *, is_whole: bool = True) -> Iterator[Printed]:
    """Split a block into its commands: comments and blank lines are none, a backslash joins lines."""
    for line in text.replace("\\\n", "").splitlines():
        line = line.strip().removeprefix("$ ")
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ValueError(
                f"{origin}: {line!r} is no command ({error}): give its block a language, such as text"
            ) from None
        if words:
            yield Printed(tuple(words), line, origin, is_whole)


def in_markdown(path: Path) -> Iterator[Printed]:
    """Find the commands of a document: in fenced blocks, and in sentences between backquotes.

    Raises:
        ValueError: a block of a language that is neither in COMMANDS nor in OTHER.
    """
    text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
    fence = re.compile(r"^ *```(.*)\n((?:.*\n)*?) *```$", re.MULTILINE)
    for match in fence.finditer(text):
        origin, language = f"{name}:{text[: match.start()].count(chr(10)) + 1}", match[1].strip()
        if language not in COMMANDS | OTHER:
            raise ValueError(f"{origin}: a block of {language}: commands are {COMMANDS}, all else {OTHER}")
        if language in COMMANDS:
            yield from split(match[2], origin)
    for match in INLINE.finditer(fence.sub("", text)):
        yield from split(match[1].replace("\n", " "), f"{name}:inline", is_whole=False)


def in_comments(path: Path) -> Iterator[Printed]:
    """Find the commands at the head of a launch file or a recipe: comments that are indented by three spaces."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    text = "\n".join(line[4:] for line in lines if line.startswith("#   "))
    yield from split(text, str(path.relative_to(ROOT)))


def in_script(path: Path) -> Iterator[Printed]:
    """Find the commands in a script's docstring: lines that are indented."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    text = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    yield from split(text, str(path.relative_to(ROOT)))


def in_make() -> Iterator[Printed]:
    """Find the targets and benchmarks that `make help` lists, and what those run that train; their shell's $(...) left out."""
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^ *(make ([\w-]+))", listed, re.MULTILINE)
    benchmarks = re.findall(r"^  (\w+) {2,}", listed.partition("Measurements")[2], re.MULTILINE)
    for command in [*(command for command, _ in targets), *(f"make bench NAME={name}" for name in benchmarks)]:
        yield from split(command, "make help")
    names = [name for _, name in targets if name.startswith(("pretrain", "finetune", "train-"))]
    recipes = subprocess.run(["make", "-n", *names], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    recipes = re.sub(r"\$\([^()]*\)", "", recipes.replace("\\\n", " ").replace(".venv/bin/", ""))
    yield from split("\n".join(re.findall(r"^accelerate .*", recipes, re.MULTILINE)), "Makefile")


def all_commands() -> list[Printed]:
    """Find all commands, each once, in the order in which a reader meets them."""
    found = [
        *itertools.chain.from_iterable(map(in_markdown, documents())),
        *itertools.chain.from_iterable(map(in_comments, sorted((ROOT / "accelerate_configs").iterdir()))),
        *itertools.chain.from_iterable(map(in_comments, sorted((ROOT / "recipes" / "catalog").glob("*.yaml")))),
        *itertools.chain.from_iterable(map(in_script, sorted((ROOT / "scripts").glob("*.py")))),
        *in_make(),
        *itertools.chain.from_iterable(
            split(re.sub("^", "samestep ", command.examples, flags=re.M), "help")
            for command in commands.COMMANDS.values()
        ),
        *split(audit.EPILOG.format(prog="python -m stepaudit", batch=audit.BATCH, window=audit.WINDOW)[10:], "help"),
    ]
    first: dict[tuple[str, ...], Printed] = {}
    for item in found:
        first.setdefault(item.words, item)
    return list(first.values())
