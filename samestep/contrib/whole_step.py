"""Normalise the feature maps of a whole step by its statistics, however it is cut (a recipe's `exact_batch_norm`)."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from samestep.errors import RunError, UsageError
from samestep.step import accumulate
from samestep.step.batch_norm import (
    BatchNorm,
    StepStatistics,
    combine_statistics,
    compute_input_gradient,
    compute_statistics,
    expand_channels,
    gather_values,
    normalize,
)
from samestep.training.parts import Part
from samestep.training.run import Run

MicroBatch = TypeVar("MicroBatch")
Loss = Callable[[MicroBatch], torch.Tensor]


class PeerError(RunError):
    """Raised when another process failed in work that all share; that process's error says why."""


@dataclasses.dataclass
class Found:
    """Holds the solution of a whole step, as far as it is known.

    Attributes:
        statistics: [3, channels], n, mean and M2; None: nothing yet.
        var, invstd: [channels], of `statistics`.
        slopes: [3, channels], sums of dy, dy * xhat and dy * dy, divided by n; None: not yet.
    """

    statistics: torch.Tensor | None = None
    var: torch.Tensor | None = None
    invstd: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


@dataclasses.dataclass
class Work:
    """Holds the place of the passes over the micro-batches of a step.

    Attributes:
        numbers, num_cells: place of each micro-batch among those of the whole step, and their number; where that counts.
        prefix_totals: [micro-batches, 3, channels], after each micro-batch the total of it and those before it on this process,
            by the previous pass; where the mode is canonical, its own.
        running_total: [3, channels], of this pass.
        counts: [micro-batches, channels], n of each total.
        index: number of the present micro-batch.
        visited_layers: those that its forward has reached.
        precision: eps of layers that compute in half precision; 0: none does.
        anchor: scalar for which adjoint passes ask gradients.
    """

    numbers: list[int] = dataclasses.field(default_factory=list)
    num_cells: int | None = None
    prefix_totals: torch.Tensor | None = None
    running_total: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    index: int = 0
    visited_layers: set[BatchNorm] = dataclasses.field(default_factory=set)
    precision: float = 0.0
    anchor: torch.Tensor | None = None


