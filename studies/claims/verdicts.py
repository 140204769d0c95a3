"""A claim, the cases in which it was tried, and the verdict that follows from their numbers.

A case is decided by one of the rules below, from numbers alone. The verdict counts cases: all hold, some hold, none holds.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from decimal import Decimal
from types import ModuleType
from typing import Any

HOLDS, CONDITIONS, FAILS = "holds", "holds under conditions", "does not hold"
VERDICTS = (HOLDS, CONDITIONS, FAILS)
RULES = {
    "rounds": "the number, rounded to the digits that are stated, is the stated one",
    "within": "the mean lies in the stated range",
    "near": "the mean is at most 5 % from what is stated, or where another tolerance is given, that",
    "less": "the mean of the paired differences is below zero by more than 2 standard errors",
    "at least": "the mean, and 2 standard errors, reach what is stated",
    "equal": "the numbers differ by at most what is given",
    "so": "a statement without a number is true or not",
}
"""How a case is decided."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to try a claim.

    Attributes:
        name: the circumstances.
        measured: the numbers, as shown.
        holds: by the rule.
        rule: a key of `RULES`.
    """

    name: str
    measured: str
    holds: bool
    rule: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """What is told, and what was found.

    Attributes:
        text: the claim, in our words.
        cases: at least one.
        right: what is right instead; shown unless the claim holds.
    """

    text: str
    cases: tuple[Case, ...]
    right: str = ""

    def __post_init__(self):
        if not self.cases:
            raise ValueError(f"claim without a case: {self.text}")

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        held = [case.holds for case in self.cases]
        return HOLDS if all(held) else CONDITIONS if any(held) else FAILS

    @property
    def conditions(self) -> str:
        """The names of the cases that hold."""
        return "; ".join(case.name for case in self.cases if case.holds)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What is run, and what it says about claims.

    Attributes:
        name: of the files, and for `--only`.
        title: a heading.
        what: model, data, steps.
        settings: all that decides the results but the seed and the code.
        measure: (settings, seed) -> a result for JSON.
        claims: all results, in the order of seeds -> claims.
        seeded: whether seeds matter; if not, it is run once.
        sources: modules that compute the results: a result of other code is not reused.
        minutes: that a seed takes on 2 cores, about.
        quick: settings to try the program with.
        draw: all results -> PNGs, one for each of `pictures`.
        pictures: names of files.
        table: all results -> Markdown beside the claims.
    """

    name: str
    title: str
    what: str
    settings: dict[str, Any]
    measure: Callable[[dict[str, Any], int], dict[str, Any]]
    claims: Callable[[list[dict[str, Any]]], list[Claim]]
    sources: tuple[ModuleType, ...]
    seeded: bool = True
    minutes: float = 0.1
    quick: dict[str, Any] = dataclasses.field(default_factory=dict)
    draw: Callable[[list[dict[str, Any]]], list[bytes]] | None = None
    pictures: tuple[str, ...] = ()
    table: Callable[[list[dict[str, Any]]], str] | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def rounds(name: str, number: float, stated: str, unit: str = "") -> Case:
    """`number` rounded to the digits of `stated`, as "0.50" or "35".

    >>> rounds("", 0.00369, "0.001").holds, rounds("", 34.6, "35").holds, rounds("", 0.0034, "0.003").holds
    (False, True, True)
    """
    digits = -Decimal(stated).as_tuple().exponent
    shown = f"{_digits(number, digits)}{unit}"
    return Case(name, f"{shown} (stated {stated}{unit})", round(number, digits) == float(stated), "rounds")


def _digits(number: float, digits: int) -> str:
    """Two digits more than stated; three significant ones where these show nothing."""
    return f"{number:.{digits + 2}f}" if abs(number) >= 10.0 ** -(digits + 1) else f"{number:.3g}"


def within(name: str, values: Sequence[float], low: float, high: float, unit: str = "") -> Case:
    """Mean of the values in [low, high]."""
    shown = f"{spread(values, unit)} (stated {low:g} to {high:g}{unit})"
    return Case(name, shown, low <= statistics.fmean(values) <= high, "within")


