"""Reads the files that a run leaves in its output folder, by one schema: no value is computed with before it was checked.

These files outlive the run. People edit them, disks fill up, other programs write lines of their own. So a value may be of any
kind or size; what a reader is given here is what `FIELDS` and `SETTINGS` say, in bounded memory.
"""

import dataclasses
import functools
import itertools
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from samestep.errors import UsageError
from samestep.recipe.reading import format_name, format_value, read_json, read_yaml

MAX_LINE, MAX_WIDE_LINE = 2**20, 2**24
"""Bytes of a line of metrics.jsonl, and of a line of the other files, which name every tensor or sample. A step of a run has
500 in metrics.jsonl, and 200 for each tensor of the model in digests.jsonl."""
MAX_PASSED = 2**28
"""Bytes of a line after which a reader that passes over it gives the file up."""
PIECE = 2**20
"""Bytes that are read at a time."""
MAX_INTEGER = 2**53 - 1
"""Largest count: floats and browsers hold each up to here."""
MAX_NAME, MAX_TEXT = 1000, 10_000
"""Characters of the name of a field, and of a text."""
MAX_SQUARE = 1e100
"""Largest squared norm of a gradient: float32 ends at 1e77, and what is computed of squares of this stays a number."""
MAX_EXPONENT = 900
"""Largest exponent of gradients under --reproducible, which are float32 and end at 128; sums of 2^900 are still numbers."""
MAX_SIZES = 10_000
"""Stages of a batch that grows."""
TIMES = ("compute_seconds_min", "compute_seconds_mean", "compute_seconds_max", "data_seconds_max", "slowest_process")
"""Fields that a line of metrics.jsonl has of the times of its processes, if there are several."""
REMEDY = "mend the line, or take it out"

# ---------------------------------------------------------------------------------------------------------------------
# Rules


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule for a value.

    Attributes:
        text: the rule in words, after "must be".
        allows: tells whether a value obeys it.
    """

    text: str
    allows: Callable[[Any], bool]

    def or_null(self) -> "Rule":
        """Make the rule that allows null, too."""
        return Rule(f"{self.text}, or null", lambda value: value is None or self.allows(value))


LARGEST = sys.float_info.max


def is_finite(value: Any) -> bool:
    """Tell whether a value is a number that a float can hold: no boolean, no infinity, no NaN, no integer of 400 digits.

    >>> [is_finite(value) for value in (1, 1.5, True, float("nan"), 10**400, "1")]
    [True, True, False, False, False, False]
    """
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST


def _is_finite_or_null(value: Any) -> bool:
    return value is None or is_finite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _is_text(value: Any, most: int = MAX_TEXT) -> bool:
    return type(value) is str and len(value) <= most


def _is_single(value: Any) -> bool:
    return value is None or type(value) is bool or is_finite(value) or _is_text(value)


def _is_plain(value: Any) -> bool:
    """Tell whether a value is JSON without numbers beyond floats; readers of files have bounded its nesting."""
    if isinstance(value, dict):
        return all(type(name) is str for name in value) and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list) else _is_single(value)


def _is_mapping(value: Any, allows: Callable[[Any], bool]) -> bool:
    return type(value) is dict and all(len(name) <= MAX_NAME for name in value) and all(map(allows, value.values()))


def _is_layer(value: Any) -> bool:
    return type(value) is dict and all(SQUARE.allows(value.get(name)) for name in ("grad_signal", "grad_noise"))


def _are_sizes(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) <= MAX_SIZES
        and all(type(pair) is list and len(pair) == 2 and all(map(_is_count, pair)) for pair in value)
    )


def _is_exact_sum(value: Any) -> bool:
    exponent = value.get("exponent") if type(value) is dict else False
    return _is_plain(value) and (exponent is None or (type(exponent) is int and abs(exponent) <= MAX_EXPONENT))


def _is_scaler(value: Any) -> bool:
    """Tell whether a value is the state of torch's gradient scaler; that of one that is off is empty."""
    names = ("scale", "growth_factor", "backoff_factor")
    counts = ("growth_interval", "_growth_tracker")
    return type(value) is dict and (
        not value
        or (
            (all(is_finite(value.get(name)) and value[name] > 0 for name in names))
            and all(_is_count(value.get(name)) for name in counts)
        )
    )


