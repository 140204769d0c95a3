"""Keeps a run going, or stops it in good order, when memory runs out, processes do not answer, or a
stop is requested.

A step is attempted. When memory runs out on any process, every process throws its gradients away, halves its caps and
attempts the step again: the same samples in smaller micro-batches, so the same gradient. For that all processes must learn of
the failure, and none may wait for ever. Processes agree once per step, between the last backward and the optimizer's step,
through one all-reduce of three flags on the host, which waits for no device. Before that, a process that has failed takes part,
with zeros, in the reductions of the gradient for which the other processes wait or will wait; the sums are thrown away.

What a step goes through in between, and how others take part in it, is the reduction's: samestep/training/reduction.py.
"""

import contextlib
import datetime
import time
import traceback
from collections.abc import Iterator

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep import interrupt
from samestep._internals import torch_distributed
from samestep._internals.torch_tracing import is_view
from samestep.data.steps import StepData, Steps
from samestep.errors import LOST_PROCESS, LostProcessError, RunError, is_lost_connection, will_be_restarted
from samestep.recipe.run_settings import choose_interval
from samestep.training.capacity import is_out_of_memory, recall
from samestep.training.checkpoint import Saver
from samestep.training.launch import waits_in_forward
from samestep.training.reduction import Reduction, RepeatStep
from samestep.training.report import RunLog

SECONDS_TO_REPORT = 5  # time for all waiting processes to say that they wait


class Recovery:
    """Attempts steps until all processes have done them.

    Args:
        accelerator: the run's.
        steps: cuts steps, also into smaller micro-batches.
        model, optimizer: as prepared by `accelerator`.
        log: writes lines and events; its settings are used: `ddp_timeout`, `max_train_minutes`, `checkpointing_minutes`.
        reduction: how gradients become the step's.
        saver: writes checkpoints.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        steps: Steps,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        log: RunLog,
        reduction: Reduction,
        saver: Saver,
    ):
        self.accelerator, self.steps, self.model, self.optimizer = accelerator, steps, model, optimizer
        self.log, self.settings, self.reduction, self.saver = log, log.settings, reduction, saver
        self.stop = interrupt.StopRequest(self.settings.max_train_minutes)
        self.capacity = recall(accelerator, log.recipe, self.settings)
        self.should_stop = False  # whether any process was asked to stop; the same on all of them
        self.should_save = False  # whether --checkpointing_minutes have passed on process 0; the same on all of them
        self.restart_save_clock()
        self.cpu_group = None
        if accelerator.num_processes > 1:
            self.cpu_group = dist.new_group(
                backend="gloo", timeout=datetime.timedelta(seconds=self.settings.ddp_timeout)
            )

    def iterate_attempts(self, data: StepData) -> Iterator["Attempt"]:
        """Iterate over attempts of a step, each a context manager around the whole step, until one is complete.

        Where others are met for each attempt, it may be one of another step than `data`.
        """
        while True:
            data, counts = self.reduction.meet(data)
            attempt = Attempt(self, data, counts)
            yield attempt
            if attempt.is_complete:
                return
            if attempt.failure == "memory":
                self._cut_smaller(data.step)
                data = self.steps[data.step]

    def restart_save_clock(self, saving: float = 0.0) -> None:
        """Count the time to the next checkpoint from now; `saving`: seconds for which training waited for the last one."""
        self.next_save = time.perf_counter() + choose_interval(self.settings.checkpointing_minutes, saving)

    def agree(self, has_failed: bool, exponent: int = 0) -> bool:
        """Agree on whether any process has failed, whether any was asked to stop (`should_stop`), whether the clock of process
        0 asks for a checkpoint (`should_save`), and on the largest exponent of the gradients (`exponent`).

        Called by all processes; it waits for the host only.
        """
        is_due = self.accelerator.is_main_process and time.perf_counter() >= self.next_save
        flags = has_failed, bool(self.stop), is_due, exponent
        if self.cpu_group is not None:
            all_flags = torch.tensor(flags, dtype=torch.int32)
            dist.all_reduce(all_flags, op=dist.ReduceOp.MAX, group=self.cpu_group)
            flags = all_flags.tolist()
        any_failed, self.should_stop, self.should_save = map(bool, flags[:3])
        self.exponent = flags[3]
        return any_failed

    def save(self, step: int, *, is_routine: bool = False) -> float:
        """Write a checkpoint of the run as it is after `step`, return its seconds; a routine one gives way to newer ones."""
        start = time.perf_counter()
        self.log.write()
        self.saver.save(step, self.log.not_finite.num_skipped, self.log.run_id, is_routine=is_routine)
        self.log.progress.restart_clock()
        return time.perf_counter() - start

    def end_session(self) -> None:
        """Wait for the last checkpoint, and let go of the output folder. Called when lines are written, as far as they could.

        Raises:
            RunError: the last checkpoint, or lines, could not be written.
        """
        folder = self.log.folder
        try:
            self.saver.close()
        finally:
            folder.release()
        if lost_files := folder.list_unwritten(self.accelerator.is_main_process):
            raise RunError(f"{', '.join(lost_files)} in {folder.output_dir} could not be written to the end")

    def close(self, is_finished: bool) -> int:
        """Handle signals as before again, and let go of the model and the optimizer.

        Called before `Accelerator.free_memory` and `Accelerator.end_training`, in this order. A DistributedDataParallel must be
        gone before its process group is: if its reducer holds the last reference to gloo, it waits for gloo's threads without
        releasing Python's lock, for which they may wait.

        Returns:
            Exit code: 0, or the one that tells a scheduler to start the run again.
        """
        self.stop.close()
        self.model = self.optimizer = None
        return interrupt.RESTART if self.should_stop and not is_finished else 0

    def _cut_smaller(self, step: int) -> None:
        """Cut a step into smaller micro-batches. Called by all processes after a failed attempt."""
        self.capacity.note(self.steps.max_longest_samples, has_fit=False)
        self.capacity.write(self.accelerator)
        self.model.zero_grad(set_to_none=True)
        if isinstance(self.model, DistributedDataParallel):
            torch_distributed.begin_again(self.model, **self.accelerator.ddp_handler.to_kwargs())
            self.accelerator.ddp_handler.register_comm_hook(self.model)
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        if not self.steps.halve(step):
            raise RunError(
                f"memory ran out in step {step + 1} with one sample in a micro-batch: nothing smaller is the same step. Try "
                f"{self.settings.memory_remedy}"
            )
        caps = {"per_device_train_batch_size": self.steps.layout.per_device_train_batch_size}
        if self.steps.max_tokens is not None:
            caps["per_device_train_tokens"] = self.steps.max_tokens
        self.log.add_event(step + 1, "memory ran out: the step is done again in smaller micro-batches", **caps)

    def count_collectives(self) -> int:
        """Count the collectives that DDP's process group has begun."""
        if isinstance(self.model, DistributedDataParallel):
            return torch_distributed.num_collectives(self.model)
        return 0


