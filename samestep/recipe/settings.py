"""Reads strict, documented settings: a frozen dataclass from a mapping or from flags, with every problem reported at once."""

import argparse
import dataclasses
import inspect
import itertools
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import FLAGS, UsageError, is_utf8, nearest
from samestep.printing import reflow
from samestep.recipe.other_names import explain
from samestep.recipe.reading import format_name, format_value


class Check(NamedTuple):
    """A rule of a setting.

    Attributes:
        rule: in words, for messages: "must be greater than 0".
        holds: whether a value keeps it.
        choices: all values, where they can be listed; `--help` does.
    """

    rule: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


LARGEST = 10**12
"""No number that can be set is larger. Fields whose size costs memory or time have bounds of their own."""
MAX_TEXT_LENGTH, MAX_ITEMS = 4096, 100_000
"""Characters of a text, items of a list (files that a shell found)."""

POSITIVE = Check("must be greater than 0", lambda value: value > 0)
NOT_NEGATIVE = Check("must be 0 or greater", lambda value: value >= 0)
PROBABILITY = Check("must lie in [0, 1]", lambda value: 0 <= value <= 1)
FRACTION = Check("must lie in [0, 1)", lambda value: 0 <= value < 1)
LINE = Check("must be one line of text", lambda value: bool(value.strip()) and value.isprintable())


def choice(*choices: str) -> Check:
    """Make the rule that a value is one of `choices`."""
    return Check(f"must be one of {', '.join(choices)}", lambda value: value in choices, choices)


def limit(largest: float, smallest: float = 1) -> Check:
    """Make the rule that a number lies in [smallest, largest]."""
    return Check(f"must be from {smallest:,} to {largest:,}", lambda value: smallest <= value <= largest)


SEED = limit(2**32 - 1, 0)  # what numpy and scikit-learn take
BATCH = limit(2**24)  # samples whose numbers are drawn at once
LENGTH = limit(2**24)  # tokens of a sample
VOCABULARY = limit(2**24)
WIDTH = limit(2**17)  # of a layer
LAYERS = limit(10_000)
PIXELS = limit(2**14)  # of a side
WORKERS = 1024  # processes or threads
SECONDS = 10**8  # three years, which clocks and timers can count
BITS_DEPEND_ON = ("per_device_train_tokens", "attn_implementation", "noise_scale_steps")
"""Settings that decide the bits of a step under --reproducible, beside precision and device."""


def setting(
    help: str, check: tuple[Any, ...] | None = None, *, decides: bool = True, flag: bool = True, **default: Any
) -> Any:
    """Make a documented dataclass field.

    Args:
        help: meaning and unit, shown by `--help`.
        check: a `Check`, or a tuple of its parts; not applied to None.
        decides: whether the value belongs to the fingerprint, that is, whether it decides the optimizer's steps.
        flag: whether `--name` can set it.
        default: `default=value` for a setting that may be left out.

    Raises:
        TypeError: a rule of another form; Python shows the line that has it.
    """
    if check is not None and not (isinstance(check, tuple) and isinstance(check[0], str) and callable(check[1])):
        raise TypeError(
            f"the rule of {help!r} must be a Check(words, function), as POSITIVE, limit(8) or choice('a', 'b')"
        )
    check = None if check is None else Check(*check)
    return dataclasses.field(metadata={"help": help, "check": check, "decides": decides, "flag": flag}, **default)


TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def _type_name(hint: Any) -> str:
    if hint in TYPE_NAMES:
        return TYPE_NAMES[hint]
    if typing.get_origin(hint) is types.UnionType:
        return " or ".join(_type_name(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of {_type_name(typing.get_args(hint)[0]).removeprefix('a ')}s"
    return (
        f"a mapping {{kind: {' | '.join(hint.find_class().KINDS)}, ...}}"
        if hasattr(hint, "read")
        else str(hint.__name__)
    )


def coerce(value: Any, hint: Any) -> Any:
    """Convert `value` to the type `hint`. Nothing is guessed; YAML reads 1e-4 as a string, and a text is a list of one text.

    A class with `read` (`samestep.recipe.variants`) says itself what it is written like.

    Raises:
        TypeError: `value` is not of that type.
        UsageError: it is, but breaks rules.
    >>> coerce("1e-4", float), coerce(1, float), coerce(["a"], tuple[str, ...]), coerce("a", tuple[str, ...])
    (0.0001, 1.0, ('a',), ('a',))
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
    elif typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if isinstance(value, list | tuple):
            return tuple(coerce(part, item) for part in value)
        if item is str and isinstance(value, str):
            return (value,)
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
    elif hasattr(hint, "read"):
        return hint.read(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise TypeError(repr(value))


def from_text(text: str, hint: Any) -> Any:
    """Convert a flag's text to the value that it stands for; text that fits no type stays as it is, for `build` to refuse.

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
    """Make an instance of the settings class `cls` from `values`, and check all its rules.

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
    problems = [f"{origin}: unknown key {format_value(key)}: {nearest(str(key)[:60], fields)}" for key in unknown]
    checked = {}
    for name, field in fields.items():
        if name not in values:
            if field.default is dataclasses.MISSING:
                problems.append(f"{origin}: {name} is missing ({field.metadata['help']})")
            continue
        try:
            value = checked[name] = coerce(values[name], hints[name])
        except TypeError:
            problems.append(f"{origin}: {name} is {format_value(values[name])}, must be {_type_name(hints[name])}")
            continue
        except UsageError as error:
            for rule in error.problems:
                remedy = " Correct it" if rule.endswith("?") else ": correct it"
                given = format_value(values[name])
                problems.append(f"{origin}: {name} is {given}, but {rule}{remedy}, or set it to null")
            continue
        check = field.metadata["check"]
        breaks = check is not None and value is not None and not _holds(check, value)
        if rule := check.rule if breaks else _find_broken_rule(value):
            problems.append(f"{origin}: {name} is {format_value(value)}, {rule} ({field.metadata['help']})")
    if not problems:
        instance = cls(**checked)
        problems = [f"{origin}: {problem}" for problem in getattr(instance, "problems", list)()]
    if problems:
        raise UsageError(problems)
    return instance


def _holds(check: Check, value: Any) -> bool:
    try:
        return check.holds(value)
    except TypeError:
        return False


def _find_broken_rule(value: Any) -> str:
    """Find the rule for all values of its type that `value` breaks; empty if it breaks none."""
    if isinstance(value, tuple):
        if len(value) > MAX_ITEMS:
            return f"must have {MAX_ITEMS:,} items or fewer"
        return next(filter(None, map(_find_broken_rule, value)), "")
    if isinstance(value, int | float) and not abs(value) <= LARGEST:  # nor is it not a number
        return f"must not be larger than {LARGEST:,}"
    if isinstance(value, str):
        if len(value) > MAX_TEXT_LENGTH:
            return f"must have {MAX_TEXT_LENGTH:,} characters or fewer"
        if "\0" in value or not is_utf8(value):
            return "must be text in UTF-8"
    return ""


ACTIVATIONS = tuple(
    """gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh hardswish laplace leaky_relu
    linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh xielu""".split()
)
"""Activations of transformers, by its own names."""


def program_name() -> str:
    """Return what was called, as it is typed: `python -m recipes`, `samestep`, `pretrain_bert.py`."""
    path = Path(sys.argv[0])
    return f"python -m {path.parent.name}" if path.name == "__main__.py" else path.name


def drop_flags(words: Sequence[str], flags: Iterable[str]) -> list[str]:
    """Return the words of a command line without some of its flags.

    >>> drop_flags("--a 1 2 --b=3 --c".split(), ["a", "b"])
    ['--c']
    """
    kept: list[str] = []
    names, is_dropped = set(flags), False
    for word in words:
        if word.startswith("--"):
            is_dropped = word.removeprefix("--").partition("=")[0] in names
        kept += [] if is_dropped else [word]
    return kept


def find_flag(argv: Sequence[str], name: str) -> str | None:
    """Find the value that a command line gives a flag last, before flags are parsed; None: it does not give it.

    >>> find_flag("--seed 1 --recipe a --recipe=b".split(), "recipe"), find_flag(["--recipe"], "seed")
    ('b', None)
    """
    values = [following for word, following in itertools.pairwise([*argv, ""]) if word == f"--{name}"]
    values += [word.removeprefix(f"--{name}=") for word in argv if word.startswith(f"--{name}=")]
    return values[-1] if values else None


class Parser(argparse.ArgumentParser):
    """An argparse parser whose flags are the fields of settings classes, as strict as those classes.

    No flag can be shortened, and every mistake is a `UsageError` of one line.

    Args:
        prog: the program, with its command: "python -m recipes plan".
        words: what follows the program, for the line of usage.
        description, epilog: texts that `--help` prints before and after the options, the second one unchanged.
    """

    def __init__(self, prog: str, words: str = "", *, description: str = "", epilog: str = "", **options: Any):
        super().__init__(
            prog,
            f"{prog} {words}".replace("%", "%%"),
            reflow(description, 100),
            epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            **options,
        )
        self.hints: dict[str, Any] = {}

    def add_settings(self, cls: type, values: Any = None, label: str = "default") -> None:
        """Add a flag for each field of a settings class: a group for each class that it inherits fields from.

        Args:
            cls: the settings class.
            values: an object of the class, whose values `--help` shows; None: the defaults of the fields.
            label: name of these values in the help; with `default` a value of None is not shown, because the field's help
                says what None does.
        """
        hints = typing.get_type_hints(cls)
        fields = {field.name: field for field in dataclasses.fields(cls) if field.metadata["flag"]}
        owners = {name: base for base in reversed(cls.__mro__) for name in inspect.get_annotations(base)}
        for owner in dict.fromkeys(owners.values()):
            group_fields = [field for name, field in fields.items() if owners[name] is owner]
            group = self.add_argument_group((owner.__doc__ or owner.__name__).splitlines()[0].rstrip("."))
            for field in group_fields:
                value = field.default if values is None else getattr(values, field.name)
                self._add_setting(group, field, hints[field.name], value, label)

    def _add_setting(self, group: Any, field: dataclasses.Field[Any], hint: Any, value: Any, label: str) -> None:
        parts = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
        item_types = [typing.get_args(part)[0] for part in parts if typing.get_origin(part) is tuple]
        kind = next(part for part in (*item_types, *parts) if part is not type(None))
        options = {"nargs": "+"} if item_types else {"nargs": "?", "const": "true"} if kind is bool else {}
        check = field.metadata["check"]
        metavar = {int: "INT", float: "FLOAT", bool: "true|false"}.get(kind, "TEXT")
        if check is not None and check.choices:
            metavar = f"{{{','.join(check.choices)}}}" if len(check.choices) < 10 else "NAME"
        text = field.metadata["help"]
        if value is not dataclasses.MISSING and (value is not None or label != "default"):
            text += f" ({label}: {_format_flag_value(value)})"
        group.add_argument(f"--{field.name}", help=text.replace("%", "%%"), metavar=metavar, **options)
        self.hints[field.name] = hint

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the flags in `argv`, and no others, as field name -> value.

        Raises:
            UsageError: unknown flags, with the nearest valid ones; stray words.
        """
        FLAGS.update(self.hints)
        flags, unknown_words = self.parse_known_args(argv)
        if unknown_words:
            raise UsageError(
                [self._explain_unknown(word) for word in unknown_words if word.startswith("-")]
                or [
                    f"unexpected argument {format_value(word)}: flags are --FIELD VALUE; see {self.prog} --help"
                    for word in unknown_words
                ]
            )
        return {name: _from_words(value, self.hints[name]) for name, value in vars(flags).items()}

    def error(self, message: str) -> typing.NoReturn:
        """Raise the message of argparse as a `UsageError`."""
        raise UsageError(f"{message}; see {self.prog} --help")

    def _explain_unknown(self, word: str) -> str:
        """Say what is wrong with a word that begins with a dash, and is no flag."""
        if re.match(r"-(\d|\.\d|inf|nan)", word):
            return f"unexpected argument {format_value(word)}: a value below 0 is written --FIELD={format_name(word)}"
        name = word.split("=")[0].lstrip("-")[:60]
        close = [f"--{flag}" for flag in get_close_matches(name.replace("-", "_"), self.hints, n=3)]
        hint = explain(name, self.hints) or (close and f"did you mean {' or '.join(close)}?")
        return f"unknown flag --{format_name(name)}: {hint or f'see {self.prog} --help'}"


def _format_flag_value(value: Any) -> str:
    """Write a value as a flag takes it, shortened.

    >>> _format_flag_value(None), _format_flag_value(True), _format_flag_value((1, 2)), _format_flag_value("x" * 99)[-5:]
    ('none', 'true', '1 2', 'xx...')
    """
    if isinstance(value, tuple):
        return " ".join(map(_format_flag_value, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if len(text) <= 60 else format_value(text).strip("'")


def _from_words(value: str | list[str], hint: Any) -> Any:
    """Convert a flag's word, or its list of words, to the flag's value.

    >>> _from_words(["none"], tuple[str, ...] | None), _from_words(["a", "none"], tuple[str, ...] | None)
    (None, ['a', 'none'])
    """
    if not isinstance(value, list):
        return from_text(value, hint)
    parts = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
    if len(value) == 1 and type(None) in parts and value[0].lower() in ("none", "null"):
        return None
    item_type = next(typing.get_args(part)[0] for part in parts if typing.get_origin(part) is tuple)
    return [from_text(word, item_type) for word in value]