def _is_growth(value: Any) -> bool:
    """Tell whether a value is a `planner.ramp.NoiseFollower.record`."""
    if type(value) is not dict or not _is_count(value.get("since")):
        return False
    stages, measurements = value.get("stages"), value.get("measurements")
    if not _are_sizes(stages) or not stages or stages[0][0] != 0 or any(size == 0 for _, size in stages):
        return False
    return all(a[0] < b[0] for a, b in itertools.pairwise(stages)) and (
        type(measurements) is list
        and len(measurements) <= MAX_SIZES
        and all(type(row) is list and len(row) == 3 and _is_measurement(*row) for row in measurements)
    )


def _is_measurement(step: Any, signal: Any, noise: Any) -> bool:
    most = MAX_SQUARE * MAX_INTEGER  # the noise is that of all samples of a step
    return _is_count(step) and all(is_finite(value) and abs(value) <= most for value in (signal, noise))


COUNT = Rule("a whole number from 0 to 2^53 - 1", _is_count)
POSITIVE = Rule("a whole number from 1 to 2^53 - 1", lambda value: _is_count(value) and value > 0)
METRIC = Rule("a finite number, or null", _is_finite_or_null)
SQUARE = Rule(f"a number up to {MAX_SQUARE:g}", lambda value: is_finite(value) and abs(value) <= MAX_SQUARE)
AMOUNT = Rule("a number from 0 to 2^53 - 1", lambda value: is_finite(value) and 0 <= value <= MAX_INTEGER)
TEXT = Rule(f"a text of at most {MAX_TEXT:,} characters", _is_text)
NAME = Rule(f"a text of at most {MAX_NAME:,} characters", functools.partial(_is_text, most=MAX_NAME))
FLAG = Rule("true or false", lambda value: type(value) is bool)
SINGLE = Rule(f"a finite number, true, false, null, or a text of at most {MAX_TEXT:,} characters", _is_single)
PLAIN = Rule(f"made of finite numbers, true, false, null and texts of at most {MAX_TEXT:,} characters", _is_plain)
LIST = Rule("a list", lambda value: type(value) is list)
DIGESTS = Rule("an object of names and digests, which are texts", functools.partial(_is_mapping, allows=NAME.allows))
TARGETS = Rule("an object of counts", functools.partial(_is_mapping, allows=_is_count))
LAYERS = Rule("an object of layers with grad_signal and grad_noise", functools.partial(_is_mapping, allows=_is_layer))
SIZES = Rule(f"at most {MAX_SIZES:,} pairs of steps and samples, which are whole numbers", _are_sizes)

FIELDS: dict[str, dict[str, Rule]] = {
    "metrics.jsonl": {
        "step": COUNT,
        "samples": COUNT,
        "tokens": COUNT,
        "images": COUNT,
        "epoch": AMOUNT,
        "seconds": AMOUNT,
        "skipped": FLAG,
        "digest": NAME,
        "event": TEXT,
    },
    "noise.jsonl": {
        "step": COUNT,
        "samples": POSITIVE,
        "targets": TARGETS,
        "layers": LAYERS,
        "micro_batches": COUNT,
        "per_device_train_batch_size": POSITIVE.or_null(),
        "per_device_train_tokens": POSITIVE.or_null(),
    },
    "digests.jsonl": {"step": COUNT, "gradients": DIGESTS, "parameters": DIGESTS, "moments": DIGESTS},
    "samples.jsonl": {"step": COUNT, "process": COUNT, "micro_step": COUNT, "epochs": LIST, "samples": LIST},
}
"""File -> field -> its rule. Other fields of metrics.jsonl are numbers or null, elsewhere and in events single values."""
NEEDED: dict[str, tuple[str, ...]] = {
    "metrics.jsonl": ("step",),
    "noise.jsonl": ("step", "samples", "targets", "layers"),
    "digests.jsonl": ("step", "gradients", "parameters", "moments"),
    "samples.jsonl": ("step",),
}
"""File -> fields that each of its lines has."""
SETTINGS = {
    "num_steps": COUNT.or_null(),
    "num_processes": POSITIVE.or_null(),
    "batch_sizes": SIZES.or_null(),
    "mixed_precision": NAME.or_null(),
    "device": NAME.or_null(),
    "reproducible": SINGLE,
}
"""Field of settings.json -> its rule, of those that something computes with or shows; the others are `PLAIN`."""
STATE = {
    "step": COUNT,
    "recipe_fingerprint": NAME,
    "data_fingerprints": DIGESTS,
    "num_skipped": COUNT,
    "run_id": NAME,
    "scaler": Rule("the state of a gradient scaler", _is_scaler).or_null(),
    "exact_sum": Rule(f"settings, and an exponent from -{MAX_EXPONENT} to {MAX_EXPONENT}", _is_exact_sum).or_null(),
    "growth": Rule("stages from 0 on, measurements, and the steps since", _is_growth).or_null(),
}
"""Field of a checkpoint's state.json -> its rule."""
RECIPE = dict.fromkeys(("description", "global_batch_size", "learning_rate", "seed"), SINGLE)
"""Field of recipe.yaml -> its rule, of those that `watch` shows."""


