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

import concurrent.futures
import contextlib
import datetime
import hashlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from samestep._internals import torchft_replica
from samestep.contrib.replication.shared_folder import SharedFolder
from samestep.data.steps import StepData
from samestep.errors import RunError, UsageError
from samestep.recipe.run_settings import RunSettings
from samestep.step.exact_sum import ExactSum
from samestep.training import checkpoint, digest
from samestep.training.recovery import Recovery
from samestep.training.reduction import HasEnded

SECONDS_BETWEEN_TRIES = 0.5  # to reach the lighthouse, or enough replicas
SECONDS_TO_CONNECT = 5.0
SECONDS_OF_QUORUM = 10.0  # to wait for one before saying so
FAILED, STOPS, EXPONENT = range(3)
"""Columns of what each replica says of a step, beside its losses."""
LARGEST = 2**62  # stands for no cap
BUCKET_BYTES = 8 * 2**20
"""Gradients that are reduced at once, while the backward computes others. Of small models more are at the end than there would
be with the 25 MiB of DistributedDataParallel."""


Answer = TypeVar("Answer")


class ReplicaAccelerator(Accelerator):
    """Accelerate's `Accelerator` of a replica of several (--fault_tolerance step).

    Accelerate knows the processes of this replica only, so that nothing is divided by the number of replicas, which add their
    gradients up.

    Attributes:
        is_main_process: whether it writes what a run writes; set from step to step.
    """

    is_main_process = True

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.is_main_process = self.process_index == 0  # until replicas have met


class GradientBuffer:
    """Gradients of a model in one tensor, of which each parameter's gradient is a part.

    It is reduced in few buckets, from the last parameters to the first: each as soon as the last backward of a step has made
    its gradients, while that backward goes on. The order of the buckets is the same on all replicas.

    Args:
        parameters: those that require gradients, all of one type.
        is_last: tells whether the backward that is running is the last one of the step.
        begin_to_add_up: begins to add a tensor of all replicas up, and returns what has to be waited for.
        bucket_bytes: size of a bucket.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        is_last: Callable[[], bool],
        begin_to_add_up: Callable[[torch.Tensor], Any],
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.is_last, self.begin_to_add_up = is_last, begin_to_add_up
        self.parameters = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
        sizes = [parameter.numel() for parameter in self.parameters]
        first = self.parameters[0]
        if others := {str(parameter.dtype) for parameter in self.parameters} - {str(first.dtype)}:
            raise UsageError(
                f"fault_tolerance is step, but parameters are {first.dtype} and {', '.join(sorted(others))}: gradients of one "
                "type are reduced together, so load the model in one"
            )
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.parts = [
            row.as_strided(parameter.size(), parameter.stride(), row.storage_offset())
            for parameter, row in zip(self.parameters, self.flat.split(sizes), strict=True)
        ]
        # Number of the bucket of each parameter, and the buckets
        numbers = (np.cumsum(sizes) * first.element_size() // bucket_bytes).tolist()
        places = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
        self.bucket = {parameter: places[number] for parameter, number in zip(self.parameters, numbers, strict=True)}
        self.num_parameters = [list(self.bucket.values()).count(place) for place in range(len(places))]
        bucket_sizes = [0] * len(places)
        for parameter, size in zip(self.parameters, sizes, strict=True):
            bucket_sizes[self.bucket[parameter]] += size
        self.buckets = self.flat.split(bucket_sizes)
        self.is_active, self.works = False, []
        self.hooks = [parameter.register_post_accumulate_grad_hook(self._note) for parameter in self.parameters]

    def begin(self) -> None:
        """Begin a step, or an attempt of it: set the gradients to 0, and let backwards add to them."""
        self.flat.zero_()
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            parameter.grad = part
        self.is_active, self.works, self.num_missing = True, [], list(self.num_parameters)

    def _note(self, parameter: nn.Parameter) -> None:
        if self.is_active and self.is_last():
            self.num_missing[self.bucket[parameter]] -= 1
            while len(self.works) < len(self.buckets) and self.num_missing[len(self.works)] == 0:
                self._begin_bucket()

    def _begin_bucket(self) -> None:
        self.works.append(self.begin_to_add_up(self.buckets[len(self.works)]))

    def finish(self) -> list[Any]:
        """Begin to add up the buckets that are left, as a parameter of theirs was not used; what has to be waited for."""
        while len(self.works) < len(self.buckets):
            self._begin_bucket()
        self.is_active = False
        return self.works

    def take(self) -> None:
        """Take the sums: they are the parameters' gradients already."""

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self.hooks:
            hook.remove()
        self.parameters, self.parts, self.bucket = [], [], {}


