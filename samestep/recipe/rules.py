"""Rules between facts, as rows: which facts exclude one another, why, and what to do instead. The rows are in `exclusions`."""

import string
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from samestep.recipe.reading import format_value

MULTI_GPU = "launch with distributed_type MULTI_GPU"


class Unknown(Exception):
    """A rule asks for a fact that is not known yet, or that recipes of this task do not have."""


class Refusal(NamedTuple):
    """A combination that is refused.

    Attributes:
        reason: fields, their values and the rule.
        remedy: what to do instead; empty where the rule says it.
    """

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.remedy}" if self.remedy else self.reason


class Rule(NamedTuple):
    """A row of what excludes what: facts for which `holds` is true are refused.

    Attributes:
        holds: of `Facts`; what it returns is true, or not.
        reason, remedy: as in `Refusal`; {f.NAME} or {f[NAME]} stands for a fact, {f.NAME!r} for it as a file has it, in quotes
            if it is text, and {found} for what `holds` returned.
    """

    holds: Callable[["Facts"], Any]
    reason: str
    remedy: str = ""


class Facts:
    """All that is known of a recipe, of the settings of its run, and of its launch: each fact by the name of its field.

    A rule is tested once, as soon as all is known that it asks for: when a recipe is read, when flags are, when both are
    known, or when the launch is. So with a launch only rules that ask for facts of the launch can be broken, with recipe and
    settings only those that ask for facts of both: the others were tested before.

    Args:
        recipe, settings: objects whose attributes are facts; None: not known.
        launch: mixed_precision (no, fp16 or bf16), is_sharded (whether it shards weights, FSDP2), num_processes, and num_copies
            (groups of these that each hold the whole model, HSDP).
    """

    def __init__(self, recipe: Any = None, settings: Any = None, **launch: Any):
        sources = {"launch": SimpleNamespace(**launch) if launch else None, "settings": settings, "recipe": recipe}
        self._sources = {kind: source for kind, source in sources.items() if source is not None}
        self._new = {"launch"} if launch else set(self._sources)
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        for kind, source in self._sources.items():
            try:
                value = getattr(source, name)
            except AttributeError:
                continue
            self._asked.add(kind)
            return list(value) if isinstance(value, tuple) else value  # as a file has it
        raise Unknown(name)

    def __getattr__(self, name: str) -> Any:
        return self[name]

    @property
    def is_replica(self) -> bool:
        """Whether each launch is one of several replicas."""
        return bool(self.fault_tolerance == "step")

    @property
    def is_reproducible(self) -> bool:
        """Whether the run is to be the same to the bit on any number of processes."""
        return self.reproducible is not None

    @property
    def is_folded(self) -> bool:
        """Whether gradients add up in the optimizer's moments."""
        return bool(self.accumulation == "optimizer")

    @property
    def is_fp16(self) -> bool:
        return bool(self.mixed_precision == "fp16")

    def find_refusals(self, rules: Iterable[Rule]) -> Iterator[Refusal]:
        """Find what rules have against these facts, in their order."""
        for rule in rules:
            self._asked.clear()
            try:
                found = rule.holds(self)
            except Unknown:
                continue
            if found and self._new <= self._asked:
                words = {"f": self, "found": found}
                yield Refusal(*(_Template().format(text, **words) for text in (rule.reason, rule.remedy)))


class _Template(string.Formatter):
    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion != "r":
            return super().convert_field(value, conversion)
        is_plain = value is None or isinstance(value, bool | int | float | str | list | tuple)
        return format_value(value if is_plain else str(value))

    def format_field(self, value: Any, format_spec: str) -> str:
        is_null_or_bool = value is None or isinstance(value, bool)  # which Python writes in another way than a file
        return format_value(value) if is_null_or_bool else str(super().format_field(value, format_spec))


# ---------------------------------------------------------------------------------------------------------------------
# Rows that several tasks have


def rows(*rules: Rule) -> tuple[Rule, ...]:
    """Make the rules of a class of recipes."""
    return rules


def each(arguments: Iterable[Any], make: Callable[..., Rule]) -> list[Rule]:
    """Make a rule of each name, or of each tuple of arguments."""
    return [make(*((row,) if isinstance(row, str) else row)) for row in arguments]


def is_multiple(field: str, divisor: str) -> Rule:
    """Make the rule that a field is a multiple of another one, where both are set."""
    return Rule(
        lambda f: f[field] is not None and f[divisor] is not None and f[field] % f[divisor],
        f"{field} {{f[{field}]}} is not a multiple of {divisor} {{f[{divisor}]}}",
        "change one of them",
    )


def is_at_most(field: str, limit: str) -> Rule:
    """Make the rule that a field does not exceed another one, where both are set."""
    return Rule(
        lambda f: f[field] is not None and f[limit] is not None and f[field] > f[limit],
        f"{field} {{f[{field}]}} exceeds {limit} {{f[{limit}]}}",
        "lower the first or raise the second",
    )


def belongs_to(optimizer: str, *fields: str) -> list[Rule]:
    """Make the rules that fields are set with an optimizer, and null with any other one."""
    text = "{} is {{f[{}]}}, but with optimizer {{f.optimizer}} it must be {}"
    numbers = each(
        fields,
        lambda name: Rule(lambda f: f.optimizer == optimizer and f[name] is None, text.format(name, name, "a number")),
    )
    nulls = each(
        fields,
        lambda name: Rule(lambda f: f.optimizer != optimizer and f[name] is not None, text.format(name, name, "null")),
    )
    return numbers + nulls
