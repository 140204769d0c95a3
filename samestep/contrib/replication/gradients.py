"""Gradients of a replica, added up with those of the others in few tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from samestep.errors import UsageError

BUCKET_BYTES = 8 * 2**20
"""Gradients that are reduced at once, while the backward computes others. Of small models more are at the end than there would
be with the 25 MiB of DistributedDataParallel."""


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
        numbers = np.cumsum(sizes) * first.element_size() // bucket_bytes
        _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        self.bucket = dict(zip(self.parameters, places.tolist(), strict=True))
        self.num_parameters = counts.tolist()
        self.buckets = self.flat.split(np.bincount(places, sizes).astype(int).tolist())
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
