"""Gradients that are folded into the optimizer's moments as they come (a recipe's `accumulation: optimizer`)."""

import math
from contextlib import AbstractContextManager

import torch
from torch import nn

from samestep.contrib.optim.folding import Accumulating
from samestep.recipe.recipe import explain_accumulation
from samestep.training.checkpoint import State
from samestep.training.recovery import Attempt
from samestep.training.reduction import Unrepeatable


class Folding(Unrepeatable):
    """The optimizer takes each micro-batch's gradient into its moments, from which it cannot be taken out again."""

    can_skip_update = False
    holds_back = False
    optimizer: Accumulating

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, start: State
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        assert isinstance(optimizer, Accumulating)
        self.optimizer = optimizer
        model = self.accelerator.prepare_model(model, evaluation_mode=True)  # moved, under autocast, not wrapped
        wrapped_optimizer = self.accelerator.prepare(optimizer)
        if self.accelerator.num_processes > 1:
            optimizer.distribute(model)
        optimizer.allocate()
        return model, wrapped_optimizer

    def list_notes(self) -> list[str]:
        return [explain_accumulation(self.recipe.second_moment)]

    def discard_gradients(self) -> AbstractContextManager[None]:
        return self.optimizer.discard_gradients()

    def begin(self, attempt: Attempt) -> None:
        super().begin(attempt)
        self.optimizer.gradient_accumulation_steps = len(attempt.data.micro_batches)
        self.optimizer.num_micro_batches = attempt.data.num_micro_batches

    def clip_parameters(self, parameters: list[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        return self.optimizer.clip_grad_norm_(math.inf if max_norm is None else max_norm)

    def abandon(self, attempt: Attempt, error: BaseException) -> None:
        self.optimizer.abandon()
        super().abandon(attempt, error)

    def explain_once(self) -> str:
        return (
            "some gradients of which are in the optimizer's moments (accumulation optimizer): it cannot be done again. Resume "
            f"with a smaller --per_device_train_batch_size than {self._size}"
        )
