"""Rules of the fields of the files that a run leaves.

These files outlive the run. People edit them, disks fill up, other programs write lines of their own. So a value may be of any
kind or size, and none is computed with before it was checked.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from samestep.recipe.reading import format_name, format_value

TIMES = ("compute_seconds_min", "compute_seconds_mean", "compute_seconds_max", "data_seconds_max", "slowest_process")
"""Fields of a line of metrics.jsonl with the times of its processes, if there are several."""
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


@dataclasses.dataclass(frozen=True)
class FieldRule:
    """A rule of what a value must be.

    Attributes:
        text: the rule in words, after "must be".
        allows: tells whether a value obeys it.
    """

    text: str
    allows: Callable[[Any], bool]

    def or_null(self) -> "FieldRule":
        """Make the rule that allows null, too."""
        return FieldRule(f"{self.text}, or null", lambda value: value is None or self.allows(value))


LARGEST = sys.float_info.max


def is_finite(value: Any) -> bool:
    """Tell whether a value is a number that a float can hold: no boolean, no infinity, no NaN, no integer of 400 digits.

    >>> [is_finite(value) for value in (1, 1.5, True, float("nan"), 10**400, "1")]
    [True, True, False, False, False, False]
    """
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST


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


def _is_norms(value: Any) -> bool:
    names = ("grad_norm", "weight_norm", "update_ratio")
    return type(value) is dict and all(is_finite(value.get(name)) and 0 <= value[name] <= MAX_SQUARE for name in names)


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


def _is_streams(value: Any) -> bool:
    """Tell whether a value is the places of streams (`samestep.contrib.streaming.streams.Mark`), by their numbers."""
    return type(value) is dict and all(
        name.isdecimal() and type(mark) is list and len(mark) == MARK and all(map(_is_count, mark))
        for name, mark in value.items()
    )


def _is_growth(value: Any) -> bool:
    """Tell whether a value is a `NoiseFollower.record` (`samestep.contrib.noise.growth`)."""
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


COUNT = FieldRule("a whole number from 0 to 2^53 - 1", _is_count)
POSITIVE = FieldRule("a whole number from 1 to 2^53 - 1", lambda value: _is_count(value) and value > 0)
METRIC = FieldRule("a finite number", is_finite).or_null()
SQUARE = FieldRule(f"a number up to {MAX_SQUARE:g}", lambda value: is_finite(value) and abs(value) <= MAX_SQUARE)
AMOUNT = FieldRule("a number from 0 to 2^53 - 1", lambda value: is_finite(value) and 0 <= value <= MAX_INTEGER)
TEXT = FieldRule(f"a text of at most {MAX_TEXT:,} characters", _is_text)
NAME = FieldRule(f"a text of at most {MAX_NAME:,} characters", functools.partial(_is_text, most=MAX_NAME))
FLAG = FieldRule("true or false", lambda value: type(value) is bool)
SINGLE = FieldRule(f"a finite number, true, false, null, or a text of at most {MAX_TEXT:,} characters", _is_single)
PLAIN = FieldRule(f"made of finite numbers, true, false, null and texts of at most {MAX_TEXT:,} characters", _is_plain)
LIST = FieldRule("a list", lambda value: type(value) is list)
DIGESTS = FieldRule(
    "an object of names and digests, which are texts", functools.partial(_is_mapping, allows=NAME.allows)
)
LAYER_VALUES = FieldRule(
    "at most 10,000 numbers", lambda value: type(value) is list and len(value) <= 10_000 and all(map(is_finite, value))
)
TARGETS = FieldRule("an object of counts", functools.partial(_is_mapping, allows=_is_count))
LAYERS = FieldRule(
    "an object of layers with grad_signal and grad_noise", functools.partial(_is_mapping, allows=_is_layer)
)
SHARE = FieldRule("a number from 0 to 1", lambda value: is_finite(value) and 0 <= value <= 1)
LAYER_NORMS = FieldRule(
    "an object of layers with grad_norm, weight_norm and update_ratio",
    functools.partial(_is_mapping, allows=_is_norms),
)
SIZES = FieldRule(f"at most {MAX_SIZES:,} pairs of steps and samples, which are whole numbers", _are_sizes)

FIELDS: dict[str, dict[str, FieldRule]] = {
    "metrics.jsonl": {
        "step": COUNT,
        "samples": COUNT,
        "tokens": COUNT,
        "images": COUNT,
        "epoch": AMOUNT,
        "seconds": AMOUNT,
        "skipped": FLAG,
        "digest": NAME,
        "max_expert_load": LAYER_VALUES,
        "unused_experts": LAYER_VALUES,
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
    "layers.jsonl": {"step": COUNT, "share_clipped": SHARE, "layers": LAYER_NORMS},
    "digests.jsonl": {"step": COUNT, "gradients": DIGESTS, "parameters": DIGESTS, "moments": DIGESTS},
    "samples.jsonl": {"step": COUNT, "process": COUNT, "micro_step": COUNT, "epochs": LIST, "samples": LIST},
}
"""File -> field -> its rule. Other fields of metrics.jsonl are numbers or null, elsewhere and in events single values."""
NEEDED: dict[str, tuple[str, ...]] = {
    "metrics.jsonl": ("step",),
    "noise.jsonl": ("step", "samples", "targets", "layers"),
    "layers.jsonl": ("step", "layers"),
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
MARK = 7
"""Whole numbers of the place of a stream."""
STATE = {
    "step": COUNT,
    "recipe_fingerprint": NAME,
    "data_fingerprints": DIGESTS,
    "num_skipped": COUNT,
    "run_id": NAME,
    "scaler": FieldRule("the state of a gradient scaler", _is_scaler).or_null(),
    "exact_sum": FieldRule(
        f"settings, and an exponent from -{MAX_EXPONENT} to {MAX_EXPONENT}", _is_exact_sum
    ).or_null(),
    "streams": FieldRule("whole numbers of each virtual stream, by its number", _is_streams).or_null(),
    "growth": FieldRule("stages from 0 on, measurements, and the steps since", _is_growth).or_null(),
}
"""Field of a checkpoint's state.json -> its rule."""
RECIPE = dict.fromkeys(("description", "global_batch_size", "learning_rate", "seed"), SINGLE)
"""Field of recipe.yaml -> its rule, of those that `watch` shows."""


@functools.lru_cache(4096)
def find_metric_rule(name: str, is_event: bool) -> FieldRule:
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


def find_problems(
    values: Mapping[str, Any], rules: Mapping[str, FieldRule], other: FieldRule | None = None
) -> dict[str, str]:
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
