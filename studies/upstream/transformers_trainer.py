"""Trainer of transformers: how a head counts is measured, and micro-batches weigh by their targets."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from transformers import Trainer

BASE = {name: getattr(Trainer, name) for name in ("get_batch_samples", "compute_loss", "prediction_step")}
BASE["evaluation_loop"] = Trainer.evaluation_loop


# page: measure
@torch.no_grad()
def measure_head(trainer: Trainer, batch: dict) -> tuple[bool, bool]:
    """Measure whether a head divides by num_items_in_batch, and whether it predicts the first label of a row."""
    was_training = trainer.model.training
    trainer.model.eval()  # no dropout

    def loss(num_items: int | None, **changed: torch.Tensor) -> torch.Tensor:
        number = {} if num_items is None else {"num_items_in_batch": torch.tensor(num_items)}
        return trainer.model(**trainer._prepare_inputs(batch | changed), **number).loss

    labels = batch.get("labels")
    takes_number = trainer.model_accepts_loss_kwargs and labels is not None
    divides = takes_number and not torch.allclose(loss(1000), loss(2000))
    skips_first = False
    if divides and labels.ndim > 1:
        without_first = labels.clone()
        without_first[..., 0] = -100
        skips_first = torch.equal(loss(1000), loss(1000, labels=without_first))
    trainer.model.train(was_training)
    return divides, not skips_first


# page: weigh
def count_targets(trainer: Trainer, batch: dict) -> torch.Tensor:
    """Count what the loss of a batch is a mean over: labels that are not ignored, or rows where there are none."""
    labels = batch.get("labels")
    if labels is None:
        return torch.tensor(len(next(iter(batch.values()))))
    return ((labels if trainer.predicts_first else labels[..., 1:]) != -100).sum()


def get_batch_samples(self, epoch_iterator, num_batches, device):
    batches, _ = BASE["get_batch_samples"](self, epoch_iterator, num_batches, device)
    if batches and not hasattr(self, "divides"):
        self.divides, self.predicts_first = measure_head(self, batches[0])
    total = sum((count_targets(self, batch) for batch in batches), torch.tensor(0)).to(device)
    return batches, self.accelerator.reduce(total, "sum")


def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    if not model.training or self.divides:  # the head divides its sum by the number of the step
        return BASE["compute_loss"](self, model, inputs, return_outputs, num_items_in_batch)
    weight = count_targets(self, inputs) * self.accelerator.num_processes / num_items_in_batch
    found = BASE["compute_loss"](self, model, inputs, return_outputs)
    return (found[0] * weight, found[1]) if return_outputs else found * weight


# page: evaluate
def prediction_step(self, model, inputs, *args, **options):
    if not hasattr(self, "divides"):
        self.divides, self.predicts_first = measure_head(self, inputs)
    found = BASE["prediction_step"](self, model, inputs, *args, **options)
    number = count_targets(self, inputs)
    self.sums += torch.stack([found[0].double() * number, number.double()])
    return found


def evaluation_loop(self, *args, metric_key_prefix="eval", **options):
    self.sums = torch.zeros(2, dtype=torch.float64)
    output = BASE["evaluation_loop"](self, *args, metric_key_prefix=metric_key_prefix, **options)
    total, number = self.accelerator.reduce(self.sums, "sum").tolist()
    output.metrics[f"{metric_key_prefix}_loss"] = total / number
    return output


# page: end
@contextmanager
def mended() -> Iterator[None]:
    """Let the installed Trainer have these methods."""
    methods = {"get_batch_samples": get_batch_samples, "compute_loss": compute_loss, "loss_is_scaled_for_ga": True}
    methods |= {"prediction_step": prediction_step, "evaluation_loop": evaluation_loop}
    with mock.patch.multiple(Trainer, **methods):
        yield
