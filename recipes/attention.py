"""BERT over samples that lie end to end, with no padding between them, and only as far as it is needed.

Of a transformer's work on short samples most is in products that know nothing of samples: embeddings, projections, feed-forward
layers. They take a cell's tokens as one long row, [1, M, width]. Only attention needs samples: queries, keys and values are
gathered into [S, heads, T, d], padded to the cell's longest sample, and its outputs go back into the row; on a GPU kernels of
variable length take the row as it is. No number of a sample depends on the others.

What a head reads is a few tokens of each sample: a classifier the first, pretraining the first and the masked ones. In the last
layer the others are keys and values only. So its queries, its feed-forward layer and its normalisations are computed for the
wanted tokens alone: the same numbers, and the same gradient.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)

KERNELS = ("sdpa", "eager", "varlen")
"""torch's kernels over padded tables; plain products over them; torch's kernel for samples of any length (CUDA only)."""


class Rows(NamedTuple):
    """Where the tokens of S samples, end to end M, are in a table of [S, T].

    Attributes:
        ends: int32 [S + 1], 0 and where each sample ends.
        source: int64 [S * T], of each place of the table its token; of padding, 0.
        place: int64 [M], of each token its place in the table.
        is_token: bool [S, 1, 1, T]; None when nothing is padded.
    """

    ends: torch.Tensor
    source: torch.Tensor
    place: torch.Tensor
    is_token: torch.Tensor | None

    @property
    def num_samples(self) -> int:
        return len(self.ends) - 1

    @property
    def longest(self) -> int:
        """T."""
        return len(self.source) // self.num_samples


def rows_of(lengths: np.ndarray) -> Rows:
    """Those of samples of these lengths.

    >>> [value.tolist() for value in rows_of(np.array([2, 1]))]
    [[0, 2, 3], [0, 1, 2, 0], [0, 1, 2], [[[[True, True]]], [[[True, False]]]]]
    """
    is_token = np.arange(lengths.max()) < lengths[:, None]
    place = np.flatnonzero(is_token)
    source = np.zeros(is_token.size, np.int64)
    source[place] = np.arange(len(place))
    ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    mask = None if is_token.all() else torch.from_numpy(is_token[:, None, None])
    return Rows(ends, torch.from_numpy(source), torch.from_numpy(place), mask)


def cell_of(
    tokens: Sequence[np.ndarray], num_first: Sequence[int], wanted: Sequence[np.ndarray]
) -> dict[str, torch.Tensor | None]:
    """What `bert_wanted` takes of S >= 1 samples.

    Args:
        tokens: of each sample.
        num_first: how many of them are of the first kind.
        wanted: places in the sample, ascending, at least one.

    Returns:
        input_ids, token_type_ids, position_ids: int64 [1, M].
        ends, source, place, is_token: of the tokens, see `Rows`.
        wanted: int64 [W], places in the row; wanted_ends, wanted_source, wanted_place: of the wanted tokens.
    """
    lengths = np.array([len(of) for of in tokens])
    starts = np.cumsum(lengths) - lengths
    position_ids = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    is_second = position_ids >= np.repeat(num_first, lengths)
    rows, num_wanted = rows_of(lengths), np.array([len(of) for of in wanted])
    queries = rows_of(num_wanted)
    return {
        "input_ids": torch.from_numpy(np.concatenate(tokens, dtype=np.int64))[None],
        "token_type_ids": torch.from_numpy(is_second.astype(np.int64))[None],
        "position_ids": torch.from_numpy(position_ids)[None],
        **rows._asdict(),
        "wanted": torch.from_numpy(np.concatenate(wanted, dtype=np.int64) + np.repeat(starts, num_wanted)),
        "wanted_ends": queries.ends,
        "wanted_source": queries.source,
        "wanted_place": queries.place,
    }


def unpad(model: Model, kernel: str = "eager") -> Model:
    """Prepare transformers' BERT for `bert_wanted`, and return it. Its own forward can be called no longer.

    Args:
        model: with a BertModel as `model.bert`.
        kernel: one of `KERNELS`.
    """
    model.set_attn_implementation(f"unpadded_{kernel}")
    last = model.bert.encoder.layer[-1]
    last.forward = functools.partial(_last_layer, last)
    return model


def ways(
    model: PreTrainedModel, device: torch.device, mixed_precision: str, only: str | None = None
) -> dict[str, functools.partial]:
    """The kernels that may be the fastest, the safe one first, for `kernels.choose`.

    Forward and backward of BERT 4 x 256 on 2 cores (torch 2.13, AVX512-BF16), 128 tokens, time of sdpa / time of eager: in
    float32 0.95, in bf16 1.25.

    Args:
        model: after `unpad`.
        device, mixed_precision: that it is computed on and in.
        only: one of `KERNELS`, where it is decided.
    """
    names = ["eager", "sdpa"] if device.type == "cpu" else ["sdpa"]
    if device.type == "cuda" and mixed_precision != "no" and not model.config.attention_probs_dropout_prob:
        names.append("varlen")
    names = [only] if only else names
    return {name: functools.partial(model.set_attn_implementation, f"unpadded_{name}") for name in names}


def bert_wanted(
    bert: nn.Module,
    input_ids: torch.Tensor,
    token_type_ids: torch.Tensor,
    position_ids: torch.Tensor,
    ends: torch.Tensor,
    source: torch.Tensor,
    place: torch.Tensor,
    is_token: torch.Tensor | None,
    wanted: torch.Tensor,
    wanted_ends: torch.Tensor,
    wanted_source: torch.Tensor,
    wanted_place: torch.Tensor,
) -> torch.Tensor:
    """What the last layer says of the wanted tokens, [W, width].

    Args:
        bert: transformers' BertModel, after `unpad`.
        input_ids, ...: see `cell_of`.
    """
    rows, queries = Rows(ends, source, place, is_token), Rows(wanted_ends, wanted_source, wanted_place, None)
    hidden = bert.embeddings(input_ids, token_type_ids, position_ids)
    *layers, last = bert.encoder.layer
    for layer in layers:
        hidden = layer(hidden, rows=rows)
    return last(hidden, rows=rows, wanted=wanted, queries=queries)[0]


def _last_layer(layer: nn.Module, hidden: torch.Tensor, *, rows: Rows, wanted: torch.Tensor, queries: Rows):
    """A BertLayer's forward at the wanted tokens, [1, M, width] -> [1, W, width]."""
    hidden, of = hidden[0], layer.attention.self
    chosen = hidden.index_select(0, wanted)
    inputs = ((of.query, chosen), (of.key, hidden), (of.value, hidden))
    q, k, v = (project(x).unflatten(1, (-1, of.attention_head_size)) for project, x in inputs)
    kernel = of.config._attn_implementation.removeprefix("unpadded_")
    y = _attention(kernel, of, q, k, v, queries, rows, of.scaling, of.dropout.p if of.training else 0.0)
    y = layer.attention.output(y.flatten(1), chosen)
    return layer.output(layer.intermediate(y), y)[None]


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
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return _attention(kernel, module, q, k, v, rows, rows, scaling, dropout)[None], None

    return attention


