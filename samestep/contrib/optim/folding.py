"""Accumulate inside the optimizer: fold every gradient into the moments as soon as it is complete, and free it.

Gradient accumulation keeps a whole gradient alive from the first micro-batch of a step to its end: 4 bytes per parameter. Here
none is kept: a hook takes each parameter's gradient in the backward that computes it. A step is cut into K micro-batches (k
micro-batches on each of N processes), a_q is the gradient of micro-batch q's share of the loss, and G = sum_q a_q is the
gradient of the step:

    m_t = b1 m_{t-1} + (1 - b1) sum_q a_q            exact: it is linear in the gradients
    v_t = b2 v_{t-1} + (1 - b2) G^2                  Adam's; without G, G^2 can only be estimated

(Su 2021, spaces.ac.cn/archives/8634; AdamA: Zhang et al. 2023, 2305.19982). Several processes need no
DistributedDataParallel: process 0 carries the moments, the others begin each step with zeros, and the moments of all processes
are added up once per step, in place, in buckets that are reduced as soon as the last backward has filled them.
"""

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep._internals.torch_operators import foreach_mul_, foreach_norm
from samestep.contrib.optim.random_projection import Signs, project
from samestep.errors import UsageError
from samestep.step.pieces import count_at_once, split_memory

BUCKET = 25 * 2**20  # bytes of moments that are reduced at once
COEFFICIENTS = ("exact", "substitute", "root", "unchanged")
"""The decay of moments with decay b:

    exact         by b once per step
    substitute    by 1 - (1 - b) / k in every micro-batch (Su 2021)
    root          by b^(1/k) in every micro-batch, so by b per step, but older gradients of a step count less
    unchanged     by b in every micro-batch: an optimizer that only moves the parameters less often
"""
TOO_MANY = (
    "a parameter of shape {} got gradient {} of a step with gradient_accumulation_steps {}. Set that to the backward passes "
    "before each step(), and call step() after them"
)
NOT_FOLDED = (
    "parameters of shapes {} have a .grad that was not folded. The model is wrapped in DistributedDataParallel (`distribute` "
    "takes its place), or they were frozen when the optimizer was made"
)