@functools.lru_cache(4096)
def _find_metric_rule(name: str, is_event: bool) -> Rule:
    """Find the rule of a field of metrics.jsonl."""
    if name in FIELDS["metrics.jsonl"]:
        return FIELDS["metrics.jsonl"][name]
    if is_event:
        return SINGLE
    if name.endswith(("grad_signal", "grad_noise")):
        return SQUARE
    if name.endswith("/samples") and not name.startswith("eval_"):
        return COUNT
    return METRIC


def find_problems(values: Mapping[str, Any], rules: Mapping[str, Rule], other: Rule | None = None) -> dict[str, str]:
    """Find the fields of a file that break their rules: field -> what is wrong.

    Args:
        values: of the file.
        rules: of its fields.
        other: of fields that `rules` does not have; None: they may be anything.

    >>> find_problems({"num_steps": "9"}, SETTINGS)
    {'num_steps': "num_steps is '9', must be a whole number from 0 to 2^53 - 1, or null"}
    """
    checked = {name: rules.get(name, other) for name in values}
    return {
        name: f"{format_name(name)[:100]} is {format_value(values[name])}, must be {rule.text}"
        for name, rule in checked.items()
        if rule is not None and not rule.allows(values[name])
    }


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def parse_line(text: bytes | None, file: str) -> dict[str, Any]:
    """Parse a line of a run's file.

    Args:
        text: the line; None: it is longer than `LineFile` keeps.
        file: name of the file, one of `FIELDS`.

    Raises:
        ValueError: the line breaks a rule, which the message says: "step is '1', must be a whole number from 0 to 2^53 - 1".

    >>> parse_line(b'{"step": 1, "loss": 2.5}', "metrics.jsonl")
    {'step': 1, 'loss': 2.5}
    """
    if text is None:
        raise ValueError(f"it has more than {max_bytes(file):,} bytes")
    line = _load(text)
    if line is None:
        raise ValueError("it is no JSON object")
    if missing := [name for name in NEEDED[file] if name not in line]:
        raise ValueError(f"{missing[0]} is missing")
    if (longest := max(map(len, line))) > MAX_NAME:
        raise ValueError(f"the name of a field has {longest:,} characters, more than {MAX_NAME:,}")
    if file == "metrics.jsonl":
        is_event = "event" in line
        if all(_find_metric_rule(name, is_event).allows(value) for name, value in line.items()):
            return line
        rules: Mapping[str, Rule] = {name: _find_metric_rule(name, is_event) for name in line}
    else:
        rules = FIELDS[file]
    if problems := find_problems(line, rules, SINGLE):
        raise ValueError(next(iter(problems.values())))
    return line


def _load(text: bytes) -> dict[str, Any] | None:
    """Load a JSON object; None: it is none."""
    try:
        line = json.loads(text.decode())
    except (ValueError, RecursionError):  # UTF-16, a number of 5,000 digits, nesting
        return None
    return line if type(line) is dict else None


def max_bytes(file: str) -> int:
    """Return the most bytes that a line of a run's file has."""
    return MAX_LINE if file == "metrics.jsonl" else MAX_WIDE_LINE


