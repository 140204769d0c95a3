"""Computes what a preference loss compares with: log-probabilities of all answers under the model as it was before training."""

from typing import Any

import numpy as np
import torch
from torch import nn

from samestep.models.summed_losses import SummedLosses
from samestep.training import evaluation
from samestep.training.run import Run


class _LogProbabilities(nn.Module):
    """Returns log-probabilities as `evaluation.evaluate_logits` takes logits: [pairs, 2], the chosen answer's first."""

    def __init__(self, model: SummedLosses, num_terms: int):
        super().__init__()
        self.model, self.num_terms = model, num_terms

    def forward(self, **batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = self.model.sequence_log_probabilities(**batch)
        return log_p.new_zeros(self.num_terms), log_p.view(-1, 2)


def add_reference(run: Run, model_class: type[SummedLosses], *sources: Any) -> None:
    """Give sources of pairs the summed log-probability of each answer under the model before its first step.

    Every session of a run computes them anew, from the weights that the recipe starts from; they are the same to the bit for
    any number of processes. Under LoRA the model before its first step is the frozen base.

    Args:
        run: its data is loaded, its model not yet prepared.
        model_class: class of the model.
        sources: get `reference`, float32 [samples, 2]. None: no source.
    """
    torch.manual_seed(run.recipe.seed)
    model = model_class.from_recipe(run.recipe, run.train).to(
        run.accelerator.device, getattr(torch, run.settings.dtype)
    )
    measured = _LogProbabilities(model, len(run.recipe.loss_weights))
    for source in filter(None, sources):
        with run.accelerator.autocast():
            _, values = evaluation.evaluate_logits(
                run.accelerator, measured, source, run.recipe.seed, run.settings.per_device_eval_batch_size
            )
        source.reference = values.astype(np.float32)
