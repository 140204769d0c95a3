"""Make `accelerator.accumulate` exact: by counts of the whole step, and the scale that undoes k and N.

A micro-batch's loss, `losses.weighted_loss` of its sums with the whole step's counts, has a gradient that only needs to be
added up over all micro-batches. `accelerator.backward` divides by k, and DistributedDataParallel averages over the N processes,
so the loss is multiplied by k * N first. k may differ between processes and from step to step: each process undoes its own.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from samestep._internals import torch_distributed
from samestep._internals.accelerate_state import begin_step
from samestep._internals.torch_operators import foreach_mul_

MicroBatch = TypeVar("MicroBatch")


def total_counts(accelerator: Accelerator, counts: torch.Tensor) -> torch.Tensor:
    """Add up the processes' counts in one all-reduce of a few integers: n_j of the step.

    Args:
        counts: [terms], targets in this process's micro-batches: int64, or sums of weights in float64.

    Returns:
        [terms] on the accelerator's device. Its first use, after the first forward, waits for it; nothing does before.
    """
    if counts.is_floating_point() and accelerator.device.type == "mps":  # which has no float64
        counts = counts.float()
    counts = counts.to(accelerator.device, non_blocking=True)
    return counts if accelerator.num_processes == 1 else torch_distributed.total(counts)


def seed_noise(
    accelerator: Accelerator, seed: int, step: int, micro_batch: int | None = None, process_index: int | None = None
) -> None:
    """Make torch's noise a function of the seed, the step and the process: nothing to save, nothing to restore.

    Args:
        process_index: number of this process; None: `accelerator` has it.
        micro_batch: number of the micro-batch in the whole step, in place of the process, for noise that does not depend on
            which process computes it.
    """
    process_index = accelerator.process_index if process_index is None else process_index
    part = process_index if micro_batch is None else ("micro-batch", micro_batch)
    digest = hashlib.sha256(repr((seed, step, part)).encode()).digest()[:8]
    # torch.manual_seed seeds every kind of device, and on a machine without GPUs notes a stack trace each time.
    torch.default_generator.manual_seed(int.from_bytes(digest, "big"))
    if accelerator.device.type == "cuda":
        torch.cuda.manual_seed(int.from_bytes(digest, "big"))


def iterate_micro_batches(
    accelerator: Accelerator, micro_batches: Sequence[MicroBatch], is_exact_sum: bool = False
) -> Iterator[MicroBatch]:
    """Iterate over a step's micro-batches so that `accelerator.accumulate` synchronises at the last one, and only there.

    Args:
        is_exact_sum: whether gradients are added up by `exact_sum`: they must have no factor k, which would be rounded. k is
            rounded up to a power of two then, by which `accelerator.backward` divides exactly.
    """
    k = len(micro_batches)
    accelerator.gradient_accumulation_steps = 1 << (k - 1).bit_length() if is_exact_sum else k
    begin_step(accelerator, accelerator.gradient_accumulation_steps - k)
    # A prepared DataLoader that has been read to its end, ahead of time, would make `accumulate` synchronise at every
    # micro-batch.
    accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
    yield from micro_batches


def clip(accelerator: Accelerator, parameters: list[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Clip the step's gradient G to an L2 norm (None: leave it): G min(1, max_norm / (|G| + 1e-6)), as
    `torch.nn.utils.clip_grad_norm_` does.

    On CPUs torch computes |G| of large gradients inexactly (see `row_norms`), and multiplies G by 1 where nothing is to be
    clipped; this function does neither.

    Args:
        parameters: the ones whose gradients are clipped.
        max_norm: the largest norm; None: no clipping, only the norm is computed.

    Returns:
        scalar on the device, the norm before clipping.
    """
    limit = math.inf if max_norm is None else max_norm
    gradients = _cpu_gradients(accelerator, parameters)
    if not gradients:
        return accelerator.clip_grad_norm_(parameters, limit)
    norm = torch.cat([row_norms(gradient) for gradient in gradients]).square().sum().sqrt()
    factor = limit / (norm.item() + 1e-6)
    if max_norm is not None and not factor >= 1:  # nan as well
        foreach_mul_(gradients, factor)
    return norm


def _cpu_gradients(accelerator: Accelerator, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients where each process has them whole on a CPU, and reading a number waits for nothing; else none."""
    is_whole = accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
    is_ready = is_whole and accelerator.device.type == "cpu" and accelerator.scaler is None
    gradients = [p.grad for p in parameters if p.grad is not None] if is_ready else []
    return gradients if {gradient.dtype for gradient in gradients} in ({torch.float32}, {torch.float64}) else []


def row_norms(gradient: torch.Tensor) -> torch.Tensor:
    """Compute the L2 norms of a gradient's rows, [rows] in its dtype; a row is all that has one index of the first dimension.

    A vector is one row. `torch.linalg.vector_norm` adds up in one sum: in float32 it is 1e-7 too small for 1e4 numbers, 1e-6
    for 1e5, 1e-5 for 1e6, 5e-3 for 4e7. Rows have sums of their own, and `torch.sum` adds those up pairwise.
    """
    rows = torch.atleast_2d(gradient)
    return torch.linalg.vector_norm(rows, dim=tuple(range(1, rows.ndim)))


def loss_scale(accelerator: Accelerator) -> int:
    """Return k * N, which undoes the division by k in `accelerator.backward` and the reduction's mean over N processes."""
    return accelerator.gradient_accumulation_steps * accelerator.num_processes
