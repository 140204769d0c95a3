"""Records what a training loop does, from outside: it need not be changed for it.

What is watched is torch's, below all frameworks: optimizers' steps, backwards, modules' outermost calls, DataLoaders' batches,
schedulers' ticks. Of Trainer and Accelerator only the losses that they log.
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
    has_hooks,
    num_changes,
    put_last_hook_first,
    tree_leaves,
)
from stepaudit.batches import Batches, plain, row_names
from stepaudit.random_projection import Signs, project, size, sketch
from stepaudit.recording import MicroStep, Recording, Step

CLIPPING = {
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "_clip_grads_with_norm_",
    "clip_grad_value_",
}  # of torch.nn.utils
# Module -> a class with .log({...}), and what a step's loss is called there. Trainer's train_loss is the mean of a whole run.
LOGS = {
    "transformers.trainer": ("Trainer", ("loss",)),
    "accelerate.accelerator": ("Accelerator", ("loss", "train_loss", "train/loss")),
}
HOOKED, HOOKED_SHORT = 1e-3, 0.05  # relative: what hooks change less is rounding, of gradients in 16 bits
SHORT = (torch.bfloat16, torch.float16)
MOST_CALLS = 64  # of modules between two backwards
MOST_PROBES = 2  # micro-batches at which the model is asked, until it answers


class Enough(BaseException):
    """The steps that were asked for are recorded. Not an Exception: a program's own handlers must not keep it."""


class Track:
    """The parameters of one optimizer, and what has happened to them since its last step.

    Args:
        model: the module that they belong to; None if unknown.
        parameters: name -> parameter.
    """

    def __init__(self, model: nn.Module | None, parameters: dict[str, nn.Parameter]):
        self.parameters = list(parameters.values())
        self.optimizer: torch.optim.Optimizer | None = None
        self.is_named = False
        self.micro_steps: list[MicroStep] = []
        self.last: np.ndarray | None = None  # .grad after the last backward
        self.before: list[torch.Tensor] = []  # the parameters before a step
        self.unclipped: np.ndarray | None = None
        self.clipped: np.ndarray | None = None
        self.num_ticks = self.num_averages = 0
        self.has_stepped = False  # inside the present backward
        self.raw: list[torch.Tensor | None] = [None] * len(self.parameters)
        self.rounding = HOOKED_SHORT if any(p.dtype in SHORT for p in self.parameters) else HOOKED
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

    def name_model(self, called: list[nn.Module]) -> None:
        """Say whose parameters they are: the class of the module that is called with them, and its suspicious modules."""
        own = {id(p) for p in self.parameters}
        model = next((of for of in called if any(id(p) in own for p in of.parameters())), None)
        if model is None or self.is_named:
            return
        self.is_named, self.recording.model = bool(self.recording.model), type(model).__name__
        self.recording.batch_norms.clear()
        self.recording.dropouts.clear()
        for name, module in model.named_modules():
            where = f"{name} ({type(module).__name__})"
            if isinstance(module, BatchNorm) and module.training:
                self.recording.batch_norms.append(where)
            if isinstance(module, Dropout) and module.training and module.p > 0:
                self.recording.dropouts.append(where)

    def watch(self, is_in_backward: Callable[[], bool]) -> Callable[[], None]:
        """See what each backward adds to each parameter, before hooks and reductions change it. Returns how to end it."""

        def note(number: int, gradient: torch.Tensor) -> None:
            if is_in_backward():
                with torch.no_grad():
                    seen, before = project(gradient, self.signs), self.raw[number]
                    self.raw[number] = seen.clone() if before is None else before + seen

        handles = []
        for number, parameter in enumerate(self.parameters):
            if has_hooks(parameter):
                self.recording.hooked.append(self.recording.names[number])
            if hasattr(parameter, "full_tensor") or not parameter.requires_grad:  # FSDP's hooks are not called
                continue
            handles.append(parameter.register_hook(functools.partial(note, number)))
            put_last_hook_first(parameter)
        return lambda: [handle.remove() for handle in handles] and None

    def sketch(self, tensors: Iterable[torch.Tensor | None]) -> np.ndarray:
        return sketch(tensors, self.parameters).numpy()

    def gradient(self) -> np.ndarray:
        """Of now. Versions of tensors do not tell whether it has changed: `.data` and all_reduce leave them."""
        return self.sketch([parameter.grad for parameter in self.parameters])

    def begin(self) -> None:
        """Before a backward."""
        self.raw, self.has_stepped = [None] * len(self.parameters), False
        self.at_begin = self.gradient()

    def end(self, is_synchronised: bool) -> MicroStep | None:
        """After it; None if it has nothing to do with these parameters."""
        after, before = self.gradient(), self.at_begin
        part = after - before
        if any(value is not None for value in self.raw):
            raw = np.concatenate(
                [
                    np.zeros(length) if value is None else value.double().cpu().numpy()
                    for value, length in zip(self.raw, self.recording.sizes, strict=True)
                ]
            )
            has_gradients = any(parameter.grad is not None for parameter in self.parameters)
            is_whole = not is_synchronised and has_gradients
            difference = np.linalg.norm(part - raw)
            is_hooked = bool(is_whole and difference > self.rounding * np.linalg.norm(raw))
            part = part if is_whole else raw
        elif not part.any() and not any(hasattr(parameter, "full_tensor") for parameter in self.parameters):
            return None
        else:
            is_hooked = False
            if is_synchronised or any(hasattr(parameter, "full_tensor") for parameter in self.parameters):
                part = None
        is_touched = self.last is not None and not np.array_equal(before, self.last, equal_nan=True)
        self.last = after
        return MicroStep(
            gradient=after,
            part=part,
            is_fresh=not before.any(),
            is_touched=is_touched,
            is_synchronised=is_synchronised,
            is_hooked=is_hooked,
        )