def near(name: str, values: Sequence[float], stated: float, tolerance: float = 0.05, unit: str = "") -> Case:
    """Mean of the values at most `tolerance` of `stated` from it."""
    given = "" if tolerance == 0.05 else f", tolerance {tolerance:.0%}"
    holds = abs(statistics.fmean(values) - stated) <= tolerance * abs(stated)
    return Case(name, f"{spread(values, unit)} (stated {stated:.4g}{unit}{given})", holds, "near")


def less(name: str, ours: Sequence[float], theirs: Sequence[float], unit: str = "") -> Case:
    """`ours` below `theirs`, pair by pair: one value each per seed, at least 2 seeds.

    >>> less("", [1.0, 2.0, 3.0], [1.5, 2.4, 3.6]).holds, less("", [1.0, 2.0], [1.5, 1.5]).holds
    (True, False)
    """
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, error = statistics.fmean(differences), standard_error(differences)
    shown = f"{statistics.fmean(ours):.4g} against {statistics.fmean(theirs):.4g}{unit}: {mean:+.3g} ± {error:.2g}"
    shown += f" ({min(differences):+.3g}..{max(differences):+.3g})"
    if mean > 2 * error:
        shown += ", the other way round"
    elif mean >= -2 * error:
        shown += ", no difference to be seen"
    return Case(name, shown, mean < -2 * error, "less")


def at_least(name: str, values: Sequence[float], stated: float, unit: str = "") -> Case:
    """Mean and 2 standard errors reach `stated`."""
    holds = statistics.fmean(values) + 2 * standard_error(values) >= stated
    return Case(name, f"{spread(values, unit)} (stated {stated:g}{unit})", holds, "at least")


def equal(name: str, differences: Sequence[float], tolerance: float, of: str = "") -> Case:
    """The largest difference is at most `tolerance`."""
    largest = max(abs(each) for each in differences)
    return Case(name, f"{of}largest difference {largest:.2g} (allowed {tolerance:g})", largest <= tolerance, "equal")


def so(name: str, measured: str, holds: bool) -> Case:
    """A statement that is true or not."""
    return Case(name, measured, bool(holds), "so")


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values, at least 2."""
    return statistics.stdev(values) / math.sqrt(len(values))


def spread(values: Sequence[float], unit: str = "") -> str:
    """Mean, standard deviation, smallest and largest; a single number if there is one, or all are the same.

    >>> spread([1.0, 2.0, 3.0]), spread([0.5])
    ('2 ± 1 (1..3)', '0.5')
    """
    mean = statistics.fmean(values)
    if len(set(values)) == 1:
        return f"{mean:.4g}{unit}"
    return f"{mean:.3g} ± {statistics.stdev(values):.2g}{unit} ({min(values):.3g}..{max(values):.3g})"


def column(results: Sequence[dict[str, Any]], *path: str) -> list[Any]:
    """The value at a path of keys in every result.

    >>> column([{"a": {"b": 1}}, {"a": {"b": 2}}], "a", "b")
    [1, 2]
    """
    found = list(results)
    for key in path:
        found = [each[key] for each in found]
    return found


def at_best(results: Sequence[dict[str, float]]) -> tuple[list[float], list[str]]:
    """For each seed the value of the setting that is best (smallest) on average over the other seeds, and that setting.

    No seed takes part in the choice that it is judged by.

    >>> at_best([{"1": 3.0, "2": 1.0}, {"1": 3.0, "2": 2.0}, {"1": 3.0, "2": 1.5}])
    ([1.0, 2.0, 1.5], ['2', '2', '2'])
    """
    values, chosen = [], []
    for left_out, own in enumerate(results):
        others = [each for place, each in enumerate(results) if place != left_out]
        best = min(own, key=lambda name: statistics.fmean(each[name] for each in others))
        values.append(own[best])
        chosen.append(best)
    return values, chosen


def named(chosen: Sequence[str], of: Sequence[str]) -> str:
    """Which settings were chosen, how often, and whether the grid ends there.

    >>> named(["4", "4", "2"], ["1", "2", "4"])
    '4 (2 of 3), the end of the grid; 2 (1 of 3)'
    """
    counts = sorted(((chosen.count(name), name) for name in set(chosen)), reverse=True)
    return "; ".join(
        f"{name} ({count} of {len(chosen)})" + (", the end of the grid" if name in (of[0], of[-1]) else "")
        for count, name in counts
    )
