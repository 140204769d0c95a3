"""Add gradients up exactly: whatever the order, and however the micro-batches are dealt to processes, to the same bits.

Each micro-batch's gradient is rounded to a multiple of a quantum q, a power of two, and then added up in float64. Sums of such
numbers are exact as long as they stay below 2^53 q, so addition is associative (Demmel and Nguyen 2013,
doi.org/10.1109/ARITH.2013.9; Ahrens, Demmel and Nguyen 2020, doi.org/10.1145/3389360). The sum is rounded to float32 once.

The rounding takes no operation of its own. Accumulators begin at C = 3 * 2^51 q. Between 2^52 q and 2^53 q neighbouring
float64s are q apart, so each addition rounds to multiples of q. Two things must hold:

- The sum so far must not decide how an addend is rounded. It would where the addend lies half-way between two multiples: such
  ties go to the even one. So addends are (1 + 2^-44) g. Below |g| = 2^42 q no such number is half-way: either g is a multiple
  of q, and 2^-44 g is less than q / 2; or the last bit of g is worth 2^e < q, and what is added to it is more than 0 and less
  than 2^e, as g has 24 bits. The factor itself changes the sum by 6e-14 of it.
- Sums must stay within 2^51 q of C: those of K micro-batches do whose numbers are below 2^50 q / K.

Whether that holds depends on the micro-batches' gradients alone, not on how they are dealt: if it does not, the step is done
again with a larger quantum. The quantum follows from the largest number in the gradients of the step before.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from samestep.errors import UsageError
from samestep.step.pieces import split_memory

FACTOR = 1 + 2.0**-44
OFFSET = 3 * 2.0**51
ADDEND_BITS, SUM_BITS = 42, 50
"""Addends stay below 2^42 q, sums of a step's addends below 2^50 q: half of what the accumulators have room for."""
EXACT_SUM_BYTES = 8
"""Bytes per parameter that sums take, beside the gradient that is made of them."""
HEADROOM = 4
"""Largest gradients may grow by 2^4 from a step to the next before a step is done again."""
SLACK = 12
"""Largest gradients may shrink by 2^12 below what the quantum was made for."""
NOT_FINITE = 10_000
"""Exponent that is said of gradients that are not finite; those of float32 are below 129."""


class ExactSum:
    """Takes the gradient of each micro-batch from a model's parameters as soon as it is complete, and adds it up exactly.

    Takes the place of gradient accumulation and of DistributedDataParallel. In a step: `begin`, a backward for each micro-batch
    of this process, `exponent` and `fits` with the largest exponent of all processes, `finish`.

    Memory: 8 bytes per parameter, and 4 for the gradient that `finish` makes.

    Args:
        model: its parameters that require gradients, in float32, on their devices.

    Attributes:
        last_exponent: e of the step before, whose gradients were all below 2^e; None: there was none.
        listener: called with a parameter and a micro-batch's gradient of it, before that is taken; None: nobody listens.

    Raises:
        UsageError: a parameter that is not float32.
    """

    def __init__(self, model: nn.Module):
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if others := {str(parameter.dtype) for parameter in self.parameters} - {"torch.float32"}:
            raise UsageError(
                f"parameters are {', '.join(sorted(others))}, but exact sums are of gradients in torch.float32"
            )
        sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64, device=self.parameters[0].device)
        self.sums = {
            parameter: row.as_strided(parameter.size(), parameter.stride(), row.storage_offset())
            for parameter, row in zip(self.parameters, self.flat.split(sizes), strict=True)
        }
        self.pieces = {parameter: split_memory(total) for parameter, total in self.sums.items()}
        self.last_exponent: int | None = None
        self.listener: Callable[[nn.Parameter, torch.Tensor], object] | None = None
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._add)

    def begin(self, num_micro_batches: int) -> None:
        """Begin a step, or begin it again.

        Args:
            num_micro_batches: K, on all processes.
        """
        bits = SUM_BITS - (num_micro_batches - 1).bit_length()
        self.limit = (self.last_exponent or 0) + HEADROOM
        self.quantum = 2.0 ** (self.limit - min(ADDEND_BITS, bits))
        self.flat.fill_(OFFSET * self.quantum)
        self.extremes: list[torch.Tensor] = []

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient.layout != torch.strided:
            raise UsageError("a gradient is sparse: make the embedding with sparse=False")
        if self.listener is not None:
            self.listener(parameter, gradient)
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        for total, part in zip(self.pieces[parameter], split_memory(gradient), strict=True):
            total.add_(part, alpha=FACTOR)
            self.extremes += torch.aminmax(part)

    def exponent(self) -> int:
        """Return the smallest e with |g| < 2^e for all numbers of this process's gradients; `NOT_FINITE` if they are not, and
        -`NOT_FINITE` if they are 0.

        Waits for the device.
        """
        largest = torch.stack(self.extremes).abs().max().item() if self.extremes else 0.0
        if largest == 0:
            return -NOT_FINITE
        return math.frexp(largest)[1] if math.isfinite(largest) else NOT_FINITE

    def fits(self, exponent: int) -> bool:
        """Tell whether the quantum suits gradients below 2^`exponent`, the largest of all processes; if not, the step has to
        begin again, with a quantum that does."""
        if abs(exponent) == NOT_FINITE:
            return True  # no quantum would be better
        self.last_exponent = exponent
        return self.limit - HEADROOM - SLACK <= exponent <= self.limit

    def finish(self, add_up: Callable[[torch.Tensor], object] | None = None) -> None:
        """Give each parameter the whole step's gradient. Called by all processes; one all-reduce of 8 bytes per parameter.

        Args:
            add_up: adds a tensor of all processes up, in place; None: the default process group does.
        """
        self.flat.sub_(OFFSET * self.quantum)
        if add_up is not None:
            add_up(self.flat)
        elif dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.flat)
        for parameter, total in self.sums.items():
            parameter.grad = torch.empty_like(parameter).copy_(total)

    def close(self) -> None:
        """Let go of the parameters."""
        self.parameters, self.sums, self.pieces = [], {}, {}


def add_exactly(values: Iterable[float]) -> float:
    """Add numbers up, rounded once, so that their order does not matter (Shewchuk 1997, doi.org/10.1007/PL00009321).

    >>> add_exactly([1e16, 1.0, -1e16]), add_exactly([math.inf, -math.inf])
    (1.0, nan)
    """
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum beyond float64
        return math.nan
