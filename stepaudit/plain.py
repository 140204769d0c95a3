"""Takes the step of one large batch in the place of a program's own, which `--against plain` compares with.

What is wrong in the same way under every cut is not seen by comparing cuts. So the audit makes a step itself: whatever the
program gives to the loss functions of `torch.nn.functional` in the micro-batches of a step is put one behind the other, and the
mean over all targets is taken once,

    L = sum_j w_j mean_j(all micro-batches),        w_j = c_j / c_1,

c_j the derivative of the program's loss for its term j. Its gradient replaces the program's, before the optimizer steps.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from stepaudit.interview import GRAD
from stepaudit.record import Recorder, replace
from stepaudit.recording import MicroStep
from stepaudit.track import Track

LABELLED = ("cross_entropy", "nll_loss")
ELEMENTWISE = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
TOLERANCE = 1e-4
"""Relative difference of the program's gradient and that of its terms, and of factors, that is rounding."""
ADDED = ("num_rows", "num_labels", "num_shifted", "num_numbers", "values")
JOINED = ("samples", "digests", "rows", "num_stops")


@dataclasses.dataclass
class Term:
    """A call of a loss function.

    Attributes:
        name: of the function.
        options: all arguments but input, target and reduction.
        input, target: [targets, ...] and [targets, ...], one for each target.
        output: what it returned, scalar.
        factor: derivative of the program's loss for it.
    """

    name: str
    options: dict[str, Any]
    input: torch.Tensor
    target: torch.Tensor
    output: torch.Tensor
    is_sum: bool
    factor: float = 0.0


