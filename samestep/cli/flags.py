"""Reads the words of a command: a recipe or folders first, then flags; and writes them anew, with other values."""

import dataclasses
import itertools
import os
import shlex
from pathlib import Path
from typing import Any

from samestep.cli.commands import COMMANDS, make_parser
from samestep.errors import UsageError
from samestep.recipe import catalog as recipes
from samestep.recipe import pretrained_shape
from samestep.recipe.reading import MAX_YAML_BYTES, format_name, parse_yaml
from samestep.recipe.recipe import Recipe
from samestep.recipe.settings import POSITIVE, Parser, build, drop_flags, program_name, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Choose what is printed"""

    json: bool = setting("print one JSON object", default=False)
    critical_batch_size: float | None = setting(
        "samples beyond which a larger global batch wastes them (the gradient's noise scale), if it is known",
        POSITIVE,
        default=None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Say what a recipe may not know of its data"""

    num_train_samples: int | None = setting("samples of the training data", POSITIVE, default=None)


def make_subject_parser(command: str, *subjects: str) -> Parser:
    """Make the parser of a command, whose first words are one of `subjects`."""
    words = [f"{subject} {COMMANDS[command].usage} [--FLAG VALUE ...]" for subject in subjects]
    return make_parser(command, f"\n       {program_name()} {command} ".join(words))


def read_recipe(
    command: str, argv: list[str], settings_class: type
) -> tuple[Recipe, Any, DataSettings, dict[str, Any]]:
    """Read the recipe that comes first with its flags, the settings of a command, and those of data that the recipe lacks.

    The last value holds the fields of the recipe that flags change.
    """
    if not argv or argv[0].startswith("-"):
        parser = make_subject_parser(command, "RECIPE")
        parser.add_settings(settings_class)
        if {"-h", "--help"} & {*argv}:
            parser.parse(argv)
        hint = "; behind one, --model_name_or_path names another model" if "--model_name_or_path" in argv else ""
        raise UsageError(f"{parser.prog}: it needs a recipe as its first word ({program_name()} list shows them){hint}")
    name, *words = argv
    recipe = recipes.load(name)
    recipe_fields = {field.name for field in dataclasses.fields(recipe)}
    classes = [settings_class] + [DataSettings] * ("num_train_samples" not in recipe_fields)
    parser = make_subject_parser(command, format_name(name))
    for cls in classes:
        parser.add_settings(cls)
    parser.add_settings(type(recipe), recipe, "recipe")
    flags = parser.parse(words)
    objects = build_each(flags, classes)
    changes = {key: value for key, value in flags.items() if key in recipe_fields}
    data = objects[1] if len(objects) > 1 else DataSettings()
    if (count := changes.get("num_train_samples")) is not None:
        # Only drawn data have it as a field: of others, with which the other flags may replace them, nobody has counted it yet
        others = {key: value for key, value in changes.items() if key != "num_train_samples"}
        read = pretrained_shape.load(name, others)
        if getattr(read, "num_train_samples", None) is None:
            return read, objects[0], DataSettings(num_train_samples=count), others
    return pretrained_shape.load(name, changes), objects[0], data, changes


def build_each(flags: dict[str, Any], classes: list[type]) -> list[Any]:
    """Make a settings object of each class, from the flags of its fields."""
    names = [{field.name for field in dataclasses.fields(cls)} for cls in classes]
    return [
        build(cls, {key: flags[key] for key in flags.keys() & fields}, "flags")
        for cls, fields in zip(classes, names, strict=True)
    ]


def read_folders(
    command: str, usage: str, argv: list[str], settings_class: type, counts: tuple[int, ...]
) -> tuple[list[str], Any]:
    """Read the output folders that come first, as many as one of `counts`, and the settings of a command."""
    folders, words = split_words(argv)
    parser = make_parser(command, usage)
    parser.add_settings(settings_class)
    settings = build(settings_class, parser.parse(words), "flags")
    if len(folders) not in counts:
        numbers = " or ".join("zero one two".split()[count] for count in counts)
        raise UsageError(
            f"{parser.prog}: {len(folders)} output folders come first, must be {numbers}; see {parser.prog} --help"
        )
    return folders, settings


def split_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the words that come first, and the flags.

    >>> split_words(["a", "b", "--json", "true"])
    (['a', 'b'], ['--json', 'true'])
    """
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    return words, argv[len(words) :]


def retype(words: list[str], **flags: object) -> str:
    """Write the command line of these words with other values of some flags; without those of value None."""
    new = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
    return f"{program_name()} {shlex.join(drop_flags(words, flags) + new)}"


def write_file(flag: str, name: str, content: str | bytes) -> None:
    """Write the file that a flag names; one that exists with other content is left alone."""
    path, content = Path(name), content if isinstance(content, bytes) else content.encode()
    try:
        if os.path.exists(path) and not (path.is_file() and _says_the_same(path, content)):
            problem = "it exists already, with other content, and is left alone"
            raise UsageError(f"--{flag} {format_name(name)}: {problem}: give another name")
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"--{flag} {format_name(name)}: {error.strerror}") from None


def _says_the_same(path: Path, content: bytes) -> bool:
    """Tell whether a file holds this content; YAML may have other comments."""
    size = len(content) + MAX_YAML_BYTES
    with path.open("rb") as file:
        found = file.read(size + 1)
    if len(found) > size:
        return False
    if path.suffix not in (".yaml", ".yml") or found == content:
        return found == content
    try:
        return parse_yaml(found.decode(), path.name) == parse_yaml(content.decode(), path.name)
    except ValueError:  # another kind of file
        return False