class Accumulating(torch.optim.Optimizer):
    """Implements what `AccumulatingSGD` and `AccumulatingAdamW` share: hooks, moments in buckets, their reduction, clipping.

    Used like torch's optimizers: k times `(loss / k).backward()`, then `step()`. With several processes the step's gradient is
    the mean over them, as with DistributedDataParallel, whose place `distribute` takes. `.grad` is always None.

    How moments decay, `COEFFICIENTS` says.

    Attributes:
        gradient_accumulation_steps: k, backward passes of this process per step; may change between steps.
        num_micro_batches: K, micro-batches of the step on all processes; None: k N. May change between steps.
    """

    moments: tuple[str, ...]

    def __init__(self, params, defaults: dict[str, Any], gradient_accumulation_steps: int, coefficients: str):
        _check_arguments(defaults, gradient_accumulation_steps, coefficients)
        self.gradient_accumulation_steps, self.coefficients = gradient_accumulation_steps, coefficients
        self.num_micro_batches: int | None = None
        self._clip: float | Tensor = 1.0  # factor of the last step's gradient
        self._expected = 1.0  # factor of this step's gradient, until its norm is known
        self.num_processes = 1  # N
        self._buckets: list[Bucket] = []
        self._bucket_by_parameter: dict[nn.Parameter, Bucket] = {}
        self._signs: Signs = {}
        self._rates_cache: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        self._steps: dict[nn.Parameter, int] = {}  # number of steps in which a parameter got a gradient
        self._num_launched, self._is_open, self._is_complete, self._discards = 0, False, False, False
        super().__init__(params, defaults)

    # --- Parameters, moments, processes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        hook = functools.partial(_fold, weakref.ref(self))
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook)

    def allocate(self) -> None:
        """Make the moments of the parameters that need gradients and have no moments yet, on the parameters' devices.

        The first gradient does this, too; the model must be on its device by then.

        Raises:
            UsageError: a parameter whose numbers do not fill its memory.
        """
        for index, group in enumerate(self.param_groups):
            new = [p for p in group["params"] if p.requires_grad and p not in self._bucket_by_parameter]
            self._buckets += _make_buckets(index, new, self.moments)
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                if parameter not in self._bucket_by_parameter:
                    self._bucket_by_parameter[parameter] = bucket
                    self.state[parameter] = self._initial_state(bucket.moments[parameter])

    def _initial_state(self, moments: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.moments, moments, strict=True)) | {"clip": torch.ones(())}

    def distribute(self, model: nn.Module) -> None:
        """Train `model` on all processes, in place of DistributedDataParallel: its parameters and buffers become process 0's,
        gradients are averaged.

        A parameter without gradient on a process has a gradient of zero there. Called by all processes; the model must not be
        wrapped in DistributedDataParallel.
        """
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        self.num_processes = dist.get_world_size()
        self.allocate()

    # --- A micro-batch: gradients are folded

    @contextmanager
    def discard_gradients(self) -> Iterator[None]:
        """Free the gradients that are computed within this context instead of folding them."""
        self._discards = True
        try:
            yield
        finally:
            self._discards = False

    def _take_gradient(self, parameter: nn.Parameter) -> None:
        """Fold the gradient that a parameter just got."""
        gradient, parameter.grad = parameter.grad, None
        if self._discards:
            return
        if gradient.layout != torch.strided:
            raise UsageError("a gradient is sparse: make the embedding with sparse=False")
        if parameter not in self._bucket_by_parameter:
            self.allocate()
        self._open()
        bucket = self._bucket_by_parameter[parameter]
        number = bucket.folds.get(parameter, 0) + 1
        if self._is_complete or number > self.gradient_accumulation_steps:
            raise UsageError(TOO_MANY.format(list(parameter.shape), number, self.gradient_accumulation_steps))
        bucket.folds[parameter] = number
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        self._fold(bucket, parameter, gradient, number)
        if number == self.gradient_accumulation_steps:
            self._launch_full_buckets()

    def _open(self) -> None:
        """Measure, before the first gradient of a step is folded, what clipping needs."""
        if not self._is_open:
            self._is_open, self._expected = True, float(self._clip)
            for bucket in self._buckets:
                bucket.first_measure = bucket.measure(self._signs)

    def _fold(self, bucket: "Bucket", parameter: nn.Parameter, gradient: Tensor | None, number: int) -> None:
        """Fold a parameter's gradient (None: zero), the `number`-th of this step."""
        t = self._steps.get(parameter, 0) + 1
        key = bucket.group, number, t
        if key not in self._rates_cache:
            self._rates_cache[key] = list(self._rates(self.param_groups[bucket.group], number, t))
        bucket.fold(parameter, gradient, self._rates_cache[key])

    def _rates(self, group: dict[str, Any], number: int, t: int) -> Iterator[tuple[float, float]]:
        """Yield for each moment its decay before the `number`-th gradient of step t is added, and the factor of that gradient
        (for the second moment, of its square)."""
        raise NotImplementedError

    def _decays(self, beta: float, number: int) -> tuple[float, float]:
        """Return a moment's decay before the `number`-th gradient of a step is added, and the factor of that gradient besides
        1 - beta."""
        if self.coefficients == "exact":
            decay, share = beta if number == 1 else 1.0, 1.0
        else:
            decay = _micro_decay(self.coefficients, beta, self.gradient_accumulation_steps)
            share = self.gradient_accumulation_steps * (1 - decay) / (1 - beta)
        carries = self.num_processes == 1 or dist.get_rank() == 0
        return (decay if carries or number > 1 else 0.0), share

    def _decay(self, beta: float) -> float:
        """Return the decay per step of a moment with decay `beta`."""
        k = self.gradient_accumulation_steps
        return beta if self.coefficients == "exact" else _micro_decay(self.coefficients, beta, k) ** k

    # --- The last micro-batch: moments are added up over the processes

    def _launch_full_buckets(self) -> None:
        """Reduce the buckets that are full, in their order, which is the same on all processes."""
        k = self.gradient_accumulation_steps
        while self.num_processes > 1 and self._num_launched < len(self._buckets):
            bucket = self._buckets[self._num_launched]
            if any(bucket.folds.get(parameter) != k for parameter in bucket.parameters):
                return
            self._launch(bucket)

    def _launch(self, bucket: "Bucket") -> None:
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        self._num_launched += 1

    def complete(self) -> None:
        """Wait until the moments hold the whole step. Called by all processes, by `step` and `clip_grad_norm_`.

        A second call does nothing, nor does a call without a gradient on the only process.

        Raises:
            UsageError: a gradient was not folded.
        """
        if self._is_complete or (self.num_processes == 1 and not self._is_open):
            return
        if shapes := [list(p.shape) for group in self.param_groups for p in group["params"] if p.grad is not None]:
            raise UsageError(NOT_FOLDED.format(shapes[:3]))
        self._open()
        for bucket in self._buckets[self._num_launched :] if self.num_processes > 1 else []:
            for parameter in bucket.parameters:
                if parameter not in bucket.folds:
                    bucket.folds[parameter] = 1
                    self._fold(bucket, parameter, None, 1)
            self._launch(bucket)
        for bucket in self._buckets:
            bucket.wait()
            for parameter in bucket.folds:
                self._steps[parameter] = self._steps.get(parameter, 0) + 1
        self._is_complete = True

    def abandon(self) -> None:
        """Take part in the reductions for which other processes wait, after a failure here. The moments are lost."""
        for bucket in self._buckets[self._num_launched :] if self.num_processes > 1 else []:
            self._launch(bucket)
        for bucket in self._buckets:
            bucket.wait()

    # --- The step

    def clip_grad_norm_(self, max_norm: float = math.inf) -> Tensor:
        """Clip the step's gradient G to the L2 norm `max_norm`, as far as that can be done when G is gone. Called by all
        processes, after the last backward.

        |G| is exact if no parameter has more than 4,096 numbers, otherwise an estimate; see `_scale_moments`.

        Args:
            max_norm: the largest norm; inf: no clipping, only the norm is computed.

        Returns:
            float64 scalar on the device: |G| before clipping; 0 if no gradient was folded.

        Raises:
            UsageError: coefficients are not exact.
        """
        if self.coefficients != "exact":
            raise UsageError(
                f"coefficients is {self.coefficients}, which leaves no gradient of the step to clip: use exact"
            )
        self.complete()
        if not self._is_complete:
            return torch.zeros((), dtype=torch.float64)
        rates = [self._step_rates(self.param_groups[bucket.group]) for bucket in self._buckets]
        measures = [bucket.measure(self._signs, self._square_share) for bucket in self._buckets]
        norm, self._clip = _scale_moments(self._buckets, rates, measures, max_norm, self._expected)
        return norm

    def _step_rates(self, group: dict[str, Any]) -> tuple[float, float, float | None]:
        """Return per step: b1, the decay of the first moment; the gradient's weight in it; b2, the decay of the second."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters, and begin the next step. Without a gradient it does nothing, like torch's optimizers.

        Args:
            closure: computes the loss and its gradients, once: the last micro-batch.

        Raises:
            UsageError: a gradient was not folded.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.complete()
        if self._is_complete:
            for bucket in self._buckets:
                group = self.param_groups[bucket.group]
                for parameters, pieces, *moments in bucket.updates():
                    self._finish(group, parameters, *moments)
                    for moment, scale in zip(moments, bucket.scales, strict=False):
                        foreach_mul_(moment, scale.to(moment[0].dtype))
                    self._update(group, parameters, pieces, *moments)
            self._close()
        return loss

    def _square_share(self, parameter: nn.Parameter) -> float:
        """Return the share of the first moment's square that `_finish` adds to the second moment."""
        return 0.0

    def _finish(self, group: dict[str, Any], parameters: list[nn.Parameter], *moments: list[Tensor]) -> None:
        """Finish pieces of parameters' moments before they are clipped."""

    def _update(self, group: dict[str, Any], parameters: list[nn.Parameter], *pieces: list[Tensor]) -> None:
        """Move parameters, given as a flat piece of each and the same pieces of its moments."""
        raise NotImplementedError

    def _close(self) -> None:
        for bucket in self._buckets:
            bucket.folds, bucket.first_measure, bucket.scales = {}, None, []
        self._num_launched, self._is_open, self._is_complete = 0, False, False
        self._rates_cache.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's optimizer of that name, which can load it, with `clip` added for each parameter: the
        factor by which the last step's gradient was clipped.

        Raises:
            UsageError: in the middle of a step, which could not be continued from the state.
        """
        if self._is_open:
            raise UsageError(
                "state_dict in the middle of a step, some gradients of which are folded: call step() first"
            )
        for state in self.state.values():
            state["clip"].fill_(self._clip)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer, or of torch's optimizer of that name."""
        super().load_state_dict(state_dict)
        loaded = {parameter: dict(state) for parameter, state in self.state.items()}
        self._close()
        self._clip = 1.0
        if loaded:
            self.allocate()
        for bucket in self._buckets:
            bucket.flat.zero_()
            self.state.update({p: self._initial_state(moments) for p, moments in bucket.moments.items()})
        for parameter, state in loaded.items():
            for name in self.state[parameter].keys() & state.keys():
                if state[name] is not None:  # torch's SGD has None before its first step
                    self.state[parameter][name].copy_(state[name])
            self._clip = self.state[parameter]["clip"].item()


