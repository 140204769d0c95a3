"""Ways to train a model in less memory: what fits on some hardware with each, and what to change where nothing fits.

A method is a set of changes to a recipe, so that what is proposed is a recipe. `METHODS` is the only list of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from samestep.recipe.catalog import load, overlay
from samestep.recipe.settings import build
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from stepplan.base_models import read_table, shape_from_config
from stepplan.decoder import Shape
from stepplan.growth import find_hardware
from stepplan.hardware import Hardware
from stepplan.placement import Placement, place, try_placement
from stepplan.workload import Workload, from_recipe

STARTING_RECIPE = "sft_small_cpu"
"""Recipe whose objective and program fine-tune a model of the table."""
LENGTHS = tuple(2**exponent for exponent in range(9, 18))
"""Lengths of samples that are tried, tokens."""
TYPICAL_LENGTH = 2048
"""Length at which models are compared, tokens."""
FASTER = 0.05
"""Share by which a method must be faster than another one to be listed beside it."""
SHORTEST = 64
"""Smallest length that is proposed, tokens."""
SAMPLES_PER_STEP = 64
"""Global batch of `find_models` at least, so that micro-batches are as large as they can be."""
LENGTH_FIELDS = ("max_seq_length", "block_size", "seq_len")
"""Fields that say how many tokens a sample has."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train in less memory.

    Attributes:
        name: its name in tables.
        changes: fields of a recipe -> their values; empty: the recipe as it is.
    """

    name: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


LORA = {"lora_rank": 16, "lora_alpha": 32.0}
METHODS = (
    Method("full"),
    Method("8-bit AdamW", {"optimizer": "adamw_8bit"}),
    Method("folded gradients", {"accumulation": "optimizer", "second_moment": "unbiased"}),
    Method("LoRA, rank 16", LORA),
    Method("QLoRA, rank 16", LORA | {"base_quantization": "nf4"}),
)
MakeWorkload = Callable[[Mapping[str, Any]], Workload]
"""Makes the workload with changed fields; raises UsageError where a field is unknown or a value is refused."""


# ------------------------------------------------------------------------------------------------------------ what fits


@dataclasses.dataclass(frozen=True)
class Fit:
    """A model that fits.

    Attributes:
        model: its name on the hub.
        method: how it is trained.
        typical: placement of samples of `TYPICAL_LENGTH`, or of the longest that fit if they are shorter.
        longest: placement of the longest samples that fit.
    """

    model: str
    method: Method
    typical: Placement
    longest: Placement


@functools.cache
def load_models() -> dict[str, Shape]:
    """Load the models that `find_models` tries, the smallest first: name -> shape; of equal shapes the first."""
    shapes = {name: shape_from_config(config, name) for name, config in read_table().items()}
    first = {shape: name for name, shape in reversed(shapes.items())}
    return {name: shape for shape, name in sorted(first.items(), key=lambda item: item[0].num_parameters)}


def make_model_workload(name: str, length: int, global_batch_size: int, changes: Mapping[str, Any]) -> Workload:
    """Make the workload of fine-tuning a causal language model by scripts/finetune_causal_lm.py.

    Args:
        name: the model's.
        length: tokens of a sample.
        global_batch_size: B.
        changes: of the recipe, as of a `Method`.

    Raises:
        UsageError: a length above the model's number of positions, a field that the recipe does not have.
    """
    own: dict[str, Any] = {"model_name_or_path": name, "max_seq_length": length, "global_batch_size": global_batch_size}
    values = overlay(_load_starting_values(), own | {"learning_rate_batch_size": global_batch_size} | dict(changes))
    return from_recipe(build(CausalLmFineTuning, values, "recipe"))


@functools.cache
def _load_starting_values() -> dict[str, Any]:
    return dict(vars(load(STARTING_RECIPE)))


def find_models(
    hardware: Hardware, *, length: int | None = None, global_batch_size: int | None = None
) -> tuple[list[Fit], list[str]]:
    """Find the models, methods and lengths that fit on some hardware, the smallest model first.

    Args:
        hardware: the devices.
        length: the only length that is tried, tokens; None: `LENGTHS`.
        global_batch_size: B; None: `SAMPLES_PER_STEP`, or a sample for each device.

    Returns:
        What fits, and the names of the models that do not. A method is among them where it allows longer samples than those
        before it in `METHODS`, or is faster.
    """
    fits, others = [], []
    batch = global_batch_size or max(SAMPLES_PER_STEP, hardware.num_processes)
    for name, shape in load_models().items():
        lengths = [each for each in (LENGTHS if length is None else [length]) if each <= (shape.max_length or each)]
        found: list[Fit] = []
        for method in METHODS:
            fit = _find_lengths(name, method, hardware, lengths, batch)
            if fit is not None and all(_is_better(fit, other) for other in found):
                found.append(fit)
        fits += found
        others += [] if found else [name]
    return fits, others


def _is_better(fit: Fit, other: Fit) -> bool:
    """Tell whether a method allows longer samples than another one, or is `FASTER`."""
    length, other_length = (each.longest.workload.model.length for each in (fit, other))
    seconds, other_seconds = (Remedy({}, each.typical).seconds_per_unit for each in (fit, other))
    return length > other_length or 1 / seconds > (1 + FASTER) / other_seconds


def _find_lengths(name: str, method: Method, hardware: Hardware, lengths: list[int], batch: int) -> Fit | None:
    """Find the longest of rising lengths that fits, by bisection, and the placement of the typical one."""

    def try_length(length: int) -> Placement | None:
        return try_placement(lambda: make_model_workload(name, length, batch, method.changes), hardware)

    longest, low, high = None, 0, len(lengths)  # lengths below `low` fit, those from `high` on do not
    while low < high:
        middle = (low + high) // 2
        placement = try_length(lengths[middle])
        if placement is None:
            high = middle
        else:
            longest, low = placement, middle + 1
    if longest is None:
        return None
    typical = longest if longest.workload.model.length <= TYPICAL_LENGTH else try_length(TYPICAL_LENGTH)
    return Fit(name, method, typical or longest, longest)


# -------------------------------------------------------------------------------------------------------------- remedies


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change with which a workload fits.

    Attributes:
        changes: fields of the recipe; empty: other hardware, so that the steps stay the same.
        placement: the workload with this change.
    """

    changes: Mapping[str, Any]
    placement: Placement

    @property
    def seconds_per_unit(self) -> float:
        """Seconds for a token, or for an image."""
        workload = self.placement.workload
        return self.placement.time.total / (workload.global_batch_size * workload.model.length)


