"""Reads the YAML and JSON files that people give, strictly: one clear line for whatever is wrong with one."""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import yaml

from samestep.errors import UsageError

MOST_YAML, MOST_JSON = 2**16, 2**24
"""Bytes of a file. Those that ship with the package have 4,000; PyYAML takes about a second for 65,536."""
DEEPEST = 16
"""Levels of nesting; recipes and devices have 2, configurations of models 4."""

PACKAGE = Path(__file__).parents[1]
IN_CHECKOUT = {"catalog": "recipes/catalog", "accelerate_configs": "accelerate_configs"}


def shipped_folder(name: str) -> Path:
    """Find a folder that ships with the package: inside it when installed from a wheel, beside it in a checkout.

    Args:
        name: one of `IN_CHECKOUT`.
    """
    return PACKAGE / name if is_installed() else PACKAGE.parent / IN_CHECKOUT[name]


def is_installed() -> bool:
    """Whether the package was installed from a wheel, which holds the folders that a checkout has beside it, and no scripts."""
    return all((PACKAGE / name).is_dir() for name in IN_CHECKOUT)


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        what: for messages: "recipe my.yaml".

    Raises:
        UsageError: no regular file, too large, not UTF-8, not YAML, or more than `field: value` lines can say: aliases,
            keys that are no text or come twice, deep nesting, numbers that are too long.
    """
    text = _text(path, what, MOST_YAML)
    try:
        values = yaml.load(text, Loader=_Strict)
    except yaml.YAMLError as error:
        raise UsageError(f"{what} is not valid YAML: {_short(error)}") from None
    except (ValueError, OverflowError) as error:  # a number of 5,000 digits, a date that there is not
        raise UsageError(f"{what} is not valid YAML: {_short(error)}") from None
    except RecursionError:
        raise UsageError(f"{what} is nested too deeply: {DEEPEST} levels at most") from None
    return _mapping(values, what, "`field: value` lines")


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file. Raises as `read_yaml`."""
    text = _text(path, what, MOST_JSON)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{what} is not JSON: {_short(error)}") from None
    except RecursionError:
        raise UsageError(f"{what} is nested too deeply: {DEEPEST} levels at most") from None
    return _mapping(values, what, 'an object: {"field": value}')


def shown(value: Any, most: int = 60) -> str:
    """A value for a message, in `most` characters; of text what can be printed.

    >>> shown(10**30), shown(10**5000), shown("x" * 100)[-6:], shown([1.5, None])
    ('1000000000000000000000000000000', 'a number of 5001 digits', 'xxx...', '[1.5, None]')
    """
    if isinstance(value, int) and abs(value).bit_length() > 300:
        return f"a number of {int(abs(value).bit_length() * math.log10(2)) + 1} digits"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested, or with a number of more digits than Python writes
        text = f"a {type(value).__name__}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most else f"{text[: most - 3]}..."


def named(name: object) -> str:
    """The name of a file or a model for a message: as `shown`, without quotes.

    >>> named("runs/a\\nb")
    'runs/a\\\\nb'
    """
    return shown(str(name), 300)[1:-1]


class _Strict(yaml.SafeLoader):
    """No aliases, which can multiply; no key twice; no deep nesting."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"alias *{event.anchor}: write the value out", event.start_mark
            )
        self.depth += 1
        if self.depth > DEEPEST:
            raise RecursionError
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    problem = f"key {shown(key.value)} comes twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                names.add(key.value)
        return super().construct_mapping(node, deep)


def _text(path: Path, what: str, most: int) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{what} cannot be read: it is no regular file")
            content = file.read(most + 1)
        if len(content) > most:
            raise UsageError(f"{what} cannot be read: it has more than {most:,} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror or error}") from None
    except UsageError:
        raise
    except ValueError as error:  # no UTF-8, or a name that no file can have
        raise UsageError(f"{what} cannot be read: {_short(error)}") from None


def _mapping(values: Any, what: str, form: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UsageError(f"{what} must hold {form}")
    if wrong := [key for key in values if not isinstance(key, str)]:
        raise UsageError(f"{what}: the key {shown(wrong[0])} is no text: write it in quotes, or leave it out")
    if _depth(values) > DEEPEST:
        raise UsageError(f"{what} is nested too deeply: {DEEPEST} levels at most")
    return values


def _depth(value: Any) -> int:
    """Levels of nesting, counted no further than is allowed."""
    level, depth = [value], 0
    while level and depth <= DEEPEST:
        level = [
            child
            for of in level
            if isinstance(of, dict | list)
            for child in (of.values() if isinstance(of, dict) else of)
        ]
        depth += bool(level)
    return depth


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 200 else f"{text[:197]}..."
