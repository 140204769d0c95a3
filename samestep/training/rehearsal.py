"""The rehearsal before the first step: how large a micro-batch fits into memory, and how large a one is the fastest.

What fits is tried with the worst micro-batch there can be, samples of the greatest length; what is fast, with the samples of a
step.
It is a matter of the hardware only: whatever is found, the step is the same.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator

import torch
from torch import nn

from samestep.data.steps import MicroBatch
from samestep.errors import RunError
from samestep.step import accumulate, batch_norm
from samestep.training import kernels
from samestep.training.capacity import is_out_of_memory
from samestep.training.launch import waits_in_forward
from samestep.training.recovery import Recovery

ForwardBackward = Callable[[MicroBatch, torch.Tensor], None]
LossOf = Callable[[MicroBatch, torch.Tensor, nn.Module], tuple[torch.Tensor, torch.Tensor]]


def fit(recovery: Recovery, forward_backward: ForwardBackward) -> None:
    """Lower the caps of `recovery.steps` to the largest that fit, and to the fastest, the same on every process. Called by all.

    First the caps as they are (without --per_device_train_batch_size all of a process's share), then halves of them, then
    what lies between: the fewest micro-batches that fit. What is remembered is not tried again. Where forwards wait for each
    other (sharded weights, synchronised batch normalisation) nothing is tried: a process that fails alone would leave the
    others waiting.

    Args:
        recovery: of this run; its `capacity` learns.
        forward_backward: computes a micro-batch, given its tensors and the step's counts.

    Raises:
        RunError: not even one sample fits.
    """
    steps, accelerator, capacity = recovery.steps, recovery.accelerator, recovery.capacity
    if waits_in_forward(accelerator, recovery.model):
        return
    if recovery.settings.per_device_train_batch_size is not None:
        capacity.fails = None  # what was asked for is tried, whatever failed before
    wanted = steps.max_longest_samples
    before = capacity.fits, capacity.fails

    def fits(num_samples: int) -> bool:
        if num_samples > capacity.fits and (capacity.fails is None or num_samples < capacity.fails):
            capacity.note(num_samples, _try(recovery, forward_backward, num_samples))
        return num_samples <= capacity.fits

    num_samples = wanted
    while not fits(num_samples):
        if num_samples == 1:
            raise RunError(
                f"not one {_sample(recovery)} fits into the memory of {accelerator.device}: try "
                f"{recovery.settings.memory_remedy}"
            )
        num_samples = -(-num_samples // 2)
    enough, too_few = -(-wanted // num_samples), 0 if num_samples == wanted else -(-wanted // capacity.fails)
    while enough - too_few > 1:  # micro-batches into which the wanted samples are cut
        middle = (enough + too_few) // 2
        enough, too_few = (middle, too_few) if fits(-(-wanted // middle)) else (enough, middle)
    if before != (capacity.fits, capacity.fails):
        recovery.remember()
    if enough > 1:
        num_samples = -(-wanted // enough)
        max_tokens = steps.max_tokens and num_samples * steps.source.max_length
        steps.set_caps(num_samples, max_tokens)
        accelerator.print(
            f"{num_samples} of the largest samples ({_sample(recovery)}) fit into memory at once: {steps.layout}"
        )
    _take_the_fastest(recovery, forward_backward)


def _take_the_fastest(recovery: Recovery, forward_backward: ForwardBackward) -> None:
    """Lower the caps of `recovery.steps` to those of the fastest micro-batches, if none was given. Small micro-batches are
    short of work; in large ones short samples are padded to long ones where kernels need tables, and tensors outgrow the
    caches."""
    steps, settings, capacity = recovery.steps, recovery.settings, recovery.capacity
    given = ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_train_tokens")
    is_given = any(getattr(settings, name, None) is not None for name in given)
    depends_on_cut = getattr(recovery.log.recipe, "normalization", None) == "batch"
    if settings.speed == "safe" or is_given or depends_on_cut:
        return
    most = steps.max_longest_samples
    if capacity.at_once is None:
        capacity.at_once = _fastest(recovery, forward_backward, most)
        recovery.remember()
    if capacity.at_once < most:
        steps.set_caps(*steps.find_caps(capacity.at_once))
        size = capacity.at_once * steps.source.max_length
        unit = recovery.log.recipe.unit
        recovery.accelerator.print(f"micro-batches: at most {size} {unit}s at once (--speed {settings.speed})")


def _fastest(recovery: Recovery, forward_backward: ForwardBackward, most: int) -> int:
    """`most` samples of the greatest length at once, or a half, a quarter, an eighth of it, or a sixteenth."""
    steps, accelerator = recovery.steps, recovery.accelerator
    number, num_samples = recovery.log.first_step, min(4 * most, steps.layout.shares[0])
    counts = steps[number].counts.clamp(min=1).to(accelerator.device)
    sizes = sorted({max(1, most // part) for part in (1, 2, 4, 8, 16)}, reverse=True)

    def computation(at_once: int) -> Callable[[], None]:
        micro_batches = steps.cut_first_samples(number, num_samples, at_once)

        def compute() -> None:
            for micro_batch in micro_batches:
                with accelerator.no_sync(recovery.model):
                    forward_backward(micro_batch, counts)

        return compute

    with _leaving_no_trace(recovery):
        return kernels.find_fastest(kernels.measure(accelerator, {size: computation(size) for size in sizes}))


def measure_batch_norm(recovery: Recovery, model: nn.Module, loss_of: LossOf) -> None:
    """Say at the start of training, where batch normalisation makes the step depend on its cut, by how much it does: the
    relative error of the first step's gradient beside that of one large batch. Called by all processes.

    Args:
        recovery: of this run.
        model: as it was before `launch.prepare`.
        loss_of: a micro-batch's part of the step's loss, and its summed losses, given its tensors, the step's counts and
            the model.
    """
    log, accelerator, recipe = recovery.log, recovery.accelerator, recovery.log.recipe
    if recipe.normalization != "batch" or recipe.exact_batch_norm or log.first_step > 0:
        return
    data = recovery.steps[0]
    counts = accumulate.total_counts(accelerator, data.counts).clamp(min=1)
    accumulate.seed_noise(accelerator, recipe.seed, 0)
    error = batch_norm.deviation(model, data.micro_batches, lambda micro_batch: loss_of(micro_batch, counts, model)[0])
    log.event(
        1,
        "batch normalisation takes its statistics from each micro-batch, so that the step depends on how it is cut, unlike "
        "with --exact_batch_norm or group normalisation",
        micro_steps=len(data.micro_batches),
        gradient_error=float(f"{error:.2g}"),
    )


def _sample(recovery: Recovery) -> str:
    """What the largest sample is."""
    unit = recovery.log.recipe.unit
    return unit if unit == "image" else f"sample of {recovery.steps.source.max_length} {unit}s"


def _try(recovery: Recovery, forward_backward: ForwardBackward, num_samples: int) -> bool:
    """Whether all processes can compute a micro-batch of that many samples of the greatest length, once more with the gradients
    of the first alive, and with the memory taken that AdamW's moments will need. Leaves no trace in the model."""
    accelerator, model, source = recovery.accelerator, recovery.model, recovery.steps.source
    micro_batch = source.collate([source.longest()] * num_samples)
    counts = micro_batch.pop("counts").clamp(min=1).to(accelerator.device)
    has_failed, moments = False, []
    with _leaving_no_trace(recovery):
        try:
            if not recovery.optimizer.state:
                moments = [torch.empty_like(parameter) for parameter in model.parameters() for _ in range(2)]
            for _ in range(2):
                with accelerator.no_sync(model):
                    forward_backward(micro_batch, counts)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            has_failed = True
    del moments
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
    return not recovery.agree(has_failed)


@contextlib.contextmanager
def _leaving_no_trace(recovery: Recovery) -> Iterator[None]:
    """What is computed inside leaves no gradient, no moment, and running statistics as they were."""
    model = recovery.model
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with recovery.folding.discarding() if recovery.folding else contextlib.nullcontext():
        yield
    model.zero_grad(set_to_none=True)
    for buffer, value in buffers:
        buffer.copy_(value)