class Recorder:
    """Records the optimizer steps taken inside `with recorder:`.

    Args:
        num_steps: raise `Enough` after so many; None: never.
        model: whose parameters are watched; None: those of every optimizer that trains the modules that are called.
        keep_parameters: put the parameters back after every step, so that each step's gradient is taken where the first one's
            is, and an error in one step is not seen again in all later ones.
    """

    def __init__(self, num_steps: int | None = None, keep_parameters: bool = True, model: nn.Module | None = None):
        self.num_steps, self.keep_parameters, self.model = num_steps, keep_parameters, model
        self.tracks: list[Track] = []
        self.calls: list[tuple[nn.Module, tuple, dict]] = []  # the model's, since the last backward
        self.activations: list[probe.Activation] = []  # outputs of modules, since the last backward, as long as needed
        self.returned: list[torch.Tensor] = []  # by the first of the calls
        self.names: dict[nn.Module, str] = {}
        self.batches = Batches()
        self.averages: list[tuple[list[torch.Tensor], int]] = []  # tensors, and the sum of their versions
        self.followed: set[nn.Module] = set()
        self.depth = 0
        self.is_in_backward = self.is_probing = self.has_called = False
        self.generator: torch.Tensor | None = None  # its state after the last outermost call
        self.probes_left = MOST_PROBES if model is None and os.environ.get("RANK", "0") == "0" else 0
        self.facts: list[probe.Fact] | None = None
        self.honours_num_items: bool | None = None
        self.num_children = 0
        self.logs = set(LOGS)

    @property
    def recording(self) -> Recording:
        """What was recorded so far: of the optimizer with the most parameters; of further ones as `others` of it."""
        ordered = sorted(self.tracks, key=lambda track: -sum(p.numel() for p in track.parameters))
        recordings = [track.recording for track in ordered if track.recording.steps or track.micro_steps]
        for track in ordered:
            track.recording.unfinished = track.micro_steps
            track.recording.facts, track.recording.honours_num_items = self.facts, self.honours_num_items
        first = (recordings or [track.recording for track in ordered] or [self._nothing()])[0]
        first.others, first.num_children = recordings[1:], self.num_children
        return first

    def _nothing(self) -> Recording:
        return Recording(process_index=int(os.environ.get("RANK", "0")))

    def __enter__(self) -> "Recorder":
        with contextlib.ExitStack() as stack:
            for hook in (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                stack.callback(hook.remove)
            self.grad = torch.autograd.grad
            stack.enter_context(_replaced(torch.autograd, "backward", self._backward))
            stack.enter_context(_replaced(torch.autograd, "grad", self._grad))
            stack.enter_context(_replaced(nn.Module, "__call__", self._call))
            stack.enter_context(_replaced(LRScheduler, "step", self._tick))
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                for name in CLIPPING & vars(module).keys():
                    stack.enter_context(_replaced(module, name, self._clip))
            for kind in FETCHERS:
                stack.enter_context(_replaced(kind, "fetch", self.batches.fetch))
            stack.enter_context(_replaced(LoaderIterator, "_next_index", self.batches.index))
            stack.enter_context(_replaced(LoaderIterator, "__next__", self.batches.draw))
            self.stack = stack.pop_all()
        return self

    def _watch_logs(self) -> None:
        """Of the libraries that the program has imported by now."""
        for module in self.logs & sys.modules.keys():
            name, losses = LOGS[module]
            self.stack.enter_context(
                _replaced(getattr(sys.modules[module], name), "log", functools.partial(self._log, losses))
            )
            self.logs.remove(module)

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    # ---------------------------------------------------------------------------------------- what torch calls

    def _call(self, call: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.is_probing:
            return call(module, *args, **kwargs)
        is_outermost = self.depth == 0
        is_recomputed = (
            self.is_in_backward and self.calls
        )  # checkpointing, gradient caching: parts of what was called before
        if is_outermost and torch.is_grad_enabled() and len(self.calls) < MOST_CALLS and not is_recomputed:
            self.calls.append((module, args, kwargs))
            self.has_called = True
            self._follow()  # here: while FSDP computes, its parameters are others
        elif is_outermost and not torch.is_grad_enabled() and not module.training:
            self.batches.evaluate()
        self.depth += 1
        try:
            returned = call(module, *args, **kwargs)
        finally:
            self.depth -= 1
        if self.probes_left and torch.is_grad_enabled() and not self.is_in_backward:
            self._keep(module, returned, is_outermost)
        return returned

    def _keep(self, module: nn.Module, returned: Any, is_outermost: bool) -> None:
        """What the model is asked about before the next backward."""
        if is_outermost and probe.is_shared(module):
            self.probes_left = 0
            return
        tensors = probe.outputs_of(returned)
        self.activations += [("", module, of) for of in tensors if of.requires_grad and of.ndim and of.grad_fn]
        if is_outermost:
            self.generator = torch.get_rng_state()
            if len(self.calls) == 1:
                self.returned = tensors
                for of in tensors:
                    if of.requires_grad:
                        of.retain_grad()

    def _backward(self, backward: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_in_backward or self.is_probing:  # checkpointing, gradient caching: a part of the backward around it
            backward(tensors, *args, **kwargs)
            return
        self._begin()
        loss = tensors if isinstance(tensors, torch.Tensor) else None
        facts = self._ask_loss(loss) if self.probes_left and self.calls else None
        self.is_in_backward = True
        try:
            backward(tensors, *args, **kwargs)
        finally:
            self.is_in_backward = False
        is_synchronised = self._is_synchronised()
        self._end(_number(tensors), [None if of.has_stepped else of.end(is_synchronised) for of in self.tracks], facts)

    def _grad(self, grad: Callable, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A program may ask for the gradients and add them up itself."""
        wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        if self.is_in_backward or self.is_probing or kwargs.get("create_graph") or not any(of.is_leaf for of in wanted):
            return grad(outputs, inputs, *args, **kwargs)
        self._begin()
        places = {id(of): number for number, of in enumerate(wanted)}
        if not any(id(p) in places for track in self.tracks for p in track.parameters):
            return grad(outputs, inputs, *args, **kwargs)
        facts = self._ask_loss(outputs) if self.probes_left and self.calls else None
        found = grad(outputs, inputs, *args, **kwargs)
        micro_steps = []
        for track in self.tracks:
            own = [found[places[id(p)]] if id(p) in places else None for p in track.parameters]
            part = track.sketch(own)
            before = track.micro_steps[-1].gradient if track.micro_steps else 0
            is_fresh = not track.micro_steps
            micro_steps.append(MicroStep(before + part, is_fresh, False, False, part=part) if part.any() else None)
            track.last = None
        self._end(_number(outputs), micro_steps, facts)
        return found

    def _begin(self) -> None:
        """Before gradients are computed."""
        self._follow()
        self._watch_logs()
        self._look_at_averages()
        for track in self.tracks:
            track.begin()

    def _end(self, loss: float | None, micro_steps: list[MicroStep | None], facts: list[probe.Fact] | None) -> None:
        """After it: one micro-batch of each track, or none."""
        new = [(track, of) for track, of in zip(self.tracks, micro_steps, strict=True) if of is not None]
        has_stepped = any(track.has_stepped for track in self.tracks)
        if new or has_stepped:
            self._describe(
                loss,
                [of for _, of in new] + [t.recording.steps[-1].micro_steps[-1] for t in self.tracks if t.has_stepped],
            )
            for track, micro_step in new:
                track.name_model([_unwrapped(module) for module, *_ in self.calls])
                track.unclipped = track.clipped = None
                if not self.calls and self.has_called and track.micro_steps and not micro_step.is_touched:
                    _add(track.micro_steps[-1], micro_step)  # the same forward's second backward
                else:
                    track.micro_steps.append(micro_step)
            if self.probes_left and self.calls:
                self._ask_model(facts, self._num_rows())
            self.calls.clear()
        self.activations.clear()
        self.returned.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if (track := self._track_of(optimizer)) is None:
            return
        self._look_at_averages()
        if not track.before:
            track.before = [torch.empty_like(parameter, requires_grad=False) for parameter in track.parameters]
        with torch.no_grad():
            for value, parameter in zip(track.before, track.parameters, strict=True):
                value.copy_(parameter)  # new memory would cost several times as much
        track.has_closure = bool(args or kwargs.get("closure"))
        if self.is_in_backward:  # hooks step as soon as a gradient is there
            track.micro_steps.append(
                track.end(is_synchronised=False) or MicroStep(track.gradient(), True, False, False)
            )
            track.has_stepped = True
        if not track.has_closure:
            self._note_gradient(track)

    def _note_gradient(self, track: Track) -> None:
        track.at_step = track.gradient()
        track.dtype = (
            _short_dtype(track.parameters) if len(track.micro_steps) > 1 or track.recording.num_processes > 1 else ""
        )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if (track := self._track_of(optimizer)) is None or not track.before:
            return
        if track.has_closure:
            self._note_gradient(track)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        with torch.no_grad():
            pairs = list(zip(track.parameters, track.before, strict=True))
            subtract = torch.Tensor.sub_ if self.keep_parameters else torch.Tensor.sub
            change = track.sketch(subtract(parameter, value) for parameter, value in pairs)
            for parameter, value in pairs if self.keep_parameters else []:
                parameter.copy_(value)
        gradient, is_clipped_early = track.at_step, False
        if track.clipped is not None and not np.array_equal(track.clipped, gradient, equal_nan=True):
            is_clipped_early, track.unclipped = True, None
        track.recording.steps.append(
            Step(
                gradient=gradient,
                unclipped=gradient if track.unclipped is None else track.unclipped,
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
        track.unclipped = track.clipped = track.last = None
        largest = max(self.tracks, key=lambda of: sum(p.numel() for p in of.parameters))
        if len(largest.recording.steps) == self.num_steps:
            raise Enough

    def _clip(self, clip: Callable, *args: Any, **kwargs: Any) -> Any:
        for track in self.tracks:
            if track.micro_steps and track.unclipped is None:
                track.unclipped = track.gradient()
        returned = clip(*args, **kwargs)
        for track in self.tracks:
            if track.micro_steps:
                track.clipped = track.gradient()
        return returned

    def _tick(self, tick: Callable, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        own = {id(p) for p in _parameters(scheduler.optimizer)}
        for track in self.tracks:
            track.num_ticks += any(id(p) in own for p in track.parameters)
        tick(scheduler, *args, **kwargs)

    def _log(self, names: tuple[str, ...], log: Callable, owner: Any, values: Any, *args: Any, **kwargs: Any) -> None:
        steps = self.recording.steps
        if isinstance(values, dict) and steps:
            steps[-1].logged += [float(values[name]) for name in names if name in values]
        log(owner, values, *args, **kwargs)

    # ---------------------------------------------------------------------------------------- what is read from it

    def _follow(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """A track for each optimizer that trains a module that was called, or for the one that steps."""
        called = {_unwrapped(module) for module, *_ in self.calls}
        if self.model is not None:
            if not self.tracks:
                self._add_track(self.model, {n: p for n, p in self.model.named_parameters() if p.requires_grad})
            return
        if self.tracks and called <= self.followed and optimizer is None:
            return
        self.followed |= called
        used = {id(p) for module in called for p in module.parameters()}
        candidates = [optimizer] if optimizer is not None else _alive(torch.optim.Optimizer)
        groups = [_parameters(of) for of in candidates if hasattr(of, "param_groups")]
        wanted = [of for of in groups if optimizer is not None or any(id(p) in used for p in of)]
        if not wanted and not self.tracks and not used:  # no module is called
            wanted = sorted(groups, key=len)[-1:]
        for parameters in sorted(wanted, key=len, reverse=True):
            known = {id(p) for track in self.tracks for p in track.parameters}
            if parameters and not any(id(p) in known for p in parameters):
                self._add_track(*_named(parameters, called))

    def _add_track(self, model: nn.Module | None, parameters: dict[str, nn.Parameter]) -> None:
        track = Track(model, parameters)
        self.tracks.append(track)
        self.stack.callback(track.watch(lambda: self.is_in_backward and not self.is_probing))
        if model is not None and self.model is None:
            self._find_averages(model)

    def _track_of(self, optimizer: torch.optim.Optimizer) -> Track | None:
        """The track of the parameters that an optimizer steps; of several optimizers of the same ones the first."""
        own = {id(p) for p in _parameters(optimizer)}
        for _ in range(2):
            for track in self.tracks:
                if any(id(p) in own for p in track.parameters):
                    track.optimizer = track.optimizer or optimizer
                    return track if track.optimizer is optimizer else None
            self._follow(optimizer)
        return None

    def _find_averages(self, model: nn.Module) -> None:
        """Modules with the shapes of the model's parameters that share none of them: averages of its weights, teachers."""
        shapes, own = sorted(tuple(p.shape) for p in model.parameters()), {id(p) for p in model.parameters()}
        for module in _alive(nn.Module):
            parameters = list(module.parameters())
            is_other = len(parameters) == len(shapes) and not any(id(p) in own for p in parameters)
            if is_other and sorted(tuple(p.shape) for p in parameters) == shapes:
                self.averages.append((parameters, sum(map(num_changes, parameters))))

    def _look_at_averages(self) -> None:
        changed = False
        for number, (tensors, version) in enumerate(self.averages):
            now = sum(map(num_changes, tensors))
            changed |= now != version
            self.averages[number] = tensors, now
        for track in self.tracks:
            track.num_averages += changed

    def _is_synchronised(self) -> bool:
        if not torch.distributed.is_initialized():
            return False
        return any(
            part.require_backward_grad_sync
            for module, *_ in self.calls
            for part in module.modules()  # a loss may be the module that is called, and hold the model
            if isinstance(part, DistributedDataParallel)
        )

    def _num_rows(self) -> int:
        tensors = [of for call in self.calls[:1] for of in _tensors(call)[1]]
        return len(tensors[0]) if tensors else 0

    def _ask_loss(self, loss: torch.Tensor | None) -> list[probe.Fact] | None:
        if loss is None:
            return None
        modules = {_unwrapped(module) for module, *_ in self.calls}
        names = {module: name for top in modules for name, module in top.named_modules()}
        activations = [(names.get(module, ""), module, of) for _, module, of in self.activations]
        self.is_probing = True
        try:
            facts = probe.facts_of_loss(loss, activations, self._num_rows(), self.grad)
        finally:
            self.is_probing = False
        if self.generator is not None and not self.generator.equal(torch.get_rng_state()):
            facts = [*(facts or []), ["dropout", "between the model and the loss"]]
        return facts

    def _ask_model(self, facts: list[probe.Fact] | None, num_rows: int) -> None:
        """Ask the module that was called first; what its samples are mixed by says more than that they are mixed."""
        self.probes_left -= 1
        if num_rows < 2:
            return
        module, args, kwargs = self.calls[0]
        used = {number for number, of in enumerate(self.returned) if of.grad is not None and of.grad.any()}
        for of in self.returned:
            if not of.is_leaf:
                of.grad = None
        self.is_probing = True
        try:
            found = probe.facts_of_model(_unwrapped(module), args, kwargs, used, num_rows)
        finally:
            self.is_probing = False
        if facts is not None or found is not None:
            mixing = {"batch_norm", "mixed_samples"} & {cause for cause, _ in found or []}
            self.facts = (found or []) + [of for of in facts or [] if not (mixing and of[0] != "dropout")]
            self.probes_left = 0

    def _describe(self, loss: float | None, micro_steps: list[MicroStep]) -> None:
        """Say of the micro-batches of one backward which samples and targets it had."""
        is_again = not self.calls and self.has_called
        samples, digests, batch = ([], [], None) if is_again else self.batches.use(self.calls)
        for micro_step in micro_steps:
            micro_step.loss, micro_step.samples, micro_step.digests = loss, samples, digests
            for call in self.calls:
                given, tensors = _tensors(call)
                if tensors:
                    self._describe_call(micro_step, call, given, tensors, batch)
                    break

    def _describe_call(self, micro_step: MicroStep, call: tuple, given: dict, tensors: list, batch: Any) -> None:
        module, args, kwargs = call
        first = tensors[0]
        micro_step.num_rows = len(first)
        micro_step.rows = [row_names(row) for row in first]
        labels = given.get("labels", batch.get("labels") if hasattr(batch, "get") else None)
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            micro_step.num_labels = int((labels != -100).sum())
            others = [of for name, of in given.items() if name.endswith("_label") and isinstance(of, torch.Tensor)]
            if others:  # BERT's next_sentence_label: another term, with another count
                micro_step.counts = [int((of != -100).sum()) for of in (labels, *others)]
            micro_step.num_shifted = int((labels[..., 1:] != -100).sum()) if labels.ndim > 1 else None
        micro_step.denominators = _denominators(first, batch)
        if given.get("num_items_in_batch") is not None:
            micro_step.num_items = float(given["num_items_in_batch"])
            if self.honours_num_items is None:
                self.is_probing = True
                try:
                    self.honours_num_items = _honours(module, args, kwargs)
                finally:
                    self.is_probing = False


def _add(micro_step: MicroStep, more: MicroStep) -> None:
    micro_step.gradient = more.gradient
    micro_step.is_synchronised |= more.is_synchronised
    micro_step.is_hooked |= more.is_hooked
    parts, losses = (micro_step.part, more.part), (micro_step.loss, more.loss)
    micro_step.part = None if any(of is None for of in parts) else parts[0] + parts[1]
    micro_step.loss = None if None in losses else losses[0] + losses[1]


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _named(
    parameters: list[nn.Parameter], called: Iterable[nn.Module]
) -> tuple[nn.Module | None, dict[str, nn.Parameter]]:
    """The module that holds most of the parameters, and their names in it: one that was called, or else the innermost."""
    wanted, best, named = {id(p) for p in parameters}, None, {}
    modules = list(called)
    for module in [*modules, *_alive(nn.Module)]:
        if isinstance(module, DistributedDataParallel):
            continue
        found = {n: p for n, p in module.named_parameters() if id(p) in wanted}
        is_inner = len(found) == len(named) and sum(map(len, found)) < sum(map(len, named))
        if len(found) > len(named) or (is_inner and best not in modules):
            best, named = module, found
    known = {id(p) for p in named.values()}
    rest = [p for p in parameters if id(p) not in known]
    return best, named | {f"parameter {number}": p for number, p in enumerate(rest)}


def _tensors(call: tuple[nn.Module, tuple, dict]) -> tuple[dict, list[torch.Tensor]]:
    """What a call is given by name, and its tensors with rows."""
    _, args, kwargs = call
    given = kwargs | (dict(args[0]) if args and hasattr(args[0], "keys") else {})
    leaves = tree_leaves(plain([*given.values(), *args]))
    return given, [value for value in leaves if isinstance(value, torch.Tensor) and value.ndim]


def _denominators(first: torch.Tensor, batch: Any) -> dict[str, int]:
    """What a mean over the micro-batch may have been divided by."""
    found = {"samples": len(first)}
    if first.ndim in (2, 3) and (first.ndim == 3 or not first.is_floating_point()):
        found["positions, padding included"] = first.shape[0] * first.shape[1]
    leaves = batch.items() if hasattr(batch, "items") else enumerate(batch) if isinstance(batch, (list, tuple)) else ()
    for name, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.ndim >= 1 and not leaf.is_floating_point():
            padding = -100 if "label" in str(name) or (leaf < 0).any() else 0
            found[f"{name} that are not {padding}"] = int((leaf != padding).sum())
            if leaf.ndim > 1:
                found[f"{name} after the first that are not {padding}"] = int((leaf[:, 1:] != padding).sum())
    return found


def _short_dtype(parameters: Sequence[nn.Parameter]) -> str:
    """The dtype of 16 bits that holds all numbers of the gradients as they are; empty if there is none."""
    for dtype in SHORT:
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


def _number(tensors: Any) -> float | None:
    """The sum of what a backward starts from, where these are single numbers."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return sum(float(tensor.detach()) for tensor in tensors) if all(tensor.numel() == 1 for tensor in tensors) else None


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _alive(kind: type) -> list:
    return [value for value in gc.get_objects() if issubclass(type(value), kind)]


def _honours(module: nn.Module, args: tuple, kwargs: dict) -> bool | None:
    """Whether the loss halves when `num_items_in_batch` doubles. Leaves no trace in the generators."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    module = _unwrapped(module)
    losses, buffers = [], [buffer.clone() for buffer in module.buffers()]
    with torch.random.fork_rng(devices), torch.no_grad():
        for factor in (1, 2):
            torch.manual_seed(0)
            output = module(*args, **kwargs | {"num_items_in_batch": kwargs["num_items_in_batch"] * factor})
            losses.append(getattr(output, "loss", None))
        for buffer, before in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(before)  # BatchNorm's statistics
    if any(loss is None for loss in losses):
        return None
    return bool(losses[1] < 0.75 * losses[0])


@contextlib.contextmanager
def _replaced(owner: Any, name: str, wrapper: Callable) -> Iterator[None]:
    """`owner.name` calls `wrapper` with the original before its arguments."""
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
