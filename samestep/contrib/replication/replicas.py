"""Replicas that train together while any of them may die, hang, leave or join (torchft).

In every step the replicas that are there agree on who they are: the quorum. The step is cut for them, so that k grows when a
replica is lost; samples, rates and noise are functions of the step, so that the cut changes nothing. One reduction adds up the
counts and one the gradients, both over cells of the whole step. Nothing lasting is done before the step is committed: when a
replica is lost on the way, the step is done again by those that are left. A replica that is behind, because it has just been
started or has slept, gets from another one all that a checkpoint holds before it computes anything.

A replica is one process, or one launch whose processes divide the weights between them (FSDP2). Each process of such a replica
reduces and heals its own part, with the processes of the same number in the other replicas; what is decided, all of them decide
together, so that they stay one replica. It lives and dies as a whole.
"""

import math
import time
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from samestep.contrib.replication.connection import SECONDS_BETWEEN_TRIES, Connection, Place
from samestep.contrib.replication.gradients import GradientBuffer, GradientParts
from samestep.contrib.replication.processes import Processes
from samestep.contrib.replication.roll_call import RollCall
from samestep.contrib.replication.shared_folder import SharedFolder
from samestep.contrib.replication.shared_state import SharedState
from samestep.data.steps import StepData
from samestep.errors import RunError, UsageError
from samestep.recipe.run_settings import RunSettings
from samestep.step.exact_sum import ExactSum
from samestep.training import checkpoint
from samestep.training.recovery import Recovery
from samestep.training.reduction import HasEnded
from samestep.training.report import RunLog

FAILED, STOPS, EXPONENT = range(3)
"""Columns of what each replica says of a step, beside its losses."""
LARGEST = 2**62  # stands for no cap


class Notices:
    """Says what has happened to the replicas, each thing once: changes by events of the log, waiting by a line."""

    def __init__(self, log: RunLog, processes: Processes):
        self.log, self.processes = log, processes
        self.last_size, self.last_complaint = 0, ""
        self.failed_step: int | None = None

    def complain(self, reason: str) -> None:
        """Print what is waited for, if it is something new."""
        if reason != self.last_complaint:
            self.last_complaint = reason
            self.processes.say(f"step {self.processes.step + 1} waits: {reason}")

    def tell_changes(self, place: Place) -> None:
        """Write and print that the step is done again, or that the replicas are others."""
        step = self.processes.step
        if self.failed_step == step:
            message = "a replica was lost or late: the step is done again"
            self.log.add_event(step + 1, message, replicas=place.num_replicas)
        elif place.size != self.last_size:
            self.log.add_event(step + 1, "the number of replicas has changed", replicas=place.num_replicas)
        self.failed_step, self.last_size, self.last_complaint = None, place.size, ""


