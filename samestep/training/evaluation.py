"""Exact evaluation: every held-out sample counted once, on any number of processes."""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data.steps import MicroBatch, Steps, to_device
from samestep.errors import UsageError, nearest
from samestep.step.exact_sum import add_exactly
from samestep.training import metrics


@torch.no_grad()
def predict(network: Any, source, num_samples: int) -> tuple[MicroBatch, torch.Tensor]:
    """Predict the classes of samples spread evenly over a dataset of images; results are on the host.

    Args:
        network: takes pixel_values, returns logits [samples, ..., classes], or an object with `logits`; in evaluation mode.
        source: a `SampleSource` of images.
        num_samples: samples at most.

    Returns:
        The micro-batch of these samples; the predicted classes (places of the largest logits), int64 [samples, ...].
    """
    places = torch.linspace(0, len(source) - 1, min(num_samples, len(source))).long().unique()
    micro_batch = source.collate([source.draw(0, place) for place in places.tolist()])
    weight = next(network.parameters())
    logits = network(micro_batch["pixel_values"].to(weight.device, weight.dtype))
    return micro_batch, getattr(logits, "logits", logits).argmax(-1).cpu()


@torch.no_grad()
def classify_images(network: Any, source, batch_size: int) -> np.ndarray:
    """Compute the logits of all images of a dataset on this process alone.

    Args:
        network: takes pixel_values, returns an object with `logits` [samples, classes]; in evaluation mode.
        source: `Images`.
        batch_size: samples in one forward, at most.

    Returns:
        float64 [samples, classes], in the dataset's order.
    """
    weight, parts = next(network.parameters()), []
    for first in range(0, len(source), batch_size):
        places = range(first, min(first + batch_size, len(source)))
        pixels = source.collate([source.draw(0, place) for place in places])["pixel_values"]
        parts.append(network(pixels.to(weight.device, weight.dtype)).logits.double().cpu().numpy())
    return np.concatenate(parts)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, source, seed: int, batch_size: int) -> torch.Tensor:
    """Add up losses, correct predictions and targets of each loss term over a whole dataset.

    The totals are the same to the bit for any number of processes: what is computed together does not depend on it, and each
    total is the exact sum of the micro-batches' values, rounded once (`math.fsum`).

    Args:
        accelerator: its processes share the work.
        model: in evaluation mode called with a micro-batch's tensors, returns (sums [terms], correct [terms]).
        source: a `SampleSource` with a length; its samples are drawn as in epoch 0.
        seed: decides the order of the samples, and so which are computed together, but no result beyond rounding.
        batch_size: samples in one forward, at most.

    Returns:
        float64 [3, terms] on the host: sums, correct, counts.
    """
    return _evaluate(model, _Share(accelerator, source, seed, batch_size))[0]


@torch.no_grad()
def evaluate_logits(
    accelerator: Accelerator, model: nn.Module, source, seed: int, batch_size: int
) -> tuple[torch.Tensor, np.ndarray]:
    """Compute a classifier's logits of each sample of a dataset, and its summed loss; the same on every process.

    They are the same to the bit for any number of processes, too, as in `evaluate`.

    Args:
        accelerator, source, seed, batch_size: see `evaluate`.
        model: in evaluation mode called with a micro-batch's tensors, returns (sums [terms], logits [samples, classes]).

    Returns:
        float64 [3, terms] on the host: sums, 0, counts; logits float64 [samples, classes] in the dataset's order, each sample
            once.
    """
    totals, _, logits = _evaluate(model, _Share(accelerator, source, seed, batch_size), has_logits=True)
    return totals, logits


def _evaluate(
    model: nn.Module, share: "_Share", has_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray | None]:
    """Add up what a model returns of a whole dataset, and of each group of its samples; gather its logits.

    Args:
        model: see `evaluate`, or `evaluate_logits` where it `has_logits`.
        share: of this process.

    Returns:
        float64 [3, terms], as of `evaluate`; of each group, [groups, 3, terms]; logits as of `evaluate_logits`, or None.
    """
    accelerator, was_training = share.accelerator, model.training
    rows, ids, logits = [], [], []
    model.eval()
    for data in share.stream(0, len(share), 0, accelerator.device):
        (micro_batch,) = data.micro_batches
        sums, second = model(**to_device(micro_batch, accelerator.device))
        correct = torch.zeros_like(sums) if has_logits else second
        parts = (part.to(accelerator.device).double() for part in (sums, correct, data.counts))
        rows.append(torch.stack(list(parts)))
        if has_logits:
            ids += [sample_id for _, sample_id in data.samples[0]]
            logits.append(second[: len(data.samples[0])].double().cpu().numpy())
    model.train(was_training)
    totals, by_group = _add_up(accelerator, rows, share.find_groups())
    if not has_logits:
        return totals, by_group, None
    shards = gather_object([(np.array(ids, np.int64), np.concatenate(logits))])
    # [samples] and [samples, classes] of all processes, in the order of the processes: sorted by sample id, the dataset's order
    places, values = (np.concatenate(parts) for parts in zip(*shards, strict=True))
    return totals, by_group, values[np.argsort(places)]