def _micro_decay(coefficients: str, beta: float, k: int) -> float:
    """Return the decay per micro-batch, of k of a step, of a moment with decay `beta`."""
    return {"substitute": 1 - (1 - beta) / k, "root": beta ** (1 / k), "unchanged": beta}[coefficients]


def _scale_moments(
    buckets: list["Bucket"],
    rates: list[tuple[float, float, float | None]],
    measures: list[tuple[Tensor, Tensor, Tensor]],
    max_norm: float,
    expected: float,
) -> tuple[Tensor, Tensor]:
    """Find the `scales` by which clipping multiplies the moments of each bucket.

    |G| is computed from the difference between random projections of m_t and b1 m_{t-1} (see `random_projection.project`). G
    should be multiplied by c = min(1, max_norm / |G|), but was folded before |G| was known, multiplied by the last step's c. So
    m = x + y, x = b1 m_{t-1} and y = (1 - b1) c_{t-1} G, is scaled to the length that x + q y would have, q = c / c_{t-1}, and
    keeps its direction. That length follows from the lengths of x, x + y and y:

        |x + q y|^2 = (1 - q) |x|^2 + q |x + y|^2 - q (1 - q) |y|^2

    The numbers of v are scaled to the sum that they would have with q^2 times this step's squares. Where q = 1, and so without
    clipping, nothing changes. To clip exactly, x and y would have to be kept apart: a third tensor beside the parameters, which
    is the gradient whose memory is saved here.

    Args:
        rates, measures: of each bucket, see `Accumulating._step_rates` and `Bucket.measure`.
        max_norm: the largest |G|.
        expected: c of the last step.

    Returns:
        |G| and c, float64 scalars; c is rounded.
    """
    # Of each bucket |y|^2, from projections of x + y and x; then x, y and x + y are sums of squares over all buckets.
    y = [
        (projection - b1 * bucket.first_measure[0]).square().sum()
        for (b1, *_), (projection, *_), bucket in zip(rates, measures, buckets, strict=True)
    ]
    norm = _sum(part / (weight * expected) ** 2 for (_, weight, _), part in zip(rates, y, strict=True)).sqrt()
    clip = (max_norm / (norm + 1e-6)).clamp(max=1)
    rounded = clip.bfloat16().double()  # rounded to what checkpoints of all dtypes can hold
    ratio = clip / expected
    if norm.device.type == "cpu" and ratio == 1:  # elsewhere, to read it is to wait for it
        return norm, rounded
    x = _sum(b1**2 * bucket.first_measure[1] for (b1, *_), bucket in zip(rates, buckets, strict=True))
    y, x_plus_y = _sum(y), _sum(length for _, length, _ in measures)
    target = (1 - ratio) * x + ratio * x_plus_y - ratio * (1 - ratio) * y
    # |y| is an estimate: keep |x + q y| within the bounds of the triangle inequality.
    target = target.clamp((x.sqrt() - ratio * y.sqrt()).square(), (x.sqrt() + ratio * y.sqrt()).square())
    scale = torch.where(ratio == 1, 1.0, (target / x_plus_y).sqrt())
    for (_, _, b2), bucket, (*_, total) in zip(rates, buckets, measures, strict=True):
        bucket.scales = [scale.to(bucket.flat.device)]
        if b2 is not None:
            old, q = b2 * bucket.first_measure[2], ratio.to(total.device)
            bucket.scales.append(torch.where(q == 1, 1.0, (old + q**2 * (total - old)) / total))
    return norm, rounded