class LineFile:
    """A file of lines that grows: reads what is new, in pieces, and keeps no more than a line of it.

    Args:
        path: of the file, whose name is one of `FIELDS`.
        offset: byte at which the first line begins that is read.
        number: of the lines before it.

    Attributes:
        number: of the last line that was read to its end; 1 is the first.
    """

    piece, max_passed = PIECE, MAX_PASSED

    def __init__(self, path: Path, offset: int = 0, number: int = 0):
        self.path, self.number, self.max_bytes = path, number, max_bytes(path.name)
        self._offset, self._size = offset, 0
        self._parts: list[bytes] = []

    @property
    def end(self) -> int:
        """Byte behind the last line that was read to its end."""
        return self._offset - self._size

    @property
    def rest(self) -> bytes | None:
        """The bytes that were read of the line that has no end yet; None: it is too long."""
        return b"".join(self._parts) if self._size <= self.max_bytes else None

    @property
    def is_given_up(self) -> bool:
        """Whether a line is so long that nothing more is read."""
        return self._size > self.max_passed

    def read(self) -> Iterator[tuple[int, bytes | None]]:
        """Read the lines that have ended since: number and text, None instead of one that is too long.

        What stands behind the last end of a line is read anew the next time, as a writer may have cut it off since, unless it
        is too long already. Who stops in the middle loses lines.

        Raises:
            OSError: the file cannot be read, or is none: a folder, a pipe, a device.
        """
        if self._size <= self.max_bytes:
            self._offset, self._size, self._parts = self.end, 0, []
        with open_regular(self.path) as file:
            file.seek(self._offset)
            while not self.is_given_up and (piece := file.read(self.piece)):
                self._offset += len(piece)
                first, *others = piece.split(b"\n")
                self._add(first)
                for part in others:
                    text, self._size, self._parts = self.rest, 0, []
                    self.number += 1
                    yield self.number, text
                    self._add(part)

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self.max_bytes:
            self._parts.clear()
        else:
            self._parts.append(part)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: it cannot be read, or is none: a folder, a pipe, a device.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 - returned
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(None, "it is no regular file", str(path))
    return file


def read_texts(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Read the lines of a run's file, as bytes without their ends and as values; none if there is no file.

    A line that a kill cut off, the last, is left out.

    Raises:
        UsageError: the file cannot be read, or a line breaks a rule of `FIELDS`; it names the line, the field and the rule.
    """
    lines = LineFile(path)
    try:
        for number, text in lines.read():
            yield text or b"", _parse(path, number, text)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{format_name(path)} cannot be read: {error.strerror or error}") from None
    rest = lines.rest
    if rest is None or _load(rest) is not None:  # too long, or whole but for its end
        yield rest or b"", _parse(path, lines.number + 1, rest)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a run's file as values; see `read_texts`."""
    return (line for _, line in read_texts(path))


def parse_lines(path: Path, lines: Iterator[tuple[int, bytes | None]]) -> Iterator[dict[str, Any]]:
    """Parse what `LineFile.read` gives.

    Raises:
        UsageError: a line breaks a rule of `FIELDS`.
    """
    return (_parse(path, number, text) for number, text in lines)


def _parse(path: Path, number: int, text: bytes | None) -> dict[str, Any]:
    try:
        return parse_line(text, path.name)
    except ValueError as error:
        raise UsageError(f"{format_name(path)}, line {number:,}: {error}: {REMEDY}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Settings


def read_settings(path: Path) -> dict[str, Any]:
    """Read a settings.json; {} if there is none.

    Raises:
        UsageError: it cannot be read, or a value breaks a rule of `SETTINGS`.
    """
    values = read_json(path, format_name(path)) if path.exists() else {}
    return _check(values, path, SETTINGS)


def read_plain(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML file of a run whose values are shown, and nothing computes with them.

    Raises:
        UsageError: it cannot be read, or a value is not `PLAIN`.
    """
    return _check((read_json if path.suffix == ".json" else read_yaml)(path, format_name(path)), path, {})


def _check(values: dict[str, Any], path: Path, rules: Mapping[str, Rule]) -> dict[str, Any]:
    if problems := find_problems(values, rules, PLAIN):
        raise UsageError([f"{format_name(path)}: {problem}" for problem in list(problems.values())[:5]])
    return values
