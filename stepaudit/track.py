"""Follows the parameters of one optimizer from step to step: their gradients after each backward, and what a step changes."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import nn

from stepaudit._internals import BatchNorm, Dropout, has_hooks, is_flat, put_last_hook_first
from stepaudit.keeping import Keeping
from stepaudit.precision import SHORT_DTYPES, name_dtype
from stepaudit.random_projection import Signs, project, size
from stepaudit.recording import MicroStep, Recording, Step
from stepaudit.vectors import norm_of, relative

NUM_LOOKS = 2  # steps before which the parameters are compared with those after the step before
# Relative: smaller changes by hooks are rounding; the latter for gradients in 16 bits.
HOOK_TOLERANCE, SHORT_HOOK_TOLERANCE = 1e-3, 0.05


_SIGNS: Signs = {}  # of projections, drawn once


@dataclasses.dataclass
class OpenStep:
    """Facts of a step that the optimizer has not taken yet.

    Attributes:
        micro_steps: backwards since the last step.
        unclipped_gradient, clipped_gradient: sketches before and after the program clips; None: it has not.
        gradient: sketch of what the optimizer takes; None: not known yet.
        initial_gradient: sketch of the gradient before the present backward.
        dtype: as of `Step`.
        moved: as of `Step`.
        drift: as of `MicroStep`, of the present backward.
        has_closure: whether the optimizer's step computes gradients itself.
        num_evaluated: micro-batches of the closure's first call.
        num_ticks, num_averages: as of `Step`.
    """

    micro_steps: list[MicroStep] = dataclasses.field(default_factory=list)
    unclipped_gradient: np.ndarray | None = None
    clipped_gradient: np.ndarray | None = None
    gradient: np.ndarray | None = None
    initial_gradient: np.ndarray | None = None
    dtype: str = ""
    moved: np.ndarray | None = None
    drift: float | None = None
    has_closure: bool = False
    num_evaluated: int = 0
    num_ticks: int = 0
    num_averages: int = 0


class Track:
    """Follows the parameters of one optimizer from step to step.

    Args:
        model: the module that the parameters belong to; None if unknown.
        parameters: name -> parameter.
        keeping: reads them; None: as torch keeps them.
    """

    def __init__(self, model: nn.Module | None, parameters: dict[str, nn.Parameter], keeping: Keeping | None = None):
        self.parameters = list(parameters.values())
        self.keeping = keeping or Keeping(self.parameters)
        self.stepping: torch.optim.Optimizer | None = None  # an optimizer whose step has begun and not ended
        self.owned: np.ndarray | None = None  # 1 for the numbers of its parameters, 0 for others; None: it has all
        self.is_named = False
        self.step = OpenStep()
        self.last_gradient: np.ndarray | None = None  # .grad after the last backward
        self.has_stepped = False  # inside the present backward
        self.raw_parts: list[torch.Tensor | None] = [None] * len(self.parameters)
        self.hook_tolerance = (
            SHORT_HOOK_TOLERANCE if any(p.dtype in SHORT_DTYPES for p in self.parameters) else HOOK_TOLERANCE
        )
        self.assigned: set[int] = set()  # parameters whose gradient was assigned since the last backward
        self.is_in_backward: Callable[[], bool] = lambda: False
        self.handles: dict[int, torch.utils.hooks.RemovableHandle] = {}  # of hooks, by the number of the parameter
        self.recording = Recording(
            num_processes=int(os.environ.get("WORLD_SIZE", "1")),
            process_index=int(os.environ.get("RANK", "0")),
            names=list(parameters),
            shapes=[list(p.shape) for p in self.keeping.templates],
            sizes=[size(p) for p in self.keeping.templates],
            frozen=[name for name, p in parameters.items() if not p.requires_grad],
            weights=self.sketch(self.keeping.read()),
            signs=self.sketch(torch.sgn(p.detach()) for p in self.keeping.read()),
            library=self.keeping.title,
        )
        # After the last step; None: later ones are not looked at
        self.weights: np.ndarray | None = self.recording.weights if self.keeping.adds_up else None
        self.name_model([] if model is None else [model])

    def name_model(self, modules: list[nn.Module]) -> None:
        """Record the model of the parameters: the class of the called module that holds them, and its suspicious modules."""
        ids = {id(p) for p in self.parameters}
        model = next((module for module in modules if any(id(p) in ids for p in module.parameters())), None)
        if model is None or self.is_named:
            return
        self.is_named, self.recording.model = bool(self.recording.model), type(model).__name__
        self.recording.batch_norms.clear()
        self.recording.dropouts.clear()
        for name, module in model.named_modules():
            place = f"{name} ({type(module).__name__})"
            if isinstance(module, BatchNorm) and module.training:
                self.recording.batch_norms.append(place)
            if isinstance(module, Dropout) and module.training and module.p > 0:
                self.recording.dropouts.append(place)

    def watch(self, is_in_backward: Callable[[], bool]) -> Callable[[], None]:
        """Record the gradient that each backward adds to each parameter, before hooks and reductions change it.

        Returns:
            A function that removes the hooks.
        """
        self.is_in_backward = is_in_backward
        for parameter, name in zip(self.parameters, self.recording.names, strict=True):
            if has_hooks(parameter):
                self.recording.hooked_parameters.append(name)
        self._hook_parameters()

        def remove() -> None:
            for handle in self.handles.values():
                handle.remove()

        return remove

    def _hook_parameters(self) -> None:
        """Hook each parameter that is trained now: some are frozen at first."""
        for number, parameter in enumerate(self.parameters):
            # FSDP's hooks are not called, or with the gradient of all processes
            is_shared = hasattr(parameter, "full_tensor") or is_flat(parameter)
            if number in self.handles or not parameter.requires_grad or is_shared:
                continue
            self.handles[number] = parameter.register_hook(functools.partial(self._note_part, number))
            put_last_hook_first(parameter)

    def _note_part(self, number: int, gradient: torch.Tensor) -> None:
        if self.is_in_backward():
            with torch.no_grad():
                projection, previous_part = project(gradient, _SIGNS), self.raw_parts[number]
                self.raw_parts[number] = projection.clone() if previous_part is None else previous_part + projection

    def sketch(self, tensors: Iterable[torch.Tensor | None]) -> np.ndarray:
        return self.keeping.sketch(tensors)

    def sketch_gradient(self) -> np.ndarray:
        return self.keeping.sketch_gradient()

    def _sketch_sum(self) -> np.ndarray:
        """Sketch what the micro-batches of the step have added up to: by themselves, where `.grad` does not hold it."""
        if self.keeping.adds_up:
            return self.sketch_gradient()
        return (
            self.step.micro_steps[-1].gradient if self.step.micro_steps else self.sketch([None] * len(self.parameters))
        )

    def _select_owned(self, numbers: np.ndarray) -> np.ndarray:
        """Keep the numbers of those parameters that the optimizer that steps has; the others become 0."""
        return numbers if self.owned is None else numbers * self.owned

    def begin_backward(self) -> None:
        """Note the gradient before a backward."""
        self._hook_parameters()
        self.raw_parts, self.has_stepped = [None] * len(self.parameters), False
        self.step.initial_gradient = self._sketch_sum()
        self.step.drift = self._measure_drift()

    def _measure_drift(self) -> float | None:
        """Measure how far the parameters are from where the last step has left them; None: it is looked at no more."""
        if self.weights is None:
            return None
        return relative(self.sketch(self.parameters) - self.weights, norm_of(self.weights))

    def end_backward(self, is_synchronised: bool) -> MicroStep | None:
        """Describe a backward after its end; None if it did not concern these parameters."""
        gradient, initial_gradient = self._sketch_sum(), self.step.initial_gradient
        assert initial_gradient is not None
        part = gradient - initial_gradient
        if any(value is not None for value in self.raw_parts):
            raw_part = np.concatenate(
                [
                    np.zeros(length) if value is None else value.double().cpu().numpy()
                    for value, length in zip(self.raw_parts, self.recording.sizes, strict=True)
                ]
            )
            has_gradients = any(parameter.grad is not None for parameter in self.parameters)
            is_whole = self.keeping.adds_up and not is_synchronised and has_gradients
            difference = np.linalg.norm(part - raw_part)
            is_hooked = bool(is_whole and difference > self.hook_tolerance * np.linalg.norm(raw_part))
            part = part if is_whole else raw_part
            gradient = gradient if self.keeping.adds_up else initial_gradient + raw_part
        elif not part.any() and not any(hasattr(parameter, "full_tensor") for parameter in self.parameters):
            return None
        else:
            is_hooked = False
            if is_synchronised or any(hasattr(parameter, "full_tensor") for parameter in self.parameters):
                part = None
        is_touched = self.last_gradient is not None and not np.array_equal(
            initial_gradient, self.last_gradient, equal_nan=True
        )
        self.last_gradient = gradient
        return MicroStep(
            gradient=gradient,
            part=part,
            is_fresh=not initial_gradient.any(),
            is_touched=is_touched,
            is_synchronised=is_synchronised,
            is_hooked=is_hooked,
            drift=self.step.drift,
            initial_gradient=initial_gradient,
        )

    def add_micro_step(self, micro_step: MicroStep, is_continued: bool) -> None:
        """Add a backward to the step; `is_continued`: unless the gradient was touched, to the same forward's earlier one."""
        self.step.unclipped_gradient = self.step.clipped_gradient = None
        if is_continued and self.step.micro_steps and not micro_step.is_touched:
            _add_backward(self.step.micro_steps[-1], micro_step)
        else:
            self.step.micro_steps.append(micro_step)

    def begin_clipping(self) -> None:
        """Note the gradient before the program clips it."""
        if self.step.micro_steps and self.step.unclipped_gradient is None:
            self.step.unclipped_gradient = self.sketch_gradient()

    def end_clipping(self) -> None:
        """Note the clipped gradient."""
        if self.step.micro_steps:
            self.step.clipped_gradient = self.sketch_gradient()

    def begin_step(
        self, optimizer: torch.optim.Optimizer, trained: Sequence[nn.Parameter], has_closure: bool, is_in_backward: bool
    ) -> None:
        """Note parameters and gradient before the optimizer's step.

        Args:
            optimizer: which takes the step.
            trained: its parameters, maybe some of the track's only: the step is recorded with a gradient of 0 for all others.
            has_closure: whether the step computes gradients itself; they are noted after it.
            is_in_backward: whether a hook takes the step, as soon as a gradient is there.
        """
        self.stepping = optimizer
        ids = {id(p) for p in trained}
        has_parameter = [float(id(p) in ids) for p in self.parameters]
        self.owned = None if all(has_parameter) else np.repeat(has_parameter, self.recording.sizes)
        self.keeping.begin_step()
        if self.weights is not None and not np.array_equal(weights := self.sketch(self.parameters), self.weights):
            self.step.moved = weights
        self.step.has_closure = has_closure
        if is_in_backward:
            micro_step = self.end_backward(is_synchronised=False)
            self.step.micro_steps.append(micro_step or MicroStep(self.sketch_gradient(), True, False, False))
            self.has_stepped = True
        if not self.keeping.adds_up:
            self.step.unclipped_gradient = self.keeping.sketch_unclipped()
        elif not has_closure:
            self._note_gradient()

    def end_closure(self) -> None:
        """Note the gradient that a closure has computed for the optimizer: the first one is the step's."""
        if self.step.gradient is None:
            self._note_gradient()
            self.step.num_evaluated = len(self.step.micro_steps)

    def describe_assignments(self) -> MicroStep:
        """Describe the gradient that a program has assigned for one micro-batch."""
        gradient, previous = self.sketch_gradient(), self.step.micro_steps
        part = gradient - previous[-1].gradient if previous else gradient
        self.assigned.clear()
        return MicroStep(gradient, not previous, False, False, part=part, is_assigned=True)

    def _note_gradient(self) -> None:
        self.step.gradient = self._select_owned(self.sketch_gradient())
        is_cut = len(self.step.micro_steps) > 1 or self.recording.num_processes > 1
        self.step.dtype = _find_short_dtype(self.parameters) if is_cut else ""

    def end_step(self, optimizer: torch.optim.Optimizer, keep_parameters: bool) -> None:
        """Record the step after the optimizer took it; `keep_parameters`: put the parameters back."""
        if self.step.gradient is None:
            self._note_gradient()
        if self.step.num_evaluated:
            del self.step.micro_steps[self.step.num_evaluated :]
        step, rates = self.step, [float(group["lr"]) for group in optimizer.param_groups]
        change = self.keeping.end_step(keep_parameters)
        is_looked_at = self.keeping.adds_up and len(self.recording.steps) < NUM_LOOKS
        self.weights = self.sketch(self.parameters) if is_looked_at else None
        if self.owned is not None:
            self._narrow(step)
        for micro_step in step.micro_steps:
            micro_step.initial_gradient = None
        clipped = step.clipped_gradient
        is_clipped_early = clipped is not None and not np.array_equal(clipped, step.gradient, equal_nan=True)
        unclipped = None if is_clipped_early else step.unclipped_gradient
        self.recording.steps.append(
            Step(
                gradient=step.gradient,
                unclipped_gradient=step.gradient if unclipped is None else unclipped,
                change=change,
                learning_rates=rates,
                num_ticks=step.num_ticks,
                micro_steps=step.micro_steps,
                is_clipped_early=is_clipped_early,
                dtype=step.dtype,
                num_averages=step.num_averages,
                moved=step.moved,
                is_by_closure=step.has_closure,
                options=[_read_options(group) for group in optimizer.param_groups],
            )
        )
        self.step, self.last_gradient, self.stepping = OpenStep(), None, None

    def _narrow(self, step: OpenStep) -> None:
        """Narrow what is known of a step down to those parameters that its optimizer has."""
        last_gradient = None
        for micro_step in step.micro_steps:
            micro_step.gradient = self._select_owned(micro_step.gradient)
            micro_step.part = None if micro_step.part is None else self._select_owned(micro_step.part)
            micro_step.terms = None if micro_step.terms is None else [self._select_owned(t) for t in micro_step.terms]
            if micro_step.initial_gradient is not None:
                initial = self._select_owned(micro_step.initial_gradient)
                micro_step.is_fresh = not initial.any()
                micro_step.is_touched &= last_gradient is not None and not np.array_equal(initial, last_gradient)
            last_gradient = micro_step.gradient
        for name in ("unclipped_gradient", "clipped_gradient"):
            if (gradient := getattr(step, name)) is not None:
                setattr(step, name, self._select_owned(gradient))


