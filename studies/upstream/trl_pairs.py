"""TRL: micro-batches weigh by their pairs, and the terms of CPO and ORPO each by what it is a mean over."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer


# page: pairs
def weigh_by_rows(trainer_class: type) -> dict:
    """Write the methods with which a trainer's micro-batches weigh by their rows, and not alike."""
    samples, loss_of = trainer_class.get_batch_samples, trainer_class.compute_loss

    def count(batch):
        return torch.tensor(len(next(value for value in batch.values() if isinstance(value, torch.Tensor))))

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, number = samples(self, epoch_iterator, num_batches, device)
        rows = sum((count(batch) for batch in batches), torch.tensor(0)).to(device)
        self.rows_of_step = self.accelerator.reduce(rows, "sum")
        return batches, number

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = count(inputs) * self.current_gradient_accumulation_steps * self.accelerator.num_processes
        found = loss_of(self, model, inputs, return_outputs, num_items_in_batch)
        weight = rows / self.rows_of_step if model.training else 1.0
        return (found[0] * weight, found[1]) if return_outputs else found * weight

    return {"get_batch_samples": get_batch_samples, "compute_loss": compute_loss}


# page: terms
def weigh_by_terms(trainer_class: type, pair_loss: str, token_labels: str) -> dict:
    """Write the methods with which the term over tokens and the term over pairs have divisors of their own."""
    samples, forward = trainer_class.get_batch_samples, trainer_class.concatenated_forward
    losses_of = getattr(trainer_class, pair_loss)

    def count(batch):
        tokens = batch[f"chosen_{token_labels}"][:, 1:]  # a mask, or labels
        return torch.tensor([(tokens != (0 if "mask" in token_labels else -100)).sum(), len(tokens)])

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, number = samples(self, epoch_iterator, num_batches, device)
        self.step = self.accelerator.reduce(sum(map(count, batches), torch.zeros(2, dtype=int)).to(device), "sum")
        return batches, number

    def concatenated_forward(self, model, batch):
        factor = self.current_gradient_accumulation_steps * self.accelerator.num_processes
        self.weights = count(batch) * factor / self.step if model.training else torch.ones(2)
        found = forward(self, model, batch)
        return (*found[:4], found[4] * self.weights[0], *found[5:])

    def weighed(self, *args):
        found = losses_of(self, *args)
        return (found[0] * self.weights[1], *found[1:])

    return {"get_batch_samples": get_batch_samples, "concatenated_forward": concatenated_forward, pair_loss: weighed}


# page: end
@contextmanager
def mended() -> Iterator[None]:
    """Let the installed trainers have these methods."""
    methods = {trainer_class: weigh_by_rows(trainer_class) for trainer_class in (DPOTrainer, KTOTrainer, RewardTrainer)}
    methods[CPOTrainer] = weigh_by_terms(CPOTrainer, "cpo_loss", "labels")
    methods[ORPOTrainer] = weigh_by_terms(ORPOTrainer, "odds_ratio_loss", "attention_mask")
    with ExitStack() as stack:
        for trainer_class, replaced in methods.items():
            stack.enter_context(mock.patch.multiple(trainer_class, **replaced, loss_is_scaled_for_ga=False))
        yield
