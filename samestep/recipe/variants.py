"""Values of a recipe that are of one of several kinds with fields of their own: mappings, on a command line sentences.

The kinds are of `samestep.contrib`; recipes and the planner know what they have in common.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, ClassVar, Self

from samestep.errors import UsageError, nearest
from samestep.recipe.extras import load_way
from samestep.recipe.reading import format_value
from samestep.recipe.settings import build, from_text

COUNT, NUMBER = r"[1-9][0-9]{0,7}", r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
"""Regular expressions: whole numbers from 1 to `LARGEST_COUNT`, and numbers without sign or exponent."""
LARGEST_COUNT = 10**8 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A value of one of several kinds.

    Attributes:
        FIELD: name of the field of a recipe.
        PLACE: MODULE:CLASS of the class that has the kinds.
        KINDS: kind -> its fields, those that it needs and those that it may have.
        DEFAULTS: kind -> values of fields that it may have, where they are not given.
        SENTENCES: regular expressions, whose named groups are fields.
        EXAMPLES: sentences, for messages.
        kind: a key of `KINDS`.
    """

    FIELD: ClassVar[str]
    PLACE: ClassVar[str]
    KINDS: ClassVar[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]]
    DEFAULTS: ClassVar[dict[str, dict[str, Any]]] = {}
    SENTENCES: ClassVar[tuple[str, ...]]
    EXAMPLES: ClassVar[str]
    kind: str

    @classmethod
    def find_class(cls) -> type[Self]:
        """Return the class that has the kinds. Raises UsageError where it was deleted."""
        found: type[Self] = load_way(cls.PLACE, cls.FIELD)
        return found

    @classmethod
    def read(cls, value: Any) -> Self:
        """Read the mapping of a recipe's file, or the sentence of a command line.

        Raises:
            UsageError: with all rules that it breaks.
            TypeError: it is neither.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, str | Mapping):
            raise TypeError(repr(value))
        return cls.find_class()._read(value)

    @classmethod
    def _read(cls, value: str | Mapping[str, Any]) -> Self:
        given = cls.read_sentence(value) if isinstance(value, str) else value
        values = {name: part for name, part in given.items() if part is not None}
        kind = values.get("kind")
        if not isinstance(kind, str) or kind not in cls.KINDS:
            subject = "kind is missing" if kind is None else f"kind is {format_value(kind)}"
            raise UsageError(f"{subject}, must be one of {', '.join(cls.KINDS)}")
        needed, optional = cls.KINDS[kind]
        known = ("kind", *needed, *optional)
        problems = [
            f"{kind} has no {format_value(key)}: {nearest(str(key)[:60], known)}" for key in values if key not in known
        ]
        problems += [f"{kind} needs {name}" for name in needed if name not in values]
        if problems:
            raise UsageError(problems)
        try:
            found: Self = build(cls, {**cls.DEFAULTS.get(kind, {}), **values}, kind)
        except UsageError as error:
            raise UsageError([problem.removeprefix(f"{kind}: ") for problem in error.problems]) from None
        return found

    @classmethod
    def read_sentence(cls, text: str) -> dict[str, Any]:
        """Read a sentence into a mapping, whose values are not yet checked. Raises UsageError for any other text."""
        for pattern in cls.SENTENCES:
            if match := re.fullmatch(pattern, text):
                return {name: from_text(word, int) for name, word in match.groupdict().items() if word is not None}
        raise UsageError(f"it is written like {cls.EXAMPLES}")

    @property
    def sentence(self) -> str:
        """The sentence that recipes had before they had mappings: fingerprints are made of it."""
        return str(self)

    @property
    def mapping(self) -> dict[str, Any]:
        """The mapping that `read` takes: the kind's own fields, those without a value left out."""
        names = ("kind", *self.KINDS[self.kind][0], *self.KINDS[self.kind][1])
        values = {name: getattr(self, name) for name in names}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth(Variant):
    """A recipe's `batch_schedule`: a batch that grows to global_batch_size."""

    FIELD: ClassVar = "batch_schedule"
    PLACE: ClassVar = "samestep.contrib.growing.batch_schedule:BatchSchedule"
    EXAMPLES: ClassVar = '"16, 32 at 0.25, 64 at 0.5", "power 0.5 from 16", "seesaw from 16" or "noise 0.1 from 16"'

    def plan_steps(self, recipe: Any, num_samples: int | None, decided: Sequence[Any] = ()) -> Any:
        """Plan the steps of the recipe; see `samestep.contrib.growing.step_plan.plan_steps`."""
        plan = load_way("samestep.contrib.growing.step_plan:plan_steps", self.FIELD)
        return plan(recipe, num_samples, decided)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm(Variant):
    """A recipe's `communication`: another algorithm than the exact step, which sends less."""

    FIELD: ClassVar = "communication"
    PLACE: ClassVar = "samestep.contrib.communication.algorithms:Communication"
    EXAMPLES: ClassVar = (
        '"local_sgd of 4 workers every 8 steps", "diloco of 4 workers every 50 steps", "power_sgd of rank 4 from step 100" '
        'or "top_k 0.01 of 4 workers"'
    )

    num_workers: int | None
    num_steps: int | None

    @property
    def is_local(self) -> bool:
        """Whether workers take steps of their own between exchanges."""
        return self.num_steps is not None

    def rehearsed(self) -> Self:
        """Return the algorithm of a rehearsal, which saves a checkpoint after an exchange."""
        return dataclasses.replace(self, num_steps=1) if self.is_local else self

    def describe(self) -> str:
        """Say that it is another algorithm, and on what its result depends."""
        raise NotImplementedError

    def describe_traffic(self, num_parameters: int) -> str:
        """Describe it, and what a worker sends of a model with so many trained parameters."""
        raise NotImplementedError

    def count_kept_bytes(self, num_processes: int, moment_bytes: float) -> float:
        """Count the bytes per trained parameter that a process keeps beside those of the exact step.

        Args:
            num_processes: N; the first process computes the most workers.
            moment_bytes: bytes per parameter that the optimizer remembers.
        """
        raise NotImplementedError


def format_number(number: float) -> str:
    """Write a number with all its digits, and without an exponent.

    >>> format_number(0.25), format_number(2.0), format_number(1e-05), format_number(8000)
    ('0.25', '2', '0.00001', '8000')
    """
    text = format(Decimal(repr(number)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
