"""One optimizer step of a run: the scripts' `step`, which the run's reduction, parts and recovery take part in."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from samestep.data.steps import MicroBatch, StepData, to_device
from samestep.errors import UsageError
from samestep.step.batch_norm import StepStatistics
from samestep.training.recovery import Attempt
from samestep.training.step import Step

if TYPE_CHECKING:
    from samestep.training.run import Run


class RunStep(Step):
    """One optimizer step of a run, a context manager around the code that computes it from its `micro_batches`.

    Attributes:
        learning_rate: learning rate of this step, from the recipe's schedule.
        grad_norm: norm of the whole gradient before clipping, scalar on the device; known after `clip_grad_norm_`.
    """

    def __init__(self, run: "Run", attempt: Attempt):
        super().__init__(run.accelerator, attempt.data.step, attempt.data.epoch)
        self.run, self.attempt = run, attempt
        self.learning_rate = run.plan.schedule(self.index)
        self.is_entered = self.is_scaled = False

    @property
    def data(self) -> StepData:
        """This process's part of the step, as it is cut now."""
        return self.attempt.data

    @property
    def num_micro_batches(self) -> int:
        return len(self.data.micro_batches)

    @property
    def loss_scale(self) -> int:
        """Factor of a micro-batch's loss, which undoes what gradients are divided by: k N.

        With --reproducible gradients are divided by a power of two alone, so that no cut rounds them differently.
        """
        self.is_scaled = True
        return self.run.reduction.loss_scale

    @property
    def num_targets(self) -> torch.Tensor:
        """n_j: targets of each loss term in the whole step, all processes and micro-batches; int64 [terms], at least 1 each.

        Of a part of the step that is a step of its own, those of this part.
        """
        return self.run.reduction.find_counts(self.attempt).clamp(min=1)

    @property
    def micro_batches(self) -> Iterator[MicroBatch]:
        return self.run.reduction.micro_batches(self)

    def take(self, micro_batch: Mapping[str, torch.Tensor | None], samples: Any) -> MicroBatch:
        """Take a micro-batch of some samples to the device, and let noise be theirs."""
        self.run.network.noise.set_samples(samples, self.run.accelerator.device)
        return to_device(micro_batch, self.run.accelerator.device)

    def look_ahead(self) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield each micro-batch for a forward before the step, without gradient, and whether it counts nothing."""
        for micro_batch, samples in zip(self.data.micro_batches, self.data.samples, strict=True):
            yield self.take(micro_batch, samples), not samples

    def confirm_look(self, error: BaseException | None) -> None:
        """Agree that memory sufficed for the forwards before the step (`error`: it did not, here). Called by all processes.

        Raises:
            RepeatStep: it did not; the step is done again.
            RunError: it did not, and the step cannot be done again.
        """
        if self.run.recovery.agree(error is not None):
            self.run.reduction.repeat(self.attempt, error)

    def find_statistics(self, whole_step: StepStatistics) -> None:
        """Find what `whole_step` needs to know of the whole step, in passes over its micro-batches, unless it needs nothing."""
        is_exact = self.run.reduction.is_exact
        if whole_step.is_needed(self.run.recovery.steps.layout.gradient_accumulation_steps, is_exact):
            model, num_targets = self.run.bare_model, self.num_targets
            whole_step.prepare(
                Replay(self) if whole_step.replays_noise else self.data.micro_batches,
                lambda micro_batch: self.run.network.compute_loss(micro_batch, num_targets, model)[0],
                numbers=self.data.numbers if is_exact else None,
                num_cells=self.data.num_micro_batches if is_exact else None,
            )

    def clip_grad_norm_(self, max_norm: float | None) -> None:
        """Clip the whole step's gradient G to an L2 norm (None: leave it): G min(1, max_norm / (|G| + 1e-6)).

        Called by all processes between the last backward and the optimizer's step. The optimizer does not take a step with a
        gradient that is not finite.
        """
        self.run.reduction.check_scale(self)
        self.grad_norm = self.run.reduction.clip(self, max_norm)

    def make_gradient_whole(self) -> None:
        """Let the reduction make the gradient of the step whole; the run's parts look at it before and after."""
        for part in self.run.parts:
            part.gradient_computed(self)
        self.attempt.confirm_gradient()
        for part in self.run.parts:
            part.gradient_reduced(self)

    def clip_whole_gradient(self, max_norm: float | None) -> torch.Tensor:
        """Clip the gradient that the parameters have; return its norm before, scalar. One that is not finite is not used."""
        run = self.run
        norm = run.reduction.clip_parameters(run.network.clipped_parameters, max_norm)
        run.log.not_finite.skip_update(run.network.optimizer, norm)
        return norm

    def add_to_log(self, sums: torch.Tensor) -> None:
        """Note the summed losses of a micro-batch, [terms], for the step's line in metrics.jsonl."""
        self.attempt.sums.append(sums.detach())

    def _default_weights(self, sums: torch.Tensor) -> torch.Tensor:
        return self.run.loss_weights

    def check_entry(self) -> None:
        """Raise if a script went on without entering the step, which would then be repeated for ever."""
        if not self.is_entered:
            raise UsageError(f"step {self.index + 1} was not taken: put what computes it inside `with step:`")

    def __enter__(self) -> "RunStep":
        self.is_entered = True
        for group in self.run.network.optimizer.param_groups:
            group["lr"] = self.learning_rate * group["lr_scale"]
        self.attempt.__enter__()
        for part in self.run.parts:
            part.begin_step(self)
        self.run.reduction.seed_noise(self)
        return self

    def __exit__(self, *error: Any) -> bool:
        return self.attempt.__exit__(*error)


class Replay:
    """The micro-batches of a step on the device, each with the noise with which it is trained, as often as is asked for."""

    def __init__(self, step: RunStep):
        self.step = step

    def __len__(self) -> int:
        return self.step.num_micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.step.micro_batches
