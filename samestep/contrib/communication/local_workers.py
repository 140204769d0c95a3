"""Workers that take steps on their own, and exchange parameters every so many steps: LocalSGD and DiLoCo.

The workers are the recipe's: each has its share of every step's samples, its own parameters and its own state of the optimizer.
A process computes one or several of them, one after the other, and keeps those of the others in memory meanwhile. So what is
computed does not depend on the number of processes.

An exchange takes the parameters x of the last one, and those x_w of the W workers, as the gradient of an outer optimizer:

    g = sum_w (x - x_w) / W,    x = outer(x, g)    SGD, for DiLoCo with Nesterov's momentum; with rate 1 and none the mean
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from samestep.contrib.communication.algorithms import Communication
from samestep.contrib.communication.exchange import Exchange, lay_out

OUTER = "outer"
"""Name of the outer optimizer's momentum in files, in the place of a worker's number."""


class LocalWorkers(Exchange):
    """The workers of a recipe that this process computes.

    The model and the optimizer (of torch, not wrapped) hold those of `current`, and after an exchange those of the first of
    `own`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communication: Communication,
        named_parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ):
        super().__init__(accelerator, communication, named_parameters)
        self.optimizer = optimizer
        self.parameters = list(self.named.values())
        self.current = self.own[0]
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        # Of the workers that the model does not hold; nothing of them is kept before they have begun
        self.held_parameters: dict[int, list[torch.Tensor]] = {}
        self.held_states: dict[int, Any] = {}
        self.outer = torch.optim.SGD(
            self.start,
            lr=communication.outer_learning_rate,
            momentum=communication.outer_momentum,
            nesterov=communication.outer_momentum > 0,
        )

    @torch.no_grad()
    def begin_worker(self, worker: int) -> None:
        """Let the model and the optimizer hold the parameters and the state of one of `own`."""
        if worker == self.current:
            return
        self.held_parameters[self.current] = [parameter.clone() for parameter in self.parameters]
        self.held_states[self.current] = self.optimizer.state
        for parameter, held in zip(self.parameters, self.held_parameters.pop(worker, self.start), strict=True):
            parameter.copy_(held)
        self.optimizer.state = self.held_states.pop(worker, None) or type(self.optimizer.state)(dict)
        self.current = worker

    def is_exchange(self, step: int, num_steps: int) -> bool:
        return (step + 1) % self.communication.num_steps == 0 or step + 1 == num_steps

    @torch.no_grad()
    def exchange(self) -> None:
        parameters_of_workers = [self.parameters, *self.held_parameters.values()]
        differences = []
        for place, start in enumerate(self.start):
            difference = torch.zeros_like(start)
            for parameters in parameters_of_workers:
                difference += start - parameters[place]
            differences.append(difference)
        for flat, parts in _flatten(differences):
            if self.accelerator.num_processes > 1:
                dist.all_reduce(flat)
            flat /= self.communication.num_workers
            for place, part in parts:
                self.start[place].grad = part
        self.outer.step()
        self.outer.zero_grad()
        self.held_parameters.clear()
        for parameter, start in zip(self.parameters, self.start, strict=True):
            parameter.copy_(start)
        if self.current != self.own[0]:
            self.held_states[self.current] = self.optimizer.state
            self.optimizer.state, self.current = self.held_states.pop(self.own[0]), self.own[0]

    def get_state(self) -> dict[str, torch.Tensor]:
        """Gather what a checkpoint lacks on process 0: the states of all workers but the first, and the outer momentum; {}
        elsewhere. Called by all processes after an exchange."""
        own_states, tensors = self.held_states | {self.current: self.optimizer.state}, {}
        for worker in range(1, self.communication.num_workers):
            for name, parameter in self.named.items():
                for key, like in sorted(own_states[self.own[0]].get(parameter, {}).items()):
                    is_own = worker in own_states
                    tensor = own_states[worker][parameter][key] if is_own else torch.empty_like(like)
                    tensors[f"{worker}/{name}/{key}"] = self._send_to_first(tensor, worker)
        if self.communication.outer_momentum > 0:
            for name, start in zip(self.named, self.start, strict=True):
                tensors[f"{OUTER}/{name}"] = self.outer.state[start]["momentum_buffer"]
        is_first = self.accelerator.is_main_process
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()} if is_first else {}

    def set_state(self, read: Callable[[str], torch.Tensor], names: set[str]) -> None:
        """Go on from a checkpoint, of which the model and the optimizer have been loaded already."""
        for start, parameter in zip(self.start, self.parameters, strict=True):
            start.copy_(parameter.detach())
        first_state = self.optimizer.state  # of worker 0, which stands for the shapes of all
        for worker in self.own:
            state: Any = type(first_state)(dict)
            for name, parameter in self.named.items():
                for key, like in first_state.get(parameter, {}).items():
                    state[parameter][key] = like if worker == 0 else lay_out(read(f"{worker}/{name}/{key}"), like)
            self.held_states[worker] = state
        self.optimizer.state = self.held_states.pop(self.own[0])
        for name, start in zip(self.named, self.start, strict=True):
            if f"{OUTER}/{name}" in names:
                self.outer.state[start]["momentum_buffer"] = lay_out(read(f"{OUTER}/{name}"), start)

    def close(self) -> None:
        super().close()
        self.parameters, self.optimizer, self.held_states = [], None, {}


def _flatten(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]]:
    """Put the tensors of each type into one: [(flat, [(place among `tensors`, its part of `flat`), ...]), ...]."""
    groups = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[place].flatten() for place in places])
        sizes = [tensors[place].numel() for place in places]
        parts = [part.view(tensors[place].shape) for place, part in zip(places, flat.split(sizes), strict=True)]
        groups.append((flat, list(zip(places, parts, strict=True))))
    return groups