class Evaluation(NamedTuple):
    """Facts of held-out data, or of a source of it, before metrics are made of them.

    Attributes:
        totals: float64 [3, terms], see `evaluate`.
        scores: metrics instead of accuracies of tokens, see `score_pairs`; None: accuracies.
    """

    totals: torch.Tensor
    scores: dict[str, float] | None


@torch.no_grad()
def evaluate_by_source(
    accelerator: Accelerator, model: nn.Module, source, recipe: Any, batch_size: int
) -> tuple[Evaluation, dict[str, Evaluation]]:
    """Evaluate a language model on a whole dataset, and on each of its sources: every sample once for both.

    A forward holds samples of one source. Totals are the same to the bit for any number of processes, as in `evaluate`.

    Args:
        accelerator, model, batch_size: see `evaluate`; of pairs the model returns margins, [pairs, 1], beside the sums.
        source: `Conversations`.
        recipe: its seed and its objective.

    Returns:
        the evaluation of all samples; those of the sources by name, none where there is one source only.
    """
    names, numbers = source.source_names, source.source_numbers
    groups = [np.flatnonzero(numbers == number) for number in range(len(names))]
    share = _Share(accelerator, source, recipe.seed, batch_size, groups)
    totals, by_group, margins = _evaluate(model, share, has_logits=recipe.objective != "sft")
    scores: list[dict[str, float] | None] = [None] * (1 + len(groups))
    if margins is not None:
        scores = [score_pairs(values) for values in (margins, *(margins[ids] for ids in groups))]
    sources = zip(by_group, scores[1:], strict=True) if len(names) > 1 else ()
    return Evaluation(totals, scores[0]), dict(zip(names, itertools.starmap(Evaluation, sources), strict=False))


def judge(
    accelerator: Accelerator, names: tuple[str, ...], logits: np.ndarray, source, trust_code: bool
) -> dict[str, float]:
    """Compute metrics of logits once, on process 0, and send them to all processes.

    Args:
        accelerator: its processes call this function together.
        names, trust_code: see `metrics.compute`.
        logits: [samples, classes]; [samples, 1] when labels are numbers.
        source: labelled texts: their `labels` [samples] and `classes`.

    Raises:
        UsageError: a metric that cannot be loaded; on all processes.
    """
    answer: list[dict[str, float] | list[str]] = [{}]
    if accelerator.is_main_process:
        predictions = logits[:, 0] if source.classes is None else logits.argmax(-1)
        try:
            answer = [metrics.compute(names, predictions, source.labels, trust_code)]
        except UsageError as error:
            answer = [error.problems]  # for the other processes, which wait
    (result,) = broadcast_object_list(answer)
    if isinstance(result, list):
        raise UsageError(result)
    return result


def check_metrics(names: tuple[str, ...], best: str, trust_code: bool) -> None:
    """Check, before anything of an earlier run is deleted, that these metrics can be loaded and that `best` is among them.

    Raises:
        UsageError: a metric that cannot be loaded, or `best` is neither the loss nor one of them.
    """
    if best not in ("loss", *names):
        raise UsageError(f"metric_for_best_model is {best!r}: {nearest(best, ['loss', *names])}")
    metrics.load(names, trust_code)


def count_confusions(source, logits: np.ndarray) -> np.ndarray:
    """Count the texts of each true class (rows) by predicted class (columns), int64 [classes, classes].

    Args:
        source: labelled texts: their `labels` [samples] and `classes`.
        logits: [samples, classes].
    """
    size = len(source.classes)
    return np.bincount(size * source.labels + logits.argmax(-1), minlength=size * size).reshape(size, size)


def score_pairs(margins: np.ndarray) -> dict[str, float]:
    """Compute the metrics of an evaluation of preferences, as `RunLog.add_evaluation` takes them.

    Args:
        margins: of all pairs, floating [pairs] or [pairs, 1]; see `samestep.contrib.preferences`.

    Returns:
        `accuracy`, the share of the pairs whose chosen sequence is ranked above the rejected one; `margin`, the mean margin.

    >>> score_pairs(np.array([0.5, -1.5, 0.0, 3.0]))
    {'accuracy': 0.5, 'margin': 0.5}
    """
    return {"accuracy": float((margins > 0).mean()), "margin": add_exactly(margins.ravel().tolist()) / margins.size}


