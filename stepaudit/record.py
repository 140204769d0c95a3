"""Records the steps of a training loop from outside: the loop needs no change.

Only torch is watched, below all frameworks: optimizers' steps, backwards, modules' outermost calls, DataLoaders' batches,
schedulers' ticks. Of Trainer and Accelerator only the losses that they log are read.
"""

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stepaudit import probe
from stepaudit._internals import (
    FETCHERS,
    BatchNorm,
    Dropout,
    LoaderIterator,
    count_changes,
    has_hooks,
    put_last_hook_first,
    tree_leaves,
)
from stepaudit.batches import Batches, describe_row, to_plain
from stepaudit.masks import read_stop_ids
from stepaudit.random_projection import Signs, project, size, sketch
from stepaudit.recording import MicroStep, Recording, Step

# Functions of torch.nn.utils.
CLIPPING = {"clip_grad_norm_", "clip_grads_with_norm_", "_clip_grads_with_norm_", "clip_grad_value_"}
# Module -> a class with .log({...}), and the names of a step's loss there. Trainer's train_loss is the mean of a whole run.
LOGS = {
    "transformers.trainer": ("Trainer", ("loss",)),
    "accelerate.accelerator": ("Accelerator", ("loss", "train_loss", "train/loss")),
}
# Relative: smaller changes by hooks are rounding; the latter for gradients in 16 bits.
HOOK_TOLERANCE, SHORT_HOOK_TOLERANCE = 1e-3, 0.05
SHORT_DTYPES = (torch.bfloat16, torch.float16)
MAX_CALLS = 64  # of modules between two backwards
MAX_PROBES = 2  # micro-batches at which the model is asked, until it answers


class EnoughSteps(BaseException):
    """Ends a program once all requested steps are recorded. No Exception: handlers of the program must not catch it."""


class Track:
    """Follows the parameters of one optimizer from step to step.

    Args:
        model: the module that the parameters belong to; None if unknown.
        parameters: name -> parameter.
    """

    def __init__(self, model: nn.Module | None, parameters: dict[str, nn.Parameter]):
        self.parameters = list(parameters.values())
        self.optimizer: torch.optim.Optimizer | None = None
        self.is_named = False
        self.micro_steps: list[MicroStep] = []
        self.last_gradient: np.ndarray | None = None  # .grad after the last backward
        self.previous_parameters: list[torch.Tensor] = []  # the parameters before a step
        self.unclipped_gradient: np.ndarray | None = None
        self.clipped_gradient: np.ndarray | None = None
        self.num_ticks = self.num_averages = 0
        self.has_stepped = False  # inside the present backward
        self.has_closure = False  # whether the present step computes gradients itself
        self.step_gradient: np.ndarray | None = None  # what the present step takes
        self.dtype = ""  # of that gradient, if it is short
        self.raw_parts: list[torch.Tensor | None] = [None] * len(self.parameters)
        self.hook_tolerance = (
            SHORT_HOOK_TOLERANCE if any(p.dtype in SHORT_DTYPES for p in self.parameters) else HOOK_TOLERANCE
        )
        self.signs: Signs = {}
        self.recording = Recording(
            num_processes=int(os.environ.get("WORLD_SIZE", "1")),
            process_index=int(os.environ.get("RANK", "0")),
            names=list(parameters),
            shapes=[list(p.shape) for p in self.parameters],
            sizes=[size(p.numel()) for p in self.parameters],
            weights=self.sketch(self.parameters),
            signs=self.sketch(p.detach().sign() for p in self.parameters),
        )
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

        def note_part(number: int, gradient: torch.Tensor) -> None:
            if is_in_backward():
                with torch.no_grad():
                    projection, previous_part = project(gradient, self.signs), self.raw_parts[number]
                    self.raw_parts[number] = projection.clone() if previous_part is None else previous_part + projection

        handles = []
        for number, parameter in enumerate(self.parameters):
            if has_hooks(parameter):
                self.recording.hooked_parameters.append(self.recording.names[number])
            if hasattr(parameter, "full_tensor") or not parameter.requires_grad:  # FSDP's hooks are not called
                continue
            handles.append(parameter.register_hook(functools.partial(note_part, number)))
            put_last_hook_first(parameter)

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def sketch(self, tensors: Iterable[torch.Tensor | None]) -> np.ndarray:
        return sketch(tensors, self.parameters).numpy()

    def sketch_gradient(self) -> np.ndarray:
        """Sketch the present gradient. Versions of tensors do not show every change: `.data` and all_reduce leave them."""
        return self.sketch([parameter.grad for parameter in self.parameters])

    def begin_backward(self) -> None:
        """Note the gradient before a backward."""
        self.raw_parts, self.has_stepped = [None] * len(self.parameters), False
        self.initial_gradient = self.sketch_gradient()

    def end_backward(self, is_synchronised: bool) -> MicroStep | None:
        """Describe a backward after its end; None if it did not concern these parameters."""
        gradient, initial_gradient = self.sketch_gradient(), self.initial_gradient
        part = gradient - initial_gradient
        if any(value is not None for value in self.raw_parts):
            raw_part = np.concatenate(
                [
                    np.zeros(length) if value is None else value.double().cpu().numpy()
                    for value, length in zip(self.raw_parts, self.recording.sizes, strict=True)
                ]
            )
            has_gradients = any(parameter.grad is not None for parameter in self.parameters)
            is_whole = not is_synchronised and has_gradients
            difference = np.linalg.norm(part - raw_part)
            is_hooked = bool(is_whole and difference > self.hook_tolerance * np.linalg.norm(raw_part))
            part = part if is_whole else raw_part
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
        )


