"""Digests of a run's tensors (--digest_steps), by which `python -m recipes compare` finds where two runs part.

After every n-th optimizer step there is one of each parameter, of each state of the optimizer, and of each gradient of that
step, whole and not clipped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from samestep.training.digest import digest_tensor
from samestep.training.parts import Part
from samestep.training.run import Run
from samestep.training.run_step import RunStep


class Digests(Part):
    """Digests a run's tensors at every n-th step (--digest_steps), on process 0, which has all of them whole.

    The line of metrics.jsonl has the digest of a step's line of digests.jsonl.
    """

    def __init__(self, run: Run):
        self.run, self.every = run, run.settings.digest_steps
        self.is_active = run.accelerator.is_main_process
        self.gradients: dict[str, str] = {}
        self.pending: dict[int, dict[str, Any]] = {}

    def gradient_reduced(self, step: RunStep) -> None:
        if self._is_due(step.index + 1):
            self.gradients = digest_gradients(self.run.network.parameters)

    def end_step(self, step: RunStep) -> None:
        number = step.index + 1
        if self._is_due(number):
            record = digest_step(number, self.run.network.parameters, self.run.network.optimizer, self.gradients)
            self.pending[number] = record

    def _is_due(self, number: int) -> bool:
        return self.is_active and number % self.every == 0

    def add_to_line(self, line: dict[str, Any], counts: torch.Tensor, values: Sequence[Any]) -> None:
        if line["step"] in self.pending:
            line["digest"] = combine(self.pending[line["step"]])

    def lines_written(self, lines: Sequence[dict[str, Any]]) -> None:
        if records := [self.pending.pop(line["step"]) for line in lines if "digest" in line]:
            self.run.log.append("digests.jsonl", records)


def digest_gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Digest the gradients that parameters have, by name.

    An optimizer that accumulates in its moments leaves none. Under fp16 they are multiplied by the loss scale.
    """
    return {name: digest_tensor(p.grad) for name, p in parameters.items() if p.grad is not None}


def digest_step(
    step: int, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, gradients: Mapping[str, str]
) -> dict[str, Any]:
    """Digest parameters and the optimizer's states after a step: its line of digests.jsonl.

    Args:
        step: its number; 1 is the first of the training.
        parameters: by the names that they have in checkpoints (see `checkpoint.name_parameters`).
        optimizer: its states are named PARAMETER/KEY, as in checkpoints.
        gradients: digests of the step's gradients, after they were reduced and before they were clipped.
    """
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    return {
        "step": step,
        "parameters": {name: digest_tensor(parameter) for name, parameter in parameters.items()},
        "moments": {
            f"{name}/{key}": digest_tensor(value)
            for name, state in states.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        },
        "gradients": gradients,
    }


def combine(record: dict[str, Any]) -> str:
    """Digest a line of digests.jsonl: its pairs of name and digest, sorted by name; not its step."""
    kinds = ((kind, digests) for kind, digests in record.items() if kind != "step")
    pairs = sorted(f"{kind}/{name} {digest}\n" for kind, digests in kinds for name, digest in digests.items())
    return xxhash.xxh3_64_hexdigest("".join(pairs).encode())
