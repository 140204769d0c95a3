"""Reading of values of a recipe that are of one of several kinds: mappings, and the sentences of a command line."""

import dataclasses
import re
from collections.abc import Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from samestep.errors import UsageError, nearest
from samestep.recipe.reading import format_value
from samestep.recipe.settings import build, from_text
from samestep.recipe.variants import Variant

COUNT, NUMBER = r"[1-9][0-9]{0,7}", r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
"""Regular expressions: whole numbers from 1 to `LARGEST_COUNT`, and numbers without sign or exponent."""
LARGEST_COUNT = 10**8 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kinds(Variant):
    """A value of a kind that is known here.

    Attributes:
        DEFAULTS: kind -> values of fields that it may have, where they are not given.
        SENTENCES: regular expressions, whose named groups are fields.
    """

    DEFAULTS: ClassVar[dict[str, dict[str, Any]]] = {}
    SENTENCES: ClassVar[tuple[str, ...]]

    @classmethod
    def read_kind(cls, value: str | Mapping[str, Any]) -> Self:
        given = cls.read_sentence(value) if isinstance(value, str) else value
        values = {name: part for name, part in given.items() if part is not None}
        kind = values.get("kind")
        if not isinstance(kind, str) or kind not in cls.KINDS:
            subject = "kind is missing" if kind is None else f"kind is {format_value(kind)}"
            raise UsageError(f"{subject}, must be one of {', '.join(cls.KINDS)}")
        needed, optional = cls.KINDS[kind]
        known = ("kind", *needed, *optional)
        unknown = [key for key in values if key not in known]
        problems = [f"{kind} has no {format_value(key)}: {nearest(str(key)[:60], known)}" for key in unknown]
        missing = [name for name in needed if name not in values]
        problems += [f"{kind} needs {name}" for name in missing if not get_close_matches(name, unknown)]
        if problems:
            raise UsageError(problems)
        try:
            found: Self = build(cls, {**cls.DEFAULTS.get(kind, {}), **values}, kind)
        except UsageError as error:
            problems = [problem.removeprefix(f"{kind}: ") for problem in error.problems]
            begins = tuple(f"{name} is " for name in needed)  # which are null for other kinds only
            raise UsageError([p.removesuffix(" or null") if p.startswith(begins) else p for p in problems]) from None
        return found

    @classmethod
    def read_sentence(cls, text: str) -> dict[str, Any]:
        """Read a sentence into a mapping, whose values are not yet checked. Raises UsageError for any other text."""
        for pattern in cls.SENTENCES:
            if match := re.fullmatch(pattern, text):
                return {name: from_text(word, int) for name, word in match.groupdict().items() if word is not None}
        raise UsageError(f"it is written like {cls.EXAMPLES}")

    @property
    def mapping(self) -> dict[str, Any]:
        names = ("kind", *self.KINDS[self.kind][0], *self.KINDS[self.kind][1])
        values = {name: getattr(self, name) for name in names}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }


def format_number(number: float) -> str:
    """Write a number with all its digits, and without an exponent.

    >>> format_number(0.25), format_number(2.0), format_number(1e-05), format_number(8000)
    ('0.25', '2', '0.00001', '8000')
    """
    text = format(Decimal(repr(number)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
