"""Records what a training loop does, from outside: it need not be changed for it.

What is watched is torch's, below all frameworks: optimizers' steps, backwards, modules' outermost calls, DataLoaders' indices,
schedulers' ticks. Of Trainer and Accelerator only the losses that they log.
"""

import contextlib
import functools
import gc
import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import dataloader

from recipes.audit.recording import MicroStep, Recording, Step
from recipes.sketch import size, sketch

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


class Enough(BaseException):
    """The steps that were asked for are recorded. Not an Exception: a program's own handlers must not keep it."""


class Recorder:
    """Records the optimizer steps taken inside `with recorder:`.

    Args:
        num_steps: raise `Enough` after so many; None: never.
        model: whose parameters are watched; None: found by looking for the optimizer that steps and for the modules called.
        keep_parameters: put the parameters back after every step, so that each step's gradient is taken where the first one's
            is, and an error in one step is not seen again in all later ones.

    Attributes:
        recording: grows with every step.
    """

    def __init__(self, num_steps: int | None = None, keep_parameters: bool = True, model: nn.Module | None = None):
        self.num_steps, self.keep_parameters, self.model = num_steps, keep_parameters, model
        self.recording = Recording(process_index=int(os.environ.get("RANK", "0")))
        self.parameters: list[nn.Parameter] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.micro_steps: list[MicroStep] = []
        self.calls: list[tuple[nn.Module, tuple, dict]] = []  # the model's, since the last backward
        self.batches: dict[int, deque] = {}  # loader -> samples, batch, addresses: drawn and not used yet
        self.last_batch: tuple[list[int] | None, Any, set[int]] | None = None
        self.newest_loader = 0
        self.versions: list[tuple[int, int] | None] = []
        self.num_ticks = self.depth = 0
        self.before: list[torch.Tensor] = []
        self.unclipped: np.ndarray | None = None
        self.logs = set(LOGS)

    def __enter__(self) -> "Recorder":
        with contextlib.ExitStack() as stack:
            for hook in (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                stack.callback(hook.remove)
            stack.enter_context(_replaced(torch.autograd, "backward", self._backward))
            stack.enter_context(_replaced(nn.Module, "__call__", self._call))
            stack.enter_context(_replaced(LRScheduler, "step", self._tick))
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                for name in CLIPPING & vars(module).keys():
                    stack.enter_context(_replaced(module, name, self._clip))
            stack.enter_context(_replaced(dataloader._BaseDataLoaderIter, "_next_index", self._index))
            stack.enter_context(_replaced(dataloader._BaseDataLoaderIter, "__next__", self._batch))
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
        self.recording.unfinished = self.micro_steps

    # ---------------------------------------------------------------------------------------- what torch calls

    def _call(self, call: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.depth == 0 and torch.is_grad_enabled() and len(self.calls) < 64:
            self.calls.append((module, args, kwargs))
        self.depth += 1
        try:
            return call(module, *args, **kwargs)
        finally:
            self.depth -= 1

    def _backward(self, backward: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not self.parameters:
            self._find_parameters()
        self._watch_logs()
        is_touched = self.versions != self._versions()
        is_fresh = (is_touched or not self.micro_steps) and self._is_zero()
        backward(tensors, *args, **kwargs)
        if not self.parameters:  # nothing had a gradient yet
            return
        self.versions = self._versions()
        micro_step = MicroStep(
            gradient=self._sketch([parameter.grad for parameter in self.parameters]),
            is_fresh=is_fresh,
            is_touched=is_touched,
            is_synchronised=self._is_synchronised(),
            loss=_number(tensors),
        )
        self._note_batch(micro_step)
        self.micro_steps.append(micro_step)
        self.unclipped = None
        self.calls.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if not self.parameters:
            self._find_parameters(optimizer)
        if not self._is_watched(optimizer):
            return
        if not self.before:
            self.before = [torch.empty_like(parameter, requires_grad=False) for parameter in self.parameters]
        with torch.no_grad():
            for value, parameter in zip(self.before, self.parameters, strict=True):
                value.copy_(parameter)  # new memory would cost several times as much
        self.has_closure = bool(args or kwargs.get("closure"))
        if not self.has_closure:
            self.gradient = self._gradient()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if not self._is_watched(optimizer):
            return
        if self.has_closure:
            self.gradient = self._gradient()
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        with torch.no_grad():
            pairs = list(zip(self.parameters, self.before, strict=True))
            subtract = torch.Tensor.sub_ if self.keep_parameters else torch.Tensor.sub
            change = self._sketch(subtract(parameter, value) for parameter, value in pairs)
            for parameter, value in pairs if self.keep_parameters else []:
                parameter.copy_(value)
        unclipped = self.gradient if self.unclipped is None else self.unclipped
        self.recording.steps.append(Step(self.gradient, unclipped, change, rates, self.num_ticks, self.micro_steps))
        self.micro_steps, self.num_ticks, self.unclipped = [], 0, None
        self.versions = self._versions()
        if len(self.recording.steps) == self.num_steps:
            raise Enough

    def _clip(self, clip: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.micro_steps and self.unclipped is None:
            self.unclipped = self._gradient()
        return clip(*args, **kwargs)

    def _tick(self, tick: Callable, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        self.num_ticks += 1
        tick(scheduler, *args, **kwargs)

    def _log(self, names: tuple[str, ...], log: Callable, owner: Any, values: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(values, dict) and self.recording.steps:
            self.recording.steps[-1].logged += [float(values[name]) for name in names if name in values]
        log(owner, values, *args, **kwargs)

    def _index(self, next_index: Callable, iterator: Any) -> Any:
        index = next_index(iterator)
        iterator.__dict__.setdefault("_audit_drawn", deque()).append(index)
        return index

    def _batch(self, following: Callable, iterator: Any) -> Any:
        batch = following(iterator)
        index = iterator.__dict__["_audit_drawn"].popleft()
        loader = id(iterator._dataset)
        pointers = {leaf.data_ptr() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.numel()}
        samples = list(index) if isinstance(index, (list, tuple)) else None
        self.batches.setdefault(loader, deque()).append((samples, batch, pointers))
        self.newest_loader = loader
        return batch

    # ---------------------------------------------------------------------------------------- what is read from it

    def _find_parameters(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Of the optimizer that has most of those of the modules that were called, and the names that a model gives them."""
        if self.model is not None:
            self._name_parameters(self.model, {n: p for n, p in self.model.named_parameters() if p.requires_grad})
            return
        alive = [optimizer] if optimizer else _alive(torch.optim.Optimizer)
        candidates = [
            [p for group in o.param_groups for p in group["params"]] for o in alive if hasattr(o, "param_groups")
        ]
        if not candidates:
            return
        called = [call[0].module if isinstance(call[0], DistributedDataParallel) else call[0] for call in self.calls]
        used = {id(p) for module in called for p in module.parameters()}
        parameters = max(candidates, key=lambda own: (sum(id(p) in used for p in own), len(own)))
        wanted = {id(p) for p in parameters}
        named: dict[str, nn.Parameter] = {}
        for module in called + _alive(nn.Module):
            found = {n: p for n, p in module.named_parameters() if id(p) in wanted}
            if len(found) > len(named):
                named, model = found, module
        known = {id(p) for p in named.values()}
        rest = [p for p in parameters if id(p) not in known]
        named |= {f"parameter {number}": p for number, p in enumerate(rest)}
        self._name_parameters(model if known else None, named)

    def _name_parameters(self, model: nn.Module | None, named: dict[str, nn.Parameter]) -> None:
        self.parameters = list(named.values())
        recording = self.recording
        recording.names, recording.sizes = list(named), [size(p.numel()) for p in self.parameters]
        recording.num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        if model is not None:
            recording.model = type(model).__name__
            for name, module in model.named_modules():
                where = f"{name} ({type(module).__name__})"
                if isinstance(module, _BatchNorm) and module.training:
                    recording.batch_norms.append(where)
                if isinstance(module, _DropoutNd) and module.training and module.p > 0:
                    recording.dropouts.append(where)
        self.versions = self._versions()

    def _is_watched(self, optimizer: torch.optim.Optimizer) -> bool:
        """Of several optimizers the one with the most parameters."""
        if self.optimizer is None and any(
            p is self.parameters[0] for group in optimizer.param_groups for p in group["params"]
        ):
            self.optimizer = optimizer
        return optimizer is self.optimizer

    def _gradient(self) -> np.ndarray:
        """Of now; that of the last backward, if nothing has changed it since."""
        if self.micro_steps and self.versions == self._versions():
            return self.micro_steps[-1].gradient
        return self._sketch([parameter.grad for parameter in self.parameters])

    def _sketch(self, tensors: Iterable[torch.Tensor | None]) -> np.ndarray:
        return sketch(tensors, self.parameters).numpy()

    def _versions(self) -> list[tuple[int, int] | None]:
        return [None if p.grad is None else (p.grad.data_ptr(), p.grad._version) for p in self.parameters]

    def _is_zero(self) -> bool:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return not any(bool(gradient.any()) for gradient in gradients)

    def _is_synchronised(self) -> bool:
        return any(
            module.require_backward_grad_sync
            for module, *_ in self.calls
            if isinstance(module, DistributedDataParallel)
        )

    def _note_batch(self, micro_step: MicroStep) -> None:
        """Of the batches that were drawn, the one whose tensors the model was given; if none was, the next one."""
        drawn, batch = self.batches.get(self.newest_loader, deque()), None
        given = {
            leaf.data_ptr() for _, *call in self.calls for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)
        }
        known = [number for number, (_, _, pointers) in enumerate(drawn) if pointers & given]
        if known or not self.last_batch or not self.last_batch[2] & given:
            for _ in range(known[0] if known else 0):
                drawn.popleft()  # never used
            self.last_batch = drawn.popleft() if drawn else None
        if self.last_batch:
            micro_step.samples, batch, _ = self.last_batch
        for module, args, kwargs in self.calls:
            given = kwargs | (dict(args[0]) if args and isinstance(args[0], dict) else {})
            tensors = [value for value in (*given.values(), *args) if isinstance(value, torch.Tensor) and value.ndim]
            if not tensors:
                continue
            micro_step.num_rows = len(tensors[0])
            micro_step.rows = [_named(row) for row in tensors[0]]
            labels = given.get("labels", batch.get("labels") if isinstance(batch, dict) else None)
            if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
                micro_step.num_labels = int((labels != -100).sum())
                others = [of for name, of in given.items() if name.endswith("_label") and isinstance(of, torch.Tensor)]
                if others:  # BERT's next_sentence_label: another term, with another count
                    micro_step.counts = [int((of != -100).sum()) for of in (labels, *others)]
                micro_step.num_shifted = int((labels[..., 1:] != -100).sum()) if labels.ndim > 1 else None
            if given.get("num_items_in_batch") is not None:
                micro_step.num_items = float(given["num_items_in_batch"])
                if self.recording.honours_num_items is None:
                    self.recording.honours_num_items = _honours(module, args, kwargs)
            break


def _number(tensors: Any) -> float | None:
    """The sum of what a backward starts from, where these are single numbers."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return sum(float(tensor.detach()) for tensor in tensors) if all(tensor.numel() == 1 for tensor in tensors) else None


def _named(row: torch.Tensor) -> list[str]:
    """Shape and hash."""
    row = row.detach().cpu()
    content = (row.double() if row.is_floating_point() else row).contiguous().numpy().tobytes()
    return [str(tuple(row.shape)), hashlib.blake2b(content, digest_size=8).hexdigest()]


def _alive(kind: type) -> list:
    return [value for value in gc.get_objects() if issubclass(type(value), kind)]


def _honours(module: nn.Module, args: tuple, kwargs: dict) -> bool | None:
    """Whether the loss halves when `num_items_in_batch` doubles. Leaves no trace in the generators."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    module = module.module if isinstance(module, DistributedDataParallel) else module
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