def find_remedies(
    workload: Workload,
    hardware: Hardware,
    make: MakeWorkload,
    length_field: str | None,
    methods: Sequence[Method] = METHODS,
    **options: Any,
) -> list[Remedy]:
    """Find what to change in a workload that does not fit: on the same hardware the fastest first, then other hardware.

    Gradient checkpointing and sharding change no step, so that `place` takes them by itself before it gives up. What is left
    is a method, shorter samples, both, and other devices.

    Args:
        workload: the computation.
        hardware: what it does not fit on.
        make: makes it with other fields.
        length_field: field that says the tokens of a sample; None: it has none.
        methods: that are tried, in any order.
        options: those of `placement.place`.
    """
    here = []
    for method in methods:
        for length in _halve(workload.model.length if length_field else 0):
            changes = {**method.changes, **({length_field: length} if length_field else {})}
            if length_field and length == workload.model.length:
                del changes[length_field]
            placement = try_placement(functools.partial(make, changes), hardware, **options) if changes else None
            if placement is not None:
                here.append(Remedy(changes, placement))
                break
    here = sorted(here, key=lambda remedy: (remedy.seconds_per_unit, len(remedy.changes)))
    elsewhere = find_hardware(workload, hardware, **options)
    return here + [Remedy({}, place(workload, other, **options)) for other in elsewhere]


def _halve(length: int) -> Iterator[int]:
    """Yield a length and its halves, down to `SHORTEST`; a length of 0 alone."""
    yield length
    while (length := length // 2) >= SHORTEST:
        yield length