def _add_backward(micro_step: MicroStep, other: MicroStep) -> None:
    micro_step.gradient = other.gradient
    micro_step.is_synchronised |= other.is_synchronised
    micro_step.is_hooked |= other.is_hooked
    parts, losses = (micro_step.part, other.part), (micro_step.loss, other.loss)
    micro_step.part = None if any(value is None for value in parts) else parts[0] + parts[1]
    micro_step.loss = None if None in losses else losses[0] + losses[1]
    micro_step.terms = (micro_step.terms or []) + (other.terms or []) or None
    micro_step.factors = (micro_step.factors or []) + (other.factors or []) or None


def _find_short_dtype(parameters: Sequence[nn.Parameter]) -> str:
    """Find the dtype of 16 bits that holds all numbers of the gradients exactly; empty if there is none.

    Nothing is found while all is computed in float32 (`precision.compute_in_float32`), as nothing can be cast then.
    """
    if torch.zeros(1).to(SHORT_DTYPES[0]).dtype != SHORT_DTYPES[0]:
        return ""
    for dtype in SHORT_DTYPES:
        num_numbers, fits = 0, True
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or hasattr(gradient, "full_tensor") or gradient.layout != torch.strided:
                continue
            num_numbers += int((gradient != 0).sum())
            if not (fits := bool((gradient == gradient.to(dtype).to(gradient.dtype)).all())):
                break
        if fits and num_numbers >= 64:
            return name_dtype(dtype)
    return ""


def _read_options(group: dict) -> dict[str, list[float]]:
    """Read the numbers of a parameter group that an optimizer's update depends on, other than rates."""
    numbers = {}
    for name, value in group.items():
        values = value if isinstance(value, (tuple, list)) else [value]
        if name != "params" and not name.endswith("lr") and all(isinstance(v, (int, float)) for v in values):
            numbers[name] = [float(v) for v in values]
    return numbers
