"""Losses of a whole step that is computed in micro-batches: of rows of all its samples, or of sums over them.

Let z be what a loss must know of a step: the embeddings of all samples, one row for each, or sums over all of them. A
micro-batch q computes its part z_q(theta), and z is all parts one behind the other, or their sum. By the chain rule the
gradient of L(z) is a sum over micro-batches,

    dL/dtheta = sum_q <dL/dz_q, dz_q/dtheta>,        dL/dz_q the rows of q of dL/dz, or dL/dz itself for sums,

once z is known. So a first pass computes all z_q without gradient, one exchange joins those of all processes, and every process
computes dL/dz; then each micro-batch's backward starts from its part. One micro-batch's activations are in memory at a time
(Gao et al., 2021, arXiv:2101.06983, for one process and embeddings).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samestep.errors import UsageError
from samestep.training.own_loop import LoopStep
from samestep.training.run_step import RunStep

Quantities = tuple[torch.Tensor, ...]
SAME = 1e-3
"""Largest difference of the two forwards of a micro-batch that is rounding, also in 16 bits; of the largest number."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A micro-batch before its backward.

    Attributes:
        quantities: z_q, without graph.
        gradients: dL/dz_q; zeros for one that counts nothing.
        share: of the step's loss that is shown as its own.
        noise: states of torch's generators before the quantities were computed.
    """

    quantities: Quantities
    gradients: Quantities
    share: float
    noise: Sequence[torch.Tensor]


class WholeBatch:
    """Computes a loss of all samples of a step, though its micro-batches are computed one at a time.

        whole = WholeBatch(model, embed, loss)
        for step in exact_steps(accelerator, pairs, collate, ..., targets=count_samples):
            whole.look(step)
            for batch in step:
                with accelerator.accumulate(model):
                    accelerator.backward(whole.loss(step, embed(model, batch)))
                    optimizer.step()
                    optimizer.zero_grad()

    The price is one more forward, without gradient. Noise must be the same in both: by `noise_by_sample`, which makes it the
    same for every cut, or by `with whole.same_noise():` around `embed`. A loss that is a sum may be added:
    accelerator.backward(step.loss(sums) + whole.loss(step, quantities)).

    Args:
        model: prepared.
        compute: (model, batch) -> z_q, a tensor or several: [samples, ...], or with `is_sum` sums over the batch.
        loss: z, as many tensors -> scalar: [samples of the step, ...], or the sums of the step. The order of the samples
            depends on the cut, and is the same in all tensors. Half precision is widened to float32, sums to float64.
        is_sum: whether the quantities are sums over samples.
        parameters: which the loss itself uses, as a temperature that is learned. They get their gradients, too.

    Raises:
        UsageError: in `look`: quantities that are not one row for each sample, a loss that is not one finite number. In `loss`:
            `look` was not called before; in the first step a micro-batch that does not give what it gave in `look`.
    """

    _refuses_nonfinite = True  # a loss that is no number; else its gradient tells
    _remedy = (
        "noise_by_sample(model, seed), given to exact_steps, draws the same in both forwards, and so does `with "
        "whole.same_noise():`. Modules that normalise by the batch cannot be used"
    )

    def __init__(
        self,
        model: nn.Module,
        compute: Callable[[nn.Module, Any], torch.Tensor | Quantities],
        loss: Callable[..., torch.Tensor],
        *,
        is_sum: bool = False,
        parameters: Sequence[nn.Parameter] = (),
    ):
        self._model, self._compute, self._loss = model, compute, loss
        self._is_sum, self._parameters = is_sum, list(parameters)
        self._step: LoopStep | RunStep | None = None
        self._is_checked, self._num_looks = False, 0
        self._value, self._slopes = torch.zeros(()), list[torch.Tensor]()
        self._parts = list[Part]()

    def look(self, step: LoopStep | RunStep) -> torch.Tensor:
        """Compute z of a step and its loss, which is returned, a scalar without graph. All processes call it."""
        self._step = step
        return self.look_at(step.accelerator.unwrap_model(self._model), step.look_ahead())

    def look_at(self, model: nn.Module, micro_batches: Iterable[tuple[Any, bool]]) -> torch.Tensor:
        """Compute z and its loss as `look`, of micro-batches, each with whether it counts nothing, by a model without DDP."""
        self._is_checked, self._num_looks = self._num_looks > 0, self._num_looks + 1
        found, noises = self._compute_all(model, micro_batches)
        join = _add_up if self._is_sum else _join_rows
        whole, places, shares = join(found)
        value, gradients, self._slopes = self._differentiate(whole)
        self._parts = [
            Part(
                values,
                tuple(map(torch.zeros_like, values)) if is_empty else tuple(part[place] for part in gradients),
                share,
                noise,
            )
            for (values, is_empty), place, share, noise in zip(found, places, shares, noises, strict=True)
        ]
        self._value = value
        return value

    @torch.no_grad()
    def _compute_all(
        self, model: nn.Module, micro_batches: Iterable[tuple[Any, bool]]
    ) -> tuple[list[tuple[Quantities, bool]], list[list[torch.Tensor]]]:
        """Compute the quantities of this process's micro-batches, each with whether it counts nothing, and note their noise."""
        found, noises = [], []
        for batch, is_empty in micro_batches:
            noises.append([torch.get_rng_state(), *_get_device_noise()])
            found.append((_to_tuple(self._compute(model, batch)), is_empty))
        return found, noises

    def _differentiate(
        self, whole: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Compute the loss, its gradients for the quantities, and for its own parameters, whose .grad stays as it is."""
        variables = [value.detach().requires_grad_(value.is_floating_point()) for value in whole]
        kept, learned = [p.grad for p in self._parameters], [*variables, *self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            with torch.enable_grad():
                value = self._loss(*variables)
                is_number = isinstance(value, torch.Tensor) and value.numel() == 1
                if not is_number or (self._refuses_nonfinite and not value.isfinite()):
                    raise UsageError(f"the loss of the whole batch returned {value}, must return one finite number")
                if value.requires_grad:
                    value.sum().backward(inputs=[x for x in learned if x.requires_grad])
            if all(variable.grad is None for variable in variables):
                raise UsageError(
                    "the loss of the whole batch does not depend on the quantities: it has no gradient for them"
                )
            slopes = [torch.zeros_like(x) if x.grad is None else x.grad for x in learned]
        finally:
            for parameter, gradient in zip(self._parameters, kept, strict=True):
                parameter.grad = gradient
        return value.detach().view(()), slopes[: len(variables)], slopes[len(variables) :]

    @contextlib.contextmanager
    def same_noise(self) -> Iterator[None]:
        """Draw the noise for the next micro-batch that `look` drew for it, from torch's generators."""
        noise = self._parts[0].noise if self._parts else [torch.get_rng_state(), *_get_device_noise()]
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if len(noise) > 1 else []):
            torch.set_rng_state(noise[0])
            for state in noise[1:]:
                torch.cuda.set_rng_state(state)
            yield

    def loss(self, step: LoopStep | RunStep, quantities: torch.Tensor | Quantities) -> torch.Tensor:
        """Compute a micro-batch's part of the loss, for `accelerator.backward`; it is multiplied by k and N, as `step.loss`.

        Args:
            quantities: what `compute` gives for it, with graph. Micro-batches come in the order of the step.
        """
        if step is not self._step or not self._parts:
            raise UsageError(
                "WholeBatch.loss was called for a micro-batch that look did not see: call whole.look(step) once, before "
                "`for batch in step:`"
            )
        part = self.take_part(quantities)
        step.add_to_log(part.detach() * step.num_targets)
        return part * step.loss_scale

    def take_part(self, quantities: torch.Tensor | Quantities) -> torch.Tensor:
        """Compute the next micro-batch's part of the loss: the parts of all micro-batches of all processes add up to it."""
        part, values = self._parts.pop(0), _to_tuple(quantities)
        if not self._is_checked:
            _check_same(values, part.quantities, self._remedy)
        pairs = [(slope, value) for slope, value in zip(part.gradients, values, strict=True) if value.requires_grad]
        slopes = zip(self._slopes, self._parameters, strict=True)
        terms = [(slope.to(value.dtype) * value).sum().to(self._value) for slope, value in pairs]
        terms += [part.share * (slope * parameter).sum() for slope, parameter in slopes]
        surrogate = sum(terms, torch.zeros_like(self._value))
        return surrogate + (part.share * self._value - surrogate).detach()


