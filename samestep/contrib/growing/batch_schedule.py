"""A global batch that grows: how large the steps are after so many samples of the training, as `batch_schedule` says.

Growth is laid out in samples, not in steps, so that the stream of samples, and how far the learning rate has fallen after so
many of them, stay as they are with a constant batch. In a recipe's file, and on a command line:

    {kind: stages, sizes: [16, 32, 64], boundaries: [0.25, 0.5]}     "16, 32 at 0.25, 64 at 0.5"
        16 samples per step; 32 from a quarter of the training's samples on, 64 from half of them (or 25 %)
    {kind: stages, sizes: [16, 32], boundaries: [8000], unit: samples}     "16, 32 at 8000 samples"
        the same by samples, or, where all samples have as many tokens, by tokens
    {kind: power, first_size: 16, power: 0.5}     "power 0.5 from 16"
        global_batch_size x (samples so far / all samples) ^ 0.5, at least 16
    {kind: seesaw, first_size: 16}     "seesaw from 16"
        16 / (learning rate / peak), at most global_batch_size; see `find_stages`
    {kind: noise, first_size: 16, more_tokens: 0.1}     "noise 0.1 from 16"
        as the measured noise of the gradient allows: what takes 10 % more tokens than 16 samples

All but Seesaw may have rate: sqrt, or linear (", rate by sqrt"): then the learning rate, which is that of
learning_rate_batch_size, grows with the square root of the batch (or in proportion). global_batch_size is the largest batch:
what it needs in memory, and how it is cut, is planned for it.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

from samestep.contrib.kinds import COUNT, LARGEST_COUNT, NUMBER, Kinds, format_number
from samestep.errors import UsageError
from samestep.recipe.settings import choice, from_text, limit, setting
from samestep.recipe.variants import Growth

MAX_STAGES = 64
"""Sizes that a power and Seesaw grow through at most: kernels meet no more shapes than that."""
EXPONENTS = {None: 0.0, "sqrt": 0.5, "linear": 1.0}
"""Ways in which the learning rate follows the batch -> exponent of (batch / learning_rate_batch_size)."""
TOLERANCE = 1e-12  # of thresholds: libraries for mathematics differ in the last bit

_RATE = r"(?:, *rate by (?P<rate>\w+))?"


class Stage(NamedTuple):
    """Steps of one size.

    Attributes:
        place: sample of the training (0 is the first) from which on steps that begin have this size.
        size: samples of a step.
    """

    place: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSchedule(Kinds, Growth):
    """A recipe's `batch_schedule`; fields of other kinds have their defaults."""

    KINDS: ClassVar = {
        "stages": (("sizes", "boundaries"), ("unit", "rate")),
        "power": (("first_size", "power"), ("rate",)),
        "seesaw": (("first_size",), ()),
        "noise": (("first_size", "more_tokens"), ("rate",)),
    }
    SENTENCES: ClassVar = (
        rf"(?P<stages>{COUNT}(?: *, *{COUNT} at {NUMBER} *(?:%|samples|tokens)?)+){_RATE}",
        rf"(?P<kind>power) (?P<power>{NUMBER}) from (?P<first_size>{COUNT}){_RATE}",
        rf"(?P<kind>seesaw) from (?P<first_size>{COUNT}){_RATE}",
        rf"(?P<kind>noise) (?P<more_tokens>{NUMBER}) from (?P<first_size>{COUNT}){_RATE}",
    )

    kind: str = setting("stages, power, seesaw or noise")
    sizes: tuple[int, ...] = setting(
        f"samples of a step, for each stage; they grow, and are at most {MAX_STAGES}",
        (
            f"must be 2 to {MAX_STAGES} numbers from 1 to {LARGEST_COUNT:,} that grow",
            lambda sizes: 2 <= len(sizes) <= MAX_STAGES and _grow((0, *sizes)) and sizes[-1] <= LARGEST_COUNT,
        ),
        default=(),
    )
    boundaries: tuple[int | float, ...] = setting(
        "where each stage but the first begins, in `unit`",
        ("must be one after the other, later than at 0", lambda places: _grow((0, *places))),
        default=(),
    )
    unit: str = setting(
        "share of the training's samples, samples, or tokens", choice("share", "samples", "tokens"), default="share"
    )
    first_size: int = setting("samples of the first step", limit(LARGEST_COUNT), default=0)
    power: float = setting("exponent", limit(100, 0.01), default=1.0)
    more_tokens: float = setting(
        "share of its tokens that a batch may take more than the first one", limit(1, 0.001), default=0.0
    )
    rate: str | None = setting(
        "how the learning rate follows the batch: sqrt or linear; null: it stays",
        choice("sqrt", "linear"),
        default=None,
    )

    def problems(self) -> list[str]:
        """List the rules between fields that it breaks."""
        if self.kind != "stages":
            return []
        problems, places = [], self.boundaries
        if len(places) != len(self.sizes) - 1:
            problems.append(
                f"{len(self.sizes)} sizes have {len(self.sizes) - 1} boundaries between them, not {len(places)}"
            )
        if self.unit == "share" and places and places[-1] >= 1:
            problems.append(
                "shares of the training are below 1 (100 %); for a number of samples set unit to samples (`at 8000 samples`)"
            )
        if self.unit != "share" and any(place != int(place) for place in places):
            problems.append(f"{self.unit} are whole numbers")
        return problems

    @classmethod
    def read_sentence(cls, text: str) -> dict[str, Any]:
        """Read "16, 32 at 0.25, rate by sqrt" and its like, as `Kinds.read_sentence`.

        >>> print(BatchSchedule.read("16, 32 at 25 %, 64 at 0.5"))
        16, 32 at 0.25, 64 at 0.5
        >>> BatchSchedule.read("power 0.5 from 16, rate by sqrt").mapping
        {'kind': 'power', 'first_size': 16, 'power': 0.5, 'rate': 'sqrt'}
        """
        values = super().read_sentence(text)
        if stages := values.pop("stages", None):
            later = re.findall(f"({COUNT}) at ({NUMBER}) *(%|samples|tokens)?", stages)
            units = {unit.replace("%", "") or "share" for _, _, unit in later}
            if len(units) > 1:
                raise UsageError(f"places are all shares, all samples or all tokens, not {' and '.join(sorted(units))}")
            sizes = [int(stages.partition(",")[0]), *(int(size) for size, _, _ in later)]
            places = [float(Fraction(at) / 100) if unit == "%" else from_text(at, int) for _, at, unit in later]
            values |= {"kind": "stages", "sizes": sizes, "boundaries": places, "unit": units.pop()}
        return values

    @property
    def smallest(self) -> int:
        """Samples of the first step."""
        return self.sizes[0] if self.kind == "stages" else self.first_size

    def __str__(self) -> str:
        rate = f", rate by {self.rate}" if self.rate else ""
        if self.kind != "stages":
            number = {"power": self.power, "noise": self.more_tokens}.get(self.kind)
            return f"{self.kind}{'' if number is None else f' {format_number(number)}'} from {self.first_size}{rate}"
        unit = "" if self.unit == "share" else f" {self.unit}"
        later = zip(self.sizes[1:], self.boundaries, strict=True)
        stages = (f"{size} at {format_number(place)}{unit}" for size, place in later)
        return f"{', '.join([str(self.sizes[0]), *stages])}{rate}"


