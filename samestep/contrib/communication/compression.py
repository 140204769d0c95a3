"""Compressed gradients with error feedback: what is not sent in a step is added to the gradient of the next one.

PowerSGD is torch's own hook of DistributedDataParallel, called by hand on one bucket with all gradients. The hook is linear in
what the processes give it, and in their errors: it depends on their means alone, hence not on the number of processes. In
DistributedDataParallel the first random matrices would depend on its buckets, and one process would have no hook at all.

Top-k (torch has none) is not linear: a number is sent if it is among the largest of its worker. So the workers are the
recipe's, each with its share of every step's samples and an error of its own, and are computed by any number of processes.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from samestep.contrib.communication.algorithms import Communication, count_largest
from samestep.contrib.communication.exchange import Exchange, lay_out
from samestep.cut.layout import shares

EPSILON = 1e-20
"""Added to the norm of a column that is divided by it: of a gradient that is 0 (an adapter's first one) it is 0."""


class FlatGradient:
    """The gradients of a model in one tensor, of which each has a part of its own shape.

    Args:
        parameters: those that are trained, of one type and on one device.
    """

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self.rows = self.flat.split(sizes)
        self.parts = [row.view(parameter.shape) for row, parameter in zip(self.rows, parameters, strict=True)]

    def take(self) -> None:
        """Move the gradients of the parameters here; one that is missing is 0."""
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            part.zero_() if parameter.grad is None else part.copy_(parameter.grad)
            parameter.grad = None

    def give(self) -> None:
        """Give each parameter its gradient."""
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            parameter.grad = lay_out(part, parameter)


class Waiting(dist.ProcessGroup):
    """A process group whose sums are complete when they are returned, so that what follows runs in the caller's thread.

    Over gloo, functions that follow a sum run in a thread of the group, and so does the end of what they hold. They hold the
    group: where theirs is the last reference, the thread waits for its own end, and the process aborts (torch 2.13; one of
    about 30 groups that ended right after 8 small steps).

    Args:
        group: who sums; None: this process is the only one.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__(*((group.rank(), group.size()) if group else (0, 1)))
        self.group = group

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> SimpleNamespace:
        """Sum tensors over the processes, in place. Returns what has the future of its result, as torch's work has."""
        if self.group is not None:
            self.group.allreduce(tensors, options).wait()
        cuda = [tensor.device for tensor in tensors if tensor.is_cuda]
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=cuda)
        future.set_result(tensors)
        return SimpleNamespace(get_future=lambda: future)


class PowerSgd(Exchange):
    """PowerSGD (Vogels et al. 2019, arXiv:1905.13727) with error feedback and a warm start.

    The seed is that of the first random matrices; `step` are the steps so far.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communication: Communication,
        named_parameters: Mapping[str, nn.Parameter],
        seed: int,
        step: int,
    ):
        super().__init__(accelerator, communication, named_parameters)
        self.loss_factor = accelerator.num_processes  # the hook takes the mean of the processes
        self.gradient = FlatGradient(list(self.named.values()))
        self.state = PowerSGDState(
            Waiting(dist.group.WORLD if dist.is_initialized() else None),
            matrix_approximation_rank=communication.rank,
            start_powerSGD_iter=communication.first_step,
            orthogonalization_epsilon=EPSILON,
            random_seed=seed,
        )
        self.state.iter = step

    @torch.no_grad()
    def reduce(self) -> None:
        self.gradient.take()
        bucket = SimpleNamespace(
            buffer=lambda: self.gradient.flat,
            gradients=lambda: self.gradient.parts,
            index=lambda: 0,
            is_last=lambda: True,
        )
        powerSGD_hook(self.state, bucket).wait()
        self.gradient.give()

    def get_state(self) -> dict[str, torch.Tensor]:
        """Return the mean of the processes' errors, which is all that matters of them, and the matrices of the warm start."""
        if 0 not in self.state.error_dict:
            return {}
        error = self.state.error_dict[0].clone()
        if self.accelerator.num_processes > 1:
            dist.all_reduce(error)
            error /= self.accelerator.num_processes
        tensors = {"error": error, "q": self.state.q_memory_dict[0], "p": self.state.p_memory_dict[0]}
        return {name: tensor.cpu() for name, tensor in tensors.items()} if self.accelerator.is_main_process else {}

    def set_state(self, read: Callable[[str], torch.Tensor], names: set[str]) -> None:
        like = self.gradient.flat
        for name, memory in (
            ("error", self.state.error_dict),
            ("q", self.state.q_memory_dict),
            ("p", self.state.p_memory_dict),
        ):
            if name in names:
                memory[0] = read(name).to(like.device, like.dtype)

    def close(self) -> None:
        super().close()
        self.gradient.parameters = []
        self.state.process_group = None


