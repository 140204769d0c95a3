"""sentence-transformers: micro-batches weigh by their rows; a loss that compares rows is not mended by weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from sentence_transformers import SentenceTransformerTrainer

SAMPLES, LOSS = SentenceTransformerTrainer.get_batch_samples, SentenceTransformerTrainer.compute_loss


# page: rows
def count_rows(batch: dict) -> torch.Tensor:
    """Count the rows of a batch: those of its labels, or of a column of texts."""
    found = batch.get("label", next((batch[name] for name in batch if name.endswith("attention_mask")), None))
    return torch.tensor(len(found) if found is not None else len(next(v for k, v in batch.items() if "offsets" in k)))


def get_batch_samples(self, epoch_iterator, num_batches, device):
    batches, number = SAMPLES(self, epoch_iterator, num_batches, device)
    rows = sum(map(count_rows, batches), torch.tensor(0)).to(device)
    self.rows_of_step = self.accelerator.reduce(rows, "sum")
    return batches, number


def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    weight = count_rows(inputs) * self.accelerator.num_processes / self.rows_of_step if model.training else 1.0
    found = LOSS(self, model, inputs, return_outputs, num_items_in_batch)
    return (found[0] * weight, found[1]) if return_outputs else found * weight


# page: end
@contextmanager
def mended() -> Iterator[None]:
    """Let the installed trainer have these methods."""
    methods = {"get_batch_samples": get_batch_samples, "compute_loss": compute_loss, "loss_is_scaled_for_ga": True}
    with mock.patch.multiple(SentenceTransformerTrainer, **methods):
        yield
