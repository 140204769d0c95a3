"""Asks the model and its loss, while a program trains them, what a step may have wrong: `probe` has the questions."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from stepaudit import probe
from stepaudit.micro_batch import Call, count_rows, unwrap
from stepaudit.recording import MicroStep

MAX_PROBES = 2  # micro-batches at which the model is asked, until it answers


class Interview:
    """Keeps what questions need from a forward until its backward, and asks them there.

    Args:
        is_wanted: whether anything is asked.

    Attributes:
        is_asking: whether modules are called by a question now, and not by the program.
        probes_left: micro-batches at which the model may still be asked.
        facts: [cause, place] of each fault that the model showed; None: it was not asked, or did not answer.
        honours_num_items: whether the loss follows the `num_items_in_batch` that it is given; None: it was given none.
    """

    def __init__(self, is_wanted: bool):
        self.activations: list[probe.Activation] = []  # outputs of modules, since the last backward, as long as needed
        self.outputs: list[torch.Tensor] = []  # of the first call
        self.is_asking = False
        self.generator: torch.Tensor | None = None  # the generator's state after the last outermost call
        self.probes_left = MAX_PROBES if is_wanted and os.environ.get("RANK", "0") == "0" else 0
        self.facts: list[probe.Fact] | None = None
        self.honours_num_items: bool | None = None
        self.grad = torch.autograd.grad  # while a program is recorded, it is replaced

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        self.is_asking = True
        try:
            yield
        finally:
            self.is_asking = False

    def keep_outputs(self, module: nn.Module, value: Any, calls: list[Call] | None) -> None:
        """Keep the outputs of a module: the model is asked about them before the next backward.

        Args:
            module, value: the module, and what it returned.
            calls: those since the last backward, if this one is outermost; None: it is not.
        """
        if calls is not None and probe.is_shared(module):
            self.probes_left = 0
            return
        tensors = probe.find_outputs(value)
        self.activations += [
            ("", module, tensor) for tensor in tensors if tensor.requires_grad and tensor.ndim and tensor.grad_fn
        ]
        if calls is None:
            return
        self.generator = torch.get_rng_state()
        if len(calls) == 1:
            self.outputs = tensors
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.retain_grad()

    def ask_loss(self, loss: Any, calls: list[Call], num_samples: int | None) -> list[probe.Fact] | None:
        """Ask whether the loss mixes samples; None: it cannot be asked. `num_samples` as of `probe.ask_loss`."""
        if not self.probes_left or not calls or loss is None:
            return None
        modules = {unwrap(module) for module, *_ in calls}
        names = {module: name for model in modules for name, module in model.named_modules()}
        activations = [(names.get(module, ""), module, output) for _, module, output in self.activations]
        with self._asking():
            facts = probe.ask_loss(loss, activations, count_rows(calls), num_samples, self.grad)
        if self.generator is not None and not self.generator.equal(torch.get_rng_state()):
            facts = [*(facts or []), ["dropout", "between the model and the loss"]]
        return facts

    def ask_model(self, loss_facts: list[probe.Fact] | None, calls: list[Call]) -> None:
        """Ask the module that was called first. A module that mixes samples is a better answer than a loss that does."""
        if not self.probes_left or not calls:
            return
        self.probes_left -= 1
        num_rows = count_rows(calls)
        if num_rows < 2:
            return
        module, args, kwargs = calls[0]
        output_numbers = {
            number for number, output in enumerate(self.outputs) if output.grad is not None and output.grad.any()
        }
        for output in self.outputs:
            if not output.is_leaf:
                output.grad = None
        with self._asking():
            model_facts = probe.ask_model(unwrap(module), args, kwargs, output_numbers, num_rows)
        if loss_facts is not None or model_facts is not None:
            mixing_causes = {"batch_norm", "mixed_samples"} & {cause for cause, _ in model_facts or []}
            self.facts = (model_facts or []) + [
                fact for fact in loss_facts or [] if not (mixing_causes and fact[0] != "dropout")
            ]
            self.probes_left = 0

    def ask_num_items(self, micro_step: MicroStep, call: Call) -> None:
        """Ask once whether the loss follows the `num_items_in_batch` of a call, if it is given one."""
        if micro_step.num_items is None or self.honours_num_items is not None:
            return
        with self._asking():
            self.honours_num_items = honours_num_items(*call)

    def forget(self) -> None:
        """Let go of the forward's outputs, after the backward."""
        self.activations.clear()
        self.outputs.clear()


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
