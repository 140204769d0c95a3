"""Records the steps of a training loop from outside: the loop needs no change.

Only torch is watched, below all frameworks: optimizers' steps, backwards, modules' outermost calls, DataLoaders' batches,
schedulers' ticks. Of Trainer and Accelerator only the losses that they log are read.
"""

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stepaudit import probe
from stepaudit._internals import FETCHERS, LoaderIterator, count_changes
from stepaudit.batches import Batches
from stepaudit.interview import Interview
from stepaudit.micro_batch import Call, describe_call, unwrap
from stepaudit.recording import MicroStep, Recording
from stepaudit.track import Track

# Functions of torch.nn.utils.
CLIPPING = {"clip_grad_norm_", "clip_grads_with_norm_", "_clip_grads_with_norm_", "clip_grad_value_"}
# Module -> a class with .log({...}), and the names of a step's loss there. Trainer's train_loss is the mean of a whole run.
LOGS = {
    "transformers.trainer": ("Trainer", ("loss",)),
    "accelerate.accelerator": ("Accelerator", ("loss", "train_loss", "train/loss")),
}
MAX_CALLS = 64  # of modules between two backwards


class EnoughSteps(BaseException):
    """Ends a program once all requested steps are recorded. No Exception: handlers of the program must not catch it."""