class WholeStep(StepStatistics):
    """Normalises a whole step at once, though its micro-batches are computed one at a time: exact, at the cost of more passes.

    With the statistics s_l of layer l as variables, the loss of a step is a sum over micro-batches q again,

        L = sum_q loss(q; s),        s_l = sum_q m_l(q; s_1 .. s_(l-1)),
        m_l = (sum x / n, sum (x - c)^2 / n) with constants n and c = mean,

    and so is its gradient, with Lagrange's multipliers lambda_l (the method of adjoints):

        dL = sum_q d [loss + sum_l lambda_l . m_l] at constant s,
        lambda_l = sum_q d/ds_l [loss + sum_(l' > l) lambda_l' . m_l'],

    where lambda = (-weight / sqrt(var + eps) * G, -weight / 2 (var + eps) * H) with G = sum dy and H = sum dy * xhat over all
    micro-batches. `prepare` finds s by forward passes over all micro-batches, then G and H by passes with a backward. Both
    systems are triangular: layers that depend on no unknown statistics are exact after one pass, layers that depend on these
    after two, so as many passes as there are layers are always enough. Fewer suffice, because a micro-batch uses what earlier
    ones of the same pass found: the whole step's statistics are assumed to have changed since the previous pass as the
    statistics of this process's micro-batches up to the present one have.

    Memory holds one micro-batch's activations at a time, and per micro-batch four numbers per channel. Out of scope: dropout
    and other noise, which would have to be the same in each pass; layers that are called twice in a forward; sharded weights.

    With `is_canonical` the results are the same to the bit whichever process computes a micro-batch, and in whatever order: a
    micro-batch uses the whole step's statistics of the previous pass and what this pass found of itself, nothing of other
    micro-batches; and the statistics of all micro-batches are exchanged, each in its own place, and combined by every process
    in the same order. That takes more passes, never more than layers, and 3 more numbers per channel for each micro-batch of
    all processes: 64 micro-batches of a ResNet-50, with 26560 normalised channels, take 20 MB in float32.

    Args:
        model: without DistributedDataParallel around it, its layers made `BatchNorm` by `synchronize`. Layers in evaluation
            mode, and layers that a forward does not reach, are left alone.
        tolerance: passes end when a pass changes no layer's y (in the adjoint passes: its gradient) by more, as root mean
            square over root mean square. None: 16 eps of the statistics' dtype, about the effect of summing in another order;
            where layers compute in half precision, half that precision's eps, to which each y is rounded anyway.
        is_canonical: whether results are the same to the bit for every distribution of the micro-batches.

    Attributes:
        layers: the model's `BatchNorm`.
        num_forward_passes, num_adjoint_passes: in the latest `prepare`.
    """

    def __init__(self, model: nn.Module, tolerance: float | None = None, is_canonical: bool = False):
        self.model, self.tolerance, self.is_canonical = model, tolerance, is_canonical
        self.names = {module: name for name, module in model.named_modules() if isinstance(module, BatchNorm)}
        self.layers = list(self.names)
        self.group = self.layers[0].group if self.layers else None
        self.num_forward_passes = self.num_adjoint_passes = 0
        self._sizes = [layer.num_features for layer in self.layers]
        ends = list(itertools.accumulate(self._sizes, initial=0))
        self._places = dict(zip(self.layers, map(slice, ends, ends[1:]), strict=False))  # among all channels
        self._terms: dict[BatchNorm, torch.Tensor] = {}
        self.release()

    def prepare(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: Loss,
        *,
        numbers: Sequence[int | None] | None = None,
        num_cells: int | None = None,
    ) -> None:
        """Find the step's statistics and multipliers, and let the layers use them until `finish` or `release`.

        Called by all processes, which may have different numbers of micro-batches, or none. No parameter's .grad is touched.

        Args:
            micro_batches: this process's; gone through once per pass.
            loss: scalar, a micro-batch's share of the step's loss, computed by the bare model; without any factor k * N.
            numbers: for `is_canonical`, the place of each micro-batch among those of the whole step; None: an empty one, left
                out.
            num_cells: for `is_canonical`, micro-batches of the whole step, on all processes.

        Raises:
            UsageError: a layer is called twice in a forward.
            PeerError: a pass failed on another process, which raises the error itself.
        """
        self.release()
        if not self.layers:
            return
        if self.is_canonical:
            micro_batches = [
                micro_batch for micro_batch, number in zip(micro_batches, numbers, strict=True) if number is not None
            ]
            self._work.numbers, self._work.num_cells = [number for number in numbers if number is not None], num_cells
        try:
            self._find_statistics(micro_batches, loss)
            self._find_adjoints(micro_batches, loss)
        except BaseException:
            self.release()
            raise
        self._set_mode(self._apply)

    def correction(self) -> torch.Tensor:
        """Return sum_l lambda_l . m_l of the latest forward, a scalar whose value is replaced by 0: only its gradient counts.

        So loss + correction() still is the loss. To be called once per forward.
        """
        total = sum(self._terms.values(), torch.zeros(()))
        self._terms = {}
        return total

    def finish(self) -> None:
        """Update running statistics once, with those of the whole step, and let the layers be ordinary ones again."""
        if self._found.statistics is not None:
            for layer, place in self._places.items():
                layer.update(self._found.statistics[:, place])
        self.release()

    def release(self) -> None:
        """Let the layers be ordinary ones again, running statistics as they are: after a step that failed."""
        self._set_mode(None)
        self._found, self._work, self._terms = Found(), Work(), {}

    def _set_mode(self, mode: Callable | None) -> None:
        for layer in self.layers:
            layer.mode = mode

    def _find_statistics(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Compute statistics, var and invstd of `Found`."""
        parameter = next(self.model.parameters())
        dtype = functools.reduce(torch.promote_types, (p.dtype for p in self.model.parameters()), torch.float32)
        self._work.prefix_totals = torch.zeros(
            len(micro_batches), 3, sum(self._sizes), dtype=dtype, device=parameter.device
        )
        eps = torch.cat([parameter.new_full((layer.num_features,), layer.eps, dtype=dtype) for layer in self.layers])
        self._work.precision = 0.0
        self._set_mode(self._measure)
        for number in range(1, len(self.layers) + 1):
            self.num_forward_passes = number
            with torch.no_grad():
                parts = self._run_pass(micro_batches, loss)
            previous, self._found.statistics = self._found.statistics, combine_statistics(parts)
            n, mean, squares = self._found.statistics
            self._found.var = squares / n.clamp(min=1)
            self._found.invstd = (self._found.var + eps).rsqrt()
            if previous is not None:
                # y changes by d_mean + xhat d_var, whose mean square is the sum of theirs: xhat has mean 0 and variance 1
                d_mean = (mean - previous[1]) * self._found.invstd
                d_var = (squares - previous[2]) / n.clamp(min=1) * self._found.invstd**2 / 2
                if self._is_settled(d_mean**2 + d_var**2, torch.ones_like(mean), self._found.statistics):
                    break

    def _measure(self, layer: BatchNorm, x: torch.Tensor) -> torch.Tensor:
        if layer in self._work.visited_layers:
            raise UsageError(
                f"{self.names[layer]} is called twice in a forward: batch normalisation of a whole step has one set of "
                "statistics per layer. Give each call a layer of its own"
            )
        self._work.visited_layers.add(layer)
        place = self._places[layer]
        old, new = self._add(place, compute_statistics(x), lambda *parts: combine_statistics(torch.stack(parts)))
        mean, var = new[1], new[2] / new[0].clamp(min=1)
        if self._found.statistics is not None:  # the affine map that makes the old distribution the new one
            growth = (new[2] / old[2]).nan_to_num(1.0).clamp(0.25, 4.0)
            mean = mean + growth.sqrt() * (self._found.statistics[1, place] - old[1])
            var = growth * self._found.var[place]
        if x.dtype.itemsize < 4:
            self._work.precision = torch.finfo(x.dtype).eps
        return normalize(layer, x, mean, var)

    def _find_adjoints(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Compute slopes of `Found`; from here on, totals are of the three sums."""
        totals = self._work.prefix_totals
        self._work.counts, self._work.prefix_totals = totals[:, 0].clone(), torch.zeros_like(totals)
        self._work.anchor = torch.zeros((), device=self._work.prefix_totals.device, requires_grad=True)
        self._set_mode(self._propagate)

        def backward(micro_batch: MicroBatch) -> None:
            total = loss(micro_batch)
            if total.requires_grad:
                torch.autograd.grad(total, self._work.anchor, allow_unused=True)

        for number in range(1, len(self.layers) + 1):
            self.num_adjoint_passes = number
            sums = self._run_pass(micro_batches, backward).sum(0)
            previous, self._found.slopes = self._found.slopes, sums / self._found.statistics[0].clamp(min=1)
            if previous is not None:
                changes = (self._found.slopes - previous)[:2].square().sum(0)
                if self._is_settled(changes, self._found.slopes[2], self._found.slopes):
                    break
        self._work.prefix_totals = self._work.counts = None

    def _propagate(self, layer: BatchNorm, x: torch.Tensor) -> torch.Tensor:
        return _Propagate.apply(x, self._work.anchor, layer, self)

    def _apply(self, layer: BatchNorm, x: torch.Tensor) -> torch.Tensor:
        place = self._places[layer]
        mean, invstd, slopes = self._found.statistics[1, place], self._found.invstd[place], self._found.slopes[:, place]
        if torch.is_grad_enabled():
            factor = -invstd if layer.weight is None else -invstd * layer.weight.detach()
            self._terms[layer] = _Correction.apply(x, mean, factor * slopes[0], factor * invstd * slopes[1])
        return normalize(layer, x, mean, self._found.var[place])

    def _add(self, place: slice, values: torch.Tensor, add: Callable) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's values [3, C] of the present micro-batch to the running total of this pass, or of this micro-batch.

        Returns:
            [3, C] each: the layer's total up to this micro-batch (or of it alone) in the previous pass, and in this pass.
        """
        total = add(self._work.running_total[:, place], values)
        self._work.running_total[:, place] = total
        return self._work.prefix_totals[self._work.index, :, place], total

    def _run_pass(self, micro_batches: Sequence[MicroBatch], work: Callable[[MicroBatch], object]) -> torch.Tensor:
        """Go through this process's micro-batches, and gather the total of each process, [processes, 3, channels], or of each
        micro-batch of the step, [cells, 3, channels].

        Called by all processes.
        """
        error, nothing = None, self._work.prefix_totals.new_zeros(self._work.prefix_totals.shape[1:])
        self._work.running_total = nothing.clone()
        try:
            for self._work.index, micro_batch in enumerate(micro_batches):
                self._work.visited_layers = set()
                if self.is_canonical:
                    self._work.running_total = nothing.clone()
                work(micro_batch)
                self._work.prefix_totals[self._work.index] = self._work.running_total
        except Exception as failure:  # the others wait
            error = failure
        # One collective, [processes or cells, 2 + 3 channels]: whether a process failed, its layers' precision, totals.
        flags = nothing.new_tensor([error is not None, self._work.precision])
        if self.is_canonical:
            totals = self._work.prefix_totals.flatten(1)
            slots = self._place(torch.cat([flags.expand(len(totals), -1), totals], 1))
        else:
            slots = gather_values(torch.cat([flags, self._work.running_total.flatten()]), self.group)
        has_failed, self._work.precision = slots[:, :2].amax(0).tolist()
        if error is not None:
            raise error
        if has_failed:
            raise PeerError("another process failed while the statistics of the step were computed")
        return slots[:, 2:].unflatten(1, nothing.shape)

    def _place(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather the rows [micro-batches, numbers] of all processes in the order of the step's micro-batches."""
        slots = rows.new_zeros(self._work.num_cells, rows.shape[1])
        slots[self._work.numbers] += rows  # 0 + x, as from other processes: never -0
        if self.group is not None:
            dist.all_reduce(slots, group=self.group)
        return slots

    def _is_settled(self, changes: torch.Tensor, sizes: torch.Tensor, values: torch.Tensor) -> bool:
        """Tell whether in no layer the sum of changes [channels] over the sum of sizes [channels] exceeds tolerance squared.

        All processes decide alike. Channels whose `values` [3, channels] are not finite, and will not be, do not count.
        """
        is_finite = values.isfinite().all(0)
        changes, sizes = torch.where(is_finite, changes, 0.0), torch.where(is_finite, sizes, 0.0)
        pairs = zip(changes.split(self._sizes), sizes.split(self._sizes), strict=True)
        tiny = torch.finfo(changes.dtype).tiny
        shares = torch.stack([change.sum() / size.sum().clamp(min=tiny) for change, size in pairs])
        largest = shares.nan_to_num(torch.inf).amax().sqrt()  # not finite before, finite now: a change
        if self.group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = self._work.precision / 2 or 16 * torch.finfo(changes.dtype).eps
        return largest.item() <= tolerance


def deviation(model: nn.Module, micro_batches: Sequence[MicroBatch], loss: Loss) -> float:
    """Measure how far the statistics of micro-batches change a step's gradient: |usual - exact| / |exact|, over all parameters.

    `usual` is the gradient that training without `WholeStep` computes, `exact` uses the statistics of the whole step, to a
    tolerance of 1e-4. Called by all processes; where there are several, all have equally many micro-batches, empty ones
    included. Parameters' .grad, running statistics and modes are left as they were. Noise in the model counts as deviation.

    Args:
        model, micro_batches, loss: as for `WholeStep`; a constant factor of the loss does not matter.
    """
    whole = WholeStep(model, tolerance=1e-4)
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for layer in whole.layers for buffer in layer.buffers()]
    model.train()
    try:
        usual = _gradient(model, micro_batches, loss, whole.group)
        whole.prepare(micro_batches, loss)
        exact = _gradient(model, micro_batches, lambda micro_batch: loss(micro_batch) + whole.correction(), whole.group)
    finally:
        whole.release()
        for module, training in modes.items():
            module.training = training
        for buffer, value in buffers:
            buffer.copy_(value)
    return ((usual - exact).norm() / exact.norm()).item()


