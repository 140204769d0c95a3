"""Reads what a plan may say of programs that are not this repository's: `plan --program litgpt`."""

import dataclasses

from samestep.errors import UsageError
from samestep.recipe.settings import Check, choice, setting
from stepplan.cli.terms import HardwareSettings
from stepplan.decoder import Decoder
from stepplan.image_text import ImageText
from stepplan.peers import PROGRAMS, Elsewhere
from stepplan.stacks import EncoderDecoder
from stepplan.transformer import Transformer
from stepplan.workload import Workload

WEIGHT_BITS = Check("must be 16 or 32", (16, 32).__contains__)
MOMENT_BITS = Check("must be 8, 16 or 32", (8, 16, 32).__contains__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElsewhereSettings(HardwareSettings):
    """Choose how another program trains it, which is planned and never launched"""

    program: str | None = setting(
        "program that trains it, where it is another one: planned only, without a command",
        choice(*PROGRAMS),
        default=None,
    )
    weight_bits: int | None = setting(
        "with program: bits of trained weights and their gradients; none: 16, of torchtitan 32",
        WEIGHT_BITS,
        default=None,
    )
    moment_bits: int | None = setting(
        "with program: bits of each of the optimizer's moments; none: those of the weights", MOMENT_BITS, default=None
    )
    zero_stage: int | None = setting(
        "with program: 2 divides gradients and moments between the processes, and leaves weights whole (DeepSpeed)",
        ("must be 2, or left out: --sharded plans stage 3", lambda value: value == 2),
        default=None,
    )
    offloaded: bool = setting(
        "with program: divided weights, gradients and moments are in the hosts' memory", default=False
    )
    selective_checkpointing: bool = setting(
        "with program: gradient checkpointing computes half of the products again, not all", default=False
    )
    fused_head: bool = setting(
        "logits exist in parts only, of models without a recipe and of other programs", default=False
    )


NEED_PROGRAM = ("weight_bits", "moment_bits", "zero_stage", "offloaded", "selective_checkpointing")


def move(workload: Workload, settings: ElsewhereSettings) -> Workload:
    """Return a workload as the program of the settings computes it; without one as it is.

    Raises:
        UsageError: settings of a program without one, or a model that is no decoder.
    """
    if settings.program is None:
        if given := [name for name in NEED_PROGRAM if getattr(settings, name)]:
            raise UsageError(f"{' and '.join(given)} without program: add --program {'|'.join(PROGRAMS)}")
        if (
            settings.fused_head
            and isinstance(workload.model, Transformer | EncoderDecoder)
            and not workload.model.chunked_head
        ):
            model = dataclasses.replace(workload.model, chunked_head=True)
            hint = "With a fused head it is planned only: no program of this repository trains it."
            return dataclasses.replace(workload, model=model, script=None, hint=hint)
        return workload
    if not isinstance(workload.model, Decoder) or isinstance(workload.model, ImageText):
        raise UsageError(
            f"program is {settings.program}, but {workload.name} is no decoder of texts, whose programs alone are known"
        )
    bits = settings.weight_bits or (32 if settings.program == "torchtitan" else 16)
    elsewhere = Elsewhere(
        program=settings.program,
        weight_bytes=bits // 8,
        moment_bytes=2 * (settings.moment_bits or bits) / 8,
        zero_stage=settings.zero_stage or 0,
        offloaded=settings.offloaded,
        selective=settings.selective_checkpointing,
        has_fused_head=settings.fused_head,
    )
    return workload.move(elsewhere)
