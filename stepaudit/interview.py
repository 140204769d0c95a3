"""Asks the model and its loss, while a program trains them, what a step may have wrong: `probe` has the questions."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from stepaudit import probe
from stepaudit._internals import tree_leaves
from stepaudit.batches import find_storage
from stepaudit.copies import put_gradients_aside
from stepaudit.graph import list_nodes
from stepaudit.micro_batch import Call, count_rows, find_owners, find_tensors, unwrap
from stepaudit.recording import MicroStep
from stepaudit.terms import take_gradients
from stepaudit.track import Track

GRAD = torch.autograd.grad  # while a program is recorded, it is replaced
MAX_PROBES = 2  # micro-batches at which the model is asked, until it answers
MAX_ASKED = 4  # calls of modules in each


class Interview:
    """Keeps what questions need from a forward until its backward, and asks them there.

    Args:
        is_wanted: whether anything is asked.

    Attributes:
        is_asking: whether modules are called by a question now, and not by the program.
        probes_left: micro-batches at which the model may still be asked.
        facts: [cause, place] of each fault that the model showed; None: it was not asked, or did not answer.
        unasked: why the model was not asked, or could not answer; empty if it did.
        collectives: name and line of each collective that the program called between a forward and its backward.
        honours_num_items: whether the loss follows the `num_items_in_batch` that it is given; None: it was given none.
        reads_numbers: whether the program reads numbers of tensors itself.
    """

    def __init__(self, is_wanted: bool):
        self.activations: list[probe.Activation] = []  # outputs of modules, since the last backward, as long as needed
        self.outputs: list[list[torch.Tensor]] = []  # of each outermost call
        self.is_asking, self.is_wanted, self.is_left_alone = False, is_wanted, False
        self.generator: torch.Tensor | None = None  # the generator's state after the last outermost call
        self.probes_left = MAX_PROBES if is_wanted and os.environ.get("RANK", "0") == "0" else 0
        self.facts: list[probe.Fact] | None = None
        self.unasked = ""
        self.collectives: list[str] = []
        self.has_talked = False  # since the last backward
        self.reads_numbers = False
        self.modes_called: list[bool] = []  # whether each module is in training, of the calls since the last backward
        self.honours_num_items: bool | None = None
        self.modes: dict[nn.Module, list[bool]] = {}  # of the modules of each model, in training or not

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Let modules be called, and gradients be taken, by a question."""
        self.is_asking = True
        try:
            yield
        finally:
            self.is_asking = False

    def leave_alone(self, reason: str) -> None:
        """Ask nothing, neither now nor later: a question to one process would wait for the others for ever."""
        self.is_wanted, self.is_left_alone, self.probes_left, self.unasked = False, True, 0, reason

    def note_collective(self, text: str) -> None:
        """Note that the processes talk to each other: a question to one of them would wait for the others for ever."""
        self.has_talked = True
        if text not in self.collectives:
            self.collectives.append(text)

    def note_read(self) -> None:
        """Note that the program reads a number of a tensor, by which it may decide something."""
        self.reads_numbers = True

    def look_at_modes(self, module: nn.Module) -> None:
        """Ask a model again, that is called with other modules in training than before: another model, as it were."""
        modes = [part.training for part in module.modules()]
        self.modes_called += [part.training for part in unwrap(module).modules()]
        if self.modes.setdefault(module, modes) != modes:
            self.modes[module] = modes
            self.probes_left = MAX_PROBES if self.is_wanted and os.environ.get("RANK", "0") == "0" else 0

    def _can_ask(self) -> bool:
        if self.has_talked:
            self.unasked = f"all processes compute it together ({self.collectives[0]})"
        return bool(self.probes_left) and not self.has_talked

    def keep_outputs(self, module: nn.Module, value: Any, calls: list[Call] | None) -> None:
        """Keep the outputs of a module: the model is asked about them before the next backward.

        Args:
            module, value: the module, and what it returned.
            calls: those since the last backward, if this one is outermost; None: it is not.
        """
        tensors = probe.find_outputs(value)
        if calls is not None:
            self.outputs.append(tensors)
        if not self.probes_left:
            return
        if calls is not None and probe.is_shared(module):
            self.probes_left, self.unasked = 0, "only all processes together can compute it"
            return
        self.activations += [
            ("", module, tensor) for tensor in tensors if tensor.requires_grad and tensor.ndim and tensor.grad_fn
        ]
        if calls is None:
            return
        self.generator = torch.get_rng_state()
        # Of a call that returns a loss alone, what the last module inside returned is asked about in its place
        inside = [] if any(tensor.ndim for tensor in tensors) else [tensor for *_, tensor in self.activations[-1:]]
        for tensor in (*tensors, *inside):
            if tensor.requires_grad:
                tensor.retain_grad()

    def leave_out_unused(self, losses: Any, calls: list[Call]) -> None:
        """Leave out those calls since the last backward that its losses do not depend on: of micro-batches that are skipped.

        A loss depends on what the model is given, too, with a gradient or without one (`detach`).
        """
        if len(calls) < 2 or len(calls) != len(self.outputs):
            return
        nodes = list_nodes([leaf.grad_fn for leaf in tree_leaves(losses) if isinstance(leaf, torch.Tensor)])
        used = [any(output.grad_fn in nodes for output in outputs) for outputs in self.outputs]
        given: set[int] = set()
        for number in reversed(range(len(calls))):
            used[number] |= any(find_storage(output) in given for output in self.outputs[number])
            given |= {find_storage(tensor) for tensor in find_tensors(calls[number])[1]} if used[number] else set()
        if any(used):
            calls[:] = itertools.compress(calls, used)
            self.outputs[:] = itertools.compress(self.outputs, used)

    def ask_loss(self, loss: Any, calls: list[Call], num_samples: int | None) -> list[probe.Fact] | None:
        """Ask whether the loss mixes samples; None: it cannot be asked. `num_samples` as of `probe.find_own_rows`."""
        if not self._can_ask() or not calls or loss is None:
            return None
        modules = {unwrap(module) for module, *_ in calls}
        names = {module: name for model in modules for name, module in model.named_modules()}
        activations = [(names.get(module, ""), module, output) for _, module, output in self.activations]
        with self.asking():
            own_rows = probe.find_own_rows(count_rows(calls), num_samples, find_owners(calls))
            facts = probe.ask_loss(loss, activations, own_rows, GRAD)
        if self.generator is not None and not self.generator.equal(torch.get_rng_state()):
            facts = [*(facts or []), ["dropout", "between the model and the loss"]]
        return facts

    def ask_terms(self, loss: Any, tracks: list[Track]) -> tuple[dict[Track, list[np.ndarray]], list[float]]:
        """Ask for the gradient of each term of the loss, of the parameters of each track, and for the number that each is
        multiplied by; empty where it has one term."""
        is_scalar = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad
        if not self.is_wanted or not is_scalar or self.has_talked or not tracks or probe.allows_single_backward(loss):
            return {}, []
        parameters = [p for track in tracks for p in track.parameters if p.requires_grad]
        if any(hasattr(p, "full_tensor") for p in parameters):  # FSDP would reduce the gradients of a question
            return {}, []
        try:
            with self.asking():
                answer = take_gradients(loss, parameters, GRAD)
        except RuntimeError:  # reentrant checkpointing; a loss that does not depend on the parameters
            return {}, []
        if answer is None:
            return {}, []
        terms, factors = answer
        found = [dict(zip(map(id, parameters), term, strict=True)) for term in terms]
        parts = {track: [track.sketch(term.get(id(p)) for p in track.parameters) for term in found] for track in tracks}
        return parts, factors

    def ask_model(self, loss_facts: list[probe.Fact] | None, calls: list[Call]) -> None:
        """Ask the modules that were called. A module that mixes samples is a better answer than a loss that does."""
        if not self._can_ask() or not calls:
            return
        self.probes_left -= 1
        answers: list[list[probe.Fact]] = []
        for call, outputs in list(zip(calls, self.outputs, strict=False))[:MAX_ASKED]:
            with self.asking(), put_gradients_aside(call[0].parameters()):
                facts = self._ask_call(call, outputs)
            answers += [] if facts is None else [facts]
        if loss_facts is not None or answers:
            model_facts = [fact for facts in answers for fact in facts]
            mixing_causes = {"batch_norm", "mixed_samples"} & {cause for cause, _ in model_facts}
            new_facts = model_facts + [
                fact for fact in loss_facts or [] if not (mixing_causes and fact[0] != "dropout")
            ]
            self.facts = [*(self.facts or []), *(fact for fact in new_facts if fact not in (self.facts or []))]
            self.probes_left = 0

    def _ask_call(self, call: Call, outputs: list[torch.Tensor]) -> list[probe.Fact] | None:
        """Ask one call of a module; None: it cannot be asked."""
        module, args, kwargs = call
        num_rows = count_rows([call])
        used = {number for number, output in enumerate(outputs) if output.grad is not None and output.grad.any()}
        inside = [tensor for *_, tensor in self.activations if tensor.retains_grad and tensor.ndim > 1]
        inside = [] if any(output.ndim for output in outputs) else inside
        counts_padding = num_rows > 1 and probe.ask_padding(unwrap(module), args, kwargs, [*outputs, *inside], num_rows)
        for output in (*outputs, *inside):
            if not output.is_leaf:
                output.grad = None
        facts, reason = probe.ask_model(unwrap(module), args, kwargs, used, num_rows)
        self.unasked = self.unasked or reason
        if counts_padding and not facts:
            whose = "what the last module inside of {} returns" if inside else "what {} returns"
            place = f"the loss, at padded positions of {whose.format(type(unwrap(module)).__name__)}"
            facts = [["padding", place]]
        return facts

    def ask_num_items(self, micro_step: MicroStep, call: Call) -> None:
        """Ask once whether the loss follows the `num_items_in_batch` of a call, if it is given one."""
        is_known = micro_step.num_items is None or self.honours_num_items is not None
        if is_known or self.has_talked or self.is_left_alone:
            return
        with self.asking():
            self.honours_num_items = honours_num_items(*call)

    def forget(self) -> None:
        """Let go of the forward's outputs, after the backward."""
        self.activations.clear()
        self.outputs.clear()
        self.modes_called.clear()
        self.has_talked = False


def honours_num_items(module: nn.Module, args: tuple, kwargs: dict) -> bool | None:
    """Tell whether the loss halves when `num_items_in_batch` doubles. Generators and buffers are left as they are."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    module = unwrap(module)
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