def _get_device_noise() -> list[torch.Tensor]:
    return [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []


def _to_tuple(quantities: torch.Tensor | Quantities) -> Quantities:
    return (quantities,) if isinstance(quantities, torch.Tensor) else tuple(quantities)


def _join_rows(
    found: Sequence[tuple[Quantities, bool]],
) -> tuple[list[torch.Tensor], list[Any], list[float]]:
    """Join rows of all samples of all processes; also where those of each micro-batch are, and their share of all."""
    for quantities, _ in found:
        lengths = {len(value) if value.ndim else 0 for value in quantities}
        if len(lengths) > 1:
            raise UsageError(
                f"compute returned tensors of {', '.join(map(str, sorted(lengths)))} rows for a micro-batch, must return one "
                "row for each sample in each of them: [samples, ...]"
            )
    sizes = [0 if is_empty else len(quantities[0]) for quantities, is_empty in found]
    own = [
        torch.cat([_widen(quantities[number][:size]) for (quantities, _), size in zip(found, sizes, strict=True)])
        for number in range(len(found[0][0]))
    ]
    counts = _gather(torch.tensor([sum(sizes)], device=own[0].device))
    num_rows = [int(count) for count in counts]
    whole = []
    for rows in own:
        padded = rows.new_zeros(max(num_rows), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = _gather(padded)
        whole.append(torch.cat([part[:size] for part, size in zip(parts, num_rows, strict=True)]))
    rank = dist.get_rank() if dist.is_initialized() else 0
    places, first = [], sum(num_rows[:rank])
    for size in sizes:
        places.append(slice(first, first + size))
        first += size
    return whole, places, [size / max(1, sum(num_rows)) for size in sizes]


def _add_up(found: Sequence[tuple[Quantities, bool]]) -> tuple[list[torch.Tensor], list[Any], list[float]]:
    """Add up sums over all micro-batches of all processes; each one's place is all of them, and their shares are alike."""
    is_live = [not is_empty for _, is_empty in found]
    whole = []
    for number in range(len(found[0][0])):
        parts = [_widen(quantities[number], to_double=True) * (not is_empty) for quantities, is_empty in found]
        whole.append(torch.stack(_gather(torch.stack(parts).sum(0))).sum(0))
    num_live = int(sum(_gather(torch.tensor([sum(is_live)], device=whole[0].device))))
    return whole, [...] * len(found), [one / max(1, num_live) for one in map(int, is_live)]


def _widen(value: torch.Tensor, to_double: bool = False) -> torch.Tensor:
    """Widen numbers to float32 at least, or to float64 where the device has it; whole numbers stay."""
    if not value.is_floating_point():
        return value
    is_wide = to_double and value.device.type != "mps"
    return value.to(torch.promote_types(value.dtype, torch.float64 if is_wide else torch.float32))


def _gather(value: torch.Tensor) -> list[torch.Tensor]:
    """Gather a tensor of one shape from all processes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value.contiguous())
    return parts


def _check_same(values: Quantities, before: Quantities, remedy: str) -> None:
    """Check that a micro-batch gives what it gave in the pass before."""
    for value, other in zip(values, before, strict=True):
        if value.shape != other.shape:
            raise UsageError(
                f"a micro-batch gave {list(other.shape)} in look, and {list(value.shape)} now: compute must give the same"
            )
        wide, known = value.detach().double().cpu(), other.double().cpu()
        if wide.numel() and (wide - known).abs().max() > SAME * known.abs().max():
            raise UsageError(f"a micro-batch gave other numbers in look: is there dropout? {remedy}")
