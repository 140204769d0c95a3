"""Compute a causal model's hidden states of a row of many sequences, and find out whether its sequences stay apart there.

Tokens of sequences that lie end to end are one row, [1, M], without padding. That gives the numbers of each sequence alone only
where nothing but attention joins tokens, attention stays inside a sequence (`sequences`), and positions are those of the
tokens in their sequence. Recurrent states, convolutions over the row, and positions that a model counts itself leak from one
sequence into the next. `probe` measures that, on the model itself.
"""

import inspect
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from samestep._internals.transformers_models import attention_kernel, can_set_attention
from samestep.models import sequences
from samestep.models.sequences import Sequences

LENGTHS = (7, 9)
"""Tokens of the probe's sequences."""
TOLERANCE = 1e-5
"""Relative error above which sequences leak. float32 rounds to 1e-7 to 1e-6; leaks are 1e-4 or more."""


class Leak(NamedTuple):
    """Holds how far a row of two sequences is from each of them alone: |x - x alone| / |x alone|.

    Attributes:
        logits: error of the logits.
        gradient: error of the gradient of the summed loss with respect to the embeddings of the tokens.
    """

    logits: float
    gradient: float

    def __str__(self) -> str:
        return f"logits differ by {self.logits:.0e}, the gradient by {self.gradient:.0e} of its size"


def row_hidden(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, row: Sequences
) -> torch.Tensor:
    """Compute the last hidden states of a row of sequences, [M, width], without padding.

    Args:
        model: a causal language model of transformers, without its head or with it.
        input_ids, position_ids: int64 [1, M], the last token spare.
        row: the sequences.
    """
    with sequences.within(row):
        return _last_hidden(model, input_ids=input_ids, position_ids=position_ids)[0]


def padded_hidden(model: PreTrainedModel, input_ids: torch.Tensor, row: Sequences) -> torch.Tensor:
    """Compute the last hidden states of a row of sequences, [n, width], each alone in a row that the spare token fills up."""
    rows = row.rows()
    padded = input_ids[0, rows.source]  # [Q', T]
    mask = None if rows.is_token is None else rows.is_token[:, 0, 0].long()
    position_ids = torch.arange(padded.shape[1], device=padded.device).expand_as(padded)
    hidden = _last_hidden(model, input_ids=padded, position_ids=position_ids, attention_mask=mask)
    return hidden.flatten(0, 1)[rows.place]


def find_padded(place: torch.Tensor, ends: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Find the padded rows' flattened places of tokens of a row of sequences, as `padded_hidden` lays them out.

    Args:
        place: int64 [m], of tokens in the row.
        ends: as of `Sequences`.
        num_tokens: of the row.
    """
    return Sequences(ends, num_tokens + 1, num_tokens).rows().place[place]


def _last_hidden(model: PreTrainedModel, **inputs: torch.Tensor | None) -> torch.Tensor:
    base = model.base_model
    known = inspect.signature(base.forward).parameters
    inputs = {name: value for name, value in inputs.items() if name in known or name != "position_ids"}
    return base(**inputs, use_cache=False, return_dict=True).last_hidden_state


def probe(model: PreTrainedModel) -> Leak | None:
    """Compute two short random sequences together in one row, and each alone, and compare logits and gradient.

    Together they are computed with the model's attention kernel as it is; alone with transformers' plain one. The model's
    weights, gradients and noise stay as they are. One forward and backward of few tokens; no gradient of weights is computed.

    Args:
        model: a causal language model of transformers, with numbers, in float32 or wider. With another head, hidden states are
            compared instead of logits.

    Returns:
        None: they are the same.
    """
    device, was_training, kernel = model.device, model.training, attention_kernel(model.config)
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    input_ids = torch.randint(model.config.get_text_config().vocab_size, (num_tokens + 1,), generator=generator).to(
        device
    )
    position_ids = torch.cat([torch.arange(length) for length in (*LENGTHS, 1)]).to(device)
    ends = torch.tensor([0, LENGTHS[0], num_tokens], dtype=torch.int32, device=device)
    model.eval()
    try:
        row = Sequences(ends, num_tokens + 1)
        logits, gradient = _compute(model, input_ids, position_ids, row, LENGTHS)
        if can_set_attention(model):
            model.set_attn_implementation("eager")
        alone = [
            _compute(model, input_ids[first:end], position_ids[first:end], None, (length,))
            for first, end, length in zip((0, LENGTHS[0]), (LENGTHS[0], num_tokens), LENGTHS, strict=True)
        ]
    finally:
        if can_set_attention(model):
            model.set_attn_implementation(kernel)
        model.train(was_training)
    pairs = zip((logits, gradient), (torch.cat(parts) for parts in zip(*alone, strict=True)), strict=True)
    leak = Leak(*(((x[:num_tokens] - y).norm() / y.norm()).item() for x, y in pairs))
    return None if max(leak) <= TOLERANCE else leak


def _compute(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    row: Sequences | None,
    lengths: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logits of a row of tokens, [M, classes], and the gradient of the embeddings, [M, width]."""
    embeddings: list[torch.Tensor] = []

    def detach(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    # A tensor of its own, so that no gradient of the table of embeddings is computed
    handle = model.get_input_embeddings().register_forward_hook(detach)
    try:
        with torch.enable_grad(), sequences.within(row):
            hidden = _last_hidden(model, input_ids=input_ids[None], position_ids=position_ids[None])[0]
            head = model.get_output_embeddings()
            logits = hidden if head is None else head(hidden)
            # Every token predicts the next one of its sequence
            labels, last = input_ids.roll(-1) % logits.shape[1], torch.tensor(lengths).cumsum(0) - 1
            labels = labels.index_fill(0, last.to(labels.device), -100)
            labels[sum(lengths) :] = -100
            loss = F.cross_entropy(logits, labels, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, embeddings)
    finally:
        handle.remove()
    return logits.detach(), gradient[0]
