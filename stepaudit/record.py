"""Records the steps of a training loop from outside: the loop needs no change.

Only torch is watched, below all frameworks: optimizers' steps, backwards, modules' outermost calls, DataLoaders' batches,
schedulers' ticks. Of Trainer and Accelerator only the losses that they log are read.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stepaudit import probe
from stepaudit._internals import FETCHERS, LoaderIterator, find_objects, is_transformed
from stepaudit.assignments import watch_assignments
from stepaudit.averages import Averages
from stepaudit.batches import Batches, UsedBatch
from stepaudit.holding import Holding
from stepaudit.interview import Interview
from stepaudit.libraries import Libraries
from stepaudit.lines import find_line_of_program, find_place, is_own
from stepaudit.micro_batch import WRAPPERS, Call, describe_call, unwrap
from stepaudit.precision import SHORT_DTYPES, compute_in_float32, name_dtype, note_autocast
from stepaudit.reads import watch_reads
from stepaudit.recording import MicroStep, Recording, Step
from stepaudit.shifts import Shifts
from stepaudit.terms import adds_up
from stepaudit.track import Track

# Functions of torch.nn.utils.
CLIPPING = {"clip_grad_norm_", "clip_grads_with_norm_", "_clip_grads_with_norm_", "clip_grad_value_"}
FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"  # whose class clips by a method of its own
# Module -> a class with .log({...}), and the names of a step's loss there. Trainer's train_loss is the mean of a whole run.
LOGS = {
    "transformers.trainer": ("Trainer", ("loss",)),
    "accelerate.accelerator": ("Accelerator", ("loss", "train_loss", "train/loss")),
}
# Methods of ProcessGroup, through which functions of torch.distributed talk; DDP and FSDP have ways of their own.
COLLECTIVES = {
    "allgather", "_allgather_base", "allreduce", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "reduce",
    "_reduce_scatter_base", "reduce_scatter", "scatter",
}  # fmt: skip
# By which a program may change gradients on their way.
HOOKS = (
    (torch.Tensor, "register_hook"), (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
)  # fmt: skip
MAX_CALLS = 64  # of modules between two backwards


class _Logs:
    """Adds the losses that a program logs through a library to the step before.

    Args:
        stack: ends the watching.
        get_steps: returns the steps that are recorded.
    """

    def __init__(self, stack: contextlib.ExitStack, get_steps: Callable[[], list[Step]]):
        self.stack, self.get_steps, self.unwatched = stack, get_steps, set(LOGS)

    def watch(self) -> None:
        """Watch the logs of those libraries that the program has imported by now."""
        for module in self.unwatched & sys.modules.keys():
            name, losses = LOGS[module]
            self.stack.enter_context(
                replace(getattr(sys.modules[module], name), "log", functools.partial(self._log, losses))
            )
            self.unwatched.remove(module)

    def _log(self, names: tuple[str, ...], log: Callable, owner: Any, values: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(values, dict) and (steps := self.get_steps()):
            steps[-1].logged_losses += [float(values[name]) for name in names if name in values]
        log(owner, values, *args, **kwargs)


class EnoughSteps(BaseException):
    """Ends a program once all requested steps are recorded. No Exception: handlers of the program must not catch it."""


class _Following:
    """Follows the optimizers of a program: which parameters are in which track.

    Args:
        model: whose parameters are watched; None: the parameters of every optimizer that trains modules that are called.
    """

    def __init__(self, model: nn.Module | None):
        self.model = model
        self.tracks: list[Track] = []
        self.calls: list[Call] = []  # of the model, since the last backward
        self.batches, self.averages, self.interview = Batches(), Averages(), Interview(is_wanted=model is None)
        self.followed_modules: set[nn.Module] = set()
        self.is_in_backward = self.has_new_groups = False  # groups of parameters, in an optimizer
        self.stack = contextlib.ExitStack()
        self.libraries = Libraries()
        self.holding = Holding()
        self.shifts = Shifts()
        self.hook_lines: list[str] = []
        self.clips_fsdp = False  # whether the method of FSDP that clips is watched

    def _follow_optimizers(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Add a track for each optimizer that trains a called module, or for the optimizer that steps.

        No parameter is in two tracks: an optimizer of parameters that others have, too, gets a track of the remaining ones, and
        its steps are recorded in all of these.
        """
        called_modules = {unwrap(module) for module, *_ in self.calls}
        if self.model is not None:
            if not self.tracks:
                self._add_track(self.model, {n: p for n, p in self.model.named_parameters() if p.requires_grad})
            return
        is_known = called_modules <= self.followed_modules and not self.has_new_groups
        if self.tracks and is_known and optimizer is None:
            return
        self.has_new_groups = self.has_new_groups and optimizer is not None
        self.followed_modules |= called_modules
        module_ids = {id(p) for module in self.followed_modules for p in module.parameters()}
        candidates = [optimizer] if optimizer is not None else self._find_optimizers()
        groups = [self._list_parameters(candidate) for candidate in candidates if hasattr(candidate, "param_groups")]
        called_groups = [group for group in groups if optimizer is not None or any(id(p) in module_ids for p in group)]
        if not called_groups and not self.tracks and not module_ids:  # no module is called
            called_groups = sorted(groups, key=len)[-1:]
        for parameters in sorted(called_groups, key=len, reverse=True):
            tracked_ids = {id(p) for track in self.tracks for p in track.parameters}
            if remaining := [p for p in parameters if id(p) not in tracked_ids]:
                self._add_track(*_name_parameters(remaining, called_modules))

    def _add_track(self, model: nn.Module | None, parameters: dict[str, nn.Parameter]) -> None:
        track = Track(model, parameters, self.libraries.make_keeping([*parameters.values()]))
        self.tracks.append(track)
        self.stack.callback(track.watch(lambda: self.is_in_backward and not self.interview.is_asking))
        self.holding.look(track)
        if (fsdp := sys.modules.get(FSDP)) is not None and not self.clips_fsdp:  # the program has imported it by now
            self.clips_fsdp = True
            self.stack.enter_context(replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", self._clip))
        if self.holding.is_divided:
            self.interview.leave_alone("only all processes together can compute it")
        if model is not None and self.model is None:
            self.averages.find(model)

    def _look_at_libraries(self, module: nn.Module | None = None) -> None:
        """Watch the libraries that the program has imported by now; ask nothing where one of them computes a called module."""
        self.libraries.watch(self)
        if module is not None and (reason := self.libraries.find_refusal(module)):
            self.interview.leave_alone(reason)

    def _find_optimizers(self) -> list[Any]:
        return [*find_objects(torch.optim.Optimizer), *self.libraries.find_optimizers()]

    def _list_parameters(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        return self.libraries.list_parameters(optimizer)

    def _find_tracks(self, optimizer: torch.optim.Optimizer) -> list[Track]:
        """Find the tracks of the parameters that an optimizer steps."""
        parameters = self._list_parameters(optimizer)
        tracked_ids = {id(p) for track in self.tracks for p in track.parameters}
        if any(id(p) not in tracked_ids for p in parameters):
            self._follow_optimizers(optimizer)
        ids = {id(p) for p in parameters}
        return [track for track in self.tracks if any(id(p) in ids for p in track.parameters)]

    def _find_assigned(self, tensor: torch.Tensor) -> tuple[Track, int] | None:
        """Find the parameter whose gradient a program assigns, unless a backward has computed some in the same step."""
        if self.is_in_backward or self.interview.is_asking or not isinstance(tensor, nn.Parameter):
            return None
        for track in self.tracks:
            number = next((number for number, p in enumerate(track.parameters) if p is tensor), None)
            if number is not None:
                by_backward = any(not micro_step.is_assigned for micro_step in track.step.micro_steps)
                return None if by_backward or track.stepping is not None else (track, number)
        return None

    def _end_assignment(self, tensor: torch.Tensor) -> None:
        if (found := self._find_assigned(tensor)) is not None:
            track, number = found
            track.assigned.add(number)

    def _register_hook(self, register: Callable, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(owner, nn.Parameter) and (line := find_line_of_program()) not in ["", *self.hook_lines]:
            self.hook_lines.append(line)
        return register(owner, *args, **kwargs)

    def _add_group(self, add: Callable, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        add(optimizer, *args, **kwargs)
        self.has_new_groups = True

    def _clip(self, clip: Callable, *args: Any, **kwargs: Any) -> Any:
        for track in self.tracks:
            track.begin_clipping()
        value = clip(*args, **kwargs)
        for track in self.tracks:
            track.end_clipping()
        self.holding.note_norm(value)
        return value

    def _tick(self, tick: Callable, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        ids = {id(p) for p in self._list_parameters(scheduler.optimizer)}
        for track in self.tracks:
            track.step.num_ticks += any(id(p) in ids for p in track.parameters)
        tick(scheduler, *args, **kwargs)


class Recorder(_Following):
    """Records the optimizer steps taken inside `with recorder:`.

    Args:
        num_steps: raise `EnoughSteps` after so many; None or 0: never.
        model: whose parameters are watched; None: the parameters of every optimizer that trains modules that are called.
        keep_parameters: put the parameters back after every step, so that every gradient is taken at the first parameters, and
            an error in one step is not seen again in all later steps.
        is_full: compute in float32 what the program computes in 16 bits.
    """

    def __init__(
        self,
        num_steps: int | None = None,
        keep_parameters: bool = True,
        model: nn.Module | None = None,
        is_full: bool = False,
    ):
        super().__init__(model)
        self.num_steps, self.keep_parameters, self.is_full = num_steps, keep_parameters, is_full
        self.short_dtypes: set[str] = set()
        self.open_averages: list[Step] = []  # steps behind which the averages were not looked at
        self.depth = self.num_children = 0
        self.has_called = self.is_synchronised = self.is_cut_off = False
        self.follows_losses = False  # a schedule looks at losses, which must be those of parameters that move

    @property
    def recording(self) -> Recording:
        """Recording so far of the optimizer with the most parameters; its `other_recordings` are of further optimizers."""
        ordered_tracks = sorted(self.tracks, key=lambda track: -sum(p.numel() for p in track.parameters))
        recordings = [track.recording for track in ordered_tracks if track.recording.steps or track.step.micro_steps]
        for track in ordered_tracks:
            track.recording.unfinished_micro_steps = track.step.micro_steps
            track.recording.has_moved = not self.puts_back
            track.recording.is_cut_off = self.is_cut_off
            track.recording.reads_numbers = self.interview.reads_numbers
            track.recording.draws_in_collate = self.batches.draws_in_collate
            track.recording.collectives, track.recording.hook_lines = self.interview.collectives, self.hook_lines
            track.recording.facts, track.recording.unasked = self.interview.facts, self.interview.unasked
            track.recording.honours_num_items = self.interview.honours_num_items
            dtypes = {name_dtype(p.dtype) for p in track.parameters if p.dtype in SHORT_DTYPES}
            track.recording.short_dtypes = sorted(self.short_dtypes | dtypes)
        largest_recording = [*recordings, *(track.recording for track in ordered_tracks), _make_empty_recording()][0]
        largest_recording.other_recordings, largest_recording.num_children = recordings[1:], self.num_children
        return largest_recording

    @property
    def puts_back(self) -> bool:
        """Whether parameters are put back after a step: what follows them, or their loss, would stand still."""
        return self.keep_parameters and not (self.averages.have_ever_changed or self.follows_losses)

    def __enter__(self) -> "Recorder":
        with contextlib.ExitStack() as stack:
            stack.enter_context(compute_in_float32() if self.is_full else note_autocast(self.short_dtypes.add))
            for hook in (
                register_optimizer_step_pre_hook(self.begin_step),
                register_optimizer_step_post_hook(self.end_step),
            ):
                stack.callback(hook.remove)
            stack.enter_context(replace(torch.autograd, "backward", self._backward))
            stack.enter_context(replace(torch.autograd, "grad", self._grad))
            stack.enter_context(replace(nn.Module, "__call__", self._call))
            self.holding.watch(stack, replace)
            for owner, name in HOOKS:
                stack.enter_context(replace(owner, name, self._register_hook))
            stack.enter_context(watch_reads(is_own, self.interview.note_read))
            stack.enter_context(watch_assignments(self._begin_assignment, self._end_assignment))
            stack.enter_context(replace(torch.optim.Optimizer, "add_param_group", self._add_group))
            stack.enter_context(replace(LRScheduler, "step", self._tick))
            if torch.distributed.is_available():
                for name in COLLECTIVES & vars(torch.distributed.ProcessGroup).keys():
                    communicate = functools.partial(self._communicate, name)
                    stack.enter_context(replace(torch.distributed.ProcessGroup, name, communicate))
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                for name in CLIPPING & vars(module).keys():
                    stack.enter_context(replace(module, name, self._clip))
            for kind in FETCHERS:
                stack.enter_context(replace(kind, "fetch", self.batches.fetch))
            stack.enter_context(replace(LoaderIterator, "_next_index", self.batches.draw_index))
            stack.enter_context(replace(LoaderIterator, "__next__", self.batches.draw_batch))
            self.stack = stack.pop_all()
        self.logs = _Logs(self.stack, lambda: self.recording.steps)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    # ---------------------------------------------------------------------------------------- what torch calls

    def _call(self, call: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.interview.is_asking or is_transformed():  # tensors inside of torch.func are wrapped: none may be kept
            return call(module, *args, **kwargs)
        is_outermost = self.depth == 0
        if isinstance(module, DistributedDataParallel) and torch.is_grad_enabled():
            # Here, as DDP reads it here: no_sync around the backward alone comes too late
            self.is_synchronised |= module.require_backward_grad_sync
        # Checkpointing and gradient caching compute parts of an earlier call again.
        is_recomputation = self.is_in_backward and self.calls
        is_noted = is_outermost and torch.is_grad_enabled() and len(self.calls) < MAX_CALLS and not is_recomputation
        if is_noted:
            self.calls.append((module, args, kwargs))
            self._look_at_libraries(module)
            self.interview.look_at_modes(module)
            self._follow_optimizers()  # here: while FSDP computes, its parameters are others
        elif is_outermost and not torch.is_grad_enabled() and not module.training:
            self.batches.evaluate()
        if torch.is_grad_enabled() and not self.is_in_backward:
            self.shifts.note(module, kwargs)
        self.depth += 1
        try:
            value = call(module, *args, **kwargs)
        except BaseException:
            del self.calls[len(self.calls) - is_noted :]
            raise
        finally:
            self.depth -= 1
        if is_outermost:
            parameters, outputs = [*module.parameters()], probe.find_outputs(value)
            dtypes = {tensor.dtype for tensor in (*parameters, *outputs)}
            self.short_dtypes |= {name_dtype(dtype) for dtype in dtypes if dtype in SHORT_DTYPES}
            if is_noted and not parameters and not any(output.requires_grad for output in outputs):
                del self.calls[-1:]  # a transform of samples: no model
                return value
            self.has_called |= is_noted
        if torch.is_grad_enabled() and not self.is_in_backward:
            self.interview.keep_outputs(module, value, self.calls if is_outermost else None)
        return value

    def _backward(self, backward: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if (
            self.is_in_backward or self.interview.is_asking
        ):  # checkpointing, gradient caching: a part of the backward around it
            backward(tensors, *args, **kwargs)
            return
        self._begin_backward()
        self.shifts.look(tensors)
        self.interview.leave_out_unused(tensors, self.calls)
        loss = tensors if isinstance(tensors, torch.Tensor) else None
        facts = self.interview.ask_loss(loss, self.calls, self.batches.count_pending_samples())
        terms, factors = self.interview.ask_terms(loss, self.tracks)
        self.is_in_backward = True
        try:
            backward(tensors, *args, **kwargs)
        finally:
            self.is_in_backward = False
        is_synchronised, self.is_synchronised = self.is_synchronised, False
        micro_steps = [None if track.has_stepped else track.end_backward(is_synchronised) for track in self.tracks]
        for track, micro_step in zip(self.tracks, micro_steps, strict=True):
            if micro_step is not None and (parts := terms.get(track)) is not None:
                micro_step.terms = parts if adds_up(parts, micro_step.part) else None
                micro_step.factors = factors if micro_step.terms else None
        self._end_backward(self.libraries.scale_loss(_sum_numbers(tensors)), micro_steps, facts)

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
        self.shifts.look(outputs)
        self.interview.leave_out_unused(outputs, self.calls)
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
        self.holding.begin_backward()
        self.logs.watch()
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
                self.holding.describe(track, micro_step)
                track.name_model([unwrap(module) for module, *_ in self.calls])
                track.add_micro_step(micro_step, is_continued=not self.calls and self.has_called)
            self.interview.ask_model(facts, self.calls)
            self.calls.clear()
        self.interview.forget()

    def _describe(self, loss: float | None, micro_steps: list[MicroStep]) -> None:
        """Note the samples and targets of the micro-batches of one backward."""
        is_again = not self.calls and self.has_called
        used = UsedBatch([], []) if is_again else self.batches.use(self.calls)
        for micro_step in micro_steps:
            micro_step.loss, micro_step.epoch = loss, used.epoch
            modes = self.interview.modes_called
            micro_step.training_share = sum(modes) / len(modes) if modes else None
            micro_step.samples, micro_step.digests = used.samples, used.digests
            call = describe_call(micro_step, self.calls, used.batch)
            micro_step.shift = micro_step.shift if self.shifts.found is None else self.shifts.found
            if call is not None:
                self.interview.ask_num_items(micro_step, call)

    def begin_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Note what an optimizer begins with: a hook of torch's optimizers, and called by libraries for theirs."""
        self._look_at_libraries()
        if self.libraries.is_inner(optimizer):
            return None
        # An optimizer around another one of the same parameters: the outer step counts
        if not (tracks := [track for track in self._find_tracks(optimizer) if track.stepping is None]):
            return None
        self._look_at_averages()
        self.averages.leave_out(trained := self._list_parameters(optimizer))
        for track in tracks:
            if track.assigned:
                self._add_assignments(track, track.describe_assignments())
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        for track in tracks:
            track.begin_step(optimizer, trained, closure is not None, self.is_in_backward)
        if closure is None:
            return None

        def evaluate(*words: Any, **more: Any) -> Any:
            value = closure(*words, **more)
            for track in tracks:
                track.end_closure()
            return value

        return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": evaluate})

    def end_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Record what an optimizer has done: as `begin_step`."""
        for track in self.tracks:
            if track.stepping is optimizer:
                if not track.recording.steps:
                    self.follows_losses |= any(True for _ in find_objects(ReduceLROnPlateau))
                track.end_step(optimizer, self.puts_back)
                self.holding.end_step(track)
                self.open_averages.append(track.recording.steps[-1])
        largest_track = max(self.tracks, key=lambda track: sum(p.numel() for p in track.parameters), default=None)
        if self.num_steps and largest_track is not None and len(largest_track.recording.steps) == self.num_steps:
            self._look_at_averages()
            self.is_cut_off = True
            raise EnoughSteps

    def _begin_assignment(self, tensor: torch.Tensor) -> None:
        if (found := self._find_assigned(tensor)) is not None:
            track, number = found
            if number in track.assigned:
                self._add_assignments(track, track.describe_assignments())

    def _add_assignments(self, track: Track, micro_step: MicroStep) -> None:
        """Add a gradient that the program has assigned to the step."""
        self._describe(None, [micro_step])
        track.add_micro_step(micro_step, is_continued=False)

    def _look_at_averages(self) -> None:
        has_changed = self.averages.have_changed()
        if self.open_averages and self.averages.modules:
            averages = self.averages.sketch()
            for step in self.open_averages:
                step.averages = averages
        self.open_averages.clear()
        for track in self.tracks:
            track.step.num_averages += has_changed

    def _communicate(self, name: str, talk: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self.is_in_backward and self.calls:
            self.interview.note_collective(f"{name.strip('_')} at {find_place()}")
        self.holding.communicate(name, args)
        return talk(*args, **kwargs)


def _make_empty_recording() -> Recording:
    return Recording(process_index=int(os.environ.get("RANK", "0")))


def _name_parameters(
    parameters: list[nn.Parameter], modules: Iterable[nn.Module]
) -> tuple[nn.Module | None, dict[str, nn.Parameter]]:
    """Find the module that holds most of the parameters, and their names in it: a called module, or else the innermost.

    Returns:
        The module, None if there is none, and name -> parameter of all parameters.
    """
    ids, model, by_name = {id(p) for p in parameters}, None, {}
    called_modules = list(modules)
    for module in [*called_modules, *find_objects(nn.Module)]:
        if isinstance(module, tuple(WRAPPERS)):
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


@contextlib.contextmanager
def replace(owner: Any, name: str, wrapper: Callable) -> Iterator[None]:
    """Replace `owner.name` inside the block by `wrapper`, which gets the original in front of the arguments."""
    # A method of a class in C++ is wrapped where it is kept, and what getattr returns does not bind
    original, kept = getattr(owner, name), vars(owner)[name]

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, kept)
