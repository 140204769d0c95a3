"""Compute a causal model's hidden states of a row of many sequences, and find out whether its sequences stay apart there.

Tokens of sequences that lie end to end are one row, [1, M], without padding. That gives the numbers of each sequence alone only
where nothing but attention joins tokens, attention stays inside a sequence (`sequences`), and positions are those of the
tokens in their sequence. Recurrent states, convolutions over the row, and positions that a model counts itself leak from one
sequence into the next. `probe` measures that, on the model itself.
"""

import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from samestep._internals.torch_tracing import is_fake
from samestep._internals.transformers_models import attention_kernel, can_set_attention, set_text_attention
from samestep.models import sequences
from samestep.models.sequences import Sequences
from samestep.step.losses import IGNORED

LENGTHS = (7, 9)
"""Tokens of the probe's sequences."""
TOLERANCE = 1e-5
"""Relative error above which sequences leak. float32 rounds to 1e-7 to 1e-6; leaks are 1e-4 or more."""


class Leak(NamedTuple):
    """Holds how far a row of two sequences is from each of them alone: |x - x alone| / |x alone|.

    Attributes:
        logits: error of the logits.
        gradient: error of the gradient of the summed loss with respect to the embeddings of the tokens, or to pixels.
    """

    logits: float
    gradient: float

    def __str__(self) -> str:
        return f"logits differ by {self.logits:.0e}, the gradient by {self.gradient:.0e} of its size"


def stay_apart(
    model: PreTrainedModel,
    find_leak: Callable[[PreTrainedModel], Leak | None],
    problem: str = "a sequence reaches the next one in a row",
) -> str | None:
    """Let a model's attention stay inside the sequences of a row; say why it cannot, and is as it was.

    Args:
        model: a causal language model of transformers. Without numbers it is not tried.
        find_leak: tries it.
        problem: what a leak means, in words.
    """
    if not can_set_attention(model):
        return "its attention does not go through transformers' AttentionInterface"
    own_kernel = attention_kernel(model.config)
    set_text_attention(model, sequences.PREFIX + "eager")
    is_apart = False
    try:
        leak = None if is_fake(next(model.parameters())) else find_leak(model)
        is_apart = leak is None
    finally:
        if not is_apart:
            set_text_attention(model, own_kernel)
    return None if is_apart else f"{problem} ({leak})"


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
    generator = torch.Generator().manual_seed(0)
    num_tokens, device = sum(LENGTHS), model.device
    input_ids = torch.randint(model.config.get_text_config().vocab_size, (num_tokens + 1,), generator=generator).to(
        device
    )
    position_ids = torch.cat([torch.arange(length) for length in (*LENGTHS, 1)]).to(device)
    ends = torch.tensor([0, LENGTHS[0], num_tokens], dtype=torch.int32, device=device)

    def compute_alone(first: int, end: int) -> torch.Tensor:
        row = slice(first, end)
        return _last_hidden(model, input_ids=input_ids[None, row], position_ids=position_ids[None, row])[0]

    alone = [
        Sequence(input_ids[first:end], partial(compute_alone, first, end))
        for first, end in ((0, LENGTHS[0]), (LENGTHS[0], num_tokens))
    ]
    row = Sequences(ends, num_tokens + 1)
    return compare(model, partial(row_hidden, model, input_ids[None], position_ids[None], row), alone)


class Sequence(NamedTuple):
    """Holds a sequence that a probe computes.

    Attributes:
        input_ids: int64 [n].
        hidden: computes its last hidden states alone, [n, width].
        leaves: what else has a gradient, as its pixels: floating tensors that require one.
    """

    input_ids: torch.Tensor
    hidden: Callable[[], torch.Tensor]
    leaves: tuple[torch.Tensor, ...] = ()


def compare(
    model: PreTrainedModel,
    hidden: Callable[[], torch.Tensor],
    alone: Collection[Sequence],
    leaves: tuple[torch.Tensor, ...] = (),
) -> Leak | None:
    """Compute sequences together, and each alone, and compare logits and gradients; see `probe`.

    Args:
        model: a causal language model; of its kernels the language model's is transformers' plain one where a sequence is
            computed alone.
        hidden: computes the last hidden states of all together, [M, width], in the order of `alone`; more rows may follow.
        alone: the sequences.
        leaves: those of all sequences together, in each of them those of the sequences that have some, end to end.

    Returns:
        None: they are the same.
    """
    was_training, kernel = model.training, attention_kernel(model.config)
    model.eval()
    try:
        together = _compute(model, hidden, alone, leaves)
        if can_set_attention(model):
            set_text_attention(model, "eager")
        parts = [_compute(model, sequence.hidden, [sequence], sequence.leaves) for sequence in alone]
    finally:
        if can_set_attention(model):
            set_text_attention(model, kernel)
        model.train(was_training)
    errors = []
    for number, x in enumerate(together):
        y = torch.cat([part[number].flatten(0, -2) for part in parts if number < len(part)])
        errors.append(((x.flatten(0, -2)[: len(y)] - y).norm() / y.norm()).item())
    leak = Leak(errors[0], max(errors[1:]))
    return None if max(leak) <= TOLERANCE else leak


def _compute(
    model: PreTrainedModel,
    hidden: Callable[[], torch.Tensor],
    row: Collection[Sequence],
    leaves: tuple[torch.Tensor, ...],
) -> list[torch.Tensor]:
    """Compute the logits of a row of sequences, [M, classes], the gradient of the embeddings, [M, width], and of the leaves."""
    embeddings: list[torch.Tensor] = []

    def detach(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    # A tensor of its own, so that no gradient of the table of embeddings is computed
    handle = model.get_input_embeddings().register_forward_hook(detach)
    try:
        with torch.enable_grad():
            states, head = hidden(), model.get_output_embeddings()
            logits = states if head is None else head(states)
            # Every token predicts the next one of its sequence
            parts = [F.pad(sequence.input_ids[1:], (0, 1), value=IGNORED) for sequence in row]
            labels = torch.cat(parts)
            labels = F.pad(labels, (0, len(logits) - len(labels)), value=IGNORED)
            labels = torch.where(labels < 0, labels, labels % logits.shape[1])
            loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
            gradient, *others = torch.autograd.grad(loss, [*embeddings, *leaves])
    finally:
        handle.remove()
    return [logits.detach(), gradient[0], *others]