class GradientParts:
    """Gradients of this process's part of a model whose weights are divided, added up in one tensor after the last backward.

    Args:
        parameters: those that require gradients.
        begin_to_add_up: begins to add a tensor of all replicas up, and returns what has to be waited for.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], begin_to_add_up: Callable[[torch.Tensor], Any]):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.begin_to_add_up = begin_to_add_up

    def begin(self) -> None:
        """Begin a step, or an attempt of it, without gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> list[Any]:
        """Begin to add up the gradients; what has to be waited for."""
        self.used = [parameter for parameter in self.parameters if parameter.grad is not None]
        self.flat = torch.cat([to_local(parameter.grad).reshape(-1) for parameter in self.used])
        return [self.begin_to_add_up(self.flat)]

    @torch.no_grad()
    def take(self) -> None:
        """Make the sums the parameters' gradients."""
        gradients = [to_local(parameter.grad) for parameter in self.used]
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, self.flat.split(sizes), strict=True):
            gradient.copy_(part.view_as(gradient))

    def close(self) -> None:
        """Let go of the parameters."""
        self.parameters = self.used = []


def to_local(value: Any) -> Any:
    """Take this process's parts of tensors that are divided, in nested dictionaries and lists; all else stays as it is."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, dict):
        return {key: to_local(item) for key, item in value.items()}
    return [to_local(item) for item in value] if isinstance(value, list) else value


class Replicas:
    """This process as one replica of a run, or as one process of a replica.

    Args:
        accelerator: the replica's; its `is_main_process` is set: process 0 of the first replica writes.
        settings: `lighthouse`, `min_replicas`, `replica_timeout`, `ddp_timeout` are used.
        folder: the output folder.

    Attributes:
        step: number of steps that this replica has committed.
        rank, size: number of this process among those of all replicas in the quorum of this step, and how many they are.
        replica, num_replicas: the same of this replica.
        everybody_stops: whether all replicas of the last committed step were asked to stop.
    """

    def __init__(self, accelerator: Accelerator, settings: RunSettings, folder: SharedFolder):
        self.accelerator, self.settings, self.folder = accelerator, settings, folder
        self.local_rank, self.local_size = accelerator.process_index, accelerator.num_processes
        self.rank, self.size, self.replica, self.num_replicas = self.local_rank, self.local_size, 0, 1
        self.local_group = None
        if self.local_size > 1:
            timeout = datetime.timedelta(seconds=settings.ddp_timeout)
            self.local_group = dist.new_group(backend="gloo", timeout=timeout)
        self.everybody_stops = False
        self.manager: Any = None
        self.store: dist.TCPStore | None = None
        self.is_group_new = self.has_begun = self.is_in_charge = False
        self.last_size = self.num_managers = 0
        self.failed_step: int | None = None
        self.last_complaint = ""

    def attach(
        self,
        recovery: Recovery,
        exact_sum: ExactSum | None,
        start: checkpoint.State,
        fingerprints: dict[str, str],
    ) -> None:
        """Take what the replicas share: the model and all that a checkpoint holds, and the cut.

        Args:
            recovery: has model and optimizer, cuts the steps, saves; the evaluations and lines of its log go to replicas that
                are behind.
            exact_sum: adds the gradients up; None: they are added up in a buffer.
            start: the checkpoint's state.
            fingerprints: of the data.
        """
        model, log = recovery.model, recovery.log
        self.model, self.optimizer, self.steps, self.log = model, recovery.optimizer, recovery.steps, log
        self.recovery, self.exact_sum = recovery, exact_sum
        self.step = start.step
        self.frozen = checkpoint.find_frozen(model)
        settings = (self.settings.reproducible, self.settings.dtype, self.accelerator.mixed_precision, self.local_size)
        text = repr((log.recipe.fingerprint, sorted(fingerprints.items()), settings))
        self.fingerprint = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        self.buffer: GradientBuffer | GradientParts | None = None
        parameters = list(model.parameters())
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            self.buffer = GradientParts(parameters, self._begin_to_add_up)
        elif exact_sum is None:
            self.buffer = GradientBuffer(parameters, lambda: self.accelerator.sync_gradients, self._begin_to_add_up)

    # ------------------------------------------------------------------------------------ processes of this replica

    def _find_largest(self, number: int) -> int:
        """Find the largest of the numbers that the processes of this replica give."""
        if self.local_group is None:
            return number
        largest = torch.tensor(number)
        with self._waiting_for_processes():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.local_group)
        return int(largest)

    def _ask_first(self, call: Callable[[], Answer]) -> Answer:
        """Let process 0 of this replica call a function, and tell all of them what it returns."""
        if self.local_group is None:
            return call()
        answer: list[Any] = [call() if self.local_rank == 0 else None]
        with self._waiting_for_processes():
            dist.broadcast_object_list(answer, 0, group=self.local_group)
        return answer[0]

    @contextlib.contextmanager
    def _waiting_for_processes(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RunError(
                f"step {self.step + 1}: another process of this replica has ended, or does not answer; its own output may say "
                "why. Start the replica again"
            ) from error

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
            if self.is_group_new and not self._greet():
                self.give_up()
                continue
            if (data.step, cut) != (self.step, self.steps.cut):
                data, cut = self.steps[self.step], self.steps.cut
            counts = self._count(data)
            if counts is None:
                self.give_up()
                continue
            self._tell_changes()
            self.last_complaint = ""
            if self.buffer is not None:
                self.buffer.begin()
            return data, counts

    def _wait_for_quorum(self) -> None:
        """Wait until enough replicas are there, and this one is where they are; set `step`, `rank`, `size`."""
        deadline = time.monotonic() + self.settings.ddp_timeout
        while True:
            reason, is_manager_lost = "", False
            try:
                if self.manager is None:
                    self._make_manager()
                self._start_quorum()
                num_replicas, replica = self.manager.num_participants(), self.manager.participating_rank()
                if (error := self.manager.errored()) is not None:
                    reason = f"replicas do not reach each other ({_shorten(error)})"
                elif num_replicas < self.settings.min_replicas:
                    reason = f"{num_replicas} of at least {self.settings.min_replicas} replicas are there"
            except (RuntimeError, TimeoutError, OSError) as error:
                if isinstance(error, RunError | UsageError):
                    raise
                lighthouse, is_manager_lost = self.settings.lighthouse, True
                reason = f"replicas that live do not come to the lighthouse {lighthouse}"
                if not isinstance(error, TimeoutError) or not torchft_replica.is_reachable(lighthouse):
                    reason = f"the lighthouse {lighthouse} gives no quorum ({_shorten(error)})"
            worst = self._find_largest(2 if is_manager_lost else bool(reason))
            if worst == 0:
                break
            if worst == 2:
                # A lighthouse that was started again at once looks like the one before, of which this manager is
                self._let_go_of_manager()
            else:
                self.give_up()
            self._wait(reason or "another process of this replica waits", deadline)
        self.step, self.replica, self.num_replicas = self.manager.current_step(), replica, num_replicas
        self.rank, self.size = replica * self.local_size + self.local_rank, num_replicas * self.local_size
        self.steps.set_process(self.rank, self.size)
        self.accelerator.is_main_process = self.rank == 0

    def _start_quorum(self) -> None:
        """Wait for a quorum, and be healed if need be, as long as the lighthouse is there.

        It is waited for in a thread, since torchft goes on waiting for a lighthouse that has died.
        """
        manager, future = self.manager, concurrent.futures.Future()

        def call() -> None:
            try:
                future.set_result(manager.start_quorum())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=call, daemon=True).start()
        while not concurrent.futures.wait([future], SECONDS_BETWEEN_TRIES).done:
            if not torchft_replica.is_reachable(self.settings.lighthouse):
                raise ConnectionError("it does not answer")
        future.result()

    def _wait(self, reason: str, deadline: float) -> None:
        """Wait a moment for something, and say so once.

        Raises:
            HasEnded: there is nothing to wait for any more.
            RunError: it took too long.
        """
        is_done, is_late = self._ask_first(lambda: (self.folder.is_done, time.monotonic() > deadline))
        if is_done:
            raise HasEnded
        if is_late:
            if self.is_first and self.has_begun:
                self.recovery.save(self.step)
            raise RunError(
                f"step {self.step + 1}: {reason}, for {self.settings.ddp_timeout:.0f} s (--ddp_timeout). Start the lighthouse "
                "and the replicas again, with --resume_from_checkpoint latest"
            )
        if reason != self.last_complaint:
            self.last_complaint = reason
            self._say(f"step {self.step + 1} waits: {reason}")
        time.sleep(SECONDS_BETWEEN_TRIES)

    @property
    def is_first(self) -> bool:
        """Whether this is the first replica, which writes."""
        return self.replica == 0

    def _make_manager(self) -> None:
        address = self._ask_first(self._open_store)
        if address is None:
            raise ConnectionError("it does not answer")
        self.is_group_new, self.num_managers = False, self.num_managers + 1
        number = self.num_managers

        def set_state(state: dict[str, Any]) -> None:
            if number == self.num_managers:  # none of a manager that was let go of
                self._set_state(state)

        self.manager = torchft_replica.make_manager(
            self.settings.lighthouse,
            self.accelerator.device,
            self.local_rank,
            self.local_size,
            address,
            timeout=self.settings.replica_timeout,
            connect_timeout=SECONDS_TO_CONNECT,
            quorum_timeout=SECONDS_OF_QUORUM,
            min_replicas=1,
            get_state=self._get_state,
            set_state=set_state,
            on_new_group=self._note_new_group,
        )
        torchft_replica.set_step(self.manager, self.step)

    def _open_store(self) -> tuple[str, int] | None:
        """Open the store by which replicas find each other; its address, or None: the lighthouse is not reached."""
        if not torchft_replica.is_reachable(self.settings.lighthouse):
            return None
        self.store, address = torchft_replica.open_store(self.settings.lighthouse)
        return address

    def _note_new_group(self) -> None:
        self.is_group_new = True

    def _let_go_of_manager(self) -> None:
        """Let go of a manager; the next one has a name and a store of its own, so that nothing old is in the way."""
        self.num_managers += 1
        if self.manager is not None:
            self.manager.shutdown(wait=False)
        self.manager = self.store = None

    def _greet(self) -> bool:
        """Agree with replicas that were not together before: on what is trained, how large micro-batches are, and whether this
        is the begin of the run. Returns whether all of them can go on to a step."""
        tokens = self.steps.max_tokens
        caps = self.steps.layout.per_device_train_batch_size, LARGEST if tokens is None else tokens
        rows = self._gather([int(self.has_begun), *caps, self.fingerprint, self._digest_parameters()])
        if rows is None:
            return False
        begun, sizes, token_caps, fingerprints, digests = rows.T
        differs = (digests.reshape(-1, self.local_size) != digests[: self.local_size]).any(1)  # of each replica
        if len(set(fingerprints.tolist())) > 1:
            if not self.has_begun:
                raise UsageError(
                    f"fault_tolerance is step, but the replicas at {self.settings.lighthouse} do not train the same: start all "
                    "with the same recipe, data, precision and --reproducible, and each run with a lighthouse of its own"
                )
            return False
        if differs[self.replica]:
            # A new lighthouse, which knew nobody, has let replicas take this step apart from each other: the same step, rounded
            # differently. Whoever is not as the first replica is goes back, and so gets its state from the others.
            torchft_replica.set_step(self.manager, max(0, self.step - 1))
        if differs.any():
            return False
        if (smallest := (int(sizes.min()), int(token_caps.min()))) != caps:
            self.steps.set_caps(smallest[0], None if smallest[1] == LARGEST else smallest[1])
        if not begun.any():
            has_begun = self.rank == 0 and self.folder.begin_session(self._prepare_folder)
            answers = self._gather([int(has_begun)])
            if answers is None:
                return False
            if not answers.any():
                self._wait(f"the run in {self.folder.output_dir} is under way on replicas that are not here", math.inf)
                return False
        if not self.has_begun:
            self.folder.take_part()
        self.has_begun, self.is_group_new = True, False
        return True

    def _prepare_folder(self, is_again: bool) -> None:
        """Make the output folder ready for the run.

        Args:
            is_again: whether all replicas that have trained are gone, and others, which have just been started, are here.

        Raises:
            RunError: those that are gone have left a checkpoint that these have not read.
        """
        if is_again and (newest := checkpoint.find_newest_step(self.folder.output_dir)) > self.step:
            raise RunError(
                f"all replicas that trained have ended, after checkpoint-{newest}: start all again, with "
                "--resume_from_checkpoint latest"
            )
        self.log.open_files(self.step)

    def _digest_parameters(self) -> int:
        """Digest the parameters, 62 bits: replicas that go on together have the same ones."""
        text = "".join(map(digest.digest_tensor, self._list_tensors().values()))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def _tell_changes(self) -> None:
        """Write and print that the step is done again, or that the replicas are others."""
        if self.failed_step == self.step:
            message = "a replica was lost or late: the step is done again"
            self.log.add_event(self.step + 1, message, replicas=self.num_replicas)
        elif self.size != self.last_size:
            self.log.add_event(self.step + 1, "the number of replicas has changed", replicas=self.num_replicas)
        self.failed_step, self.last_size = None, self.size

    def _say(self, text: str) -> None:
        if self.local_rank == 0:
            tqdm.write(text, file=sys.stderr)

    # --------------------------------------------------------------------------------------------------- the step

    def _begin_to_add_up(self, tensor: torch.Tensor) -> Any:
        return self.manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM)

    def _add_up(self, tensor: torch.Tensor, *works: Any) -> bool:
        """Add up a tensor of all processes of all replicas in place, and wait for `works`, which began before.

        Returns:
            False where that failed; nobody knows then what is in the tensors.
        """
        if self.local_size > 1:
            with self._waiting_for_processes():
                dist.all_reduce(tensor)
        for work in (*works, self._begin_to_add_up(tensor)):
            work.wait()
        return not self._find_largest(self.manager.errored() is not None)

    def _gather(self, numbers: list[int]) -> np.ndarray | None:
        """Gather the same number of whole numbers from each process, int64 [processes, numbers]; None: a replica was lost."""
        rows = torch.zeros((self.size, len(numbers)), dtype=torch.int64, device=self.accelerator.device)
        rows[self.rank] = torch.tensor(numbers)
        return rows.cpu().numpy() if self._add_up(rows) else None

    def _count(self, data: StepData) -> torch.Tensor | None:
        """Add up the counts of the step, and check that all replicas together have each of its samples once.

        Returns:
            int64 [terms]; None: a replica was lost.
        """
        num_terms, device = len(data.counts), self.accelerator.device
        own = np.array([sample for samples in data.samples for sample in samples], np.int64).reshape(-1, 2)
        offset = sum(sum(sizes) for sizes in data.sizes[: self.rank])
        numbers = torch.zeros(num_terms + 2 * data.num_samples, dtype=torch.int64)
        numbers[:num_terms] = data.counts
        numbers[num_terms:].view(-1, 2)[offset : offset + len(own)] = torch.from_numpy(own)
        numbers = numbers.to(device)
        if not self._add_up(numbers):
            return None
        pairs = numbers[num_terms:].view(-1, 2).cpu().numpy()
        expected_pairs = np.stack(self.steps.order.samples(data.step), 1)
        if not np.array_equal(pairs[np.lexsort(pairs.T)], expected_pairs[np.lexsort(expected_pairs.T)]):
            raise RunError(
                f"step {data.step + 1}: the replicas' parts are not each sample of the step once. Start all replicas with the "
                "same version of this program"
            )
        self.pairs = pairs
        return numbers[:num_terms]

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
        exact_sum, num_terms, sizes = self.exact_sum, len(data.counts), data.sizes
        num_rows, offset = sum(map(len, sizes)), sum(map(len, sizes[: self.rank]))
        table = torch.zeros(num_rows * num_terms + 3 * self.size, dtype=torch.float64, device=self.accelerator.device)
        rows, says = table[: num_rows * num_terms].view(-1, num_terms), table[num_rows * num_terms :].view(-1, 3)
        exponent = 0 if exact_sum is None or has_failed else exact_sum.exponent()
        says[self.rank] = torch.tensor([has_failed, is_asked_to_stop, exponent], dtype=torch.float64)
        if not has_failed:
            if len(sums) != len(data.micro_batches):
                raise UsageError("call step.add_to_log(sums) for each micro-batch before step.clip_grad_norm_")
            num_own = len(sizes[self.rank])  # the others are empty, as processes that divide weights need as many
            rows[offset : offset + num_own] = torch.stack(list(sums)[:num_own]).double()
        if not self._add_up(table, *([] if self.buffer is None else self.buffer.finish())):
            return self.give_up()
        said = says.cpu()
        if said[:, FAILED].any():
            self.give_up()
            return "memory"
        if exact_sum is not None:
            if not exact_sum.fits(int(said[:, EXPONENT].max())):
                self.give_up()
                return "quantum"
            exact_sum.finish(self._add_up)
        if not self._should_commit():
            return self._note_failure()
        self.step += 1  # where the next manager begins, if the lighthouse has gone
        self.everybody_stops = bool(said[:, STOPS].all())
        self.all_sums = list(rows) if self.local_rank == 0 else []
        if self.buffer is not None:
            self.buffer.take()
        return None

    def give_up(self) -> str:
        """Give the attempt up: this replica does not commit it, and meets the others anew."""
        if self.manager is not None:
            self.manager.report_error(RuntimeError("the attempt was given up"))
            self._should_commit()
        return self._note_failure()

    def _should_commit(self) -> bool:
        """Ask whether nothing failed here. A state that is stuck on its way to another replica is a failure, too."""
        is_lost = commits = False
        try:
            commits = self.manager.should_commit()
        except (RuntimeError, TimeoutError):
            is_lost = True
        if self._find_largest(is_lost):
            self._let_go_of_manager()
            return False
        return commits

    def _note_failure(self) -> str:
        self.failed_step = self.step if self.has_begun else None
        return "replica"

    def list_parts(self, data: StepData) -> tuple[list[tuple[int, int]], list[list[tuple[int, int]]]]:
        """List (process, number) and the samples of each micro-batch of all replicas, as they told them before the step.

        Of a replica of several processes the first one lists them for all.
        """
        if self.local_rank > 0:
            return [], []
        places = [(process, number) for process, sizes in enumerate(data.sizes) for number in range(len(sizes))]
        ends = np.cumsum([size for sizes in data.sizes for size in sizes])
        return places, [[tuple(pair) for pair in part.tolist()] for part in np.split(self.pairs, ends)[:-1]]

    # -------------------------------------------------------------------------------------------------- the state

    def _list_tensors(self) -> dict[str, torch.Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: to_local(tensor.detach()) for name, tensor in named if name not in self.frozen}

    def _get_state(self) -> dict[str, Any]:
        """Return all that a replica needs that is behind: what a checkpoint holds, and what is not in the files yet."""
        record = {
            "fingerprint": self.fingerprint,
            "log": self.log.share() | {"lines": self.folder.share()},
            "exponent": None if self.exact_sum is None else self.exact_sum.last_exponent,
        }
        optimizer = to_local(self.optimizer.optimizer.state_dict())
        return {"tensors": self._list_tensors(), "optimizer": optimizer, "record": json.dumps(record)}

    @torch.no_grad()
    def _set_state(self, state: dict[str, Any]) -> None:
        """Become what another replica is.

        Raises:
            UsageError: it trains something else.
        """
        record, tensors = json.loads(state["record"]), self._list_tensors()
        if record["fingerprint"] != self.fingerprint or tensors.keys() != state["tensors"].keys():
            raise UsageError(
                f"fault_tolerance is step, but the replicas at {self.settings.lighthouse} train something else: give this one "
                "the same recipe, data, precision and --reproducible, or a lighthouse of its own"
            )
        for name, tensor in tensors.items():
            tensor.copy_(state["tensors"][name])
        self.optimizer.optimizer.load_state_dict(self._divide(state["optimizer"]))
        checkpoint.lay_out_as_parameters(self.optimizer)
        if self.exact_sum is not None:
            self.exact_sum.last_exponent = record["exponent"]
        self.log.join(record["log"], self.manager.current_step())
        self.folder.take_over(record["log"]["lines"])
        self.recovery.saver.abandoned_folders = []  # those in the folder are of the run that is joined

    def _divide(self, state: dict[str, Any]) -> dict[str, Any]:
        """Make moments that are this process's parts into parts of divided tensors, as their parameters are."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        moments_of_all = {}
        for number, moments in state["state"].items():
            parameter = parameters[number]
            if isinstance(parameter, DTensor):
                part, layout = parameter.to_local(), (parameter.device_mesh, parameter.placements)
                whole = {"shape": parameter.shape, "stride": parameter.stride()}
                moments = {
                    name: DTensor.from_local(value.to(part.device), *layout, **whole)
                    if value.shape == part.shape
                    else value
                    for name, value in moments.items()
                }
            moments_of_all[number] = moments
        return state | {"state": moments_of_all}

    # ---------------------------------------------------------------------------------------------------- the end

    def take_charge(self) -> bool:
        """Leave the other replicas, and wait until this one may end the run: save, evaluate, publish.

        Returns:
            False: another one has done it.
        """
        self._let_go_of_manager()
        deadline = time.monotonic() + self.settings.ddp_timeout
        while True:
            may_end, is_late = self._ask_first(lambda: (self.folder.try_to_end(), time.monotonic() > deadline))
            if may_end:
                break
            if is_late:
                raise RunError(
                    f"another replica has been ending the run in {self.folder.output_dir} for "
                    f"{self.settings.ddp_timeout:.0f} s (--ddp_timeout): see whether it hangs"
                )
            time.sleep(0.1)
        is_in_charge = self._ask_first(lambda: not self.folder.is_done)
        self.accelerator.is_main_process = self.is_in_charge = is_in_charge and self.local_rank == 0
        return is_in_charge

    def leave(self) -> None:
        """Leave the run to the other replicas."""
        self._let_go_of_manager()
        self.accelerator.is_main_process = False

    def close(self) -> None:
        """Let the other replicas know that the run is ended, if this one did that; let go of all."""
        self._let_go_of_manager()
        if self.is_in_charge:
            self.folder.end(is_done=True)
        self.folder.close()
        if self.buffer is not None:
            self.buffer.close()
        self.model = self.optimizer = self.buffer = self.exact_sum = self.recovery = None


def _shorten(error: object) -> str:
    """Shorten an error of torchft to its first line, without a stack trace."""
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
