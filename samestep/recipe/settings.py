"""Strict, documented settings: a frozen dataclass from a mapping or from flags, with every problem reported at once."""

import argparse
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from samestep.errors import UsageError, is_utf8, nearest
from samestep.recipe.reading import named, shown

Check = tuple[str, Callable[[Any], bool]]

LARGEST = 10**12
"""No number that can be set is larger. Fields whose size costs memory or time have bounds of their own."""
MOST_TEXT, MOST_ITEMS = 4096, 100_000
"""Characters of a text, items of a list (files that a shell found)."""

POSITIVE: Check = ("must be greater than 0", lambda value: value > 0)
NOT_NEGATIVE: Check = ("must be 0 or greater", lambda value: value >= 0)
PROBABILITY: Check = ("must lie in [0, 1]", lambda value: 0 <= value <= 1)
BELOW_ONE: Check = ("must lie in [0, 1)", lambda value: 0 <= value < 1)


def one_of(*choices: str) -> Check:
    return f"must be one of {', '.join(choices)}", lambda value: value in choices


def at_most(most: int, least: int = 1) -> Check:
    """From `least` to `most`."""
    return f"must be from {least:,} to {most:,}", lambda value: least <= value <= most


SEED = at_most(2**32 - 1, 0)  # what numpy and scikit-learn take
BATCH = at_most(2**24)  # samples whose numbers are drawn at once
LENGTH = at_most(2**24)  # tokens of a sample
VOCABULARY = at_most(2**24)
WIDTH = at_most(2**17)  # of a layer
LAYERS = at_most(10_000)
PIXELS = at_most(2**14)  # of a side
WORKERS = 1024  # processes or threads
SECONDS = 10**8  # three years, which clocks and timers can count


def setting(help: str, check: Check | None = None, *, decides: bool = True, flag: bool = True, **default: Any) -> Any:
    """A documented dataclass field.

    Args:
        help: meaning and unit, shown by `--help`.
        check: a rule in words and its predicate; not applied to None.
        decides: whether the value belongs to the fingerprint, that is, whether it decides the optimizer's steps.
        flag: whether `--name` can set it.
        default: `default=value` for a setting that may be left out.
    """
    return dataclasses.field(metadata={"help": help, "check": check, "decides": decides, "flag": flag}, **default)


