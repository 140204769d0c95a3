"""Reads small files of others, YAML and JSON among them, strictly: one clear line for whatever is wrong with one."""

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import yaml
from yaml.composer import Composer

from samestep.errors import UsageError

MAX_YAML_BYTES, MAX_TEXT_BYTES, MAX_JSON_BYTES = 2**16, 2**20, 2**24
"""Bytes of a file. The files that ship with the package have 4,000; without libyaml 65,536 take about a second."""
MAX_TOKENIZER_BYTES = 2**28
"""Bytes of a file of a model's folder that is read whole; tokenizer.json of 256,000 tokens has 3e7."""
MAX_DEPTH = 16
"""Levels of nesting; recipes and devices have 2, configurations of models 4."""

PACKAGE = Path(__file__).parents[1]
CHECKOUT_FOLDERS = {"catalog": "recipes/catalog", "accelerate_configs": "accelerate_configs"}


def shipped_folder(name: str) -> Path:
    """Find a folder that ships with the package: inside it when installed from a wheel, beside it in a checkout.

    Args:
        name: one of `CHECKOUT_FOLDERS`.
    """
    return PACKAGE / name if is_installed() else PACKAGE.parent / CHECKOUT_FOLDERS[name]


def is_installed() -> bool:
    """Tell whether the package was installed from a wheel, which holds `CHECKOUT_FOLDERS` inside it, and no scripts."""
    return all((PACKAGE / name).is_dir() for name in CHECKOUT_FOLDERS)


def read_yaml(path: Path, origin: str) -> dict[str, Any]:
    """Read the mapping in a YAML file.

    Args:
        path: of the file.
        origin: what the file is, for messages: "recipe my.yaml".

    Returns:
        Field -> value, not yet checked against the fields of a class.

    Raises:
        UsageError: the file is no regular file, too large, not UTF-8 or not YAML, or holds more than `field: value` lines
            can say: aliases, keys that are no text or come twice, deep nesting, numbers that are too long.
    """
    return parse_yaml(read_text(path, origin, MAX_YAML_BYTES), origin)


def parse_yaml(text: str, origin: str) -> dict[str, Any]:
    """Read the mapping in a text, as `read_yaml` does in a file's."""
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
    ) as error:  # or a number of 5,000 digits, a date that there is not
        raise UsageError(f"{origin} is not valid YAML: {_shorten(error)}") from None
    except RecursionError:
        raise UsageError(f"{origin} is nested too deeply: {MAX_DEPTH} levels at most") from None
    return _check_mapping(values, origin, "`field: value` lines")


def read_json(path: Path, origin: str) -> dict[str, Any]:
    """Read the object in a JSON file. Arguments, result and errors are those of `read_yaml`."""
    return parse_json(read_text(path, origin, MAX_JSON_BYTES), origin)


def parse_json(text: str | bytes, origin: str) -> dict[str, Any]:
    """Read the object in a text of JSON, which came over a network or through a lock, as `read_json` does in a file's."""
    if len(text) > MAX_JSON_BYTES:
        raise UsageError(f"{origin} cannot be read: it has more than {MAX_JSON_BYTES:,} bytes")
    try:
        values = json.loads(text, object_hook=_decode_float)
    except ValueError as error:
        raise UsageError(f"{origin} is not JSON: {_shorten(error)}") from None
    except RecursionError:
        raise UsageError(f"{origin} is nested too deeply: {MAX_DEPTH} levels at most") from None
    return _check_mapping(values, origin, 'an object: {"field": value}')


def _decode_float(values: dict[str, Any]) -> Any:
    """Decode an object that stands for a number without a form in JSON, as transformers writes it into a config.json.

    >>> _decode_float({"__float__": "-Infinity"}), _decode_float({"size": 3})
    (-inf, {'size': 3})
    """
    text = values.get("__float__") if len(values) == 1 else None
    return float(text) if text in ("Infinity", "-Infinity", "NaN") else values


