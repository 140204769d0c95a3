"""Exact evaluation: every held-out sample counted once, on any number of processes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data.steps import MicroBatch, Steps, to_device
from samestep.errors import UsageError, nearest
from samestep.training import metrics


@torch.no_grad()
def predict(network: Callable[[torch.Tensor], Any], source, num_samples: int) -> tuple[MicroBatch, torch.Tensor]:
    """A micro-batch of samples spread evenly over a dataset of images, and what a network says of it, on the host.

    Args:
        network: given pixel_values, returns logits [samples, ..., classes], or what holds them; in evaluation mode.
        source: a `SampleSource` of images.
        num_samples: at most.

    Returns:
        The micro-batch; the places of the largest logits, int64 [samples, ...].
    """
    places = torch.linspace(0, len(source) - 1, min(num_samples, len(source))).long().unique()
    micro_batch = source.collate([source.draw(0, place) for place in places.tolist()])
    weight = next(network.parameters())
    logits = network(micro_batch["pixel_values"].to(weight.device, weight.dtype))
    return micro_batch, getattr(logits, "logits", logits).argmax(-1).cpu()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, source, seed: int, batch_size: int) -> torch.Tensor:
    """Summed losses, correct predictions and targets of each loss term over a whole dataset.

    Args:
        accelerator: its processes share the work.
        model: in evaluation mode called with a micro-batch's tensors, returns (sums [terms], correct [terms]).
        source: a `SampleSource` with a length; its samples are drawn as in epoch 0.
        seed: of the order, which decides nothing but the cut.
        batch_size: most samples in one forward.

    Returns:
        float64 [3, terms] on the host: sums, correct, counts.
    """
    totals = 0
    for data, (sums, correct) in _forwards(accelerator, model, source, seed, batch_size):
        totals = totals + torch.stack([part.to(accelerator.device).double() for part in (sums, correct, data.counts)])
    return accelerator.reduce(totals, reduction="sum").cpu()


@torch.no_grad()
def outputs(
    accelerator: Accelerator, model: nn.Module, source, seed: int, batch_size: int
) -> tuple[torch.Tensor, np.ndarray]:
    """What a classifier says of each sample of a dataset, and its summed loss; the same on every process.

    Args:
        accelerator, source, seed, batch_size: as of `evaluate`.
        model: in evaluation mode called with a micro-batch's tensors, returns (sums [1], logits [samples, classes]).

    Returns:
        float64 [3, 1] on the host: sums, 0, counts; logits float64 [samples, classes] in the dataset's order, each sample once.
    """
    totals, ids, logits = 0, [], []
    for data, (sums, of_micro_batch) in _forwards(accelerator, model, source, seed, batch_size):
        totals = totals + torch.stack([sums.double().cpu(), torch.zeros(1).double(), data.counts.double()])
        ids += [sample_id for _, sample_id in data.samples[0]]
        logits.append(of_micro_batch[: len(data.samples[0])].double().cpu().numpy())
    gathered = gather_object([(np.array(ids, np.int64), np.concatenate(logits))])
    places, rows = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
    return accelerator.reduce(totals.to(accelerator.device), reduction="sum").cpu(), rows[np.argsort(places)]


def judge(
    accelerator: Accelerator, names: tuple[str, ...], logits: np.ndarray, source, trust_code: bool
) -> dict[str, float]:
    """Metrics of `outputs`, computed once, by process 0, and known to all.

    Args:
        accelerator: its processes.
        names, trust_code: of `metrics.compute`.
        logits: [samples, classes]; [samples, 1] when labels are numbers.
        source: labelled texts: their `labels` [samples] and `classes`.

    Raises:
        UsageError: a metric that cannot be loaded; on all processes.
    """
    found: list[dict[str, float] | list[str]] = [{}]
    if accelerator.is_main_process:
        predictions = logits[:, 0] if source.classes is None else logits.argmax(-1)
        try:
            found = [metrics.compute(names, predictions, source.labels, trust_code)]
        except UsageError as error:
            found = [error.problems]  # for the others, which wait
    (judged,) = broadcast_object_list(found)
    if isinstance(judged, list):
        raise UsageError(judged)
    return judged


def check_metrics(names: tuple[str, ...], best: str, trust_code: bool) -> None:
    """Before anything of an earlier run is deleted: can these metrics be had, and is the one that is to be `best` among them?

    Raises:
        UsageError: no.
    """
    if best not in ("loss", *names):
        raise UsageError(f"metric_for_best_model is {best!r}: {nearest(best, ['loss', *names])}")
    metrics.load(names, trust_code)


def confusion(source, logits: np.ndarray) -> np.ndarray:
    """How many texts of each class, int64 [classes, classes], were taken for which one. Args: as of `judge`."""
    size = len(source.classes)
    return np.bincount(size * source.labels + logits.argmax(-1), minlength=size * size).reshape(size, size)


def classify(model: nn.Module, source, batch_size: int) -> np.ndarray:
    """Logits float64 [samples, classes] of a dataset in its order.

    Args:
        model: as of `outputs`, but on this process alone; left in evaluation mode.
        source: labelled texts.
        batch_size: samples in one forward.
    """
    model.eval()
    found = []
    for first in range(0, len(source), batch_size):
        micro_batch = source.collate(
            [source.draw(0, place) for place in range(first, min(first + batch_size, len(source)))]
        )
        del micro_batch["counts"]
        with torch.no_grad():
            _, logits = model(**to_device(micro_batch, next(model.parameters()).device))
        found.append(logits.double().cpu().numpy())
    return np.concatenate(found)


def best_of(evaluations: Sequence[Mapping[str, Any]], metric: str) -> tuple[int, int]:
    """The step of the best of a run's evaluations, the earlier one of equals, and how many came after it.

    Args:
        evaluations: `step` and `eval_METRIC` of each, in order.
        metric: a loss, a perplexity and an error are better when smaller, all others when larger.

    Raises:
        UsageError: no such metric.

    >>> best_of([{"step": 0, "eval_loss": 2.0}, {"step": 5, "eval_loss": 1.0}, {"step": 9, "eval_loss": 1.0}], "loss")
    (5, 1)
    """
    known = [name.removeprefix("eval_") for name in evaluations[0] if name.startswith("eval_")]
    if metric not in known:
        raise UsageError(f"metric_for_best_model is {metric!r}: {nearest(metric, known)}")
    sign = -1 if metric.endswith(("loss", "perplexity", "mse", "mae", "error")) else 1
    values = [sign * line[f"eval_{metric}"] for line in evaluations]
    place = values.index(max(values))
    return evaluations[place]["step"], len(values) - 1 - place


def _forwards(accelerator: Accelerator, model: nn.Module, source, seed: int, batch_size: int):
    """This process's part of a dataset in evaluation mode: data of one micro-batch, and what the model returns of it."""
    layout = solve_layout(
        num_processes=accelerator.num_processes, per_device_train_batch_size=batch_size, gradient_accumulation_steps=1
    )
    order = Order(len(source), layout.global_batch_size, seed, epoch_end="keep")
    steps = Steps(source, order, layout, process_index=accelerator.process_index)
    was_training = model.training
    model.eval()
    for data in steps.stream(0, int(order.steps_per_epoch), 0, accelerator.device):
        (micro_batch,) = data.micro_batches
        yield data, model(**to_device(micro_batch, accelerator.device))
    model.train(was_training)