class PlainRecorder(Recorder):
    """Records steps of one large batch, made of what the program computes; arguments as of `Recorder`.

    Where it cannot, the program ends with a line that says why.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.noted = list[Term]()  # since the last backward
        self.micro_batches = list[list[Term]]()  # since the last step
        self.clipping: Callable[[], Any] | None = None

    def __enter__(self) -> "PlainRecorder":
        super().__enter__()
        self.logs.unwatched = set()  # they are of the program's own steps
        for name in (*LABELLED, *ELEMENTWISE):
            self.stack.enter_context(replace(F, name, functools.partial(self._note, name)))
        return self

    def _note(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        if self.is_in_backward or self.interview.is_asking or not torch.is_grad_enabled() or not output.requires_grad:
            return output
        given = inspect.signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        options = dict(given.arguments)
        reduction = options.pop("reduction")
        if reduction == "none":
            _give_up(f"{name} returns a loss for each target (reduction none), and the program makes the mean itself")
        parts = _flatten(name, options.pop("input"), options.pop("target"))
        self.noted.append(Term(name, options, *parts, output, reduction == "sum"))
        return output

    def _backward(self, backward: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_in_backward or self.interview.is_asking:
            super()._backward(backward, tensors, *args, **kwargs)
            return
        if not isinstance(tensors, torch.Tensor) or tensors.numel() != 1:
            _give_up("a backward starts from more than one number")
        with self.interview.asking():
            terms = self._ask_factors(tensors)
        super()._backward(functools.partial(_retaining, backward), tensors, *args, **kwargs)
        self.micro_batches.append(terms)
        self.noted.clear()

    def _ask_factors(self, loss: torch.Tensor) -> list[Term]:
        """Find the terms of a loss and their factors, and check that there is nothing else in it."""
        grad = GRAD
        if not self.noted:
            _give_up("the loss is computed by no loss function of torch.nn.functional")
        factors = grad(loss, [term.output for term in self.noted], retain_graph=True, allow_unused=True)
        terms = [
            dataclasses.replace(term, factor=float(factor))
            for term, factor in zip(self.noted, factors, strict=True)
            if factor is not None
        ]
        if not terms or not all(term.factor for term in terms):
            _give_up("the loss does not follow the loss functions of torch.nn.functional that the program calls")
        parameters = [p for track in self.tracks for p in track.parameters if p.requires_grad]
        whole = grad(loss, parameters, retain_graph=True, allow_unused=True)
        parts = grad(sum(term.factor * term.output for term in terms), parameters, retain_graph=True, allow_unused=True)
        given = zip(parameters, whole, parts, strict=True)
        pairs = [[torch.zeros_like(p) if g is None else g for g in gradients] for p, *gradients in given]
        error = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
        size = sum(float(a.square().sum()) for a, _ in pairs) ** 0.5
        if error > TOLERANCE * size:
            _give_up("the loss has a part that no loss function of torch.nn.functional computes (a penalty?)")
        return terms

    def _clip(self, clip: Callable, *args: Any, **kwargs: Any) -> Any:
        self.clipping = functools.partial(super()._clip, clip, *args, **kwargs)
        return self.clipping()

    def begin_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        tracks = [track for track in self._find_tracks(optimizer) if track.stepping is None]
        if tracks and (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            _give_up("the optimizer computes gradients itself, by a closure")
        if tracks and self.micro_batches:
            self._replace_gradients(tracks)
        return super().begin_step(optimizer, args, kwargs)

    def _replace_gradients(self, tracks: list[Track]) -> None:
        loss = join(self.micro_batches)
        parameters = [p for track in tracks for p in track.parameters if p.requires_grad]
        with self.interview.asking():
            gradients = GRAD(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for track in tracks:
            track.step.micro_steps = [_join_micro_steps(track, float(loss))]
            track.step.unclipped_gradient = track.step.clipped_gradient = None
        if self.clipping is not None:
            self.clipping()
        self.micro_batches, self.clipping = [], None


def join(micro_batches: list[list[Term]]) -> torch.Tensor:
    """Compute the loss of all micro-batches of a step: of each term the mean over all its targets."""
    first = micro_batches[0]
    if any(len(terms) != len(first) for terms in micro_batches):
        _give_up("micro-batches of a step have different numbers of terms")
    weights = [[term.factor / terms[0].factor for term in terms] for terms in micro_batches]
    if len(first) > 1 and any(term.is_sum for term in first):
        _give_up("the loss has several terms, and one is a sum: what it is divided by is not known")
    if any(abs(a - b) > TOLERANCE * abs(b) for row in weights for a, b in zip(row, weights[0], strict=True)):
        _give_up("the terms of the loss have other weights in other micro-batches")
    means = []
    for calls in zip(*micro_batches, strict=True):
        if len({call.name for call in calls}) > 1 or len({call.input.shape[1:] for call in calls}) > 1:
            _give_up("micro-batches of a step call other loss functions")
        function = getattr(F, calls[0].name)
        parts = torch.cat([call.input for call in calls]), torch.cat([call.target for call in calls])
        means.append(function(*parts, **calls[0].options, reduction="mean"))
    return sum((weight * mean for weight, mean in zip(weights[0], means, strict=True)), torch.zeros_like(means[0]))


def _flatten(name: str, given: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reshape input and target of a loss function so that they have one row for each target."""
    if name in ELEMENTWISE:
        return given.reshape(-1), target.expand_as(given).reshape(-1)
    if given.ndim == 1:
        return given[None], target[None]
    rows = given.movedim(1, -1).flatten(0, -2)
    is_soft = target.ndim == given.ndim and target.is_floating_point()
    return rows, target.movedim(1, -1).flatten(0, -2) if is_soft else target.reshape(-1)


def _join_micro_steps(track: Track, loss: float) -> MicroStep:
    """Describe the micro-batches of a step as one, of the gradients that the parameters have."""
    parts, gradient = track.step.micro_steps, track.sketch_gradient()
    joined = dataclasses.replace(
        parts[0],
        gradient=gradient,
        part=gradient,
        is_fresh=True,
        is_touched=False,
        is_synchronised=False,
        is_hooked=False,
        is_assigned=False,
        loss=loss,
        terms=None,
        factors=None,
        num_items=None,
        counts=None,
        denominators={},
    )
    for name in (*ADDED, *JOINED):
        values = [getattr(part, name) for part in parts]
        empty: Any = [] if name in JOINED else 0
        setattr(joined, name, None if any(value is None for value in values) else sum(values, empty))
    others = [part.other_rows for part in parts]
    are_alike = len({len(rows) for rows in others}) == 1
    joined.other_rows = [list(itertools.chain(*rows)) for rows in zip(*others, strict=True)] if are_alike else []
    return joined


def _retaining(backward: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
    """Compute gradients, and keep the graph, of which the large batch is made."""
    names = ("grad_tensors", "retain_graph")
    given = dict(zip(names, args, strict=False)) | kwargs | {"retain_graph": True}
    backward(tensors, *[given.pop(name) for name in names[: len(args)]], *args[len(names) :], **given)


def _give_up(reason: str) -> NoReturn:
    raise SystemExit(f"--against plain: no step of one large batch can be made: {reason}")
