"""Accumulation inside the optimizer: every gradient is folded into the moments as soon as it is complete, and freed.

Gradient accumulation keeps a whole gradient alive from the first micro-batch of a step to its end: 4 bytes per parameter. Here
none is: a hook takes each parameter's gradient in the backward that computes it. A step is cut into K micro-batches (k
micro-batches on each of N processes), a_q is the gradient of micro-batch q's share of the loss, and G = sum_q a_q that of the
step:

    m_t = b1 m_{t-1} + (1 - b1) sum_q a_q            exact: it is linear in the gradients
    v_t = b2 v_{t-1} + (1 - b2) G^2                  Adam's; without G, G^2 can only be estimated

(Su 2021, spaces.ac.cn/archives/8634; AdamA: Zhang et al. 2023, 2305.19982). Several processes need no
DistributedDataParallel: process 0 carries the moments, the others begin each step with zeros, and what they have is added up
once per step, where it lies, in buckets that leave as soon as the last backward has filled them.
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
from samestep.errors import UsageError
from stepaudit.random_projection import Signs, project

BUCKET = 25 * 2**20  # bytes of moments that are reduced at once
PIECES = {"cpu": 2**17}  # numbers taken at once, so that a CPU's cache holds them
PIECE = 2**25  # and elsewhere, so that temporaries stay small
COEFFICIENTS = ("exact", "substitute", "root", "unchanged")


class Accumulating(torch.optim.Optimizer):
    """What `AccumulatingSGD` and `AccumulatingAdamW` share: hooks, moments in buckets, their reduction, clipping.

    Used like torch's optimizers: k times `(loss / k).backward()`, then `step()`. With several processes the step's gradient is
    the mean over them, as with DistributedDataParallel, whose place `distribute` takes. `.grad` is always None.

    `coefficients` decide how moments decay, of decay b per step:

        exact         by b once per step
        substitute    by 1 - (1 - b) / k in every micro-batch (Su 2021)
        root          by b^(1/k) in every micro-batch, so by b per step, but older gradients of a step count less
        unchanged     by b in every micro-batch: one that only moves the parameters less often

    Attributes:
        gradient_accumulation_steps: k, backward passes of this process per step; may change between steps.
        num_micro_batches: K, micro-batches of the step on all processes; None: k N. May change between steps.
    """

    moments: tuple[str, ...]

    def __init__(self, params, defaults: dict[str, Any], gradient_accumulation_steps: int, coefficients: str):
        betas = defaults.get("betas", (defaults.get("momentum"),))
        rules = [
            (name, defaults[name], "0 or greater", math.inf)
            for name in ("lr", "eps", "weight_decay")
            if name in defaults
        ]
        rules += [("momentum" if len(betas) == 1 else "betas", beta, "in [0, 1)", 1) for beta in betas]
        problems = [f"{name} is {value}, must be {rule}" for name, value, rule, end in rules if not 0 <= value < end]
        if gradient_accumulation_steps < 1:
            problems.append(f"gradient_accumulation_steps is {gradient_accumulation_steps}, must be 1 or more")
        if coefficients not in COEFFICIENTS:
            problems.append(f"coefficients is {coefficients!r}, must be one of {', '.join(COEFFICIENTS)}")
        if problems:
            raise UsageError(problems)
        self.gradient_accumulation_steps, self.coefficients = gradient_accumulation_steps, coefficients
        self.num_micro_batches: int | None = None
        self._clip: float | Tensor = 1.0  # what the last step's gradient was multiplied with
        self._expected = 1.0  # and what this step's is, until its norm is known
        self.process_group: dist.ProcessGroup | None = None
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._signs: Signs = {}
        self._known_rates: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        self._steps: dict[nn.Parameter, int] = {}  # in which a parameter got a gradient
        self._num_launched, self._is_open, self._is_complete, self._discards = 0, False, False, False
        super().__init__(params, defaults)

    # -----------------------------------------------------------------------------------------------------------------
    # Parameters, moments, processes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        hook = functools.partial(_fold, weakref.ref(self))
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook)

    def allocate(self) -> None:
        """Make the moments of the parameters that need gradients and have none yet, on their devices. The first gradient does
        it, too; the model must be on its device by then.

        Raises:
            UsageError: a parameter whose numbers do not fill its memory.
        """
        for index, group in enumerate(self.param_groups):
            new: dict[tuple, list[nn.Parameter]] = {}
            for parameter in reversed(group["params"]):  # as a backward completes them
                if parameter.requires_grad and parameter not in self._bucket_of:
                    new.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            for alike in new.values():
                self._buckets += [Bucket(index, part, self.moments) for part in _parts(alike, len(self.moments))]
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                if parameter not in self._bucket_of:
                    self._bucket_of[parameter] = bucket
                    self.state[parameter] = self._initial_state(bucket.moments[parameter])

    def _initial_state(self, moments: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.moments, moments, strict=True)) | {"clip": torch.ones(())}

    def distribute(self, model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        """Train `model` on the processes of a group (None: all), in place of DistributedDataParallel: its parameters and
        buffers become process 0's, gradients are averaged. A parameter without gradient on a process has a gradient of zero
        there. Called by all processes; the model is not to be wrapped."""
        group = process_group or dist.group.WORLD
        first = dist.get_global_rank(group, 0)
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), first, group=group)
        self.process_group = group
        self.allocate()

    @property
    def num_processes(self) -> int:
        """N."""
        return 1 if self.process_group is None else self.process_group.size()

    # -----------------------------------------------------------------------------------------------------------------
    # A micro-batch: gradients are folded

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Gradients that are computed within are freed, not folded."""
        self._discards = True
        try:
            yield
        finally:
            self._discards = False

    def _take(self, parameter: nn.Parameter) -> None:
        """Fold the gradient that a parameter just got."""
        gradient, parameter.grad = parameter.grad, None
        if self._discards:
            return
        if gradient.layout != torch.strided:
            raise UsageError("a gradient is sparse: make the embedding with sparse=False")
        if parameter not in self._bucket_of:
            self.allocate()
        self._open()
        bucket = self._bucket_of[parameter]
        number = bucket.folds.get(parameter, 0) + 1
        if self._is_complete or number > self.gradient_accumulation_steps:
            raise UsageError(
                f"a parameter of shape {list(parameter.shape)} got gradient {number} of a step with "
                f"gradient_accumulation_steps {self.gradient_accumulation_steps}: set that to the backward passes before each "
                "step(), and call step() after them"
            )
        bucket.folds[parameter] = number
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        self._fold(bucket, parameter, gradient, number)
        if number == self.gradient_accumulation_steps:
            self._launch_full()

    def _open(self) -> None:
        """Note, before the first gradient of a step is folded, what clipping will ask for."""
        if not self._is_open:
            self._is_open, self._expected = True, float(self._clip)
            for bucket in self._buckets:
                bucket.before = bucket.measure(self._signs)

    def _fold(self, bucket: "Bucket", parameter: nn.Parameter, gradient: Tensor | None, number: int) -> None:
        """Fold a parameter's gradient (None: zero), the `number`-th of this step."""
        t, pieces = self._steps.get(parameter, 0) + 1, bucket.pieces[parameter]
        key = bucket.group, number, t
        if key not in self._known_rates:
            self._known_rates[key] = list(self._rates(self.param_groups[bucket.group], number, t))
        (decay, weight), *second = self._known_rates[key]
        parts = [gradient] if len(pieces) == 1 else [None] * len(pieces) if gradient is None else _split(gradient)
        for part, (mean, *squares) in zip(parts, pieces, strict=True):
            if decay != 1:
                mean.mul_(decay)
            if part is not None:
                mean.add_(part, alpha=weight)
            for square, (its_decay, its_weight) in zip(squares, second, strict=True):
                if its_decay != 1:
                    square.mul_(its_decay)
                if part is not None:
                    square.addcmul_(part, part, value=its_weight)

    def _rates(self, group: dict[str, Any], number: int, t: int) -> Iterator[tuple[float, float]]:
        """Of each moment: what it is multiplied with before the `number`-th gradient of step t is added, and what that gradient
        (of the second moment: its square) is multiplied with."""
        raise NotImplementedError

    def _decays(self, beta: float, number: int) -> tuple[float, float]:
        """What a moment is multiplied with before the `number`-th gradient of a step is added, and the weight of that gradient
        beside 1 - beta."""
        if self.coefficients == "exact":
            decay, share = beta if number == 1 else 1.0, 1.0
        else:
            decay = self._micro_decay(beta)
            share = self.gradient_accumulation_steps * (1 - decay) / (1 - beta)
        carries = self.process_group is None or self.process_group.rank() == 0
        return (decay if carries or number > 1 else 0.0), share

    def _micro_decay(self, beta: float) -> float:
        k = self.gradient_accumulation_steps
        return {"substitute": 1 - (1 - beta) / k, "root": beta ** (1 / k), "unchanged": beta}[self.coefficients]

    def _decay(self, beta: float) -> float:
        """Of a moment, per step."""
        return beta if self.coefficients == "exact" else self._micro_decay(beta) ** self.gradient_accumulation_steps

    # -----------------------------------------------------------------------------------------------------------------
    # The last micro-batch: moments are added up over the processes

    def _launch_full(self) -> None:
        """Reduce the buckets that are full, in their order, which is the same on all processes."""
        k = self.gradient_accumulation_steps
        while self.num_processes > 1 and self._num_launched < len(self._buckets):
            bucket = self._buckets[self._num_launched]
            if any(bucket.folds.get(parameter) != k for parameter in bucket.parameters):
                return
            self._launch(bucket)

    def _launch(self, bucket: "Bucket") -> None:
        bucket.work = dist.all_reduce(bucket.flat, group=self.process_group, async_op=True)
        self._num_launched += 1

    def complete(self) -> None:
        """Wait until the moments are those of the whole step. Called by all processes, by `step` and `clip_grad_norm_`; once
        more it does nothing, and without a gradient on the only process, too.

        Raises:
            UsageError: a gradient was not folded.
        """
        if self._is_complete or (self.num_processes == 1 and not self._is_open):
            return
        if left := [list(p.shape) for group in self.param_groups for p in group["params"] if p.grad is not None]:
            raise UsageError(
                f"parameters of shapes {left[:3]} have a .grad that was not folded: the model is wrapped in "
                "DistributedDataParallel (`distribute` takes its place), or they were frozen when the optimizer was made"
            )
        self._open()
        for bucket in self._buckets[self._num_launched :] if self.num_processes > 1 else []:
            for parameter in bucket.parameters:
                if parameter not in bucket.folds:
                    bucket.folds[parameter] = 1
                    self._fold(bucket, parameter, None, 1)
            self._launch(bucket)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
            for parameter in bucket.folds:
                self._steps[parameter] = self._steps.get(parameter, 0) + 1
        self._is_complete = True

    def abandon(self) -> None:
        """Take part in the reductions for which other processes wait, after a failure here. The moments are lost."""
        for bucket in self._buckets[self._num_launched :] if self.num_processes > 1 else []:
            self._launch(bucket)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()

    # -----------------------------------------------------------------------------------------------------------------
    # The step

    def clip_grad_norm_(self, max_norm: float = math.inf) -> Tensor:
        """Clip the step's gradient G to the L2 norm `max_norm`, as far as that can be done when G is gone. Called by all
        processes, after the last backward.

        |G| is that of the difference between random projections of m_t and b1 m_{t-1} (see `sketch.project`): exact if no
        parameter has more than 4,096 numbers, otherwise an estimate. G is to be multiplied with c = min(1, max_norm / |G|), but
        was folded before that was known, multiplied with the last step's c. So m = x + y, x = b1 m_{t-1} and
        y = (1 - b1) c_{t-1} G, is scaled to the length that x + q y would have, q = c / c_{t-1}, and keeps its direction. That
        length follows from those of x, x + y and y:

            |x + q y|^2 = (1 - q) |x|^2 + q |x + y|^2 - q (1 - q) |y|^2

        The numbers of v are scaled to the sum that they would have with q^2 times this step's squares. Where q = 1, and so
        without clipping, nothing changes. To clip exactly, x and y must be known apart, beside the parameters: that third
        tensor is the gradient that is saved here.

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
        of_bucket = [self._linear(self.param_groups[bucket.group]) for bucket in self._buckets]  # b1, weight of G, b2
        after = [bucket.measure(self._signs, self._squares) for bucket in self._buckets]
        y = [
            (new - b1 * bucket.before[0]).square().sum()
            for (b1, *_), (new, *_), bucket in zip(of_bucket, after, self._buckets, strict=True)
        ]
        norm = _sum(
            part / (weight * self._expected) ** 2 for (_, weight, _), part in zip(of_bucket, y, strict=True)
        ).sqrt()
        clip = (max_norm / (norm + 1e-6)).clamp(max=1)
        self._clip = clip.bfloat16().double()  # which checkpoints of all dtypes can hold
        ratio = clip / self._expected
        if norm.device.type == "cpu" and ratio == 1:  # elsewhere, to read it is to wait for it
            return norm
        x = _sum(b1**2 * bucket.before[1] for (b1, *_), bucket in zip(of_bucket, self._buckets, strict=True))
        y, both = _sum(y), _sum(length for _, length, _ in after)
        wanted = (1 - ratio) * x + ratio * both - ratio * (1 - ratio) * y
        wanted = wanted.clamp((x.sqrt() - ratio * y.sqrt()).square(), (x.sqrt() + ratio * y.sqrt()).square())
        scale = torch.where(ratio == 1, 1.0, (wanted / both).sqrt())
        for (_, _, b2), bucket, (*_, total) in zip(of_bucket, self._buckets, after, strict=True):
            bucket.scales = [scale.to(bucket.flat.device)]
            if b2 is not None:
                old, q = b2 * bucket.before[2], ratio.to(total.device)
                bucket.scales.append(torch.where(q == 1, 1.0, (old + q**2 * (total - old)) / total))
        return norm

    def _linear(self, group: dict[str, Any]) -> tuple[float, float, float | None]:
        """Decay of the first moment, the gradient's weight in it, decay of the second moment."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters, and begin the next step. Without a gradient it does nothing, as torch's optimizers.

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
                    for of, scale in zip(moments, bucket.scales, strict=False):
                        foreach_mul_(of, scale.to(of[0].dtype))
                    self._update(group, parameters, pieces, *moments)
            self._close()
        return loss

    def _squares(self, parameter: nn.Parameter) -> float:
        """What of the first moment's square `_finish` adds to the second."""
        return 0.0

    def _finish(self, group: dict[str, Any], parameters: list[nn.Parameter], *moments: list[Tensor]) -> None:
        """What is left to do to pieces of parameters' moments before they are clipped."""

    def _update(self, group: dict[str, Any], parameters: list[nn.Parameter], *pieces: list[Tensor]) -> None:
        """Move parameters: of each a flat piece, and the same pieces of its moments."""
        raise NotImplementedError

    def _close(self) -> None:
        for bucket in self._buckets:
            bucket.folds.clear()
            bucket.before, bucket.scales = None, []
        self._num_launched, self._is_open, self._is_complete = 0, False, False
        self._known_rates.clear()

    # -----------------------------------------------------------------------------------------------------------------
    # State

    def state_dict(self) -> dict[str, Any]:
        """As torch's optimizer of that name, which can load it; of each parameter there is `clip`, too, what the last step's
        gradient was clipped by.

        Raises:
            UsageError: in the middle of a step, which no later one could continue.
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


class Bucket:
    """Parameters of one group whose moments lie in one piece of memory, so that one all-reduce adds them up.

    Args:
        group: which one.
        parameters: of one dtype, on one device, in the order in which a backward is expected to complete them.
        names: of the moments.

    Attributes:
        flat: [moments, numbers], the moments; `moments` has them as each parameter's, in its shape and strides, `pieces` as
            pieces of it, see `_split`.
        folds: parameter -> gradients folded in this step.
        work: of the all-reduce under way.
        before: `measure` of the moments before this step.
        scales: what clipping multiplies each moment with, when the step is taken; none: nothing.
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
            parameter: [moment.as_strided(parameter.size(), parameter.stride()) for moment in of]
            for parameter, of in zip(parameters, self.flat.split(sizes, dim=1), strict=True)
        }
        self.pieces = {parameter: list(zip(*map(_split, of), strict=True)) for parameter, of in self.moments.items()}
        self.folds: dict[nn.Parameter, int] = {}
        self.work: dist.Work | None = None
        self.before: tuple[Tensor, Tensor, Tensor] | None = None
        self.scales: list[Tensor] = []

    def measure(
        self, signs: Signs, squares: Callable[[nn.Parameter], float] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A projection of the first moments and their squared length; the sum of the last ones, with so much of the first ones'
        squares as `squares` says of a parameter."""
        dtype = torch.promote_types(self.flat.dtype, torch.float32)
        firsts = [first for first, *_ in self.moments.values()]
        lengths = torch.stack(foreach_norm(firsts, 2, dtype)).square()
        total = self.flat[-1].sum(dtype=dtype)
        if squares is not None:
            total = total + lengths @ lengths.new_tensor([squares(p) if p in self.folds else 0.0 for p in self.moments])
        return torch.cat([project(first, signs) for first in firsts]), lengths.sum(), total

    def updates(self) -> Iterator[tuple[list, ...]]:
        """Of the parameters that got a gradient: lists of parameters, of pieces of them and of their moments, few enough at
        once that the temporaries of an update stay small."""
        rows, number = [], 0
        for parameter in self.folds:
            for piece, moments in zip(_split(parameter.detach()), self.pieces[parameter], strict=True):
                rows.append((parameter, piece, *moments))
                number += piece.numel()
                if number >= PIECES.get(self.flat.device.type, PIECE):
                    yield tuple(map(list, zip(*rows, strict=True)))
                    rows, number = [], 0
        if rows:
            yield tuple(map(list, zip(*rows, strict=True)))


@torch.no_grad()
def _fold(optimizer: weakref.ref, parameter: nn.Parameter) -> None:
    """The hook. An optimizer that is no more leaves gradients alone."""
    if (alive := optimizer()) is not None:
        alive._take(parameter)


def _split(tensor: Tensor) -> tuple[Tensor, ...]:
    """A small tensor as it is, a large one's numbers as they lie in memory, which they fill, in flat pieces."""
    most = PIECES.get(tensor.device.type, PIECE)
    return (tensor,) if tensor.numel() <= most else tensor.as_strided((tensor.numel(),), (1,)).split(most)


def _parts(parameters: list[nn.Parameter], num_moments: int) -> Iterator[list[nn.Parameter]]:
    """Parameters for one bucket after the other."""
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
    """In float64, on the device of the first."""
    first, *others = scalars
    return sum((scalar.double().to(first.device) for scalar in others), first.double())
