"""The contrastive loss of a run's steps, of the embeddings of all samples, and the evaluation of embeddings."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from samestep.contrib.whole_batch import contrastive
from samestep.contrib.whole_batch.quantities import Quantities, WholeBatch
from samestep.data.text_pairs import MISSING
from samestep.recipe.tasks.embedding_training import EmbeddingTraining
from samestep.training import evaluation, retrieval
from samestep.training.capacity import is_out_of_memory
from samestep.training.own_loop import LoopStep
from samestep.training.run import Run
from samestep.training.run_step import RunStep

MAX_SCALE = math.log(100)
"""Largest logarithm of 1 / temperature that is learned, as CLIP has it (Radford et al., 2021, arXiv:2103.00020)."""


class ContrastiveLoss:
    """Computes a recipe's loss of the rows of all samples; their order decides nothing, not even a rounding.

    Args:
        recipe: names the loss.
        scale, bias: parameters, the logarithm of 1 / temperature and the bias of siglip; None: the recipe's numbers.
    """

    def __init__(self, recipe: EmbeddingTraining, scale: torch.Tensor | None = None, bias: torch.Tensor | None = None):
        self.recipe, self._scale, self._bias = recipe, scale, bias

    def __call__(
        self, numbers: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor, texts: torch.Tensor
    ) -> torch.Tensor:
        """Compute the mean loss of B samples, scalar.

        Args:
            numbers: int64 [B], which put the samples in order.
            keys: int64 [B, 1 + m], of texts, equal for equal ones; `MISSING` where there is none.
            queries, texts: [B, d], [B, 1 + m, d], of length 1; of each sample its own text, then its negatives.
        """
        order = numbers.argsort(stable=True)
        keys, queries, texts = keys[order], queries[order], texts[order]
        negatives = (texts[:, 1:],) if texts.shape[1] > 1 else ()
        sizes = self.recipe.matryoshka_sizes

        def loss(*rows: torch.Tensor) -> torch.Tensor:
            return self._compare(keys, *rows)

        return (contrastive.matryoshka(loss, sizes) if sizes else loss)(queries, texts[:, 0], *negatives)

    def _compare(
        self, keys: torch.Tensor, queries: torch.Tensor, documents: torch.Tensor, negatives: torch.Tensor | None = None
    ) -> torch.Tensor:
        scale: Any = 1 / self.recipe.temperature
        if self._scale is not None:  # its gradient is not 0 at the bound, so that it can come back
            scale = (self._scale + (self._scale.clamp(max=MAX_SCALE) - self._scale).detach()).exp()
        if self.recipe.objective == "siglip":
            bias: Any = self.recipe.similarity_bias if self._bias is None else self._bias
            return contrastive.siglip(queries, documents, scale=scale, bias=bias)
        own, candidates = keys[:, 0], torch.cat([keys[:, 0], keys[:, 1:].flatten()])
        masks, texts = self.recipe.mask_duplicates, documents
        if negatives is not None:
            texts = torch.cat([documents, negatives.flatten(0, 1)])

        def is_left_out(rows: slice) -> torch.Tensor:
            is_out = (candidates == MISSING).expand(len(own[rows]), -1) | self._are_nearer(queries, texts, rows)
            return is_out | (candidates == own[rows, None]) if masks else is_out

        def is_same(rows: slice) -> torch.Tensor:
            return (own == own[rows, None]) | self._are_nearer(documents, queries, rows)

        loss = contrastive.info_nce(queries, documents, negatives, scale=scale, is_false_negative=is_left_out)
        if not self.recipe.symmetric:
            return loss
        other = contrastive.info_nce(documents, queries, scale=scale, is_false_negative=is_same if masks else None)
        return (loss + other) / 2

    @torch.no_grad()
    def _are_nearer(self, rows: torch.Tensor, others: torch.Tensor, part: slice) -> torch.Tensor:
        """Tell which others are nearer to a part of the rows than their own one by more than the recipe's margin."""
        margin = self.recipe.false_negative_margin
        if margin is None:
            return torch.zeros((), dtype=torch.bool, device=rows.device)
        similarities = rows[part] @ others.T
        own = similarities.diagonal(part.start)
        return similarities > own[:, None] + margin