class TopK(Exchange):
    """The numbers of largest magnitude in each tensor of a worker's gradient and error; the rest is its next error.

    The workers' numbers are added up in the order of the workers, on every process.
    """

    def __init__(
        self, accelerator: Accelerator, communication: Communication, named_parameters: Mapping[str, nn.Parameter]
    ):
        super().__init__(accelerator, communication, named_parameters)
        self.gradient = FlatGradient(list(self.named.values()))
        self.counts = [count_largest(communication.share, row.numel()) for row in self.gradient.rows]
        if self.gradient.flat.numel() >= 2**31:
            raise ValueError("top_k numbers the gradient's numbers in 32 bits")
        self.errors = {worker: torch.zeros_like(self.gradient.flat) for worker in self.own}
        # Of each of the own workers; processes with fewer workers than others send zeros in place of one
        self.num_rows = -(-communication.num_workers // accelerator.num_processes)
        self.current, self.values, self.places = self.own[0], [], []

    def begin_worker(self, worker: int) -> None:
        self.current = worker

    @torch.no_grad()
    def end_worker(self) -> None:
        self.gradient.take()
        error = self.errors[self.current].add_(self.gradient.flat)
        values, places, offset = [], [], 0
        for row, count in zip(error.split([row.numel() for row in self.gradient.rows]), self.counts, strict=True):
            chosen = row.abs().topk(count, sorted=False).indices
            values.append(row[chosen])
            row[chosen] = 0
            places.append((chosen + offset).int())
            offset += row.numel()
        self.values.append(torch.cat(values))
        self.places.append(torch.cat(places))

    @torch.no_grad()
    def reduce(self) -> None:
        self.end_worker()
        values, places = (self._gather(torch.stack(rows)) for rows in (self.values, self.places))
        self.values, self.places = [], []
        self.gradient.flat.zero_()
        for process, num_own in enumerate(shares(self.communication.num_workers, self.accelerator.num_processes)):
            for row in range(num_own):
                self.gradient.flat.index_add_(0, places[process, row], values[process, row])
        self.gradient.give()

    def _gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all processes: [processes, `num_rows`, numbers]."""
        if len(rows) < self.num_rows:
            rows = torch.cat([rows, torch.zeros_like(rows[:1])])
        if self.accelerator.num_processes == 1:
            return rows[None]
        gathered = rows.new_empty(self.accelerator.num_processes, *rows.shape)
        dist.all_gather(list(gathered), rows)
        return gathered

    def get_state(self) -> dict[str, torch.Tensor]:
        """Gather the errors of all workers on process 0."""
        tensors = {}
        for worker in range(self.communication.num_workers):
            own = self.errors.get(worker, self.gradient.flat.new_empty(self.gradient.flat.shape))
            tensors[f"{worker}/error"] = self._send_to_first(own, worker).cpu()
        return tensors if self.accelerator.is_main_process else {}

    def set_state(self, read: Callable[[str], torch.Tensor], names: set[str]) -> None:
        for worker, error in self.errors.items():
            error.copy_(read(f"{worker}/error"))

    def close(self) -> None:
        super().close()
        self.gradient.parameters = []