def classify(model: nn.Module, source, batch_size: int) -> np.ndarray:
    """Compute the logits of a dataset on this process alone.

    Args:
        model: returns (sums [1], logits [samples, classes]) of a micro-batch's tensors; is left in evaluation mode.
        source: labelled texts.
        batch_size: samples in one forward, at most.

    Returns:
        float64 [samples, classes], in the dataset's order.
    """
    model.eval()
    parts = []
    for first in range(0, len(source), batch_size):
        micro_batch = source.collate(
            [source.draw(0, place) for place in range(first, min(first + batch_size, len(source)))]
        )
        del micro_batch["counts"]
        with torch.no_grad():
            _, logits = model(**to_device(micro_batch, next(model.parameters()).device))
        parts.append(logits.double().cpu().numpy())
    return np.concatenate(parts)


def find_best(evaluations: Sequence[Mapping[str, Any]], metric: str) -> tuple[int, int]:
    """Find the step of the best of a run's evaluations, the earliest of equal ones, and count the evaluations after it.

    Args:
        evaluations: `step` and `eval_METRIC` of each, in order.
        metric: a loss, a perplexity and an error are better when smaller, all others when larger.

    Raises:
        UsageError: no such metric.

    >>> find_best([{"step": 0, "eval_loss": 2.0}, {"step": 5, "eval_loss": 1.0}, {"step": 9, "eval_loss": 1.0}], "loss")
    (5, 1)
    """
    names = [name.removeprefix("eval_") for name in evaluations[0] if name.startswith("eval_")]
    if metric not in names:
        raise UsageError(f"metric_for_best_model is {metric!r}: {nearest(metric, names)}")
    sign = -1 if metric.endswith(("loss", "perplexity", "mse", "mae", "error", "error_rate")) else 1
    values = [sign * line[f"eval_{metric}"] for line in evaluations]
    place = values.index(max(values))
    return evaluations[place]["step"], len(values) - 1 - place


class _Share(Steps):
    """The micro-batches that one process of several evaluates: each N-th of those that a single process would, whole.

    All processes have equally many, since a sharded model's forward needs all of them; empty ones fill up.

    Args:
        accelerator: its processes share the micro-batches.
        source, seed, batch_size: see `evaluate`.
        groups: sample ids of each group, int64 [samples of the group]; a micro-batch holds samples of one group. None: one of
            all samples.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        source,
        seed: int,
        batch_size: int,
        groups: Sequence[np.ndarray] | None = None,
    ):
        groups = [np.arange(len(source))] if groups is None else groups
        layout = solve_layout(num_processes=1, global_batch_size=batch_size)
        orders = [Order(len(ids), batch_size, seed, epoch_end="keep") for ids in groups]
        super().__init__(source, orders[0], layout, process_index=0)
        self.accelerator, self.groups, self.orders = accelerator, groups, orders
        self.ends = list(
            itertools.accumulate(int(order.steps_per_epoch) for order in orders)
        )  # micro-batches up to each group
        self.rank, self.num_ranks = accelerator.process_index, accelerator.num_processes

    def __len__(self) -> int:
        return math.ceil(self.ends[-1] / self.num_ranks)

    def find_groups(self) -> list[int | None]:
        """Find the group of each micro-batch of all processes, those of process 0 first; None: an empty one."""
        numbers = [step * self.num_ranks + rank for rank in range(self.num_ranks) for step in range(len(self))]
        return [bisect.bisect_right(self.ends, number) if number < self.ends[-1] else None for number in numbers]

    def _draw(self, step: int) -> tuple[np.ndarray, np.ndarray, list[Any], np.ndarray]:
        number = step * self.num_ranks + self.rank
        if number >= self.ends[-1]:
            nothing = np.zeros(0, np.int64)
            return nothing, nothing, [], nothing
        group = bisect.bisect_right(self.ends, number)
        epochs, places = self.orders[group].samples(number - (self.ends[group - 1] if group else 0))
        ids = self.groups[group][places]
        samples = [self.source.draw(0, sample_id) for sample_id in ids.tolist()]
        return epochs, ids, samples, np.array([sample.length for sample in samples])


def _add_up(
    accelerator: Accelerator, rows: list[torch.Tensor], groups: Sequence[int | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up the values, float64 [3, terms], of all micro-batches of all processes, which have equally many.

    The sums are exact, rounded once, whatever the order: one gather in all.

    Args:
        groups: number of the group of each micro-batch of all processes.

    Returns:
        the sums over all micro-batches, [3, terms], and over those of each group, [groups, 3, terms].
    """
    gathered = accelerator.gather(torch.stack(rows).to(accelerator.device)).cpu()  # [micro-batches, 3, terms]

    def add(values: torch.Tensor) -> torch.Tensor:
        totals = [add_exactly(column) for column in values.flatten(1).T.tolist()]
        return torch.tensor(totals, dtype=torch.float64).view(values.shape[1:])

    numbers = torch.tensor([-1 if group is None else group for group in groups])
    return add(gathered), torch.stack([add(gathered[numbers == group]) for group in range(int(numbers.max()) + 1)])