class Attempt:
    """One try to compute the gradient of a step.

    Attributes:
        data: this process's part of the step as it is cut now.
        counts: int64 [terms] on the device, targets of the whole step; known inside the `with`.
        sums: detached summed losses of each micro-batch, [terms] each; the loop appends them.
        is_complete: whether all processes came to the end of the step.
        failure: why the step is not complete: `memory` ran out, its exact sums need another `quantum`, or what else the
            reduction says.
    """

    def __init__(self, recovery: Recovery, data: StepData, counts: torch.Tensor | None = None):
        self.recovery, self.data, self.is_complete, self.is_agreed = recovery, data, False, False
        self.failure = "memory"
        self.sums: list[torch.Tensor] = []
        if counts is not None:
            self.counts = counts

    def __enter__(self) -> "Attempt":
        recovery = self.recovery
        with self._report_missing_processes():
            if isinstance(recovery.model, DistributedDataParallel):
                torch_distributed.rebuild_buckets(recovery.model)
            recovery.reduction.begin(self)
        self.first_collective = recovery.count_collectives()
        return self

    def confirm_gradient(self) -> None:
        """Confirm that no process failed, and make the gradient whole. Called between the last backward and the optimizer's
        step.

        Raises:
            RepeatStep: the step is done again.
            RunError: a process failed, and the step cannot be done again.
        """
        self.recovery.reduction.finish(self)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        if error is None:
            self.is_complete = True
        if error is None or isinstance(error, RepeatStep):
            return error is not None
        with self._report_missing_processes():
            if (explained := self.recovery.reduction.explain(error)) is not None:
                raise explained from error
            if not is_out_of_memory(error):
                raise error
            self._leave_in_good_order(error)
        return True

    def _leave_in_good_order(self, error: BaseException) -> None:
        recovery = self.recovery
        if self.is_agreed:
            raise RunError(
                f"memory ran out in the optimizer's step {self.data.step + 1}, which cannot be cut: resume with "
                f"{recovery.settings.memory_remedy}"
            ) from error
        if waits_in_forward(recovery.accelerator, recovery.model):
            recovery.reduction.abandon_forward(self, error)
        _free_activations(error)
        recovery.reduction.abandon(self, error)

    @contextlib.contextmanager
    def _report_missing_processes(self):
        try:
            yield
        except RuntimeError as error:
            if self.recovery.cpu_group is None or isinstance(error, RunError) or not is_lost_connection(error):
                raise
            if will_be_restarted():
                self.recovery.saver.finish_writing()
                raise LostProcessError(f"step {self.data.step + 1}: {LOST_PROCESS}") from error
            raise RunError(f"step {self.data.step + 1}: {self._describe_missing_processes()}") from error

    def _describe_missing_processes(self) -> str:
        """Say which processes do not answer: every process that waits writes so into the common store, the others do not."""
        rank, size = self.recovery.accelerator.process_index, self.recovery.accelerator.num_processes
        store, key = torch_distributed.default_store(), f"samestep/waiting/{self.data.step}/"
        try:
            store.set(f"{key}{rank}", "")
            time.sleep(SECONDS_TO_REPORT)
            missing = [process for process in range(size) if not store.check([f"{key}{process}"])]
        except RuntimeError:
            missing = [0]  # it holds the store
        names = ", ".join(map(str, missing)) or "unknown"
        return (
            f"no answer from process {names} of {size}: it hangs (longer than --ddp_timeout) or has ended; its own output "
            "may say why. Resume with --resume_from_checkpoint latest"
        )


def _free_activations(error: BaseException) -> None:
    """Free the memory that a forward or backward holds after it was broken off by an error.

    That is the variables of functions that have ended, and the graphs of tensors in functions that go on: the script's loop.
    """
    traceback.clear_frames(error.__traceback__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None and not is_view(value):
                value.detach_()