def read_text(path: Path, origin: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a small file whole: no more of it than is allowed, and nothing that could be waited for.

    Args:
        path: of the file.
        origin: what the file is, for messages.
        max_bytes: bytes that it may have.

    Raises:
        UsageError: the file is missing, no regular file (a folder, a device, a pipe, a socket), too large, or not UTF-8.
    """
    try:
        return read_content(path, origin, max_bytes).decode("utf-8")
    except UsageError:
        raise
    except ValueError as error:  # no UTF-8
        raise UsageError(f"{origin} cannot be read: {_shorten(error)}") from None


def read_content(path: Path, origin: str, max_bytes: int) -> bytes:
    """Read the bytes of a file whole. Arguments and errors are those of `read_text`, but for UTF-8."""
    try:
        with open_without_waiting(path) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{origin} cannot be read: it is no regular file. Copy what it gives into one")
            content = file.read(max_bytes + 1)
        if content is None:  # a file of the kernel, which would have to be waited for
            raise UsageError(f"{origin} cannot be read: it holds nothing yet. Copy what it gives into a file")
        if len(content) > max_bytes:
            raise UsageError(f"{origin} cannot be read: it has more than {max_bytes:,} bytes. Give another file")
        return content
    except OSError as error:
        raise UsageError(f"{origin} cannot be read: {error.strerror or error}") from None
    except UsageError:
        raise
    except ValueError as error:  # a name that no file can have
        raise UsageError(f"{origin} cannot be read: {_shorten(error)}") from None


def open_without_waiting(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading so that no read waits for what others may write, as in files of the kernel."""
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")


def find_fault(file: str | os.PathLike[str]) -> str | None:
    """Say what is wrong with a path that leads to no regular file, whose opening could wait for ever; else return None."""
    try:
        mode = os.stat(file).st_mode
    except OSError as error:
        return f"cannot be read: {error.strerror}. Check the path and its permissions."
    except ValueError:
        return "has a name that no file can have. Check the path."
    if stat.S_ISREG(mode):
        if os.path.realpath(file).startswith(("/proc/", "/sys/")):  # such as /proc/kmsg, which waits
            return "is a file of the kernel. Copy what it gives into one."
        return None
    kind = "folder" if stat.S_ISDIR(mode) else "device, a pipe or a socket"
    return f"is a {kind}, not a regular file. Copy what it gives into one."


def describe_missing(pattern: str, rule: str = "no such file") -> str:
    """Describe a path of data, or a pattern of paths, that leads to no file."""
    place = "" if os.path.isabs(pattern) else f" in {os.getcwd()}"
    return f"data file {pattern}: {rule}{place}. Check the path."


def check_model_folder(folder: str | os.PathLike[str], origin: str) -> None:
    """Check the files of a folder before a library reads them whole. What is no folder is left to the library.

    Raises:
        UsageError: a file that is none (a device, a pipe, a broken link), or a text (.json, .txt, .jinja) that is too large.
    """
    places = [path for path in (Path(folder), Path(folder) / "additional_chat_templates") if os.path.isdir(path)]
    for place in places:
        try:
            entries = sorted(os.scandir(place), key=lambda entry: entry.name)
            for entry in entries:
                if entry.is_dir():
                    continue
                if fault := find_fault(entry.path):
                    raise UsageError(f"{origin}: {format_name(entry.name)} {fault}")
                if entry.name.endswith((".json", ".txt", ".jinja")) and entry.stat().st_size > MAX_TOKENIZER_BYTES:
                    raise UsageError(
                        f"{origin}: {format_name(entry.name)} cannot be read: it has more than {MAX_TOKENIZER_BYTES:,} bytes. "
                        "Give another folder"
                    )
        except OSError as error:
            raise UsageError(f"{origin} cannot be read: {error.strerror or error}") from None


def has_hub_form(name: str) -> bool:
    """Tell whether a text may be a name on the hub, OWNER/NAME or NAME; a path of more parts, or from the root, is none.

    >>> has_hub_form("Qwen/Qwen3-8B"), has_hub_form("/data/qwen"), has_hub_form("runs/a/b")
    (True, False, False)
    """
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def format_value(value: Any, max_length: int = 60) -> str:
    """Write a value for a message, in at most `max_length` characters; what cannot be printed is escaped.

    >>> format_value(10**30), format_value(10**5000), format_value("x" * 100)[-6:], format_value([1.5]), format_value(None)
    ('1000000000000000000000000000000', 'a number of 5001 digits', 'xxx...', '[1.5]', 'null')
    """
    if value is None or isinstance(value, bool):  # as YAML, JSON and flags have it
        return "null" if value is None else str(value).lower()
    if isinstance(value, int) and abs(value).bit_length() > 300:
        return f"a number of {int(abs(value).bit_length() * math.log10(2)) + 1} digits"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested, or with a number of more digits than Python writes
        text = f"a {type(value).__name__}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def format_name(name: object) -> str:
    """Write the name of a file or a model for a message: as `format_value`, without quotes.

    >>> format_name("runs/a\\nb")
    'runs/a\\\\nb'
    """
    return format_value(str(name), 300)[1:-1]


if TYPE_CHECKING or not yaml.__with_libyaml__:
    _Loader = yaml.SafeLoader
else:

    class _Loader(Composer, yaml.CSafeLoader):
        """Composes nodes in Python, where they are checked, from the events of libyaml, which parses in a fifth of the time."""

        def __init__(self, stream: str):
            yaml.CSafeLoader.__init__(self, stream)
            Composer.__init__(self)


class _StrictLoader(_Loader):
    """Refuses aliases, which can multiply, and a key that comes twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"alias *{event.anchor}: write the value out", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    problem = f"key {format_value(key.value)} comes twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                names.add(key.value)
        return super().construct_mapping(node, deep)


def _check_mapping(values: Any, origin: str, form: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UsageError(f"{origin} must hold {form}")
    if wrong := [key for key in values if not isinstance(key, str)]:
        raise UsageError(f"{origin}: the key {format_value(wrong[0])} is no text: write it in quotes, or leave it out")
    if _count_levels(values) > MAX_DEPTH:
        raise UsageError(f"{origin} is nested too deeply: {MAX_DEPTH} levels at most")
    return values


def _count_levels(value: Any) -> int:
    """Count the levels of nesting, no further than is allowed."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        depth += bool(level)
    return depth


def _shorten(error: Exception) -> str:
    text = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 200 else f"{text[:197]}..."