class Deviation(Part):
    """Writes into the log at the start of training how much batch normalisation makes the step depend on its cut.

    The measure is the relative error of the first step's gradient against the gradient of one large batch.
    """

    def __init__(self, run: Run):
        self.run = run

    def start(self) -> None:
        """Measure, before the first step of a training. Called by all processes."""
        run = self.run
        if run.log.first_step > 0:
            return
        data, model = run.recovery.steps[0], run.bare_model
        counts = accumulate.total_counts(run.accelerator, data.counts).clamp(min=1)
        accumulate.seed_noise(run.accelerator, run.recipe.seed, 0)
        error = deviation(
            model, data.micro_batches, lambda micro_batch: run.network.compute_loss(micro_batch, counts, model)[0]
        )
        run.log.add_event(
            1,
            "batch normalisation takes its statistics from each micro-batch, so that the step depends on how it is cut, unlike "
            "with --exact_batch_norm or group normalisation",
            micro_steps=len(data.micro_batches),
            gradient_error=float(f"{error:.2g}"),
        )


def _gradient(
    model: nn.Module, micro_batches: Sequence[MicroBatch], loss: Loss, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Compute the gradient [parameters] of the summed loss of all micro-batches of all processes."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    totals = [torch.zeros_like(parameter) for parameter in parameters]
    for micro_batch in micro_batches:
        gradients = torch.autograd.grad(loss(micro_batch), parameters, allow_unused=True)
        for total, gradient in zip(totals, gradients, strict=True):
            if gradient is not None:
                total += gradient
    flat = torch.cat([total.flatten() for total in totals])
    if group is not None:
        dist.all_reduce(flat, group=group)
    return flat


class _Propagate(torch.autograd.Function):
    """Computes a layer in an adjoint pass: y of x; the backward adds up its sums and goes on with the whole step's.

    Gradients are asked for the anchor: so every layer of the forward is part of the backward, and no parameter is.
    """

    @staticmethod
    def forward(ctx, x, anchor, layer, step):
        place = step._places[layer]
        ctx.layer, ctx.step, ctx.place, ctx.index = layer, step, place, step._work.index
        ctx.save_for_backward(x)
        return normalize(layer, x, step._found.statistics[1, place], step._found.var[place])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (x,), step, place = ctx.saved_tensors, ctx.step, ctx.place
        mean, invstd = step._found.statistics[1, place], step._found.invstd[place]
        dy, xhat = dy.to(mean.dtype), (x - expand_channels(mean)) * expand_channels(invstd)
        sums = torch.stack([dy.sum((0, 2, 3)), (dy * xhat).sum((0, 2, 3)), (dy * dy).sum((0, 2, 3))])
        old, new = step._add(place, sums, torch.add)  # [3, C] each
        # Means [3, C]: of the micro-batches up to this one; later the whole step's, changed as those micro-batches' have.
        n = step._work.counts[ctx.index, place].clamp(min=1)
        slopes = new / n if step._found.slopes is None else step._found.slopes[:, place] + (new - old) / n
        return compute_input_gradient(dy, xhat, slopes, ctx.layer.weight, invstd).to(x.dtype), None, None, None


class _Correction(torch.autograd.Function):
    """Returns 0, with the gradient a + b * (x - mean) for each element of x."""

    @staticmethod
    def forward(ctx, x, mean, a, b):
        ctx.save_for_backward(x, mean, a, b)
        return mean.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale):
        x, mean, a, b = ctx.saved_tensors
        dx = expand_channels(scale * a) + expand_channels(scale * b) * (x - expand_channels(mean))
        return dx.to(x.dtype), None, None, None
