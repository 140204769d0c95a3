"""Common parts of the algorithms of `recipe.communication`: the workers of a process, and the state that a checkpoint keeps.

Each takes the place of DistributedDataParallel: gradients stay on a process until the exchange, which is one for the whole
model, so that no bucket and no number of processes decides what is computed.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from samestep.contrib.communication.algorithms import Communication, count_sent_bytes
from samestep.cut.layout import shares


class Exchange:
    """An algorithm of a recipe's `communication`, on this process.

    Args:
        accelerator: the run's.
        communication: the recipe's.
        named_parameters: of the model without wrapping; those that require gradients are trained.

    Attributes:
        named: the parameters that are trained, by name.
        own: numbers of the workers that this process computes, in order; empty where the result does not depend on workers,
            so that processes cut steps among themselves.
        loss_factor: factor of a loss, beside the k of `accelerator.backward`.
    """

    loss_factor = 1

    def __init__(
        self, accelerator: Accelerator, communication: Communication, named_parameters: Mapping[str, nn.Parameter]
    ):
        self.accelerator, self.communication = accelerator, communication
        self.named = {name: parameter for name, parameter in named_parameters.items() if parameter.requires_grad}
        self.own = find_own_workers(communication.num_workers, accelerator.num_processes, accelerator.process_index)

    def begin_worker(self, worker: int) -> None:
        """Begin the micro-batches of one of `own`."""

    def end_worker(self) -> None:
        """Take the gradient of the worker whose micro-batches are done."""

    def reduce(self) -> None:
        """Make the gradient whole, between the last backward and the optimizer's step. Called by all processes."""

    def is_exchange(self, step: int, num_steps: int) -> bool:
        """Tell whether workers that take steps of their own exchange parameters after a step (0 is the first) of a training of
        `num_steps`."""
        return False

    def exchange(self) -> None:
        """Exchange parameters: all workers go on from the same ones. Called by all processes."""

    def get_state(self) -> dict[str, torch.Tensor]:
        """Gather what a checkpoint lacks on process 0; {} elsewhere. Called by all processes."""
        return {}

    def set_state(self, read: Callable[[str], torch.Tensor], names: set[str]) -> None:
        """Go on from a checkpoint: `read` reads a tensor of those that `get_state` has named."""

    def count_bytes(self) -> dict[str, int]:
        """Count the bytes that a worker sends in a step on average, and those of the exact step, for the log."""
        tensors = list(self.named.values())
        sizes, itemsize = [tuple(tensor.shape) for tensor in tensors], tensors[0].element_size()
        return {
            "bytes_per_step": round(count_sent_bytes(self.communication, sizes, itemsize)),
            "bytes_per_exact_step": round(count_sent_bytes(None, sizes, itemsize)),
        }

    def close(self) -> None:
        """Let go of the parameters, and of what it made."""
        self.named = {}

    def _send_to_first(self, tensor: torch.Tensor, worker: int) -> torch.Tensor:
        """Send a worker's tensor from its process to process 0, which gives one of the same shape to be filled.

        Returns:
            The tensor of the worker on process 0; elsewhere the same as before.
        """
        num_workers, num_processes = self.communication.num_workers, self.accelerator.num_processes
        owner = next(p for p in range(num_processes) if worker in find_own_workers(num_workers, num_processes, p))
        if owner == 0 or self.accelerator.process_index not in (0, owner):
            return tensor
        moved = tensor.to(self.accelerator.device).contiguous()
        if self.accelerator.process_index == 0:
            dist.recv(moved, owner)
        else:
            dist.send(moved, 0)
        return moved


def find_own_workers(num_workers: int | None, num_processes: int, process_index: int) -> list[int]:
    """List the workers that a process computes: consecutive ones, as many as other processes do, or one more.

    >>> [find_own_workers(4, 3, process) for process in range(3)], find_own_workers(None, 2, 0)
    ([[0, 1], [2], [3]], [])
    """
    if num_workers is None:
        return []
    sizes = shares(num_workers, num_processes)
    first = sum(sizes[:process_index])
    return list(range(first, first + sizes[process_index]))


def lay_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the device, the type and the strides of another one: fused optimizers are wrong where they differ."""
    return torch.empty_like(like, requires_grad=False).copy_(tensor)
