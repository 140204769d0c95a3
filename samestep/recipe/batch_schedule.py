"""A global batch that grows: how large the steps are after so many samples of the training, as `batch_schedule` says.

Growth is laid out in samples, not in steps, so that the stream of samples, and how far the learning rate has fallen after so
many of them, stay as they are with a constant batch:

    "16, 32 at 0.25, 64 at 0.5"     16 samples per step; 32 from a quarter of the training's samples on, 64 from half of them
    "16, 32 at 8000 samples"        the same by samples, or, where all samples have as many tokens, by tokens
    "power 0.5 from 16"             global_batch_size x (samples so far / all samples) ^ 0.5, at least 16
    "seesaw from 16"                16 / (learning rate / peak), at most global_batch_size; see `find_stages`
    "noise 0.1 from 16"             as the measured noise of the gradient allows: what takes 10 % more tokens than 16 samples

All but Seesaw may end with ", rate by sqrt" (or linear): then the learning rate, which is that of learning_rate_batch_size,
grows with the square root of the batch (or in proportion). global_batch_size is the largest batch: what it needs in memory, and
how it is cut, is planned for it.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

MAX_STAGES = 64
"""Sizes that a power and Seesaw grow through at most: kernels meet no more shapes than that."""
EXAMPLES = '"16, 32 at 0.25, 64 at 0.5", "power 0.5 from 16", "seesaw from 16" or "noise 0.1 from 16"'
EXPONENTS = {None: 0.0, "sqrt": 0.5, "linear": 1.0}
"""Ways in which the learning rate follows the batch -> exponent of (batch / learning_rate_batch_size)."""
TOLERANCE = 1e-12  # of thresholds: libraries for mathematics differ in the last bit

_SIZE = r"([1-9][0-9]{0,7})"
_NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)"
_RATE = re.compile(r"(.*?), *rate by (\w+)")
_POWER = re.compile(rf"power {_NUMBER} from {_SIZE}")
_NOISE = re.compile(rf"noise {_NUMBER} from {_SIZE}")
_SEESAW = re.compile(rf"seesaw from {_SIZE}")
_STAGE = re.compile(rf"{_SIZE} at {_NUMBER} *(%|samples|tokens)?")


class Stage(NamedTuple):
    """Steps of one size.

    Attributes:
        place: sample of the training (0 is the first) from which on steps that begin have this size.
        size: samples of a step.
    """

    place: int
    size: int


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    """A `batch_schedule`, read.

    Attributes:
        kind: stages, power, seesaw or noise.
        sizes: of each stage; of the others the first size alone.
        places: where each stage but the first begins, in `unit`.
        unit: share (of the training's samples), samples or tokens.
        power: exponent of power; None for the others.
        more_tokens: of noise, the share of its tokens that a batch may take more than the first one; None for the others.
        rate: how the learning rate follows the batch: a key of `EXPONENTS`.
    """

    kind: str
    sizes: tuple[int, ...]
    places: tuple[Fraction, ...] = ()
    unit: str = "share"
    power: float | None = None
    more_tokens: float | None = None
    rate: str | None = None


def parse(text: str) -> BatchSchedule:
    """Read a recipe's `batch_schedule`.

    Raises:
        ValueError: the text breaks a rule, which the message says.

    >>> parse("16, 32 at 25 %, 64 at 0.5").places
    (Fraction(1, 4), Fraction(1, 2))
    >>> parse("power 0.5 from 16").power, parse("16, 32 at 9000 samples, rate by sqrt").rate
    (0.5, 'sqrt')
    """
    if match := _SEESAW.fullmatch(text):
        return BatchSchedule("seesaw", (int(match[1]),))
    rest, rate = text, None
    if match := _RATE.fullmatch(text):
        rest, rate = match[1], match[2]
        if rate not in EXPONENTS:
            raise ValueError("the learning rate follows the batch by sqrt or linear")
    if match := _POWER.fullmatch(rest):
        power = float(match[1])
        if not 0.01 <= power <= 100:
            raise ValueError("a power is from 0.01 to 100")
        return BatchSchedule("power", (int(match[2]),), power=power, rate=rate)
    if match := _NOISE.fullmatch(rest):
        more_tokens = float(match[1])
        if not 0.001 <= more_tokens <= 1:
            raise ValueError("a share of more tokens is from 0.001 to 1")
        return BatchSchedule("noise", (int(match[2]),), more_tokens=more_tokens, rate=rate)
    return _read_stages(rest, rate)


def _read_stages(text: str, rate: str | None) -> BatchSchedule:
    """Read a size, and the sizes and places of later stages. Raises ValueError as `parse`."""
    first, *others = re.split(r" *, *", text)
    matches = [match for part in others if (match := _STAGE.fullmatch(part))]
    if not re.fullmatch(_SIZE, first) or not matches or len(matches) < len(others):
        raise ValueError(f"it is written like {EXAMPLES}")
    if len(matches) >= MAX_STAGES:
        raise ValueError(f"it has at most {MAX_STAGES} stages")
    sizes, places = [int(first)], []
    units = {"share" if match[3] in (None, "%") else match[3] for match in matches}
    for match in matches:
        sizes.append(int(match[1]))
        places.append(Fraction(match[2]) / (100 if match[3] == "%" else 1))
    if len(units) > 1:
        raise ValueError(f"places are all shares, all samples or all tokens, not {' and '.join(sorted(units))}")
    if sizes != sorted(set(sizes)):
        raise ValueError(f"batches grow, unlike {', '.join(map(str, sizes))}")
    if places != sorted(set(places)) or places[0] <= 0:
        raise ValueError("stages begin one after the other, later than at 0")
    (unit,) = units
    if unit == "share" and places[-1] >= 1:
        raise ValueError("shares of the training are below 1 (100 %); write `at 8000 samples` for a number of samples")
    if unit != "share" and any(place.denominator != 1 for place in places):
        raise ValueError(f"{unit} are whole numbers")
    return BatchSchedule("stages", tuple(sizes), tuple(places), unit, rate=rate)


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

    >>> find_stages(parse("4, 8 at 0.5"), 8, 100, 1, lambda place: 1.0)
    (Stage(place=0, size=4), Stage(place=50, size=8))
    >>> [stage.place for stage in find_stages(parse("seesaw from 4"), 8, 100, 1, lambda place: 1 - place / 100)]
    [0, 20, 34, 43, 50]
    """
    if growth.kind == "stages":
        factor = {"share": Fraction(num_samples), "samples": Fraction(1), "tokens": Fraction(1, tokens_per_sample)}
        places = [0, *(math.ceil(place * factor[growth.unit]) for place in growth.places)]
        return tuple(map(Stage, places, growth.sizes))
    if growth.kind == "noise":
        return tuple(decided) or (Stage(0, growth.sizes[0]),)
    first, *sizes = make_sizes(growth.sizes[0], largest)
    if growth.kind == "power":
        exponent = 1 / (growth.power or 1)
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