class Replicas:
    """This process as one replica of a run, or as one process of a replica.

    Args:
        accelerator: the replica's; its `is_main_process` is set: process 0 of the first replica writes.
        settings: `lighthouse`, `min_replicas`, `replica_timeout`, `ddp_timeout` are used.
        folder: the output folder.

    Attributes:
        place: of this process in the quorum of this step.
        everybody_stops: whether all replicas of the last committed step were asked to stop.
    """

    def __init__(self, accelerator: Accelerator, settings: RunSettings, folder: SharedFolder):
        self.accelerator, self.settings, self.folder = accelerator, settings, folder
        self.processes = Processes(accelerator, settings.ddp_timeout)
        self.place = Place(self.processes.rank, self.processes.size)
        self.everybody_stops = self.has_begun = self.is_in_charge = False
        self.connection: Connection | None = None
        self.buffer: GradientBuffer | GradientParts | None = None

    def attach(
        self,
        recovery: Recovery,
        exact_sum: ExactSum | None,
        start: checkpoint.State,
        fingerprints: dict[str, str],
    ) -> None:
        """Take what the replicas share: the model and all that a checkpoint holds, and the cut.

        Without an `exact_sum`, gradients are added up in a buffer.
        """
        self.steps, log = recovery.steps, recovery.log
        self.notices = Notices(log, self.processes)
        self.processes.step = start.step
        precision = self.accelerator.mixed_precision
        settings = (self.settings.reproducible, self.settings.dtype, precision, self.processes.size)
        identity = (log.recipe.fingerprint, sorted(fingerprints.items()), settings)
        self.state = SharedState(recovery, self.folder, exact_sum, identity, self.settings.lighthouse)
        self.connection = Connection(self.settings, self.processes, self.state, self.accelerator.device)
        self.roll_call = RollCall(self.connection, self.steps)
        parameters, add_up = list(recovery.model.parameters()), self.connection.begin_to_add_up
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            self.buffer = GradientParts(parameters, add_up)
        elif exact_sum is None:
            self.buffer = GradientBuffer(parameters, lambda: self.accelerator.sync_gradients, add_up)

    @property
    def is_first(self) -> bool:
        """Whether this is the first replica, which writes."""
        return self.place.replica == 0

    # ------------------------------------------------------------------------------------------------- the quorum

    def meet(self, data: StepData) -> tuple[StepData, torch.Tensor]:
        """Meet the other replicas for the next step. Waits for them, and for the lighthouse.

        Args:
            data: this replica's part of the step that it would do next, as `steps` cuts it now.

        Returns:
            Its part of the step that the replicas do next, cut for them; the counts of the whole step, int64 [terms].

        Raises:
            HasEnded: the run was ended by other replicas.
            RunError: the lighthouse, or enough replicas, were not there for --ddp_timeout seconds.
        """
        cut = self.steps.cut
        while True:
            self._wait_for_quorum()
            if self.connection.is_group_new and not self._greet():
                self.give_up()
                continue
            step = self.processes.step
            if (data.step, cut) != (step, self.steps.cut):
                data, cut = self.steps[step], self.steps.cut
            counts = self.roll_call.count(data, self.place)
            if counts is None:
                self.give_up()
                continue
            self.notices.tell_changes(self.place)
            if self.buffer is not None:
                self.buffer.begin()
            return data, counts

    def _wait_for_quorum(self) -> None:
        """Wait until enough replicas are there, and this one is where they are; set the step, and `place`."""
        deadline, connection, processes = time.monotonic() + self.settings.ddp_timeout, self.connection, self.processes
        while True:
            is_manager_lost = False
            try:
                reason = connection.wait_for_quorum()
                num_replicas, replica = connection.manager.num_participants(), connection.manager.participating_rank()
                if reason is None and num_replicas < self.settings.min_replicas:
                    reason = f"{num_replicas} of at least {self.settings.min_replicas} replicas are there"
            except (RuntimeError, TimeoutError, OSError) as error:
                if isinstance(error, RunError | UsageError):
                    raise
                is_manager_lost, reason = True, connection.explain(error)
            worst = processes.find_largest(2 if is_manager_lost else reason is not None)
            if worst == 0:
                break
            if worst == 2:
                # A lighthouse that was started again at once looks like the one before, of which this manager is
                connection.close()
            else:
                self.give_up()
            self._wait(reason or "another process of this replica waits", deadline)
        processes.step = connection.manager.current_step()
        rank, size = replica * processes.size + processes.rank, num_replicas * processes.size
        self.place = Place(rank, size, replica, num_replicas)
        self.steps.set_process(rank, size)
        self.accelerator.is_main_process = rank == 0

    def _wait(self, reason: str, deadline: float) -> None:
        """Wait a moment for something, and say so once.

        Raises:
            HasEnded: there is nothing to wait for any more.
            RunError: it took too long.
        """
        is_done, is_late = self.processes.ask_first(lambda: (self.folder.is_done, time.monotonic() > deadline))
        if is_done:
            raise HasEnded
        if is_late:
            if self.is_first and self.has_begun:
                self.state.recovery.save(self.processes.step)
            raise RunError(
                f"step {self.processes.step + 1}: {reason}, for {self.settings.ddp_timeout:.0f} s (--ddp_timeout). Start the "
                "lighthouse and the replicas again, with --resume_from_checkpoint latest"
            )
        self.notices.complain(reason)
        time.sleep(SECONDS_BETWEEN_TRIES)

    def _greet(self) -> bool:
        """Agree with replicas that were not together before: on what is trained, how large micro-batches are, and whether this
        is the begin of the run. Returns whether all of them can go on to a step."""
        tokens = self.steps.max_tokens
        caps = self.steps.layout.per_device_train_batch_size, LARGEST if tokens is None else tokens
        rows = self.connection.gather(
            [int(self.has_begun), *caps, self.state.fingerprint, self.state.digest_parameters()], self.place
        )
        if rows is None:
            return False
        begun, sizes, token_caps, fingerprints, digests = rows.T
        differs = (digests.reshape(-1, self.processes.size) != digests[: self.processes.size]).any(1)  # of each replica
        if len(set(fingerprints.tolist())) > 1:
            if not self.has_begun:
                raise UsageError(
                    f"fault_tolerance is step, but the replicas at {self.settings.lighthouse} do not train the same. Start all "
                    "with the same recipe, data, precision and --reproducible, and each run with a lighthouse of its own"
                )
            return False
        if differs[self.place.replica]:
            # A new lighthouse, which knew nobody, has let replicas take this step apart from each other: the same step, rounded
            # differently. Whoever is not as the first replica is goes back, and so gets its state from the others.
            self.connection.go_back()
        if differs.any():
            return False
        if (smallest := (int(sizes.min()), int(token_caps.min()))) != caps:
            self.steps.set_caps(smallest[0], None if smallest[1] == LARGEST else smallest[1])
        if not begun.any():
            has_begun = self.place.rank == 0 and self.folder.begin_session(self._prepare_folder)
            answers = self.connection.gather([int(has_begun)], self.place)
            if answers is None:
                return False
            if not answers.any():
                self._wait(f"the run in {self.folder.output_dir} is under way on replicas that are not here", math.inf)
                return False
        if not self.has_begun:
            self.folder.take_part()
        self.has_begun, self.connection.is_group_new = True, False
        return True

    def _prepare_folder(self, is_again: bool) -> None:
        """Make the output folder ready for the run.

        Args:
            is_again: whether all replicas that have trained are gone, and others, which have just been started, are here.

        Raises:
            RunError: those that are gone have left a checkpoint that these have not read.
        """
        if is_again and (newest := checkpoint.find_newest_step(self.folder.output_dir)) > self.processes.step:
            raise RunError(
                f"all replicas that trained have ended, after checkpoint-{newest}: start all again, with "
                "--resume_from_checkpoint latest"
            )
        self.state.log.open_files(self.processes.step)

    # --------------------------------------------------------------------------------------------------- the step

    def reduce(
        self, data: StepData, sums: Sequence[torch.Tensor], has_failed: bool, is_asked_to_stop: bool
    ) -> str | None:
        """Add up the gradient of the step, tell each other of the step, and commit it.

        Args:
            data: this replica's part of the step.
            sums: summed losses of its micro-batches, [terms] each.
            has_failed: whether memory ran out here; then its sums and gradients do not matter.
            is_asked_to_stop: whether this replica leaves after the step.

        Returns:
            None: the step is committed; `sums` of all micro-batches of all replicas are in `all_sums`. Else why it has to be
            done again: `memory` ran out on a replica, the sums need another `quantum`, or a `replica` was lost.
        """
        exact_sum, num_terms, sizes = self.state.exact_sum, len(data.counts), data.sizes
        num_rows, offset = sum(map(len, sizes)), sum(map(len, sizes[: self.place.rank]))
        table = torch.zeros(
            num_rows * num_terms + 3 * self.place.size, dtype=torch.float64, device=self.accelerator.device
        )
        rows, says = table[: num_rows * num_terms].view(-1, num_terms), table[num_rows * num_terms :].view(-1, 3)
        exponent = 0 if exact_sum is None or has_failed else exact_sum.exponent()
        says[self.place.rank] = torch.tensor([has_failed, is_asked_to_stop, exponent], dtype=torch.float64)
        if not has_failed:
            if len(sums) != len(data.micro_batches):
                raise UsageError("call step.add_to_log(sums) for each micro-batch before step.clip_grad_norm_")
            num_own = len(sizes[self.place.rank])  # the others are empty, as processes that divide weights need as many
            rows[offset : offset + num_own] = torch.stack(list(sums)[:num_own]).double()
        if not self.connection.add_up(table, *([] if self.buffer is None else self.buffer.finish())):
            return self.give_up()
        said = says.cpu()
        if said[:, FAILED].any():
            self.give_up()
            return "memory"
        if exact_sum is not None:
            if not exact_sum.fits(int(said[:, EXPONENT].max())):
                self.give_up()
                return "quantum"
            exact_sum.finish(self.connection.add_up)
        if not self.connection.should_commit():
            return self._note_failure()
        self.processes.step += 1  # where the next manager begins, if the lighthouse has gone
        self.everybody_stops = bool(said[:, STOPS].all())
        self.all_sums = list(rows) if self.processes.rank == 0 else []
        if self.buffer is not None:
            self.buffer.take()
        return None

    def give_up(self) -> str:
        """Give the attempt up: this replica does not commit it, and meets the others anew."""
        self.connection.give_up()
        return self._note_failure()

    def _note_failure(self) -> str:
        self.notices.failed_step = self.processes.step if self.has_begun else None
        return "replica"

    # ---------------------------------------------------------------------------------------------------- the end

    def take_charge(self) -> bool:
        """Leave the other replicas, and wait until this one may end the run: save, evaluate, publish.

        Returns:
            False: another one has done it.
        """
        self.connection.close()
        deadline = time.monotonic() + self.settings.ddp_timeout
        while True:
            may_end, is_late = self.processes.ask_first(lambda: (self.folder.try_to_end(), time.monotonic() > deadline))
            if may_end:
                break
            if is_late:
                raise RunError(
                    f"another replica has been ending the run in {self.folder.output_dir} for "
                    f"{self.settings.ddp_timeout:.0f} s (--ddp_timeout): see whether it hangs"
                )
            time.sleep(0.1)
        is_in_charge = self.processes.ask_first(lambda: not self.folder.is_done)
        self.accelerator.is_main_process = self.is_in_charge = is_in_charge and self.processes.rank == 0
        return is_in_charge

    def leave(self) -> None:
        """Leave the run to the other replicas."""
        self.connection.close()
        self.accelerator.is_main_process = False

    def close(self) -> None:
        """Let the other replicas know that the run is ended, if this one did that; let go of all."""
        if self.connection is not None:
            self.connection.close()
        if self.is_in_charge:
            self.folder.end(is_done=True)
        self.folder.close()
        if self.buffer is not None:
            self.buffer.close()