def _check_arguments(defaults: dict[str, Any], gradient_accumulation_steps: int, coefficients: str) -> None:
    betas = defaults.get("betas", (defaults.get("momentum"),))
    rules: list[tuple[str, Any, str, float]] = [
        (name, defaults[name], "0 or greater", math.inf) for name in ("lr", "eps", "weight_decay") if name in defaults
    ]
    rules += [("momentum" if len(betas) == 1 else "betas", beta, "in [0, 1)", 1) for beta in betas]
    problems = [f"{name} is {value}, must be {rule}" for name, value, rule, end in rules if not 0 <= value < end]
    if gradient_accumulation_steps < 1:
        problems.append(f"gradient_accumulation_steps is {gradient_accumulation_steps}, must be 1 or more")
    if coefficients not in COEFFICIENTS:
        problems.append(f"coefficients is {coefficients!r}, must be one of {', '.join(COEFFICIENTS)}")
    if problems:
        raise UsageError(problems)


class Bucket:
    """Holds the moments of parameters of one group in one piece of memory, so that one all-reduce adds them up.

    Args:
        group: index of the parameter group.
        parameters: of one dtype, on one device, in the order in which a backward is expected to complete them.
        names: names of the moments.

    Attributes:
        flat: [moments, numbers], the moments of all parameters.
        moments: parameter -> its moments, views of `flat` in the parameter's shape and strides.
        pieces: parameter -> its moments in pieces, see `split_memory`.
        folds: parameter -> number of gradients folded in this step.
        work: the handle of the all-reduce under way.
        first_measure: `measure` of the moments at the beginning of this step.
        scales: the factors by which clipping multiplies each moment at the end of the step; empty: no clipping.
    """

    def __init__(self, group: int, parameters: list[nn.Parameter], names: tuple[str, ...]):
        for parameter in parameters:
            if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
                raise UsageError(
                    f"a parameter of shape {list(parameter.shape)} does not fill its memory: make it contiguous"
                )
        self.group, self.parameters = group, parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = parameters[0].new_zeros((len(names), sum(sizes)), requires_grad=False)
        self.moments = {
            parameter: [row.as_strided(parameter.size(), parameter.stride()) for row in rows]
            for parameter, rows in zip(parameters, self.flat.split(sizes, dim=1), strict=True)
        }
        self.pieces = {
            parameter: list(zip(*map(split_memory, moments), strict=True))
            for parameter, moments in self.moments.items()
        }
        self.folds: dict[nn.Parameter, int] = {}
        self.work: dist.Work | None = None
        self.first_measure: tuple[Tensor, Tensor, Tensor] | None = None
        self.scales: list[Tensor] = []

    def fold(self, parameter: nn.Parameter, gradient: Tensor | None, rates: list[tuple[float, float]]) -> None:
        """Fold a gradient (None: zero) into a parameter's moments; rates as of `Accumulating._rates`."""
        (decay, weight), *second_rates = rates
        pieces = self.pieces[parameter]
        # A small parameter is one part in its own shape; a large one is flat parts, as `split_memory` made of its moments.
        parts = [gradient] if len(pieces) == 1 else [None] * len(pieces) if gradient is None else split_memory(gradient)
        for part, (mean, *squares) in zip(parts, pieces, strict=True):
            if decay != 1:
                mean.mul_(decay)
            if part is not None:
                mean.add_(part, alpha=weight)
            for square, (square_decay, square_weight) in zip(squares, second_rates, strict=True):
                if square_decay != 1:
                    square.mul_(square_decay)
                if part is not None:
                    square.addcmul_(part, part, value=square_weight)

    def wait(self) -> None:
        """Wait for the all-reduce that is under way, if one is."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def measure(
        self, signs: Signs, square_share: Callable[[nn.Parameter], float] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Measure the moments for clipping.

        Args:
            signs: of the random projection.
            square_share: gives the share of a parameter's squared first moment that is to be added to its second moment.

        Returns:
            A random projection of the first moments, flat; their squared length, scalar; the sum of the last moments with
            `square_share` added, scalar.
        """
        dtype = torch.promote_types(self.flat.dtype, torch.float32)
        firsts = [first for first, *_ in self.moments.values()]
        lengths = torch.stack(foreach_norm(firsts, 2, dtype)).square()
        total = self.flat[-1].sum(dtype=dtype)
        if square_share is not None:
            shares = [square_share(parameter) if parameter in self.folds else 0.0 for parameter in self.moments]
            total = total + lengths @ lengths.new_tensor(shares)
        return torch.cat([project(first, signs) for first in firsts]), lengths.sum(), total

    def updates(self) -> Iterator[tuple[list, ...]]:
        """Yield, for the parameters that got a gradient, lists of parameters, of pieces of them and of their moments, few
        enough at once that the temporaries of an update stay small."""
        rows, num_numbers = [], 0
        for parameter in self.folds:
            for piece, moments in zip(split_memory(parameter.detach()), self.pieces[parameter], strict=True):
                rows.append((parameter, piece, *moments))
                num_numbers += piece.numel()
                if num_numbers >= count_at_once(self.flat.device):
                    yield tuple(map(list, zip(*rows, strict=True)))  # rows become columns
                    rows, num_numbers = [], 0
        if rows:
            yield tuple(map(list, zip(*rows, strict=True)))


@torch.no_grad()
def _fold(optimizer: weakref.ref, parameter: nn.Parameter) -> None:
    """Pass a complete gradient to the optimizer, as a hook; a deleted optimizer leaves gradients alone."""
    if (live_optimizer := optimizer()) is not None:
        live_optimizer._take_gradient(parameter)


def _make_buckets(group: int, parameters: list[nn.Parameter], names: tuple[str, ...]) -> list[Bucket]:
    """Make the buckets of parameters of one group, see `Bucket`."""
    by_kind: dict[tuple, list[nn.Parameter]] = {}
    for parameter in reversed(parameters):  # as a backward completes them
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [Bucket(group, part, names) for kind in by_kind.values() for part in _parts(kind, len(names))]


def _parts(parameters: list[nn.Parameter], num_moments: int) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of one bucket after the other."""
    part, num_bytes = [], 0
    for parameter in parameters:
        part.append(parameter)
        num_bytes += num_moments * parameter.nbytes
        if num_bytes >= BUCKET:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def _sum(scalars: Iterable[Tensor]) -> Tensor:
    """Add scalars in float64, on the device of the first."""
    first, *others = scalars
    return sum((scalar.double().to(first.device) for scalar in others), first.double())