class Averages:
    """Modules with the shapes of a model's parameters that share none of them: averages of its weights, teachers."""

    def __init__(self) -> None:
        self.modules: list[tuple[list[torch.Tensor], int]] = []  # tensors, and the sum of their versions

    def find(self, model: nn.Module) -> None:
        """Find those of a model."""
        shapes, model_ids = sorted(tuple(p.shape) for p in model.parameters()), {id(p) for p in model.parameters()}
        for module in _find_objects(nn.Module):
            parameters = list(module.parameters())
            is_other = len(parameters) == len(shapes) and not any(id(p) in model_ids for p in parameters)
            if is_other and sorted(tuple(p.shape) for p in parameters) == shapes:
                self.modules.append((parameters, sum(map(count_changes, parameters))))

    def have_changed(self) -> bool:
        """Tell whether any of them has changed since the last call."""
        has_changed = False
        for number, (tensors, version) in enumerate(self.modules):
            new_version = sum(map(count_changes, tensors))
            has_changed |= new_version != version
            self.modules[number] = tensors, new_version
        return has_changed


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
        self.calls: list[Call] = []  # of the model, since the last backward
        self.batches, self.averages, self.interview = Batches(), Averages(), Interview(is_wanted=model is None)
        self.followed_modules: set[nn.Module] = set()
        self.depth = 0
        self.is_in_backward = self.has_called = False
        self.num_children = 0
        self.logs = set(LOGS)

    @property
    def recording(self) -> Recording:
        """Recording so far of the optimizer with the most parameters; its `other_recordings` are of further optimizers."""
        ordered_tracks = sorted(self.tracks, key=lambda track: -sum(p.numel() for p in track.parameters))
        recordings = [track.recording for track in ordered_tracks if track.recording.steps or track.step.micro_steps]
        for track in ordered_tracks:
            track.recording.unfinished_micro_steps = track.step.micro_steps
            track.recording.facts = self.interview.facts
            track.recording.honours_num_items = self.interview.honours_num_items
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
        if self.interview.is_asking:
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
        if self.interview.probes_left and torch.is_grad_enabled() and not self.is_in_backward:
            self.interview.keep_outputs(module, value, self.calls if is_outermost else None)
        return value

    def _backward(self, backward: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if (
            self.is_in_backward or self.interview.is_asking
        ):  # checkpointing, gradient caching: a part of the backward around it
            backward(tensors, *args, **kwargs)
            return
        self._begin_backward()
        loss = tensors if isinstance(tensors, torch.Tensor) else None
        facts = self.interview.ask_loss(loss, self.calls, self.batches.count_pending_samples())
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
            or self.interview.is_asking
            or kwargs.get("create_graph")
            or not any(tensor.is_leaf for tensor in tensors)
        ):
            return grad(outputs, inputs, *args, **kwargs)
        self._begin_backward()
        places = {id(tensor): number for number, tensor in enumerate(tensors)}
        if not any(id(p) in places for track in self.tracks for p in track.parameters):
            return grad(outputs, inputs, *args, **kwargs)
        facts = self.interview.ask_loss(outputs, self.calls, self.batches.count_pending_samples())
        gradients = grad(outputs, inputs, *args, **kwargs)
        micro_steps = []
        for track in self.tracks:
            track_gradients = [gradients[places[id(p)]] if id(p) in places else None for p in track.parameters]
            part = track.sketch(track_gradients)
            previous_steps = track.step.micro_steps
            previous_gradient, is_fresh = previous_steps[-1].gradient if previous_steps else 0, not previous_steps
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
                track.name_model([unwrap(module) for module, *_ in self.calls])
                track.add_micro_step(micro_step, is_continued=not self.calls and self.has_called)
            self.interview.ask_model(facts, self.calls)
            self.calls.clear()
        self.interview.forget()

    def _describe(self, loss: float | None, micro_steps: list[MicroStep]) -> None:
        """Note the samples and targets of the micro-batches of one backward."""
        is_again = not self.calls and self.has_called
        samples, digests, batch = ([], [], None) if is_again else self.batches.use(self.calls)
        for micro_step in micro_steps:
            micro_step.loss, micro_step.samples, micro_step.digests = loss, samples, digests
            call = describe_call(micro_step, self.calls, batch)
            if call is not None:
                self.interview.ask_num_items(micro_step, call)

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if (track := self._find_track(optimizer)) is not None:
            self._look_at_averages()
            track.begin_step(bool(args or kwargs.get("closure")), self.is_in_backward)

    def _end_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if (track := self._find_track(optimizer)) is None or not track.previous_parameters:
            return
        track.end_step(optimizer, self.keep_parameters)
        largest_track = max(self.tracks, key=lambda track: sum(p.numel() for p in track.parameters))
        if len(largest_track.recording.steps) == self.num_steps:
            raise EnoughSteps

    def _look_at_averages(self) -> None:
        has_changed = self.averages.have_changed()
        for track in self.tracks:
            track.step.num_averages += has_changed

    def _clip(self, clip: Callable, *args: Any, **kwargs: Any) -> Any:
        for track in self.tracks:
            track.begin_clipping()
        value = clip(*args, **kwargs)
        for track in self.tracks:
            track.end_clipping()
        return value

    def _tick(self, tick: Callable, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        ids = {id(p) for p in _list_parameters(scheduler.optimizer)}
        for track in self.tracks:
            track.step.num_ticks += any(id(p) in ids for p in track.parameters)
        tick(scheduler, *args, **kwargs)

    def _log(self, names: tuple[str, ...], log: Callable, owner: Any, values: Any, *args: Any, **kwargs: Any) -> None:
        steps = self.recording.steps
        if isinstance(values, dict) and steps:
            steps[-1].logged_losses += [float(values[name]) for name in names if name in values]
        log(owner, values, *args, **kwargs)

    # ---------------------------------------------------------------------------------------- what is read from it

    def _follow_optimizers(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Add a track for each optimizer that trains a called module, or for the optimizer that steps."""
        called_modules = {unwrap(module) for module, *_ in self.calls}
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
        self.stack.callback(track.watch(lambda: self.is_in_backward and not self.interview.is_asking))
        if model is not None and self.model is None:
            self.averages.find(model)

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

    def _is_synchronised(self) -> bool:
        if not torch.distributed.is_initialized():
            return False
        return any(
            part.require_backward_grad_sync
            for module, *_ in self.calls
            for part in module.modules()  # a loss may be the module that is called, and hold the model
            if isinstance(part, DistributedDataParallel)
        )


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


def _sum_numbers(tensors: Any) -> float | None:
    """Sum the tensors that a backward starts from; None unless all of them are single numbers."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return sum(float(tensor.detach()) for tensor in tensors) if all(tensor.numel() == 1 for tensor in tensors) else None


def _find_objects(kind: type) -> list:
    return [value for value in gc.get_objects() if issubclass(type(value), kind)]


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
