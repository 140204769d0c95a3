"""Attention over samples that lie end to end, with no padding between them.

Of a transformer's work on short samples most is in products that know nothing of samples: embeddings, projections, feed-forward
layers. They take a cell's tokens as one long row, [1, M, width]. Only attention needs samples: queries, keys and values are
gathered into [S, heads, T, d], padded to the cell's longest sample, and its outputs go back into the row. Both gathers are
one-to-one on tokens, so that their backward is the other one. No number of a sample depends on the others.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface


class Rows(NamedTuple):
    """Where the tokens of S samples, end to end M, are in a table of [S, T].

    Attributes:
        num_samples: S.
        source: int64 [S * T], of each place of the table its token; of padding, 0.
        place: int64 [M], of each token its place in the table.
        is_token: bool [S, 1, 1, T]; None when nothing is padded.
    """

    num_samples: int
    source: torch.Tensor
    place: torch.Tensor
    is_token: torch.Tensor | None


def rows_of(lengths: np.ndarray) -> dict[str, torch.Tensor | None]:
    """What `Rows` holds beside their number, of samples of these lengths, as a cell's tensors.

    >>> {name: value.tolist() for name, value in rows_of(np.array([2, 1])).items()}
    {'source': [0, 1, 2, 0], 'place': [0, 1, 2], 'is_token': [[[[True, True]]], [[[True, False]]]]}
    """
    is_token = np.arange(lengths.max()) < lengths[:, None]
    place = np.flatnonzero(is_token)
    source = np.zeros(is_token.size, np.int64)
    source[place] = np.arange(len(place))
    mask = None if is_token.all() else torch.from_numpy(is_token[:, None, None])
    return {"source": torch.from_numpy(source), "place": torch.from_numpy(place), "is_token": mask}


class _Gather(torch.autograd.Function):
    """x[index], whose gradient is that of the gather back: `back[index[i]] == i` wherever a gradient is not zero."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, index: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None


def _attention(kernel: str, module: nn.Module, q, k, v, is_token, scaling: float, dropout: float) -> torch.Tensor:
    """softmax(scaling q k^T) v of each sample: q [S, heads, Q, d], k and v [S, heads, T, d] -> [S, heads, Q, d]."""
    if kernel == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=is_token, dropout_p=dropout, scale=scaling)
    scores = q @ k.transpose(2, 3) * scaling
    if is_token is not None:
        scores = scores.masked_fill(~is_token, torch.finfo(scores.dtype).min)
    return F.dropout(scores.softmax(-1), dropout, module.training) @ v


def _interface(kernel: str):
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        rows: Rows,
        scaling: float,
        dropout: float = 0.0,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """As transformers calls it: query, key, value [1, heads, M, d] -> [1, M, heads, d]."""
        q, k, v = (_table(x[0].transpose(0, 1), rows) for x in (query, key, value))
        y = _attention(kernel, module, q, k, v, rows.is_token, scaling, dropout)
        return _Untable.apply(y.transpose(1, 2).flatten(0, 1), rows)[None], None

    return attention


def bert_first_tokens(
    bert: nn.Module,
    input_ids: torch.Tensor,
    token_type_ids: torch.Tensor,
    position_ids: torch.Tensor,
    first_index: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """What a BERT's last layer says of each sample's first token, [S, width]: all that a classifier reads.

    The same numbers as of a forward of all of it, and the same gradient: of the last layer nothing but keys and values depends
    on other tokens, so its query, its feed-forward layer and its normalisations are computed for one token per sample.

    Args:
        bert: transformers' BertModel with attention `unpadded_sdpa` or `unpadded_eager`.
        input_ids, token_type_ids, position_ids: int64 [1, M].
        first_index: int64 [S], places of the first tokens.
        rows: of the samples.
    """
    hidden = bert.embeddings(input_ids, token_type_ids, position_ids)
    *layers, last = bert.encoder.layer
    for layer in layers:
        hidden = layer(hidden, rows=rows)
    hidden = hidden[0]
    first, of = hidden[first_index], last.attention.self
    query = of.query(first).unflatten(1, (-1, 1, of.attention_head_size))
    key, value = (_table(each(hidden).unflatten(1, (-1, of.attention_head_size)), rows) for each in (of.key, of.value))
    kernel = of.config._attn_implementation.removeprefix("unpadded_")
    dropout = of.dropout.p if of.training else 0.0
    y = _attention(kernel, of, query, key, value, rows.is_token, of.scaling, dropout)
    y = last.attention.output(y.flatten(1), first)
    return last.output(last.intermediate(y), y)


def _table(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """[M, heads, d] -> [S, heads, T, d]."""
    y = _Gather.apply(x, rows.source, rows.place)
    return y.unflatten(0, (rows.num_samples, -1)).transpose(1, 2)


class _Untable(torch.autograd.Function):
    """[S * T, heads, d] -> [M, heads, d]; padding gets a gradient of 0."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return y.index_select(0, rows.place)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows = ctx.rows
        found = gradient.index_select(0, rows.source)
        if rows.is_token is not None:
            found *= rows.is_token.flatten()[:, None, None]
        return found, None


for _kernel in ("sdpa", "eager"):
    AttentionInterface.register(f"unpadded_{_kernel}", _interface(_kernel))
