"""The trials before the first step, which find the largest micro-batch that fits into memory, and the fastest one.

Memory is tried with the largest micro-batch there can be, samples of the greatest length; speed with the samples of a step. The
results concern the hardware only: whatever they are, the step is the same.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch

from samestep.data.steps import MicroBatch
from samestep.errors import RunError
from samestep.training import kernels
from samestep.training.capacity import has_memory, preserved_model
from samestep.training.launch import waits_in_forward
from samestep.training.recovery import Recovery

ForwardBackward = Callable[[MicroBatch, torch.Tensor], None]

ENOUGH_TOKENS = 512
"""Tokens of a micro-batch for which a CPU's products hardly become faster with more."""


def fit_micro_batch(recovery: Recovery, forward_backward: ForwardBackward) -> None:
    """Lower the caps of `recovery.steps` to the largest that fit, and to the fastest, the same on every process. Called by all.

    The caps are tried as they are (without --per_device_train_batch_size all of a process's share), then halved until they fit,
    then between, for the fewest micro-batches that fit; on a CPU the fastest caps are found first. Sizes whose result is
    remembered are not tried again. Where forwards wait for each other (sharded weights, synchronised batch normalisation)
    nothing is tried: a process that fails alone would leave the others waiting.

    Args:
        recovery: the run's; its `capacity` learns.
        forward_backward: computes a micro-batch; takes its tensors and the step's counts, int64 [terms].

    Raises:
        RunError: not even one sample fits.
    """
    steps, accelerator, capacity = recovery.steps, recovery.accelerator, recovery.capacity
    if waits_in_forward(accelerator, recovery.model):
        return
    # On a CPU speed is tried first, with one step's samples: then no larger micro-batch than the fastest is rehearsed
    is_cpu = accelerator.device.type == "cpu"
    if is_cpu:
        _choose_fastest(recovery, forward_backward)
    if recovery.settings.per_device_train_batch_size is not None:
        capacity.fails = None  # a size that the user asks for is tried, whatever failed before
    target_size = steps.max_longest_samples
    previous = capacity.fits, capacity.fails

    def fits(num_samples: int) -> bool:
        if num_samples > capacity.fits and (capacity.fails is None or num_samples < capacity.fails):
            capacity.note(num_samples, _try(recovery, forward_backward, num_samples))
        return num_samples <= capacity.fits

    num_samples = target_size
    while not fits(num_samples):
        if num_samples == 1:
            raise RunError(
                f"not one {_describe_sample(recovery)} fits into the memory of {accelerator.device}: try "
                f"{recovery.settings.memory_remedy}"
            )
        num_samples = -(-num_samples // 2)
    # Numbers of micro-batches into which `target_size` samples are cut: `upper` are enough to fit, `lower` are too few
    upper, lower = (
        -(-target_size // num_samples),
        0 if num_samples == target_size else -(-target_size // capacity.fails),
    )
    while upper - lower > 1:
        middle = (upper + lower) // 2
        upper, lower = (middle, lower) if fits(-(-target_size // middle)) else (upper, middle)
    if previous != (capacity.fits, capacity.fails):
        capacity.write(accelerator)
    if upper > 1:
        num_samples = -(-target_size // upper)
        max_tokens = steps.max_tokens and num_samples * steps.source.max_length
        steps.set_caps(num_samples, max_tokens)
        accelerator.print(
            f"{num_samples} of the largest samples ({_describe_sample(recovery)}) fit into memory at once: {steps.layout}"
        )
    if not is_cpu:
        _choose_fastest(recovery, forward_backward)


def _choose_fastest(recovery: Recovery, forward_backward: ForwardBackward) -> None:
    """Lower the caps of `recovery.steps` to the fastest micro-batches, unless the user gave caps.

    Small micro-batches are short of work; in large ones, kernels that need tables pad short samples to long ones, and tensors
    outgrow the caches.
    """
    steps, settings, capacity = recovery.steps, recovery.settings, recovery.capacity
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_train_tokens")
    is_fixed = any(getattr(settings, name, None) is not None for name in names)
    depends_on_cut = getattr(recovery.log.recipe, "normalization", None) == "batch"
    if settings.speed == "safe" or is_fixed or depends_on_cut:
        return
    limit = steps.max_longest_samples
    if capacity.at_once is None:
        capacity.at_once = _measure_fastest(recovery, forward_backward, limit)
        capacity.write(recovery.accelerator)
    if capacity.at_once < limit:
        steps.set_caps(*steps.find_caps(capacity.at_once))
        size = capacity.at_once * steps.source.max_length
        unit = recovery.log.recipe.unit
        recovery.accelerator.print(f"micro-batches: at most {size:,} {unit}s at once (--speed {settings.speed})")


def _measure_fastest(recovery: Recovery, forward_backward: ForwardBackward, limit: int) -> int:
    """Measure the fastest size of a micro-batch: `limit` samples of the greatest length, or 1/2, 1/4, 1/8 or 1/16 of it.

    Where the first one takes long it is kept, see `list_sizes`.
    """
    steps, accelerator = recovery.steps, recovery.accelerator
    is_cpu = accelerator.device.type == "cpu"
    number, num_samples = recovery.log.first_step, min(4 * limit, steps.layout.shares[0])
    counts = steps[number].counts.clamp(min=1).to(accelerator.device)
    sizes = list_sizes(limit, steps.source.max_length, is_cpu)

    def computation(max_samples: int) -> Callable[[], None]:
        micro_batches = steps.cut_first_samples(number, num_samples, max_samples)

        def compute() -> None:
            for micro_batch in micro_batches:
                with accelerator.no_sync(recovery.model):
                    forward_backward(micro_batch, counts)

        return compute

    with _discarded(recovery):
        seconds = kernels.measure(accelerator, {size: computation(size) for size in sizes})
    return find_smallest(seconds) if is_cpu else kernels.find_fastest(seconds)


def list_sizes(limit: int, max_length: int, is_cpu: bool) -> list[int]:
    """List the sizes of micro-batches that are compared, first the one that is kept where measuring takes long.

    On a GPU, short of work, it is the largest. A CPU has enough work in `ENOUGH_TOKENS`: there it is the smallest size of as
    many, which pads least and needs least memory. Images have no tokens: the largest.

    Args:
        limit: samples of the greatest length in a micro-batch, at most.
        max_length: tokens of such a sample; 1 of images.
        is_cpu: whether a CPU computes.

    >>> list_sizes(16, 1024, is_cpu=True), list_sizes(16, 128, is_cpu=True), list_sizes(16, 1024, is_cpu=False)
    ([1, 16, 8, 4, 2], [4, 16, 8, 2, 1], [16, 8, 4, 2, 1])
    """
    sizes = sorted({max(1, limit // part) for part in (1, 2, 4, 8, 16)}, reverse=True)
    enough = [size for size in sizes if size * max_length >= ENOUGH_TOKENS]
    first = min(enough) if is_cpu and enough else limit
    return [first, *(size for size in sizes if size != first)]


def find_smallest(seconds: Mapping[int, float]) -> int:
    """Find the smallest size that is hardly slower than the fastest, for a CPU, whose memory other programs need, too.

    >>> find_smallest({16: 1.0, 8: 0.99, 4: 1.01, 2: 1.2})
    4
    """
    return min(size for size, value in seconds.items() if value <= kernels.GAIN * min(seconds.values()))


def _describe_sample(recovery: Recovery) -> str:
    """Describe the largest sample, for messages."""
    unit = recovery.log.recipe.unit
    return unit if unit == "image" else f"sample of {recovery.steps.source.max_length} {unit}s"


def _try(recovery: Recovery, forward_backward: ForwardBackward, num_samples: int) -> bool:
    """Tell whether all processes can compute a micro-batch of that many samples of the greatest length.

    It is computed twice, the second time with the gradients of the first in memory, and beside the memory that AdamW's moments
    will need. The model stays as it was.
    """
    accelerator, model, source = recovery.accelerator, recovery.model, recovery.steps.source
    micro_batch = source.collate([source.longest()] * num_samples)
    counts = micro_batch.pop("counts").clamp(min=1).to(accelerator.device)

    def compute() -> None:
        number = 0 if recovery.optimizer.state else 2
        moments = [torch.empty_like(parameter) for parameter in model.parameters() for _ in range(number)]
        for _ in range(2):
            with accelerator.no_sync(model):
                forward_backward(micro_batch, counts)
        del moments  # which were there until now

    with _discarded(recovery):
        fits = has_memory(compute)
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
    return not recovery.agree(not fits)


@contextlib.contextmanager
def _discarded(recovery: Recovery) -> Iterator[None]:
    """Keep gradients that are computed within this context out of parameters and moments, and the model as it was."""
    with recovery.reduction.discard_gradients(), preserved_model(recovery.model):
        yield
