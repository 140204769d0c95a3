"""The ways in which gradients of micro-batches, on all processes, become the step's gradient: one class for each way.

`Reduction` is the usual way, and says all that a run asks of any. `ExactSums` is --reproducible. What else there is enters by
`samestep.training.ways`. A run has one reduction, and never asks which one it is.

A step goes through `begin`, `micro_batches` and `finish`. Where memory ran out on this process, `abandon` takes the place of
`finish`: it takes part in what other processes wait for.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep._internals import torch_distributed
from samestep.data.steps import MicroBatch, StepData
from samestep.errors import RunError, UsageError
from samestep.recipe.recipe import Recipe
from samestep.recipe.run_settings import RunSettings
from samestep.recipe.settings import BITS_DEPEND_ON
from samestep.step import accumulate
from samestep.step.exact_sum import ExactSum
from samestep.training import digest, launch

if TYPE_CHECKING:  # who asks; they import this module
    from samestep.training.checkpoint import State
    from samestep.training.output_folder import OutputFolder
    from samestep.training.recovery import Attempt, Recovery
    from samestep.training.report import RunLog
    from samestep.training.run import Run
    from samestep.training.run_step import RunStep


class RepeatStep(Exception):
    """Raised to leave a step because memory ran out on some process, exact sums need another quantum, or others were lost."""


class HasEnded(Exception):
    """Raised when others have ended the run while this process was away."""


class Reduction:
    """The usual way: Accelerate divides by k and adds up in the parameters, DistributedDataParallel or FSDP2 averages over N.

    Args:
        accelerator: the run's.
        recipe: what is trained.
        settings: how it is run here.

    Attributes:
        num_parts: parts in which a step's samples are dealt out; None: one for each process.
        own_parts: numbers of those that this process computes, one after the other; empty: that of its own number.
        exact_sum: takes gradients away from the parameters as they come; None: they accumulate there.
        is_exact: whether the bits of a step depend on no process: batch normalisation and noise then do not, either.
        can_skip_update: whether an optimizer that is told so leaves out an update whose gradient is not finite.
        holds_back: whether parameters and all else are as they were before such a step.
        has_ended: whether others have ended the run while this launch was away.
    """

    num_parts: int | None = None
    own_parts: Sequence[int] = ()
    exact_sum: ExactSum | None = None
    is_exact = False
    can_skip_update = True
    holds_back = True
    has_ended = False

    def __init__(self, accelerator: Accelerator, recipe: Recipe, settings: RunSettings):
        self.accelerator, self.recipe, self.settings = accelerator, recipe, settings

    # ------------------------------------------------------------------------------------------ before the first step

    def join(self, folder: "OutputFolder") -> None:
        """Join others in the output folder, where it is shared."""

    def check_checkpoint(self, folder: Path | None, start: "State", say: Callable[[str], None]) -> None:
        """Check that the bits of the next step can follow from a checkpoint (None: there is none). Raises UsageError if not."""

    def check_longer(self, folder: Path, num_done: int, num_steps: int) -> None:
        """Check that the checkpoint at the end of a training of `num_done` steps can be one of a training of `num_steps`.

        Raises:
            UsageError: it cannot.
        """

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, start: "State"
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Prepare model and optimizer, as `Accelerator.prepare` does.

        Args:
            model, optimizer: as they were made.
            start: the checkpoint's state.
        """
        return launch.prepare(self.accelerator, model, optimizer)

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint, whose model and optimizer have been loaded."""

    def attach(self, recovery: "Recovery", start: "State", data_fingerprints: dict[str, str]) -> None:
        """Take what attempts the steps, and what identifies the run."""
        self.recovery = recovery

    def list_notes(self) -> list[str]:
        """List what somebody who chose this way has to know."""
        return []

    def announce(self, log: "RunLog", step: int) -> None:
        """Say at the start of a session, before step `step`, how gradients are sent."""
        if self.settings.reduce_dtype != "own":
            self.accelerator.print(
                launch.describe_reduce_dtype(self.settings.reduce_dtype, self.accelerator.num_processes)
            )

    def describe_cut(self, layout: Any) -> str:
        """Say how steps are cut."""
        return str(layout)

    def describe_bits(self) -> str:
        """Say what the bits of a step do not depend on, behind the first line of a run; nothing if they depend on the cut."""
        return ""

    def discard_gradients(self) -> AbstractContextManager[None]:
        """Let nothing of the gradients that are computed within this context stay, where `zero_grad` cannot remove it."""
        return contextlib.nullcontext()

    # ------------------------------------------------------------------------------------------------------- a step

    def meet(self, data: StepData) -> tuple[StepData, torch.Tensor | None]:
        """Meet others for the next step, which may be another one than `data`; its counts, [terms], if they are known then."""
        return data, None

    def begin(self, attempt: "Attempt") -> None:
        """Begin an attempt: set its counts, of the whole step, and what depends on them."""
        attempt.counts = accumulate.total_counts(self.accelerator, attempt.data.counts)

    @property
    def loss_scale(self) -> int:
        """Factor of a micro-batch's loss that undoes what gradients are divided by: k N."""
        return accumulate.loss_scale(self.accelerator)

    @property
    def num_averaged(self) -> int:
        """Number of processes by which gradients are divided after the last backward: N."""
        return self.accelerator.num_processes

    def seed_noise(self, step: "RunStep") -> None:
        """Make noise that is drawn on this process a function of the seed, the step and the process."""
        accumulate.seed_noise(self.accelerator, self.recipe.seed, step.index)

    def find_counts(self, attempt: "Attempt") -> torch.Tensor:
        """Find the counts that weight this process's losses now, [terms]."""
        return attempt.counts

    def micro_batches(self, step: "RunStep") -> Iterator[MicroBatch]:
        """Iterate over this process's micro-batches of a step; `accelerator.accumulate` synchronises at the last one."""
        data = step.data
        parts = list(zip(data.micro_batches, data.samples, strict=True))
        for micro_batch, samples in accumulate.iterate_micro_batches(self.accelerator, parts):
            yield step.take(micro_batch, samples)

    def check_scale(self, step: "RunStep") -> None:
        """Check that a script has multiplied its losses by `loss_scale`, where no other factor will do."""

    def clip(self, step: "RunStep", max_norm: float | None) -> torch.Tensor:
        """Make a step's gradient whole, clip it, and return its norm before, scalar; called between backward and update."""
        step.make_gradient_whole()
        return step.clip_whole_gradient(max_norm)

    def clip_parameters(self, parameters: list[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Clip the gradient that parameters have to an L2 norm (None: leave it); return its norm before, scalar."""
        return accumulate.clip(self.accelerator, parameters, max_norm)

    def finish(self, attempt: "Attempt") -> None:
        """Agree with all processes that none failed, and make the gradient whole.

        Raises:
            RepeatStep: one failed; the step is done again.
            RunError: one failed, and the step cannot be done again.
        """
        if self._agree(attempt):
            raise RepeatStep

    def abandon(self, attempt: "Attempt", error: BaseException) -> None:
        """Leave a step in which memory ran out here. Raises RunError where it cannot be done again."""
        recovery = self.recovery
        if isinstance(recovery.model, DistributedDataParallel):
            num_begun = recovery.count_collectives() - attempt.first_collective
            torch_distributed.reduce_zeros(recovery.model, num_begun)
        recovery.agree(has_failed=True)

    def repeat(self, attempt: "Attempt", error: BaseException | None) -> NoReturn:
        """Leave a step before its first backward, as all processes have agreed: memory ran out here (`error`), or elsewhere.

        Raises as `finish`.
        """
        raise RepeatStep

    def abandon_forward(self, attempt: "Attempt", error: BaseException) -> NoReturn:
        """Leave a step in which memory ran out here, and the forwards of other processes wait for this one."""
        raise RunError(
            f"memory ran out in step {attempt.data.step + 1}. With sharded weights or synchronised batch normalisation it "
            f"cannot be done again: resume with a smaller --per_device_train_batch_size than {self._size}"
        ) from error

    def explain(self, error: BaseException) -> RunError | None:
        """Explain an error that is none of memory; None: it speaks for itself."""
        return None

    def _agree(self, attempt: "Attempt", exponent: int = 0) -> bool:
        any_failed = self.recovery.agree(False, exponent)
        attempt.is_agreed = True
        return any_failed

    @property
    def _size(self) -> int:
        return self.recovery.steps.layout.per_device_train_batch_size

    # ------------------------------------------------------------------------------------------------- after a step

    def list_parts(self, data: StepData) -> tuple[list[tuple[int, int]], list[list[tuple[int, int]]]] | None:
        """List (process, micro-step) and samples of all micro-batches of a step, where this process has the losses of all."""
        return None

    def list_counts(self, counts: torch.Tensor, norms: torch.Tensor) -> Any:
        """List what other processes lack of steps' counts [steps, terms] and norms [steps]; None: they have the same."""
        return None

    def join_counts(self, parts: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Join what `list_counts` listed on each process: counts and norms of the whole steps."""
        raise NotImplementedError

    def may_save(self, step: int, num_steps: int) -> bool:
        """Tell whether all parameters are the same after step `step` (0 is the first) of `num_steps`."""
        return True

    @property
    def saves(self) -> bool:
        """Whether this launch saves checkpoints."""
        return True

    def get_tensors(self) -> dict[str, torch.Tensor] | None:
        """Gather what a checkpoint lacks beside model and optimizer, on process 0; None: nothing. Called by all processes."""
        return None

    def describe_state(self) -> dict[str, Any] | None:
        """Describe what the next step's bits depend on beside tensors, for `State.exact_sum`; None: nothing."""
        return None

    def ends_the_run(self, run: "Run") -> bool:
        """Tell whether this launch ends a session: saves, evaluates, publishes; if not, it has left it to another one."""
        return True

    def close(self) -> None:
        """Let go of the parameters. Called before the process group ends."""


class Unrepeatable(Reduction):
    """A way whose steps cannot be done again once memory has run out on a process."""

    def explain_once(self) -> str:
        """Say why not, and what helps; follows "memory ran out on this process in step 3, "."""
        raise NotImplementedError

    def cannot_repeat(self, process: str, attempt: "Attempt") -> RunError:
        """Make the error for memory that ran out on "this process" or "another process"."""
        return RunError(f"memory ran out on {process} in step {attempt.data.step + 1}, {self.explain_once()}")

    def finish(self, attempt: "Attempt") -> None:
        if self._agree(attempt):
            raise self.cannot_repeat("another process", attempt)

    def repeat(self, attempt: "Attempt", error: BaseException | None) -> NoReturn:
        raise self.cannot_repeat("another process" if error is None else "this process", attempt) from error

    def abandon(self, attempt: "Attempt", error: BaseException) -> None:
        self.recovery.agree(has_failed=True)
        raise self.cannot_repeat("this process", attempt) from error


class ExactSums(Unrepeatable):
    """Exact sums of micro-batches of one size (--reproducible): the same bits on any number of processes."""

    is_exact = True
    bits_depend_on: dict[str, Any]

    def check_checkpoint(self, folder: Path | None, start: "State", say: Callable[[str], None]) -> None:
        values: dict[str, Any] = {"reproducible": self.settings.reproducible}
        values |= {"mixed_precision": self.accelerator.mixed_precision, "device": self.accelerator.device.type}
        for name in BITS_DEPEND_ON:
            values[name] = getattr(self.settings, name, None)
        saved, machine = values if folder is None else start.exact_sum or {}, digest.machine_kind()
        if differences := "; ".join(
            f"{name} {saved.get(name)} there, {value} here"
            for name, value in values.items()
            if saved.get(name) != value
        ):
            raise UsageError(
                f"reproducible is given, but the bits of checkpoint {folder} depend on other values: {differences}. "
                "Resume with its values, or leave --reproducible out"
            )
        if saved.get("machine", machine) != machine:
            say(
                f"WARNING: from here on the bits may be others, as kernels are: {folder} was written on "
                f"{saved['machine']}; this is {machine}"
            )
        self.bits_depend_on = values | {"machine": machine}

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, start: "State"
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = launch.prepare_unwrapped(self.accelerator, model, optimizer)
        self.exact_sum = ExactSum(model)
        if start.exact_sum is not None:
            self.exact_sum.last_exponent = start.exact_sum["exponent"]
        return model, optimizer

    def describe_bits(self) -> str:
        threads = "; one thread per process" if self.accelerator.device.type == "cpu" else ""
        return f"; the same bits on any number of processes{threads}"

    def begin(self, attempt: "Attempt") -> None:
        super().begin(attempt)
        self.exact_sum.begin(attempt.data.num_micro_batches)

    @property
    def loss_scale(self) -> int:
        return self.accelerator.gradient_accumulation_steps

    @property
    def num_averaged(self) -> int:
        return 1

    def micro_batches(self, step: "RunStep") -> Iterator[MicroBatch]:
        data = step.data
        parts = list(zip(data.micro_batches, data.samples, data.numbers, strict=True))
        for micro_batch, samples, number in accumulate.iterate_micro_batches(
            self.accelerator, parts, is_exact_sum=True
        ):
            accumulate.seed_noise(self.accelerator, self.recipe.seed, step.index, number or 0)
            yield step.take(micro_batch, samples)

    def check_scale(self, step: "RunStep") -> None:
        if not step.is_scaled:
            raise UsageError(
                "reproducible is given, but the loss was multiplied by other factors than step.loss_scale: write "
                "accelerator.backward(loss * step.loss_scale)"
            )

    def finish(self, attempt: "Attempt") -> None:
        if self._agree(attempt, self.exact_sum.exponent()):
            raise self.cannot_repeat("another process", attempt)
        if not self.exact_sum.fits(self.recovery.exponent):
            attempt.failure = "quantum"
            raise RepeatStep
        self.exact_sum.finish()

    def abandon_forward(self, attempt: "Attempt", error: BaseException) -> NoReturn:
        raise self.cannot_repeat("this process", attempt) from error

    def explain_once(self) -> str:
        return (
            f"with micro-batches of {self.settings.reproducible} samples (--reproducible), whose size decides the bits: start "
            f"anew with a smaller size, or try {self.settings.memory_remedy}"
        )

    def explain(self, error: BaseException) -> RunError | None:
        if "deterministic implementation" not in str(error):
            return None
        return RunError(
            f"{str(error).split()[0]} has no kernel on {self.accelerator.device} whose result is the same each time: leave "
            "--reproducible out, or train on CPUs"
        )

    def describe_state(self) -> dict[str, Any] | None:
        return self.bits_depend_on | {"exponent": self.exact_sum.last_exponent}

    def close(self) -> None:
        self.exact_sum.close()
