"""Normalise batches by the statistics of a micro-batch on all processes together, or by running ones.

Per channel, over the n elements of the feature maps x that are normalised together (Ioffe and Szegedy, 2015,
arXiv:1502.03167):

    mean = sum x / n,    var = sum (x - mean)^2 / n,    xhat = (x - mean) / sqrt(var + eps),    y = weight * xhat + bias

Statistics are computed, exchanged and combined in float32 or wider, as triples (n, mean, M2) with M2 = n var (Chan, Golub and
LeVeque, 1983, The American Statistician 37). Those of a whole step are `samestep.contrib.whole_step`'s.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from samestep.errors import UsageError


class BatchNorm(nn.BatchNorm2d):
    """Normalises as nn.BatchNorm2d, with the statistics of a micro-batch on all processes of a group. Made by `synchronize`.

    With a group, every process calls it equally often. Processes may have different numbers of samples, or none. Gradients of
    weight and bias are this process's share of the sums, which DistributedDataParallel adds up. Checkpointed (its forward
    computed twice) it counts a micro-batch twice in its running statistics, as nn.BatchNorm2d does.

    Attributes:
        group: the processes; None: this process alone.
        mode: the function of other `StepStatistics` at work that replaces training's forward; None: there is none.
    """

    group: dist.ProcessGroup | None = None
    mode: Callable[["BatchNorm", torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [S, C, H, W]: [S, C, H, W] in x's dtype and memory format."""
        if self.training and self.mode is not None:
            return self.mode(self, x)
        uses_running = not self.training and self.running_mean is not None
        if self.group is None or uses_running:
            return super().forward(x)
        self._check_input_dim(x)
        with torch.no_grad():
            statistics = combine_statistics(gather_values(compute_statistics(x), self.group))
            if self.training:
                self.update(statistics)
        return _Normalize.apply(x, statistics, self, self.weight, self.bias)

    @torch.no_grad()
    def update(self, statistics: torch.Tensor) -> None:
        """Update the running statistics, as nn.BatchNorm2d does: with the variance divided by n - 1 instead of n.

        Args:
            statistics: [3, C], n, mean and M2 of a step; n = 0 changes nothing.
        """
        if self.running_mean is None:
            return
        n, mean, squares = statistics
        # The running values move towards the new ones by a share [C]; 0 where there are no elements, which is no batch.
        self.num_batches_tracked += n[0] > 0
        share = (n > 0).to(n.dtype)
        share *= 1 / self.num_batches_tracked.clamp(min=1).to(n.dtype) if self.momentum is None else self.momentum
        self.running_mean += share * (mean - self.running_mean)
        self.running_var += share * (squares / (n - 1).clamp(min=1) - self.running_var)