def _grow(numbers: Sequence[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


def make_sizes(smallest: int, largest: int) -> list[int]:
    """Make the sizes that a batch grows through: whole samples, evenly spaced, at most `MAX_STAGES` of them.

    >>> make_sizes(4, 7), make_sizes(16, 1000)[:3], len(make_sizes(16, 1000))
    ([4, 5, 6, 7], [16, 32, 48], 63)
    """
    unit = -(-(largest - smallest) // (MAX_STAGES - 1))
    return [*range(smallest, largest, max(1, unit)), largest]


def find_stages(
    growth: BatchSchedule,
    largest: int,
    num_samples: int,
    tokens_per_sample: int,
    ratio: Callable[[int], float],
    decided: Sequence[Stage] = (),
) -> tuple[Stage, ...]:
    """Find the stages of a training.

    Seesaw: where a schedule multiplies the learning rate by a < 1, multiply it by sqrt(a) instead and the batch by 1 / a. The
    derivation: of a gradient whose square is mostly noise, E|G|^2 ~ s^2 / B, an update of Adam, taken as G / sqrt(E|G|^2),
    moves the weights by lr sqrt(B) / s times G, so that it is SGD with the rate lr sqrt(B) / s. SGD moves as far per sample at
    equal rate / B, here lr / sqrt(B): this is what a decay multiplies by a, and sqrt(a) / sqrt(1 / a) = a does, too. Of the
    ways to do that, this grows the batch the most while the rate of SGD, lr sqrt(B), does not grow: sqrt(a) sqrt(1 / a) = 1.
    With r the learning rate over its peak without Seesaw, and B_0 the first batch:

        B = B_0 / r, rounded down to a size of `make_sizes`, at most `largest`      learning rate = peak r sqrt(B / B_0)

    The second keeps lr / sqrt(B) as it is without Seesaw whatever the rounding, and where the batch can grow no more. For SGD
    itself rate / B is kept by the exponent 1 instead of 1/2: the rate stays as the batch grows.

    Reference: Meterez et al., Seesaw: Accelerating Training by Balancing Learning Rate and Batch Size Scheduling, 2025,
    arXiv:2510.14717.

    Args:
        growth: the schedule.
        largest: global_batch_size.
        num_samples: samples of the training.
        tokens_per_sample: of each sample, where places are tokens.
        ratio: learning rate over its peak where a step begins at a sample, without Seesaw; it never grows again once it fell.
        decided: of noise, the stages so far.

    Returns:
        Stages in order; the first begins at 0.

    >>> find_stages(BatchSchedule.read("4, 8 at 0.5"), 8, 100, 1, lambda place: 1.0)
    (Stage(place=0, size=4), Stage(place=50, size=8))
    >>> [stage.place for stage in find_stages(BatchSchedule.read("seesaw from 4"), 8, 100, 1, lambda place: 1 - place / 100)]
    [0, 20, 34, 43, 50]
    """
    if growth.kind == "stages":
        factor = {"share": Fraction(num_samples), "samples": Fraction(1), "tokens": Fraction(1, tokens_per_sample)}
        # Of the decimal numbers that people wrote, not of the floats that are nearest to them
        exact = [Fraction(format_number(place)) for place in growth.boundaries]
        places = [0, *(math.ceil(place * factor[growth.unit]) for place in exact)]
        return tuple(map(Stage, places, growth.sizes))
    if growth.kind == "noise":
        return tuple(decided) or (Stage(0, growth.smallest),)
    first, *sizes = make_sizes(growth.smallest, largest)
    if growth.kind == "power":
        exponent = 1 / growth.power
        shares = ((size / largest) ** exponent for size in sizes)
        places = [math.ceil(num_samples * share * (1 - TOLERANCE)) for share in shares]
    else:
        places = [_find_fall(ratio, first / size * (1 + TOLERANCE), num_samples) for size in sizes]
    stages = [Stage(0, first), *map(Stage, places, sizes)]
    # Of stages that begin at the same sample the last one counts
    return (*(a for a, b in itertools.pairwise(stages) if a.place < b.place), stages[-1])


def _find_fall(ratio: Callable[[int], float], threshold: float, num_samples: int) -> int:
    """Find the first sample at which `ratio` is at most `threshold`; the number of samples where there is none."""
    low, high = -1, num_samples  # above, and at most, or the end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ratio(middle) <= threshold else (middle, high)
    return high
