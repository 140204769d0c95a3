"""Exact evaluation: every held-out sample counted once, on any number of processes."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from recipes.data.steps import Cell, Steps, to_device
from recipes.order import Order
from recipes.plan import solve_layout


@torch.no_grad()
def predict(network: Callable[[torch.Tensor], Any], source, num_samples: int) -> tuple[Cell, torch.Tensor]:
    """A cell of samples spread evenly over a dataset of images, and what a network says of it, on the host.

    Args:
        network: given pixel_values, returns logits [samples, ..., classes], or what holds them; in evaluation mode.
        source: a `SampleSource` of images.
        num_samples: at most.

    Returns:
        The cell; the places of the largest logits, int64 [samples, ...].
    """
    places = torch.linspace(0, len(source) - 1, min(num_samples, len(source))).long().unique()
    cell = source.collate([source.draw(0, place) for place in places.tolist()])
    weight = next(network.parameters())
    logits = network(cell["pixel_values"].to(weight.device, weight.dtype))
    return cell, getattr(logits, "logits", logits).argmax(-1).cpu()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, source, seed: int, batch_size: int) -> torch.Tensor:
    """Summed losses, correct predictions and targets of each loss term over a whole dataset.

    Args:
        accelerator: its processes share the work.
        model: in evaluation mode called with a cell's tensors, returns (sums [terms], correct [terms]).
        source: a `SampleSource` with a length; its samples are drawn as in epoch 0.
        seed: of the order, which decides nothing but the cut.
        batch_size: most samples in one forward.

    Returns:
        float64 [3, terms] on the host: sums, correct, counts.
    """
    layout = solve_layout(
        num_processes=accelerator.num_processes, per_device_train_batch_size=batch_size, gradient_accumulation_steps=1
    )
    order = Order(len(source), layout.global_batch_size, seed, epoch_end="keep")
    steps = Steps(source, order, layout, process_index=accelerator.process_index)
    was_training, totals = model.training, 0
    model.eval()
    for data in steps.stream(0, int(order.steps_per_epoch), 0, accelerator.device):
        (cell,) = data.cells
        sums, correct = model(**to_device(cell, accelerator.device))
        totals = totals + torch.stack([part.to(accelerator.device).double() for part in (sums, correct, data.counts)])
    model.train(was_training)
    return accelerator.reduce(totals, reduction="sum").cpu()