class FrozenBatchNorm(nn.BatchNorm2d):
    """Normalises with its running statistics and never changes them, in training, too. Made by `freeze`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [S, C, H, W] by the running statistics: [S, C, H, W]."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def synchronize(model: nn.Module) -> None:
    """Make every nn.BatchNorm2d a `BatchNorm`, over all processes where there are several. Called by all processes.

    The modules stay the same objects, with their parameters, buffers and hooks; frozen ones stay frozen. Their collectives
    have a process group of their own, so that they do not mix with DistributedDataParallel's.

    Raises:
        UsageError: the model has a subclass of nn.BatchNorm2d, whose forward may do more.
    """
    layers = _layers(model)
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    group = None if is_alone or not layers else dist.new_group()
    for layer in layers:
        layer.__class__ = BatchNorm
        layer.group = group


def freeze(model: nn.Module) -> None:
    """Make every nn.BatchNorm2d a `FrozenBatchNorm`; weight and bias are trained as before. Raises as `synchronize`."""
    for layer in _layers(model):
        layer.__class__ = FrozenBatchNorm


def _layers(model: nn.Module) -> list[nn.BatchNorm2d]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    layers = {name: layer for name, layer in layers.items() if not isinstance(layer, FrozenBatchNorm)}
    unknown_names = [name for name, layer in layers.items() if type(layer) not in (nn.BatchNorm2d, BatchNorm)]
    if unknown_names:
        raise UsageError(
            f"{', '.join(unknown_names)} of {type(model).__name__}: a kind of batch normalisation that is not known here; only "
            "nn.BatchNorm2d itself can be replaced"
        )
    return list(layers.values())


class StepStatistics:
    """Leaves it to each micro-batch to normalise by its own statistics: the usual way. Others are of this form.

    statistics.prepare(micro_batches, loss)
    for micro_batch in micro_batches:
        backward(loss(micro_batch) + statistics.correction())
    statistics.finish()

    Attributes:
        replays_noise: whether `prepare` needs micro-batches with the noise with which they are trained.
    """

    replays_noise = False

    def is_needed(self, num_micro_batches: int, is_exact: bool) -> bool:
        """Tell whether a step is to be prepared that a process cuts into so many micro-batches, at most.

        One micro-batch of every process has the statistics of the step, unless its bits may depend on no process (`is_exact`).
        """
        return is_exact or num_micro_batches > 1

    def prepare(
        self,
        micro_batches: Any,
        loss: Callable[[Any], torch.Tensor],
        *,
        numbers: Sequence[int | None] | None = None,
        num_cells: int | None = None,
    ) -> None:
        """Find what the layers need to know of a step before its first backward. Called by all processes.

        Args:
            micro_batches: this process's, to be gone through as often as is needed; they have a length.
            loss, numbers, num_cells: as of `samestep.contrib.whole_step.WholeStep.prepare`.
        """

    def correction(self) -> torch.Tensor:
        """Return what is added to the loss of the latest forward, a scalar; where its value is 0, only its gradient counts."""
        return torch.zeros(())

    def finish(self) -> None:
        """End a step, after its last backward."""


class _Normalize(torch.autograd.Function):
    """Normalises x to y by statistics of all processes, of which x is a part.

    dx = weight / sqrt(var + eps) * (dy - sum dy / n - xhat * sum (dy * xhat) / n), sums over all processes.
    """

    @staticmethod
    def forward(ctx, x, statistics, layer, weight, bias):
        n, mean, squares = statistics
        var = squares / n.clamp(min=1)
        ctx.group, ctx.invstd = layer.group, (var + layer.eps).rsqrt()
        ctx.save_for_backward(x, weight, statistics)
        return normalize(layer, x, mean, var)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, (n, mean, _) = ctx.saved_tensors
        dy, xhat = dy.to(mean.dtype), (x - expand_channels(mean)) * expand_channels(ctx.invstd)
        # [2, C], the sums over this process's elements: gradients of bias and weight, and a part of all processes' sums.
        sums = torch.stack([dy.sum((0, 2, 3)), (dy * xhat).sum((0, 2, 3))])
        d_bias, d_weight = (None, None) if weight is None else sums.to(weight.dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            slopes = gather_values(sums, ctx.group).sum(0) / n.clamp(min=1)
            dx = compute_input_gradient(dy, xhat, slopes, weight, ctx.invstd).to(x.dtype)
        return dx, None, None, d_weight, d_bias


def normalize(layer: BatchNorm, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    """Normalise x by mean and var [C], which are constants: y [S, C, H, W]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if p is None else p.to(wide) for p in (layer.weight, layer.bias))
    return F.batch_norm(x, mean.to(wide), var.to(wide), weight, bias, eps=layer.eps)


def compute_input_gradient(
    dy: torch.Tensor, xhat: torch.Tensor, slopes: torch.Tensor, weight: torch.Tensor | None, invstd: torch.Tensor
) -> torch.Tensor:
    """Compute dx [S, C, H, W]; slopes: means of dy and of dy * xhat, [C] each."""
    factor = invstd if weight is None else invstd * weight
    return expand_channels(factor) * (dy - expand_channels(slopes[0]) - xhat * expand_channels(slopes[1]))


def compute_statistics(x: torch.Tensor) -> torch.Tensor:
    """Compute n, mean and M2, [3, C], of x [S, C, H, W]; zeros where x is empty."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    n = x.numel() // x.shape[1]
    if n == 0:
        return x.new_zeros(3, x.shape[1])
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return torch.stack([torch.full_like(mean, n), mean, var * n])


def combine_statistics(parts: torch.Tensor) -> torch.Tensor:
    """Combine the statistics of parts [parts, 3, C] into those of their union, [3, C]."""
    counts, means, squares = parts.unbind(1)
    n = counts.sum(0)
    mean = (counts * means).sum(0) / n.clamp(min=1)
    return torch.stack([n, mean, (squares + counts * (means - mean) ** 2).sum(0)])


def gather_values(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Gather the values [...] of each process, [processes, ...]: in slots of a sum, which every backend has."""
    if group is None:
        return values[None]
    slots = values.new_zeros(dist.get_world_size(group), *values.shape)
    slots[dist.get_rank(group)] = values
    dist.all_reduce(slots, group=group)
    return slots


def expand_channels(values: torch.Tensor) -> torch.Tensor:
    """Reshape [C] to [C, 1, 1], which broadcasts to feature maps."""
    return values[:, None, None]
