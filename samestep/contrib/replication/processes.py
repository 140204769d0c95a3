"""The processes of one replica, which decide together, so that they stay one replica."""

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from tqdm import tqdm

from samestep.errors import RunError

Answer = TypeVar("Answer")


class Processes:
    """The processes of one replica.

    Args:
        accelerator: the replica's.
        seconds: to wait for another process.

    Attributes:
        rank, size: number of this process in the replica, and how many there are.
        step: number of steps that the replica has committed.
    """

    def __init__(self, accelerator: Accelerator, seconds: float):
        self.rank, self.size, self.step = accelerator.process_index, accelerator.num_processes, 0
        self.group = None
        if self.size > 1:
            self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=seconds))

    def find_largest(self, number: int) -> int:
        """Find the largest of the numbers that the processes give."""
        if self.group is None:
            return number
        largest = torch.tensor(number)
        with self._waiting():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return int(largest)

    def ask_first(self, call: Callable[[], Answer]) -> Answer:
        """Let process 0 call a function, and tell all of them what it returns."""
        if self.group is None:
            return call()
        answer: list[Any] = [call() if self.rank == 0 else None]
        with self._waiting():
            dist.broadcast_object_list(answer, 0, group=self.group)
        return answer[0]

    def add_up(self, tensor: torch.Tensor) -> None:
        """Add up a tensor of all processes in place."""
        if self.size > 1:
            with self._waiting():
                dist.all_reduce(tensor)

    def say(self, text: str) -> None:
        """Print a line of the replica."""
        if self.rank == 0:
            tqdm.write(text, file=sys.stderr)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RunError(
                f"step {self.step + 1}: another process of this replica has ended, or does not answer; its own output may say "
                "why. Start the replica again"
            ) from error