class Recorder:
    """Records the optimizer steps taken inside `with recorder:`.

    Args:
        num_steps: raise `EnoughSteps` after so many; None: never.
        model: whose parameters are watched; None: the parameters of every optimizer that trains modules that are called.
        keep_parameters: put the parameters back after every step, so that every gradient is taken at the first parameters, and
            an error in one step is not seen again in all later steps.
    """

    def __init__(self, num_steps: int | None = None, keep_parameters: bool = True, model: nn.Module | None = None):
        self.num_steps, self.keep_parameters, self.model = num_steps, keep_parameters, model
        self.tracks: list[Track] = []
        self.calls: list[tuple[nn.Module, tuple, dict]] = []  # of the model, since the last backward
        self.activations: list[probe.Activation] = []  # outputs of modules, since the last backward, as long as needed
        self.outputs: list[torch.Tensor] = []  # of the first call
        self.batches = Batches()
        self.averages: list[tuple[list[torch.Tensor], int]] = []  # tensors, and the sum of their versions
        self.followed_modules: set[nn.Module] = set()
        self.depth = 0
        self.is_in_backward = self.is_probing = self.has_called = False
        self.generator: torch.Tensor | None = None  # the generator's state after the last outermost call
        self.probes_left = MAX_PROBES if model is None and os.environ.get("RANK", "0") == "0" else 0
        self.facts: list[probe.Fact] | None = None
        self.honours_num_items: bool | None = None
        self.num_children = 0
        self.logs = set(LOGS)

    @property
    def recording(self) -> Recording:
        """Recording so far of the optimizer with the most parameters; its `other_recordings` are of further optimizers."""
        ordered_tracks = sorted(self.tracks, key=lambda track: -sum(p.numel() for p in track.parameters))
        recordings = [track.recording for track in ordered_tracks if track.recording.steps or track.micro_steps]
        for track in ordered_tracks:
            track.recording.unfinished_micro_steps = track.micro_steps
            track.recording.facts, track.recording.honours_num_items = self.facts, self.honours_num_items
        largest_recording = (
            recordings or [track.recording for track in ordered_tracks] or [self._make_empty_recording()]
        )[0]
        largest_recording.other_recordings, largest_recording.num_children = recordings[1:], self.num_children
        return largest_recording

    def _make_empty_recording(self) -> Recording:
        return Recording(process_index=int(os.environ.get("RANK", "0")))

    def __enter__(self) -> "Recorder":
        with contextlib.ExitStack() as stack:
            for hook in (
                register_optimizer_step_pre_hook(self._begin_step),
                register_optimizer_step_post_hook(self._end_step),
            ):
                stack.callback(hook.remove)
            self.grad = torch.autograd.grad
            stack.enter_context(_replace(torch.autograd, "backward", self._backward))
            stack.enter_context(_replace(torch.autograd, "grad", self._grad))
            stack.enter_context(_replace(nn.Module, "__call__", self._call))
            stack.enter_context(_replace(LRScheduler, "step", self._tick))
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                for name in CLIPPING & vars(module).keys():
                    stack.enter_context(_replace(module, name, self._clip))
            for kind in FETCHERS:
                stack.enter_context(_replace(kind, "fetch", self.batches.fetch))
            stack.enter_context(_replace(LoaderIterator, "_next_index", self.batches.draw_index))
            stack.enter_context(_replace(LoaderIterator, "__next__", self.batches.draw_batch))
            self.stack = stack.pop_all()
        return self

    def _watch_logs(self) -> None:
        """Watch the logs of those libraries that the program has imported by now."""
        for module in self.logs & sys.modules.keys():
            name, losses = LOGS[module]
            self.stack.enter_context(
                _replace(getattr(sys.modules[module], name), "log", functools.partial(self._log, losses))
            )
            self.logs.remove(module)

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    # ---------------------------------------------------------------------------------------- what torch calls

    def _call(self, call: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.is_probing:
            return call(module, *args, **kwargs)
        is_outermost = self.depth == 0
        # Checkpointing and gradient caching compute parts of an earlier call again.
        is_recomputation = self.is_in_backward and self.calls
        if is_outermost and torch.is_grad_enabled() and len(self.calls) < MAX_CALLS and not is_recomputation:
            self.calls.append((module, args, kwargs))
            self.has_called = True
            self._follow_optimizers()  # here: while FSDP computes, its parameters are others
        elif is_outermost and not torch.is_grad_enabled() and not module.training:
            self.batches.evaluate()
        self.depth += 1
        try:
            value = call(module, *args, **kwargs)
        finally:
            self.depth -= 1
        if self.probes_left and torch.is_grad_enabled() and not self.is_in_backward:
            self._keep_outputs(module, value, is_outermost)
        return value

    def _keep_outputs(self, module: nn.Module, value: Any, is_outermost: bool) -> None:
        """Keep the outputs of a module: the model is asked about them before the next backward."""
        if is_outermost and probe.is_shared(module):
            self.probes_left = 0
            return
        tensors = probe.find_outputs(value)
        self.activations += [
            ("", module, tensor) for tensor in tensors if tensor.requires_grad and tensor.ndim and tensor.grad_fn
        ]
        if is_outermost:
            self.generator = torch.get_rng_state()
            if len(self.calls) == 1:
                self.outputs = tensors
                for tensor in tensors:
                    if tensor.requires_grad:
                        tensor.retain_grad()

    def _backward(self, backward: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_in_backward or self.is_probing:  # checkpointing, gradient caching: a part of the backward around it
            backward(tensors, *args, **kwargs)
            return
        self._begin_backward()
        loss = tensors if isinstance(tensors, torch.Tensor) else None
        facts = self._ask_loss(loss) if self.probes_left and self.calls else None
        self.is_in_backward = True
        try:
            backward(tensors, *args, **kwargs)
        finally:
            self.is_in_backward = False
        is_synchronised = self._is_synchronised()
        self._end_backward(
            _sum_numbers(tensors),
            [None if track.has_stepped else track.end_backward(is_synchronised) for track in self.tracks],
            facts,
        )

    def _grad(self, grad: Callable, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a call of `torch.autograd.grad`: a program may take gradients and add them up itself."""
        tensors = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        if (
            self.is_in_backward
            or self.is_probing
            or kwargs.get("create_graph")
            or not any(tensor.is_leaf for tensor in tensors)
        ):
            return grad(outputs, inputs, *args, **kwargs)
        self._begin_backward()
        places = {id(tensor): number for number, tensor in enumerate(tensors)}
        if not any(id(p) in places for track in self.tracks for p in track.parameters):
            return grad(outputs, inputs, *args, **kwargs)
        facts = self._ask_loss(outputs) if self.probes_left and self.calls else None
        gradients = grad(outputs, inputs, *args, **kwargs)
        micro_steps = []
        for track in self.tracks:
            track_gradients = [gradients[places[id(p)]] if id(p) in places else None for p in track.parameters]
            part = track.sketch(track_gradients)
            previous_gradient = track.micro_steps[-1].gradient if track.micro_steps else 0
            is_fresh = not track.micro_steps
            micro_steps.append(
                MicroStep(previous_gradient + part, is_fresh, False, False, part=part) if part.any() else None
            )
            track.last_gradient = None
        self._end_backward(_sum_numbers(outputs), micro_steps, facts)
        return gradients

    def _begin_backward(self) -> None:
        """Prepare every track before gradients are computed."""
        self._follow_optimizers()
        self._watch_logs()
        self._look_at_averages()
        for track in self.tracks:
            track.begin_backward()

    def _end_backward(
        self, loss: float | None, micro_steps: list[MicroStep | None], facts: list[probe.Fact] | None
    ) -> None:
        """Add the micro-batch of each track, None for none, after gradients were computed."""
        pairs = [
            (track, micro_step)
            for track, micro_step in zip(self.tracks, micro_steps, strict=True)
            if micro_step is not None
        ]
        has_stepped = any(track.has_stepped for track in self.tracks)
        if pairs or has_stepped:
            self._describe(
                loss,
                [micro_step for _, micro_step in pairs]
                + [t.recording.steps[-1].micro_steps[-1] for t in self.tracks if t.has_stepped],
            )
            for track, micro_step in pairs:
                track.name_model([_unwrap(module) for module, *_ in self.calls])
                track.unclipped_gradient = track.clipped_gradient = None
                if not self.calls and self.has_called and track.micro_steps and not micro_step.is_touched:
                    _add_backward(track.micro_steps[-1], micro_step)  # the same forward's second backward
                else:
                    track.micro_steps.append(micro_step)
            if self.probes_left and self.calls:
                self._ask_model(facts, self._count_rows())
            self.calls.clear()
        self.activations.clear()
        self.outputs.clear()

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if (track := self._find_track(optimizer)) is None:
            return
        self._look_at_averages()
        if not track.previous_parameters:
            track.previous_parameters = [
                torch.empty_like(parameter, requires_grad=False) for parameter in track.parameters
            ]
        with torch.no_grad():
            for value, parameter in zip(track.previous_parameters, track.parameters, strict=True):
                value.copy_(parameter)  # new memory would cost several times as much
        track.has_closure = bool(args or kwargs.get("closure"))
        if self.is_in_backward:  # hooks step as soon as a gradient is there
            track.micro_steps.append(
                track.end_backward(is_synchronised=False) or MicroStep(track.sketch_gradient(), True, False, False)
            )
            track.has_stepped = True
        if not track.has_closure:
            self._note_gradient(track)

    def _note_gradient(self, track: Track) -> None:
        track.step_gradient = track.sketch_gradient()
        track.dtype = (
            _find_short_dtype(track.parameters)
            if len(track.micro_steps) > 1 or track.recording.num_processes > 1
            else ""
        )

    def _end_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if (track := self._find_track(optimizer)) is None or not track.previous_parameters:
            return
        if track.has_closure:
            self._note_gradient(track)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        with torch.no_grad():
            pairs = list(zip(track.parameters, track.previous_parameters, strict=True))
            subtract = torch.Tensor.sub_ if self.keep_parameters else torch.Tensor.sub
            change = track.sketch(subtract(parameter, value) for parameter, value in pairs)
            for parameter, value in pairs if self.keep_parameters else []:
                parameter.copy_(value)
        gradient, is_clipped_early = track.step_gradient, False
        if track.clipped_gradient is not None and not np.array_equal(track.clipped_gradient, gradient, equal_nan=True):
            is_clipped_early, track.unclipped_gradient = True, None
        track.recording.steps.append(
            Step(
                gradient=gradient,
                unclipped_gradient=gradient if track.unclipped_gradient is None else track.unclipped_gradient,
                change=change,
                learning_rates=rates,
                num_ticks=track.num_ticks,
                micro_steps=track.micro_steps,
                is_clipped_early=is_clipped_early,
                dtype=track.dtype,
                num_averages=track.num_averages,
            )
        )
        track.micro_steps, track.num_ticks, track.num_averages = [], 0, 0
        track.unclipped_gradient = track.clipped_gradient = track.last_gradient = None
        largest_track = max(self.tracks, key=lambda track: sum(p.numel() for p in track.parameters))
        if len(largest_track.recording.steps) == self.num_steps:
            raise EnoughSteps

    def _clip(self, clip: Callable, *args: Any, **kwargs: Any) -> Any:
        for track in self.tracks:
            if track.micro_steps and track.unclipped_gradient is None:
                track.unclipped_gradient = track.sketch_gradient()
        value = clip(*args, **kwargs)
        for track in self.tracks:
            if track.micro_steps:
                track.clipped_gradient = track.sketch_gradient()
        return value

    def _tick(self, tick: Callable, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        ids = {id(p) for p in _list_parameters(scheduler.optimizer)}
        for track in self.tracks:
            track.num_ticks += any(id(p) in ids for p in track.parameters)
        tick(scheduler, *args, **kwargs)

    def _log(self, names: tuple[str, ...], log: Callable, owner: Any, values: Any, *args: Any, **kwargs: Any) -> None:
        steps = self.recording.steps
        if isinstance(values, dict) and steps:
            steps[-1].logged_losses += [float(values[name]) for name in names if name in values]
        log(owner, values, *args, **kwargs)

    # ---------------------------------------------------------------------------------------- what is read from it

    def _follow_optimizers(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Add a track for each optimizer that trains a called module, or for the optimizer that steps."""
        called_modules = {_unwrap(module) for module, *_ in self.calls}
        if self.model is not None:
            if not self.tracks:
                self._add_track(self.model, {n: p for n, p in self.model.named_parameters() if p.requires_grad})
            return
        if self.tracks and called_modules <= self.followed_modules and optimizer is None:
            return
        self.followed_modules |= called_modules
        module_ids = {id(p) for module in called_modules for p in module.parameters()}
        candidates = [optimizer] if optimizer is not None else _find_objects(torch.optim.Optimizer)
        groups = [_list_parameters(candidate) for candidate in candidates if hasattr(candidate, "param_groups")]
        called_groups = [group for group in groups if optimizer is not None or any(id(p) in module_ids for p in group)]
        if not called_groups and not self.tracks and not module_ids:  # no module is called
            called_groups = sorted(groups, key=len)[-1:]
        for parameters in sorted(called_groups, key=len, reverse=True):
            tracked_ids = {id(p) for track in self.tracks for p in track.parameters}
            if parameters and not any(id(p) in tracked_ids for p in parameters):
                self._add_track(*_name_parameters(parameters, called_modules))

    def _add_track(self, model: nn.Module | None, parameters: dict[str, nn.Parameter]) -> None:
        track = Track(model, parameters)
        self.tracks.append(track)
        self.stack.callback(track.watch(lambda: self.is_in_backward and not self.is_probing))
        if model is not None and self.model is None:
            self._find_averages(model)

    def _find_track(self, optimizer: torch.optim.Optimizer) -> Track | None:
        """Find the track of the parameters that an optimizer steps; None for a second optimizer of the same parameters."""
        ids = {id(p) for p in _list_parameters(optimizer)}
        for _ in range(2):
            for track in self.tracks:
                if any(id(p) in ids for p in track.parameters):
                    track.optimizer = track.optimizer or optimizer
                    return track if track.optimizer is optimizer else None
            self._follow_optimizers(optimizer)
        return None

    def _find_averages(self, model: nn.Module) -> None:
        """Find modules with the shapes of the model's parameters that share none of them: averages of its weights, teachers."""
        shapes, model_ids = sorted(tuple(p.shape) for p in model.parameters()), {id(p) for p in model.parameters()}
        for module in _find_objects(nn.Module):
            parameters = list(module.parameters())
            is_other = len(parameters) == len(shapes) and not any(id(p) in model_ids for p in parameters)
            if is_other and sorted(tuple(p.shape) for p in parameters) == shapes:
                self.averages.append((parameters, sum(map(count_changes, parameters))))

    def _look_at_averages(self) -> None:
        has_changed = False
        for number, (tensors, version) in enumerate(self.averages):
            new_version = sum(map(count_changes, tensors))
            has_changed |= new_version != version
            self.averages[number] = tensors, new_version
        for track in self.tracks:
            track.num_averages += has_changed

    def _is_synchronised(self) -> bool:
        if not torch.distributed.is_initialized():
            return False
        return any(
            part.require_backward_grad_sync
            for module, *_ in self.calls
            for part in module.modules()  # a loss may be the module that is called, and hold the model
            if isinstance(part, DistributedDataParallel)
        )

    def _count_rows(self) -> int:
        tensors = [tensor for call in self.calls[:1] for tensor in _find_tensors(call)[1]]
        return len(tensors[0]) if tensors else 0

    def _ask_loss(self, loss: torch.Tensor | None) -> list[probe.Fact] | None:
        if loss is None:
            return None
        modules = {_unwrap(module) for module, *_ in self.calls}
        names = {module: name for model in modules for name, module in model.named_modules()}
        activations = [(names.get(module, ""), module, output) for _, module, output in self.activations]
        self.is_probing = True
        try:
            num_rows, num_samples = self._count_rows(), self.batches.count_pending_samples()
            facts = probe.ask_loss(loss, activations, num_rows, num_samples, self.grad)
        finally:
            self.is_probing = False
        if self.generator is not None and not self.generator.equal(torch.get_rng_state()):
            facts = [*(facts or []), ["dropout", "between the model and the loss"]]
        return facts

    def _ask_model(self, loss_facts: list[probe.Fact] | None, num_rows: int) -> None:
        """Ask the module that was called first. A module that mixes samples is a better answer than a loss that does."""
        self.probes_left -= 1
        if num_rows < 2:
            return
        module, args, kwargs = self.calls[0]
        output_numbers = {
            number for number, output in enumerate(self.outputs) if output.grad is not None and output.grad.any()
        }
        for output in self.outputs:
            if not output.is_leaf:
                output.grad = None
        self.is_probing = True
        try:
            model_facts = probe.ask_model(_unwrap(module), args, kwargs, output_numbers, num_rows)
        finally:
            self.is_probing = False
        if loss_facts is not None or model_facts is not None:
            mixing_causes = {"batch_norm", "mixed_samples"} & {cause for cause, _ in model_facts or []}
            self.facts = (model_facts or []) + [
                fact for fact in loss_facts or [] if not (mixing_causes and fact[0] != "dropout")
            ]
            self.probes_left = 0

    def _describe(self, loss: float | None, micro_steps: list[MicroStep]) -> None:
        """Note the samples and targets of the micro-batches of one backward."""
        is_again = not self.calls and self.has_called
        samples, digests, batch = ([], [], None) if is_again else self.batches.use(self.calls)
        for micro_step in micro_steps:
            micro_step.loss, micro_step.samples, micro_step.digests = loss, samples, digests
            for call in self.calls:
                named_inputs, tensors = _find_tensors(call)
                if tensors:
                    self._describe_call(micro_step, call, named_inputs, tensors, batch)
                    break

    def _describe_call(self, micro_step: MicroStep, call: tuple, named_inputs: dict, tensors: list, batch: Any) -> None:
        module, args, kwargs = call
        first_tensor = tensors[0]
        micro_step.num_rows = len(first_tensor)
        micro_step.rows = [describe_row(row) for row in first_tensor]
        labels = named_inputs.get("labels", batch.get("labels") if hasattr(batch, "get") else None)
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            micro_step.num_labels = int((labels != -100).sum())
            other_labels = [
                targets
                for name, targets in named_inputs.items()
                if name.endswith("_label") and isinstance(targets, torch.Tensor)
            ]
            if other_labels:  # BERT's next_sentence_label: another term, with another count
                micro_step.counts = [int((targets != -100).sum()) for targets in (labels, *other_labels)]
            micro_step.num_shifted = int((labels[..., 1:] != -100).sum()) if labels.ndim > 1 else None
            stop_ids = read_stop_ids(getattr(_unwrap(module), "config", None))
            inputs = named_inputs.get("input_ids")
            if stop_ids and isinstance(inputs, torch.Tensor):
                micro_step.num_stops = [
                    sum(int((tokens == stop).sum()) for stop in stop_ids) for tokens in (labels[..., 1:], inputs)
                ]
        micro_step.denominators = _find_denominators(first_tensor, batch)
        if named_inputs.get("num_items_in_batch") is not None:
            micro_step.num_items = float(named_inputs["num_items_in_batch"])
            if self.honours_num_items is None:
                self.is_probing = True
                try:
                    self.honours_num_items = _honours_num_items(module, args, kwargs)
                finally:
                    self.is_probing = False


def _add_backward(micro_step: MicroStep, other: MicroStep) -> None:
    micro_step.gradient = other.gradient
    micro_step.is_synchronised |= other.is_synchronised
    micro_step.is_hooked |= other.is_hooked
    parts, losses = (micro_step.part, other.part), (micro_step.loss, other.loss)
    micro_step.part = None if any(value is None for value in parts) else parts[0] + parts[1]
    micro_step.loss = None if None in losses else losses[0] + losses[1]


def _list_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _name_parameters(
    parameters: list[nn.Parameter], modules: Iterable[nn.Module]
) -> tuple[nn.Module | None, dict[str, nn.Parameter]]:
    """Find the module that holds most of the parameters, and their names in it: a called module, or else the innermost.

    Returns:
        The module, None if there is none, and name -> parameter of all parameters.
    """
    ids, model, by_name = {id(p) for p in parameters}, None, {}
    called_modules = list(modules)
    for module in [*called_modules, *_find_objects(nn.Module)]:
        if isinstance(module, DistributedDataParallel):
            continue
        module_parameters = {n: p for n, p in module.named_parameters() if id(p) in ids}
        is_inner = len(module_parameters) == len(by_name) and len("".join(module_parameters)) < len("".join(by_name))
        if len(module_parameters) > len(by_name) or (is_inner and model not in called_modules):
            model, by_name = module, module_parameters
    named_ids = {id(p) for p in by_name.values()}
    unnamed_parameters = [p for p in parameters if id(p) not in named_ids]
    return model, by_name | {f"parameter {number}": p for number, p in enumerate(unnamed_parameters)}


def _find_tensors(call: tuple[nn.Module, tuple, dict]) -> tuple[dict, list[torch.Tensor]]:
    """Find the inputs that a call is given by name, and its tensors with rows [rows, ...]."""
    _, args, kwargs = call
    named_inputs = kwargs | (dict(args[0]) if args and hasattr(args[0], "keys") else {})
    leaves = tree_leaves(to_plain([*named_inputs.values(), *args]))
    return named_inputs, [value for value in leaves if isinstance(value, torch.Tensor) and value.ndim]


def _find_denominators(first_tensor: torch.Tensor, batch: Any) -> dict[str, int]:
    """Find the numbers by which a mean over the micro-batch may have been divided: name -> number."""
    denominators = {"samples": len(first_tensor)}
    if first_tensor.ndim in (2, 3) and (first_tensor.ndim == 3 or not first_tensor.is_floating_point()):
        denominators["positions, padding included"] = first_tensor.shape[0] * first_tensor.shape[1]
    leaves = batch.items() if hasattr(batch, "items") else enumerate(batch) if isinstance(batch, (list, tuple)) else ()
    for key, leaf in leaves:
        name = key if isinstance(key, str) else f"batch[{key}]"
        if isinstance(leaf, torch.Tensor) and leaf.ndim >= 1 and not leaf.is_floating_point():
            padding = -100 if "label" in name or (leaf < 0).any() else 0
            denominators[f"values other than {padding} in {name}"] = int((leaf != padding).sum())
            if leaf.ndim > 1:
                denominators[f"values other than {padding} after the first in {name}"] = int(
                    (leaf[:, 1:] != padding).sum()
                )
    return denominators


def _find_short_dtype(parameters: Sequence[nn.Parameter]) -> str:
    """Find the dtype of 16 bits that holds all numbers of the gradients exactly; empty if there is none."""
    for dtype in SHORT_DTYPES:
        num_numbers, fits = 0, True
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or hasattr(gradient, "full_tensor"):
                continue
            num_numbers += int((gradient != 0).sum())
            if not (fits := bool((gradient == gradient.to(dtype).to(gradient.dtype)).all())):
                break
        if fits and num_numbers >= 64:
            return str(dtype).removeprefix("torch.")
    return ""


def _sum_numbers(tensors: Any) -> float | None:
    """Sum the tensors that a backward starts from; None unless all of them are single numbers."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return sum(float(tensor.detach()) for tensor in tensors) if all(tensor.numel() == 1 for tensor in tensors) else None


def _unwrap(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _find_objects(kind: type) -> list:
    return [value for value in gc.get_objects() if issubclass(type(value), kind)]


def _honours_num_items(module: nn.Module, args: tuple, kwargs: dict) -> bool | None:
    """Tell whether the loss halves when `num_items_in_batch` doubles. Generators and buffers are left as they are."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    module = _unwrap(module)
    losses, buffers = [], [buffer.clone() for buffer in module.buffers()]
    with torch.random.fork_rng(devices), torch.no_grad():
        for factor in (1, 2):
            torch.manual_seed(0)
            output = module(*args, **kwargs | {"num_items_in_batch": kwargs["num_items_in_batch"] * factor})
            losses.append(getattr(output, "loss", None))
        for buffer, initial_values in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(initial_values)  # BatchNorm's statistics
    if any(loss is None for loss in losses):
        return None
    return bool(losses[1] < 0.75 * losses[0])


@contextlib.contextmanager
def _replace(owner: Any, name: str, wrapper: Callable) -> Iterator[None]:
    """Replace `owner.name` inside the block by `wrapper`, which gets the original in front of the arguments."""
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