class RunLoss(WholeBatch):
    """Computes the loss of all samples of a run's step, though its micro-batches are computed one at a time.

        whole = run.whole_batch()
        for step in run.steps(train):
            with step:
                whole.look(step)
                for batch in step.micro_batches:
                    with accelerator.accumulate(model):
                        accelerator.backward(whole.loss(step, model(**batch)[1]))
                        ...

    Memory that runs out in `look` repeats the step in smaller micro-batches, as in a backward. Where one micro-batch is the
    whole step, `look` does nothing: its own loss is the step's.
    """

    _refuses_nonfinite = False  # the run's on_nonfinite decides
    _remedy = "A module draws it by itself, not by sample, or normalises by the batch: set dropout to 0, or take another model"
    _run_step: RunStep

    def __init__(self, run: Run):
        body = run.bare_model.body
        scale, bias = getattr(body, "similarity_scale", None), getattr(body, "similarity_bias", None)
        self._run, self.compare = run, ContrastiveLoss(run.recipe, scale, bias)
        parameters = [parameter for parameter in (scale, bias) if parameter is not None]
        super().__init__(run.network.model, lambda model, batch: model(**batch)[1], self.compare, parameters=parameters)

    def look(self, step: LoopStep | RunStep) -> torch.Tensor:
        assert isinstance(step, RunStep)
        self._run_step = step
        return torch.zeros(()) if _is_whole(step) else super().look(step)

    def loss(self, step: LoopStep | RunStep, quantities: torch.Tensor | Quantities) -> torch.Tensor:
        assert isinstance(step, RunStep)
        if not _is_whole(step):
            return super().loss(step, quantities)
        if step.data.samples[0]:
            value = self.compare(*quantities)
        else:  # another process has the samples, and waits for gradients of all parameters
            value = sum((rows.sum() for rows in (*quantities[2:], *self._parameters)), torch.zeros(())) * 0
        step.add_to_log(value.detach() * step.num_targets)
        return value * step.loss_scale

    def _compute_all(self, model: nn.Module, micro_batches: Iterable[tuple[Any, bool]]) -> Any:
        found, failure = None, None
        try:
            found = super()._compute_all(model, micro_batches)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error
        self._run_step.confirm_look(failure)
        return found

    def _differentiate(self, whole: Sequence[torch.Tensor]) -> Any:
        # The exchange was not one of gradients
        self._run_step.attempt.first_collective = self._run.recovery.count_collectives()
        return super()._differentiate(whole)

    @torch.no_grad()
    def evaluate(self, held_out: Any) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the loss of all held-out pairs, as if they were one step, and how their queries find their texts.

        Called by all processes.

        Returns:
            float64 [3, 1]: sum, 0, count; the scores of `retrieval.score`.
        """
        run, size = self._run, self._run.settings.per_device_eval_batch_size
        _, values = evaluation.evaluate_logits(run.accelerator, run.network.model, held_out, run.recipe.seed, size)
        answer: list[Any] = [None]
        if run.accelerator.is_main_process:  # the others would compute the same
            device = run.accelerator.device
            rows = torch.from_numpy(values).to(
                device, torch.float64 if run.settings.dtype == "float64" else torch.float32
            )
            queries, texts = rows.view(len(held_out), held_out.num_texts, -1).split([1, held_out.num_texts - 1], 1)
            keys = torch.tensor(held_out.keys, device=device)
            loss = self.compare(torch.arange(len(keys), device=device), keys, queries[:, 0], texts)
            answer = [(loss.item(), retrieval.score(queries[:, 0], texts, keys))]
        ((loss_value, scores),) = broadcast_object_list(answer)
        count = float(len(held_out))
        return torch.tensor([[loss_value * count], [0.0], [count]], dtype=torch.float64), scores


def _is_whole(step: RunStep) -> bool:
    """Tell whether one micro-batch, of whatever process, has all samples of a step."""
    return step.data.num_micro_batches == 1
