"""The connection of a process to the processes of the same number in the other replicas: a manager of torchft."""

import concurrent.futures
import threading
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from samestep.contrib.replication import torchft_internals
from samestep.contrib.replication.processes import Processes
from samestep.contrib.replication.shared_state import SharedState
from samestep.recipe.run_settings import RunSettings

SECONDS_BETWEEN_TRIES = 0.5  # to reach the lighthouse, or enough replicas
SECONDS_TO_CONNECT = 5.0
SECONDS_OF_QUORUM = 10.0  # to wait for one before saying so


class Place(NamedTuple):
    """The place of this process in a quorum.

    Attributes:
        rank, size: its number among the processes of all replicas, and how many they are.
        replica, num_replicas: number of its replica, and how many they are.
    """

    rank: int
    size: int
    replica: int = 0
    num_replicas: int = 1


class Connection:
    """The connection to other replicas, by a manager that is made anew where it was let go of.

    Args:
        settings: `lighthouse` and `replica_timeout` are used.
        processes: of this replica.
        state: what a replica that is behind gets.
        device: of gradients.

    Attributes:
        manager: of torchft; None: there is none now.
        is_group_new: whether replicas came or went since the last greeting.
    """

    def __init__(self, settings: RunSettings, processes: Processes, state: SharedState, device: torch.device):
        self.settings, self.processes, self.state, self.device = settings, processes, state, device
        self.manager: Any = None
        self.store: dist.TCPStore | None = None
        self.is_group_new, self.num_managers = False, 0

    def wait_for_quorum(self) -> str | None:
        """Wait for a quorum, and be healed if need be; say what is wrong with it, None: nothing.

        Raises:
            RuntimeError, TimeoutError, OSError: the lighthouse gives none.
        """
        if self.manager is None:
            self._make_manager()
        self._start_quorum()
        error = self.manager.errored()
        return None if error is None else f"replicas do not reach each other ({shorten_error(error)})"

    def explain(self, error: Exception) -> str:
        """Say why the lighthouse gives no quorum, by the error of `wait_for_quorum`."""
        lighthouse = self.settings.lighthouse
        if isinstance(error, TimeoutError) and torchft_internals.is_reachable(lighthouse):
            return f"replicas that live do not come to the lighthouse {lighthouse}"
        return f"the lighthouse {lighthouse} gives no quorum ({shorten_error(error)})"

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
            if not torchft_internals.is_reachable(self.settings.lighthouse):
                raise ConnectionError("it does not answer")
        future.result()

    def _make_manager(self) -> None:
        address = self.processes.ask_first(self._open_store)
        if address is None:
            raise ConnectionError("it does not answer")
        self.is_group_new, self.num_managers = False, self.num_managers + 1
        number = self.num_managers

        def set_state(state: dict[str, Any]) -> None:
            if number == self.num_managers:  # none of a manager that was let go of
                self.state.set(state, self.manager.current_step())

        self.manager = torchft_internals.make_manager(
            self.settings.lighthouse,
            self.device,
            self.processes.rank,
            self.processes.size,
            address,
            timeout=self.settings.replica_timeout,
            connect_timeout=SECONDS_TO_CONNECT,
            quorum_timeout=SECONDS_OF_QUORUM,
            min_replicas=1,
            get_state=self.state.get,
            set_state=set_state,
            on_new_group=self._note_new_group,
        )
        torchft_internals.set_step(self.manager, self.processes.step)

    def _open_store(self) -> tuple[str, int] | None:
        """Open the store by which replicas find each other; its address, or None: the lighthouse is not reached."""
        if not torchft_internals.is_reachable(self.settings.lighthouse):
            return None
        self.store, address = torchft_internals.open_store(self.settings.lighthouse)
        return address

    def _note_new_group(self) -> None:
        self.is_group_new = True

    def close(self) -> None:
        """Let go of a manager; the next one has a name and a store of its own, so that nothing old is in the way."""
        self.num_managers += 1
        if self.manager is not None:
            self.manager.shutdown(wait=False)
        self.manager = self.store = None

    def go_back(self) -> None:
        """Go back a step, so that this replica is behind, and gets its state from the others."""
        torchft_internals.set_step(self.manager, max(0, self.processes.step - 1))

    def begin_to_add_up(self, tensor: torch.Tensor) -> Any:
        """Begin to add a tensor of all replicas up in place; return what has to be waited for."""
        return self.manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM)

    def add_up(self, tensor: torch.Tensor, *works: Any) -> bool:
        """Add up a tensor of all processes of all replicas in place, and wait for `works`, which began before.

        Returns:
            False where that failed; nobody knows then what is in the tensors.
        """
        self.processes.add_up(tensor)
        for work in (*works, self.begin_to_add_up(tensor)):
            work.wait()
        return not self.processes.find_largest(self.manager.errored() is not None)

    def gather(self, numbers: list[int], place: Place) -> np.ndarray | None:
        """Gather the same number of whole numbers from each process, int64 [processes, numbers]; None: a replica was lost."""
        rows = torch.zeros((place.size, len(numbers)), dtype=torch.int64, device=self.device)
        rows[place.rank] = torch.tensor(numbers)
        return rows.cpu().numpy() if self.add_up(rows) else None

    def give_up(self) -> None:
        """Tell the other replicas that this one does not commit the attempt."""
        if self.manager is not None:
            self.manager.report_error(RuntimeError("the attempt was given up"))
            self.should_commit()

    def should_commit(self) -> bool:
        """Ask whether nothing failed here. A state that is stuck on its way to another replica is a failure, too."""
        is_lost = commits = False
        try:
            commits = self.manager.should_commit()
        except (RuntimeError, TimeoutError):
            is_lost = True
        if self.processes.find_largest(is_lost):
            self.close()
            return False
        return commits


def shorten_error(error: object) -> str:
    """Shorten an error of torchft to its first line, without a stack trace."""
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
