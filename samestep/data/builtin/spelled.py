"""Dates and numbers as people write them, and as computers do: drawn pairs of texts, each decided by a seed and a number.

A source belongs to one split, which a hash of its date or number decides, however it is written. So no held-out date or
number occurs in training. Numbers below 100, of whose words all others are made, are in training only.
"""

import datetime
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from samestep.cut.order import sample_rng
from samestep.data import documents
from samestep.data.arrow import Dataset, Features, Value, datasets, hash_modules

SPELLED = 31  # stream of random numbers (see order.sample_rng)
SPLITS = ("train", "validation")
HELD_OUT = 10  # one date or number of so many is held out
FIRST, NUM_DAYS = datetime.date(1900, 1, 1), 200 * 365
NAMES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
NAMES += ["seventeen", "eighteen", "nineteen"]
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
ORDINALS |= {"twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"}
MONTHS = "January February March April May June July August September October November December".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
FEATURES = Features(dict.fromkeys(("source", "target", "origin"), Value("string"))) if datasets else None


class Spelled(NamedTuple):
    """A pair of texts.

    Attributes:
        source: as people write it.
        target: a date in ISO's format, or digits.
        kind: dates or numbers.
    """

    source: str
    target: str
    kind: str


def draw(seed: int, split: str, sample_id: int) -> Spelled:
    """Draw the pair of a number: a pure function of its arguments.

    Args:
        seed: any integer.
        split: train or validation.
        sample_id: 0 or more.
    """
    rng = sample_rng(seed, SPELLED, SPLITS.index(split), sample_id)
    while True:
        if rng.random() < 0.5:
            date = FIRST + datetime.timedelta(days=int(rng.integers(NUM_DAYS)))
            pair = Spelled(spell_date(date, rng), date.isoformat(), "dates")
        else:
            number = int(rng.integers(10 ** int(rng.integers(2, 7))))
            pair = Spelled(spell_number(number, rng.random() < 0.7), str(number), "numbers")
        if find_split(pair.target) == split:
            return pair


def find_split(target: str) -> str:
    """Find the split that a date or a number belongs to, by a hash of it; of numbers below 100 none is held out."""
    if len(target) < 3:
        return "train"
    digest = hashlib.sha256(target.encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") % HELD_OUT == 0 else "train"


def spell_number(number: int, has_and: bool = True) -> str:
    """Spell a number below a million.

    >>> spell_number(402), spell_number(402, has_and=False), spell_number(71_000), spell_number(100_015)
    ('four hundred and two', 'four hundred two', 'seventy-one thousand', 'one hundred thousand and fifteen')
    """
    if number < 20:
        return NAMES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens - 2] + (f"-{NAMES[ones]}" if ones else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    first, rest = divmod(number, size)
    joined = " and " if has_and and rest < 100 else " "
    return f"{spell_number(first, has_and)} {name}" + (joined + spell_number(rest, has_and) if rest else "")


def spell_ordinal(number: int) -> str:
    """Spell an ordinal number below 100.

    >>> spell_ordinal(3), spell_ordinal(21), spell_ordinal(30), spell_ordinal(16)
    ('third', 'twenty-first', 'thirtieth', 'sixteenth')
    """
    head, dash, last = spell_number(number).rpartition("-")
    return head + dash + ORDINALS.get(last, f"{last}th")


def spell_date(date: datetime.date, rng: np.random.Generator) -> str:
    """Write a date in one of the ways of people, drawn by `rng`."""
    month, day, year = MONTHS[date.month - 1], date.day, date.year
    short = month if rng.random() < 0.5 else month[:3]
    ending = "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    ways = (
        f"the {day}{ending} of {month} {year}",
        f"{short} {day}{ending}, {year}",
        f"{day} {short} {year}",
        f"{DAYS[date.weekday()]}, {day} {month} {year}",
        f"the {spell_ordinal(day)} of {month}, {year}",
        f"{day}.{date.month}.{year}",
    )
    return ways[rng.integers(len(ways))]


def load_rows(seed: int, split: str, num_samples: int) -> Dataset:
    """Draw the rows of a split, with columns `source`, `target` and `origin` (its kind); cached."""
    key = (seed, split, num_samples, hash_modules(__name__))
    return documents.cache_rows(_draw_rows, FEATURES, key=key, seed=seed, split=split, num_samples=num_samples)


def _draw_rows(seed: int, split: str, num_samples: int) -> Iterator[dict[str, Any]]:
    for sample_id in range(num_samples):
        pair = draw(seed, split, sample_id)
        yield {"source": pair.source, "target": pair.target, "origin": pair.kind}
