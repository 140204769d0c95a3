"""Values of a recipe that are of one of several kinds, with fields of their own: mappings, on a command line sentences.

The kinds are of `samestep.contrib`; here is what recipes and the planner know of them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from samestep.recipe.extras import load_way


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A value of one of several kinds.

    Attributes:
        FIELD: name of the field of a recipe.
        PLACE: MODULE:CLASS of the class that has the kinds.
        KINDS: kind -> its fields, those that it needs and those that it may have.
        EXAMPLES: sentences, for messages.
        kind: a key of `KINDS`.
    """

    FIELD: ClassVar[str]
    PLACE: ClassVar[str]
    KINDS: ClassVar[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]]
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
        return cls.find_class().read_kind(value)

    @classmethod
    def read_kind(cls, value: str | Mapping[str, Any]) -> Self:
        """Read a mapping or a sentence, in the class that has the kinds."""
        raise NotImplementedError

    @property
    def sentence(self) -> str:
        """The sentence that recipes had before they had mappings: fingerprints are made of it."""
        return str(self)

    @property
    def mapping(self) -> dict[str, Any]:
        """The mapping that `read` takes: the kind's own fields, those without a value left out."""
        raise NotImplementedError


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
