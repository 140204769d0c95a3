"""The loss of a causal language model over the tokens of a batch in one row, without its padding."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from samestep._internals.libc import stop_malloc_returning_memory
from samestep._internals.transformers_models import (
    attention_kernel,
    can_set_attention,
    recompute_activations,
    recomputes_within,
    supports_sdpa,
)
from samestep.cut.layout import round_up
from samestep.errors import UsageError
from samestep.models import packing, sequences
from samestep.models.sequences import Sequences
from samestep.step.losses import IGNORED, cross_entropy_sum
from samestep.training.head_loss import BALANCES, HeadLoss, find_balance_weight

INPUTS = ("input_ids", "attention_mask", "labels")


class PackedLoss:
    """Sums a causal language model's cross-entropy over a batch, and computes no padding: `loss=` of `exact(Trainer)`.

    The samples of a padded batch become one row, in which attention stays inside each of them and positions begin anew; logits
    exist of tokens with a label only. Sum and gradient are those of the padded batch,

        sum = - sum_i sum_t log p(label_it | tokens 1 to t - 1 of sample i),

    as is measured on the model itself, before it is changed. In evaluation batches stay padded, so that metrics see logits
    [b, T, classes]. Attention is torch's (sdpa). On a CPU malloc keeps the memory of freed tensors from then on: rows are of
    another size in each step.

        packed = PackedLoss(model)
        trainer = exact(Trainer)(model, arguments, ..., loss=packed)

    Args:
        model: of transformers, or peft's model of it, with a head of tokens. Its attention is set to this row's, and outside of
            rows to torch's, for good.

    Raises:
        UsageError: another head; attention that cannot be exchanged; a model in which one sample reaches the next in a row
            (recurrent layers, convolutions).
    """

    def __init__(self, model: nn.Module):
        causal_lm: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._padded, name = HeadLoss(causal_lm), type(causal_lm).__name__
        if not self._padded.is_shifted:
            raise UsageError(f"PackedLoss is of causal language models, but {name} is none")
        if find_balance_weight(causal_lm.config):
            raise UsageError(BALANCES.format(name))
        if not can_set_attention(causal_lm) or not supports_sdpa(causal_lm):
            raise UsageError(f"{name} computes attention by itself, and not by torch's kernel (sdpa): leave it padded")
        own_kernel = attention_kernel(causal_lm.config)
        kernel = "varlen" if causal_lm.device.type == "cuda" and causal_lm.dtype.itemsize == 2 else "sdpa"
        self._kernel = sequences.register_beside(kernel, "sdpa")
        causal_lm.set_attn_implementation(self._kernel)
        if leak := packing.probe(causal_lm):
            causal_lm.set_attn_implementation(own_kernel)
            raise UsageError(f"{name}: in a row a sample reaches the next one ({leak}): leave it padded")
        if causal_lm.device.type == "cpu":
            stop_malloc_returning_memory()
        self._causal_lm = causal_lm
        self._keeps_logits = "logits_to_keep" in inspect.signature(causal_lm.forward).parameters

    def targets(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Count the labels that are predicted, int64 [1]."""
        return self._padded.targets(_without_first_labels(batch))

    def __call__(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the sum [1] and the number of targets [1].

        Args:
            model: the one of the constructor, or what wraps it (DDP, FSDP).
            batch: input_ids, labels, int64 [b, T]; attention_mask [b, T], 0 where padding is: none is a token everywhere.

        Raises:
            UsageError: the batch has other inputs, or lacks some; a label is where no token is; it is another model.
        """
        batch = _without_first_labels(batch)
        if not model.training:
            return self._padded(model, batch)
        if others := set(batch) - set(INPUTS):
            raise UsageError(f"batch has {', '.join(sorted(others))}: PackedLoss packs {', '.join(INPUTS)} alone")
        mask = batch["attention_mask"].bool()
        labels, lengths = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)[mask], mask.sum(1)
        places = (labels != IGNORED).nonzero().flatten()
        ends = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        ids, num_tokens = batch["input_ids"][mask], len(labels)
        positions = torch.arange(num_tokens, device=ids.device) - ends[:-1].long().repeat_interleave(lengths)
        num_spare = round_up(num_tokens + 1, 6) - num_tokens  # at least one, and few sizes of rows
        row = Sequences(ends, num_tokens + num_spare)
        self._check_model(model)
        keep = {"logits_to_keep": places} if self._keeps_logits else {}
        with sequences.within(row):
            logits = model(
                input_ids=F.pad(ids, (0, num_spare))[None],
                position_ids=F.pad(positions, (0, num_spare))[None],
                use_cache=False,
                **keep,
            ).logits[0]
        logits = logits if self._keeps_logits else logits[places]
        return cross_entropy_sum(logits, labels[places])[None], self._padded.targets(batch)

    def _check_model(self, model: nn.Module) -> None:
        """Refuse a model whose attention would leave the samples; let layers that are computed again know the row, too.

        Trainer turns recomputation on when it begins to train, each time.
        """
        if attention_kernel(self._causal_lm.config) != self._kernel or all(
            module is not self._causal_lm for module in model.modules()
        ):
            raise UsageError(
                "the model is not the one that PackedLoss(model) was made of, or its attention was set anew since: make "
                "PackedLoss of the trainer's model, last"
            )
        causal_lm = self._causal_lm
        if causal_lm.is_gradient_checkpointing and not recomputes_within(causal_lm, sequences.recomputation):
            recompute_activations(causal_lm, {"use_reentrant": False, "context_fn": sequences.recomputation})


def _without_first_labels(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Ignore the labels of samples' first tokens, which only padding in front of them would predict; name the mask."""
    if missing := [name for name in ("input_ids", "labels") if name not in batch]:
        raise UsageError(f"batch has {', '.join(batch) or 'nothing'}, must have {' and '.join(missing)}, too")
    labels = batch["labels"]
    mask = batch.get("attention_mask", torch.ones_like(labels))
    if num_wrong := int(((labels != IGNORED) & (mask == 0)).sum()):
        raise UsageError(f"{num_wrong} labels are at places where attention_mask is 0: set them to {IGNORED}")
    is_first = F.pad(mask[:, :-1], (1, 0)) == 0
    return {**batch, "attention_mask": mask, "labels": labels.masked_fill(is_first, IGNORED)}