def _type_name(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is types.UnionType:
        return " or ".join(_type_name(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"list of {typing.get_args(hint)[0].__name__}"
    return hint.__name__


def coerce(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`, or TypeError. Nothing is guessed, but for one trap: YAML reads 1e-4 as a string.

    >>> coerce("1e-4", float), coerce(1, float), coerce(["a"], tuple[str, ...])
    (0.0001, 1.0, ('a',))
    >>> coerce(True, int)
    Traceback (most recent call last):
    TypeError: True
    """
    if typing.get_origin(hint) is types.UnionType:
        for part in typing.get_args(hint):
            try:
                return coerce(value, part)
            except TypeError:
                pass
    elif hint is type(None):
        if value is None:
            return None
    elif typing.get_origin(hint) is tuple:
        if isinstance(value, list | tuple):
            return tuple(coerce(item, typing.get_args(hint)[0]) for item in value)
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                return math.inf if value > 0 else -math.inf
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                pass
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise TypeError(repr(value))


def from_text(text: str, hint: Any) -> Any:
    """The value that a flag's text stands for; text that fits no type is returned as it is, for `build` to refuse.

    >>> from_text("8", int | None), from_text("none", int | None), from_text("true", bool), from_text("x", int)
    (8, None, True, 'x')
    """
    parts = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
    if type(None) in parts and text.lower() in ("none", "null"):
        return None
    if bool in parts and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if int in parts:
        try:
            return int(text)
        except ValueError:
            pass
    return text


def build(cls: type, values: Mapping[str, Any], origin: str) -> Any:
    """An instance of the settings class `cls` from `values`, all its rules checked.

    Args:
        cls: a dataclass of `setting` fields; may define `problems(self) -> list[str]` for rules between fields.
        values: field name -> value.
        origin: what the values come from, for messages ("recipe my.yaml").

    Raises:
        UsageError: with all problems at once: unknown keys (and the nearest valid ones), missing values, wrong types,
            values that break a rule.
    """
    hints, fields = typing.get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    unknown = [key for key in values if key not in fields]
    problems = [f"{origin}: unknown key {shown(key)}: {nearest(str(key)[:60], fields)}" for key in unknown]
    checked = {}
    for name, field in fields.items():
        if name not in values:
            if field.default is dataclasses.MISSING:
                problems.append(f"{origin}: {name} is missing ({field.metadata['help']})")
            continue
        try:
            value = checked[name] = coerce(values[name], hints[name])
        except TypeError:
            problems.append(f"{origin}: {name} is {shown(values[name])}, must be {_type_name(hints[name])}")
            continue
        check = field.metadata["check"]
        breaks = check is not None and value is not None and not _holds(check, value)
        if rule := check[0] if breaks else _limit(value):
            problems.append(f"{origin}: {name} is {shown(value)}, {rule} ({field.metadata['help']})")
    if not problems:
        instance = cls(**checked)
        problems = [f"{origin}: {problem}" for problem in getattr(instance, "problems", list)()]
    if problems:
        raise UsageError(problems)
    return instance


def _holds(check: Check, value: Any) -> bool:
    try:
        return check[1](value)
    except TypeError:
        return False


def _limit(value: Any) -> str:
    """The rule for all values of its kind that it breaks; empty if it breaks none."""
    if isinstance(value, tuple):
        if len(value) > MOST_ITEMS:
            return f"must have {MOST_ITEMS:,} items or fewer"
        return next(filter(None, map(_limit, value)), "")
    if isinstance(value, int | float) and not abs(value) <= LARGEST:  # nor is it not a number
        return f"must not be larger than {LARGEST:,}"
    if isinstance(value, str):
        if len(value) > MOST_TEXT:
            return f"must have {MOST_TEXT:,} characters or fewer"
        if "\0" in value or not is_utf8(value):
            return "must be text in UTF-8"
    return ""


ACTIVATIONS = tuple(
    """gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh hardswish laplace leaky_relu
    linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh xielu""".split()
)
"""What transformers knows by these names."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(f"{message}; see --help")


def _unknown(word: str, names: Sequence[str]) -> str:
    """What is wrong with a word that begins with a dash, and is no flag."""
    if re.match(r"-(\d|\.\d|inf|nan)", word):
        return f"unexpected argument {shown(word)}: a value below 0 is written --FIELD={named(word)}"
    name = word.split("=")[0].lstrip("-")[:60]
    hint = nearest(f"--{name}", [f"--{valid}" for valid in names])
    return f"unknown flag --{named(name)}: {hint if hint.startswith('did') else 'see --help'}"


def parse_flags(classes: Sequence[type], argv: Sequence[str], description: str) -> dict[str, Any]:
    """Flags given in `argv` (only those) as field name -> value, for all flag fields of the settings `classes`.

    Raises:
        UsageError: unknown flags, with the nearest valid ones.
    """
    parser = _Parser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    hints = {}
    for cls in classes:
        group, types_of = parser.add_argument_group(cls.__name__), typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if not field.metadata["flag"]:
                continue
            hints[field.name] = hint = types_of[field.name]
            parts = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
            several = any(typing.get_origin(part) is tuple for part in parts)
            shape = {"nargs": "+"} if several else {"nargs": "?", "const": "true"} if hint is bool else {}
            default = "" if field.default is dataclasses.MISSING else f" [{field.default}]"
            text = (field.metadata["help"] + default).replace("%", "%%")
            group.add_argument(f"--{field.name}", help=text, metavar=_type_name(hint), **shape)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UsageError(
            [_unknown(word, hints) for word in unknown if word.startswith("-")]
            or [f"unexpected argument {shown(word)}: flags are --FIELD VALUE; see --help" for word in unknown]
        )
    return {name: _from_words(value, hints[name]) for name, value in vars(given).items()}


def _from_words(value: str | list[str], hint: Any) -> Any:
    """The value of a flag: of one word, or of several."""
    if not isinstance(value, list):
        return from_text(value, hint)
    parts = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
    of = next(typing.get_args(part)[0] for part in parts if typing.get_origin(part) is tuple)
    return [from_text(word, of) for word in value]
