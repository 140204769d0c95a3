"""Launches that are replicas of one run (--fault_tolerance step): any of them may die, hang, leave or join."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from samestep.contrib.replication.replicas import Replicas
from samestep.contrib.replication.shared_folder import SharedFolder
from samestep.data.steps import MicroBatch, StepData
from samestep.step import accumulate
from samestep.training.checkpoint import State
from samestep.training.output_folder import OutputFolder
from samestep.training.recovery import Attempt, Recovery
from samestep.training.reduction import ExactSums, HasEnded, Reduction, RepeatStep
from samestep.training.run import Run
from samestep.training.run_step import RunStep


class Replicated(Reduction):
    """Replicas add gradients up and commit a step together; within a replica it goes on as `inner` says."""

    replicas: Replicas

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        is_exact = self.settings.reproducible is not None
        self.exact = ExactSums(*arguments) if is_exact else None
        self.inner = self.exact or Reduction(*arguments)
        self.is_exact = is_exact

    def join(self, folder: OutputFolder) -> None:
        assert isinstance(folder, SharedFolder)
        self.replicas = Replicas(self.accelerator, self.settings, folder)

    def check_checkpoint(self, folder: Path | None, start: State, say: Callable[[str], None]) -> None:
        self.inner.check_checkpoint(folder, start, say)

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        named_parameters: dict[str, nn.Parameter],
        start: State,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = self.inner.prepare(model, optimizer, named_parameters, start)
        self.exact_sum = self.inner.exact_sum
        return model, optimizer

    def attach(self, recovery: Recovery, start: State, data_fingerprints: dict[str, str]) -> None:
        super().attach(recovery, start, data_fingerprints)
        self.inner.attach(recovery, start, data_fingerprints)
        self.replicas.attach(recovery, self.exact_sum, start, data_fingerprints)

    def describe_cut(self, layout: Any) -> str:
        return f"a replica of those at {self.settings.lighthouse}"

    def describe_bits(self) -> str:
        return self.inner.describe_bits()

    def meet(self, data: StepData) -> tuple[StepData, torch.Tensor | None]:
        try:
            return self.replicas.meet(data)
        except HasEnded:
            self.has_ended = True
            raise

    def begin(self, attempt: Attempt) -> None:
        if self.exact_sum is not None:  # `meet` has counted
            self.exact_sum.begin(attempt.data.num_micro_batches)

    @property
    def loss_scale(self) -> int:
        return self.inner.loss_scale

    @property
    def num_averaged(self) -> int:
        return self.inner.num_averaged

    def seed_noise(self, step: RunStep) -> None:
        accumulate.seed_noise(self.accelerator, self.recipe.seed, step.index, process_index=self.replicas.place.rank)

    def micro_batches(self, step: RunStep) -> Iterator[MicroBatch]:
        return self.inner.micro_batches(step)

    def check_scale(self, step: RunStep) -> None:
        self.inner.check_scale(step)

    def finish(self, attempt: Attempt) -> None:
        """Make the gradient whole, and commit the step, together with the replicas."""
        recovery = self.recovery
        recovery.agree(False)  # what this replica alone decides: whether it leaves, whether it saves
        failure = self.replicas.reduce(
            attempt.data, attempt.sums, has_failed=False, is_asked_to_stop=recovery.should_stop
        )
        attempt.is_agreed = True
        if failure == "memory" and self.exact is not None:
            raise self.exact.cannot_repeat("a replica", attempt)
        if failure is not None:
            attempt.failure = failure
            recovery.should_stop = recovery.should_save = False
            recovery.model.zero_grad(set_to_none=True)
            raise RepeatStep
        attempt.sums = self.replicas.all_sums

    def abandon(self, attempt: Attempt, error: BaseException) -> None:
        attempt.failure = self.replicas.reduce(attempt.data, [], has_failed=True, is_asked_to_stop=False)
        if self.exact is not None:
            raise self.exact.cannot_repeat("this process", attempt) from error
        attempt.failure = "memory"  # here, even if a replica was lost on top of it

    def abandon_forward(self, attempt: Attempt, error: BaseException) -> NoReturn:
        self.inner.abandon_forward(attempt, error)

    def explain(self, error: BaseException) -> Any:
        return self.inner.explain(error)

    def list_parts(self, data: StepData) -> tuple[list[tuple[int, int]], list[list[tuple[int, int]]]] | None:
        return self.replicas.roll_call.list_parts(data)

    @property
    def saves(self) -> bool:
        return self.replicas.is_first

    def describe_state(self) -> dict[str, Any] | None:
        return self.inner.describe_state()

    def ends_the_run(self, run: Run) -> bool:
        """Tell whether this replica ends the run; if not, wait until another one has done that, or leave it to the others."""
        stops = self.recovery.should_stop and not run.is_finished
        if self.has_ended or (stops and not self.replicas.everybody_stops):
            self.replicas.leave()
            reason = "other replicas have ended it" if self.has_ended else "it was asked to stop; the others go on"
            print(f"This replica leaves the run in {run.output_dir}: {reason}", flush=True)
            return False
        return self.replicas.take_charge()

    def close(self) -> None:
        self.inner.close()
        self.replicas.close()
