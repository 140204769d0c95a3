"""Launches that are replicas of one run (--fault_tolerance step): any of them may die, hang, leave or join."""

from typing import Any

import torch

from samestep.contrib.replication.replicas import Replicas
from samestep.contrib.replication.shared_folder import SharedFolder
from samestep.data.steps import StepData
from samestep.step import accumulate
from samestep.training.checkpoint import State
from samestep.training.output_folder import OutputFolder
from samestep.training.recovery import Attempt, Recovery
from samestep.training.reduction import ExactSums, HasEnded, Reduction, RepeatStep
from samestep.training.run import Run
from samestep.training.run_step import RunStep


class Replicated(Reduction):
    """Replicas add gradients up and commit a step together; within a replica it goes on as usual."""

    replicas: Replicas

    def join(self, folder: OutputFolder) -> None:
        assert isinstance(folder, SharedFolder)
        self.replicas = Replicas(self.accelerator, self.settings, folder)

    def attach(self, recovery: Recovery, start: State, data_fingerprints: dict[str, str]) -> None:
        super().attach(recovery, start, data_fingerprints)
        self.replicas.attach(recovery, self.exact_sum, start, data_fingerprints)

    def describe_cut(self, layout: Any) -> str:
        return f"a replica of those at {self.settings.lighthouse}"

    def meet(self, data: StepData) -> tuple[StepData, torch.Tensor | None]:
        try:
            return self.replicas.meet(data)
        except HasEnded:
            self.has_ended = True
            raise

    def begin(self, attempt: Attempt) -> None:
        if self.exact_sum is not None:  # `meet` has counted
            self.exact_sum.begin(attempt.data.num_micro_batches)

    def seed_noise(self, step: RunStep) -> None:
        accumulate.seed_noise(self.accelerator, self.recipe.seed, step.index, process_index=self.replicas.place.rank)

    def finish(self, attempt: Attempt) -> None:
        """Make the gradient whole, and commit the step, together with the replicas."""
        recovery = self.recovery
        recovery.agree(False)  # what this replica alone decides: whether it leaves, whether it saves
        failure = self.replicas.reduce(
            attempt.data, attempt.sums, has_failed=False, is_asked_to_stop=recovery.should_stop
        )
        attempt.is_agreed = True
        if failure == "memory":
            self.check_repeatable("a replica", attempt)
        if failure is not None:
            attempt.failure = failure
            recovery.should_stop = recovery.should_save = False
            recovery.model.zero_grad(set_to_none=True)
            raise RepeatStep
        attempt.sums = self.replicas.all_sums

    def abandon(self, attempt: Attempt, error: BaseException) -> None:
        attempt.failure = self.replicas.reduce(attempt.data, [], has_failed=True, is_asked_to_stop=False)
        self.check_repeatable("this process", attempt, error)
        attempt.failure = "memory"  # here, even if a replica was lost on top of it

    def check_repeatable(self, process: str, attempt: Attempt, error: BaseException | None = None) -> None:
        """Raise RunError where a step cannot be done again in smaller micro-batches, once memory has run out."""

    def list_parts(self, data: StepData) -> tuple[list[tuple[int, int]], list[list[tuple[int, int]]]] | None:
        return self.replicas.roll_call.list_parts(data)

    @property
    def saves(self) -> bool:
        return self.replicas.is_first

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
        super().close()
        self.replicas.close()


class ReplicatedExactSums(Replicated, ExactSums):
    """Replicas add gradients up exactly (--reproducible)."""

    def check_repeatable(self, process: str, attempt: Attempt, error: BaseException | None = None) -> None:
        raise self.cannot_repeat(process, attempt) from error