for _kernel in KERNELS:
    AttentionInterface.register(f"unpadded_{_kernel}", _interface(_kernel))


def _attention(
    kernel: str, module: nn.Module, q, k, v, queries: Rows, rows: Rows, scaling: float, dropout: float
) -> torch.Tensor:
    """softmax(scaling q k^T) v of each sample: q [W, heads, d], k and v [M, heads, d] -> [W, heads, d]."""
    if kernel == "varlen":
        assert not dropout, "the kernel has none"
        return varlen_attn(q, k, v, queries.ends, rows.ends, queries.longest, rows.longest, scale=scaling)
    q, k, v = _table(q, queries), _table(k, rows), _table(v, rows)
    if kernel == "sdpa":
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.is_token, dropout_p=dropout, scale=scaling)
    else:
        y = F.dropout(_scores(q, k, rows, scaling).softmax(-1), dropout, module.training) @ v
    return _Untable.apply(y.transpose(1, 2).flatten(0, 1), queries.place)


def _scores(q: torch.Tensor, k: torch.Tensor, rows: Rows, scaling: float) -> torch.Tensor:
    """scaling q k^T, and the least number that there is at padding: [S, heads, W, d] and [S, heads, T, d] -> [S, heads, W, T].

    All in one product, where three passes over the scores would take a fifth of attention's time.
    """
    bias, beta = q.new_zeros(1, 1, 1), 0
    if rows.is_token is not None:
        bias = q.new_zeros(rows.is_token.shape).masked_fill(~rows.is_token, torch.finfo(q.dtype).min)
        bias, beta = bias.expand(-1, q.shape[1], -1, -1).flatten(0, 1), 1
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), beta=beta, alpha=scaling)
    return scores.unflatten(0, q.shape[:2])


def _table(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """[M, heads, d] -> [S, heads, T, d]."""
    y = _Table.apply(x, rows.source, rows.place)
    return y.unflatten(0, (rows.num_samples, -1)).transpose(1, 2)


class _Table(torch.autograd.Function):
    """x[source], [M, ...] -> [S * T, ...]. Padding holds token 0, and its gradient is left out: it is one-to-one on tokens."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, source: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return gradient.index_select(0, place), None, None


class _Untable(torch.autograd.Function):
    """y[place], [S * T, ...] -> [M, ...]. Padding gets a gradient of 0."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.num_places = len(y)
        return y.index_select(0, place)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (place,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.num_places, *gradient.shape[1:]).index_copy_(0, place, gradient), None
