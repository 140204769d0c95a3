"""The flags by which one chooses the cut of a step, where a plan would choose: of `samestep plan`, and of `samestep launch`."""

import dataclasses
from typing import Any

from samestep.recipe.settings import BATCH, POSITIVE, choice, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutSettings:
    """Choose the cut of the step, and what decides the memory of one process"""

    per_device_train_batch_size: int | None = setting(
        "most samples in one forward (b); none: the most that fit on the hardware, or all", BATCH, default=None
    )
    gradient_accumulation_steps: int | None = setting(
        "micro-batches per step (k); none: what b leaves", POSITIVE, default=None
    )
    mixed_precision: str | None = setting(
        "precision of the launch; none: the best that the hardware has, or bf16",
        choice("no", "bf16", "fp16"),
        default=None,
    )
    gradient_checkpointing: bool = setting("recompute activations in the backward", default=False)
    sharded: bool = setting(
        "divide weights, gradients and moments between the processes (FSDP2), instead of a copy each (DDP)",
        default=False,
    )

    @property
    def options(self) -> dict[str, Any]:
        """The fields by their names, as `placement.place` takes them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(CutSettings)}
