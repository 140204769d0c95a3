"""Accelerate: a window is a mean over what its micro-batches hold, whatever their number and sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import find_batch_size

ITERATE = DataLoaderShard.__iter__
ACCUMULATE, BACKWARD = Accelerator.accumulate, Accelerator.backward


# page: accumulate
@contextmanager
def accumulate(self, *models, targets=None):
    """Accumulate a mean over `targets` things; without it, over the rows of the loader's batch."""
    with ACCUMULATE(self, *models):
        self.targets = self.gradient_state.rows if targets is None else targets
        self.models_of_window = models
        yield
    self.targets = None


def backward(self, loss, **options):
    if self.targets is None:  # outside of `accumulate`
        return BACKWARD(self, loss, **options)
    BACKWARD(self, loss * self.targets * self.gradient_accumulation_steps, **options)  # a sum: its divisor comes last
    self.num_targets = self.num_targets + self.targets
    if self.sync_gradients:
        total = self.reduce(torch.as_tensor(self.num_targets, dtype=torch.float64), "sum").item()
        for model in self.models_of_window:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= self.num_processes / total  # DDP divides by the processes
        self.num_targets = 0


def iterate(self):
    for batch in ITERATE(self):
        self.gradient_state.rows = find_batch_size(batch)
        yield batch


# page: end
@contextmanager
def mended() -> Iterator[None]:
    """Let the installed Accelerator have these methods."""
    methods = {"accumulate": accumulate, "backward": backward}
    with (
        mock.patch.multiple(Accelerator, **methods, targets=None, num_targets=0, create=True),
        mock.patch.object(DataLoaderShard, "__iter__", iterate),
    ):
        yield
