"""Keeps a run on CPUs within the memory of its machine, by the plan of its step: a host that is short of memory kills programs,
or swaps, instead of raising an error."""

import os
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from samestep.cut.layout import solve_layout
from samestep.errors import UsageError
from samestep.recipe.prediction import predict_memory
from samestep.recipe.recipe import Recipe
from samestep.recipe.rehearsal import NUM_STEPS
from samestep.recipe.run_settings import RunSettings
from samestep.step.exact_sum import EXACT_SUM_BYTES
from samestep.training.launch import count_copies, is_sharded

USABLE = 0.8
"""Share of the free memory that a micro-batch chosen here may fill by the plan."""


def read_free_bytes() -> int | None:
    """Read how many bytes programs may still take without swapping; None: this system does not say it as Linux does."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def choose_batch_size(accelerator: Accelerator, recipe: Recipe, settings: RunSettings) -> int | None:
    """Choose the most samples in one forward (b) on a CPU. Called by all processes; process 0's machine decides.

    Returns:
        b of the settings if they have b or k, or if memory is not known to be scarce; else the largest b whose plan fits.

    Raises:
        UsageError: by the plan, one sample, or the micro-batch that the settings ask for, needs more than the free memory.
    """
    b, k = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    if accelerator.device.type != "cpu":
        return b
    (free_bytes,) = broadcast_object_list([read_free_bytes()])
    if free_bytes is None:
        return b
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE") or accelerator.num_processes)
    copies = count_copies(accelerator)

    def plan(size: int | None, steps: int | None = None) -> int | None:
        """Plan the bytes that all processes of this machine need; None: nothing can plan them."""
        layout = solve_layout(
            num_processes=accelerator.num_processes,
            global_batch_size=recipe.global_batch_size,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
        )
        needed = predict_memory(
            recipe,
            layout,
            attention=getattr(settings, "attn_implementation", None) or "sdpa",
            more_gradient_bytes=0 if settings.reproducible is None else EXACT_SUM_BYTES,
            mixed_precision=accelerator.mixed_precision,
            gradient_checkpointing=getattr(settings, "gradient_checkpointing", False),
            sharded=is_sharded(accelerator),
            num_shards=accelerator.num_processes // copies if copies > 1 else None,
        )
        return None if needed is None else num_here * needed * (2 if settings.dtype == "float64" else 1)

    is_free = b is None and k is None
    least = plan(1) if is_free else plan(b, k)
    if least is None:
        return b
    if least > free_bytes:
        subject = "a micro-batch of one sample" if is_free or b == 1 else f"a micro-batch of {b or 'so many'} samples"
        smaller = "" if is_free or b == 1 or plan(1) > free_bytes else "a smaller --per_device_train_batch_size, "
        raise UsageError(
            f"{recipe.name} needs {least / 1e9:.1f} GB for {subject}, by its plan, and this machine has "
            f"{free_bytes / 1e9:.1f} GB free. Give {smaller}--rehearse (a small model, {NUM_STEPS} steps), or a recipe with a "
            "smaller model"
        )
    if not is_free or plan(None) <= USABLE * free_bytes:
        return b
    low, high = 1, -(-recipe.global_batch_size // accelerator.num_processes)  # low is taken, high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plan(middle) <= USABLE * free_bytes else (low, middle)
    accelerator.print(
        f"{low} samples at once: by the plan, more do not fit into {free_bytes / 1e9:.1f} GB of free memory"
    )
    return low
