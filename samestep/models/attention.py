"""BERT over samples that lie end to end, with no padding between them, and only as far as it is needed.

Of a transformer's work on short samples most is in products that know nothing of samples: embeddings, projections, feed-forward
layers. They take a micro-batch's tokens as one long row, [1, M, width]. Only attention needs samples: queries, keys and values
are gathered into tables [S, heads, T, d], padded to the longest sample, and its outputs go back into the row, all tables of a
micro-batch at once; or a kernel of variable length takes the row as it is. No number of a sample depends on the others.

What a head reads is a few tokens of each sample: a classifier the first, pretraining the first and the masked ones. In the last
layer the others are keys and values only. So its queries, its feed-forward layer and its normalisations are computed for the
wanted tokens alone: the same numbers, and the same gradient. Where one token of each sample is wanted, a classifier's, keys and
values are not computed either (`_attention_alone`).
"""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from samestep._internals.transformers_models import attention_kernel
from samestep.data.ragged import Rows, Tables, by_length, make_rows, make_tables
from samestep.models import cpu_matmul
from samestep.recipe.run_settings import LanguageModelSettings

Model = TypeVar("Model", bound=PreTrainedModel)

BY_LENGTH = "_by_length"
KERNELS = ("sdpa", "eager", "sdpa" + BY_LENGTH, "eager" + BY_LENGTH, "varlen")
"""torch's kernels over a padded table; plain products over it; both over several tables, each for samples of about the same
length; torch's kernel for samples of any length (CUDA only)."""


def unpad(model: Model, kernel: str = "eager") -> Model:
    """Prepare transformers' BERT for `last_hidden_at`, and return it. Its own forward can be called no longer.

    Args:
        model: with a BertModel as `model.bert`.
        kernel: one of `KERNELS`.
    """
    model.set_attn_implementation(f"unpadded_{kernel}")
    last = model.bert.encoder.layer[-1]
    last.forward = functools.partial(_last_layer, last)
    return model


def kernel_candidates(
    model: PreTrainedModel, device: torch.device, mixed_precision: str, settings: LanguageModelSettings
) -> dict[str, functools.partial]:
    """The kernels of attention and of matmuls that may be the fastest, the safe one first, for `kernels.choose`.

    Args:
        model: after `unpad`.
        device, mixed_precision: that it is computed on and in.
        settings: its attn_implementation, where that is decided. What is compiled has one table, and products of its own.
    """
    only, names = settings.attn_implementation, ["sdpa"]
    if device.type == "cpu":
        names = ["eager", "sdpa"] + [name + BY_LENGTH for name in ("eager", "sdpa") if not settings.torch_compile]
    if device.type == "cuda" and mixed_precision != "no" and not model.config.attention_probs_dropout_prob:
        names.append("varlen")
    names = [only] if only else names
    found = {name: functools.partial(model.set_attn_implementation, f"unpadded_{name}") for name in names}
    return found if settings.torch_compile else cpu_matmul.with_onednn(found, model, device, mixed_precision)


def last_hidden_at(
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
    """Last hidden states at the given positions, [W, width]; those of no sample mean nothing.

    Args:
        bert: transformers' BertModel, after `unpad`.
        input_ids, ...: see `make_micro_batch`.
    """
    parts, wanted_parts = [Rows(ends, source, place, is_token)], [Rows(wanted_ends, wanted_source, wanted_place, None)]
    kernel = attention_kernel(bert.config)
    if kernel.endswith(BY_LENGTH):
        lengths = by_length(ends.diff().numpy())
        num_wanted = np.split(wanted_ends.diff().numpy(), np.cumsum([len(part) for part in lengths])[:-1])
        parts, wanted_parts = _parts_of(lengths), _parts_of(num_wanted)
    num_groups = bert.config.num_attention_heads if "eager" in kernel else 1
    rows, queries = make_tables(parts, num_groups), make_tables(wanted_parts, num_groups)
    hidden = bert.embeddings(input_ids, token_type_ids, position_ids)
    *layers, last = bert.encoder.layer
    for layer in layers:
        hidden = layer(hidden, rows=rows)
    is_alone = "varlen" not in kernel and all(part.source.shape[1] == 1 for part in wanted_parts)
    if is_alone:
        rows, queries = make_tables(parts, 1), make_tables(wanted_parts, 1)
    return last(hidden, rows=rows, wanted=wanted, queries=queries, is_alone=is_alone)[0]


def _parts_of(lengths: Sequence[np.ndarray]) -> list[Rows]:
    """Of samples, end to end, in parts."""
    *firsts, end = accumulate((int(part.sum()) for part in lengths), initial=0)
    return [make_rows(part, first, end) for part, first in zip(lengths, firsts, strict=True)]


def _last_layer(
    layer: nn.Module,
    hidden: torch.Tensor,
    *,
    rows: Tables,
    wanted: torch.Tensor,
    queries: Tables,
    is_alone: bool = False,
) -> torch.Tensor:
    """A BertLayer's forward at the wanted tokens, [1, M, width] -> [1, W, width].

    Args:
        is_alone: no sample has more than one wanted token, and tables are of whole tokens.
    """
    hidden, of = hidden[0], layer.attention.self
    chosen = hidden.index_select(0, wanted)
    if is_alone:
        y = _attention_alone(of, chosen, hidden, queries, rows)
    else:
        inputs = ((of.query, chosen), (of.key, hidden), (of.value, hidden))
        q, k, v = (project(x).unflatten(1, (-1, of.attention_head_size)) for project, x in inputs)
        kernel = attention_kernel(of.config).removeprefix("unpadded_")
        y = _attention(kernel, of, q, k, v, queries, rows, of.scaling, of.dropout.p if of.training else 0.0)
    y = layer.attention.output(y.flatten(1), chosen)
    return layer.output(layer.intermediate(y), y)[None]


def _attention_alone(
    of: nn.Module, chosen: torch.Tensor, hidden: torch.Tensor, queries: Tables, rows: Tables
) -> torch.Tensor:
    """A BertSelfAttention of one query per sample, without keys and values: [W, width] and [M, width] -> [W, heads, d].

    Of a head with key weights K and value weights V, [d, width], biases b and c, query q and probabilities p over tokens X

        q (X K^T + b)^T = (q K) X^T + a constant, which softmax takes away;  p (X V^T + c) = (p X) V^T + sum(p) c

    so that K and V are multiplied with one vector per head and sample instead of one per token. Under dropout sum(p) is not 1.
    The gradient of b is 0.
    """
    heads = of.num_attention_heads
    key, value = (project.weight.unflatten(0, (heads, -1)) for project in (of.key, of.value))
    q = torch.einsum("whd,hdn->whn", of.query(chosen).unflatten(1, (heads, -1)), key)
    outputs = []
    tables = zip(_to_tables(q, queries), _to_tables(hidden[:, None].to(q.dtype), rows), rows.is_token, strict=True)
    for mine, tokens, is_token in tables:  # [S', heads, 1, width], [S', 1, T, width]
        p = _scores(mine.transpose(1, 2), tokens, is_token, of.scaling).softmax(-1)
        p = F.dropout(p, of.dropout.p, of.training)
        outputs.append(torch.cat([p @ tokens, p.sum(-1, keepdim=True)], -1).transpose(1, 2))
    y = _from_tables(outputs, queries, len(q))
    y, total = y.split([y.shape[-1] - 1, 1], -1)
    bias = of.value.bias.unflatten(0, (heads, -1)) + 0 * of.key.bias.sum()
    return torch.einsum("whn,hdn->whd", y, value) + total * bias


def _interface(kernel: str):
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        rows: Tables,
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
    kernel: str, module: nn.Module, q, k, v, queries: Tables, rows: Tables, scaling: float, dropout: float
) -> torch.Tensor:
    """softmax(scaling q k^T) v of each sample: q [W, heads, d], k and v [M, heads, d] -> [W, heads, d]."""
    if kernel == "varlen":
        assert not dropout, "the kernel has none"
        longest = queries.sources[0].shape[2], rows.sources[0].shape[2]
        (num_wanted,), (number,) = queries.place.shape, rows.place.shape
        y = varlen_attn(q[:num_wanted], k[:number], v[:number], queries.ends, rows.ends, *longest, scale=scaling)
        return torch.cat([y, y.new_zeros(len(q) - num_wanted, *y.shape[1:])])
    tables = zip(_to_tables(q, queries), _to_tables(k, rows), _to_tables(v, rows), rows.is_token, strict=True)
    outputs = []
    for mine, keys, values, is_token in tables:
        if kernel.startswith("sdpa"):
            y = F.scaled_dot_product_attention(mine, keys, values, attn_mask=is_token, dropout_p=dropout, scale=scaling)
        else:
            y = F.dropout(_scores(mine, keys, is_token, scaling).softmax(-1), dropout, module.training) @ values
        outputs.append(y)
    return _from_tables(outputs, queries, len(q))


def _to_tables(x: torch.Tensor, tables: Tables) -> list[torch.Tensor]:
    """[M, heads, d] -> of each table [S', heads, T, d]."""
    heads, d = x.shape[1:]
    num_groups = tables.sources[0].shape[1]
    y = _ToTables.apply(x.reshape(len(x) * num_groups, -1), _source(tables), tables.place)
    parts = [y] if len(tables.sources) == 1 else y.split([of.numel() for of in tables.sources])
    shapes = [(*of.shape, heads // num_groups, d) for of in tables.sources]
    return [part.view(shape).transpose(2, 3).flatten(1, 2) for part, shape in zip(parts, shapes, strict=True)]


def _from_tables(outputs: list[torch.Tensor], tables: Tables, num_tokens: int) -> torch.Tensor:
    """Of each table [S', heads, T, d] -> [W, heads, d], 0 for tokens of no sample."""
    heads, d = outputs[0].shape[1], outputs[0].shape[3]
    num_groups = tables.sources[0].shape[1]
    width = heads // num_groups * d
    parts = [y.unflatten(1, (num_groups, -1)).transpose(2, 3).reshape(-1, width) for y in outputs]
    y = _FromTables.apply(_joined(parts), _source(tables), tables.place, num_tokens * num_groups)
    return y.view(num_tokens, heads, d)


def _source(tables: Tables) -> torch.Tensor:
    """int64 [P], of each place of all tables the part of a token."""
    return _joined([of.flatten() for of in tables.sources])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """One behind the other; of one no copy is made."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scores(q: torch.Tensor, k: torch.Tensor, is_token: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """scaling q k^T, and the least number that there is at padding: [S, heads, W, d] and [S, heads, T, d] -> [S, heads, W, T].

    All in one product, where three passes over the scores would take a fifth of attention's time.
    """
    bias, beta = q.new_zeros(1, 1, 1), 0
    if is_token is not None:
        bias = q.new_zeros(is_token.shape).masked_fill(~is_token, torch.finfo(q.dtype).min)
        bias, beta = bias.expand(-1, q.shape[1], -1, -1).flatten(0, 1), 1
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), beta=beta, alpha=scaling)
    return scores.unflatten(0, q.shape[:2])


def _pick(y: torch.Tensor, place: torch.Tensor, number: int) -> torch.Tensor:
    """y[place], and 0 up to a number of rows."""
    x = y.index_select(0, F.pad(place, (0, number - len(place))))
    x[len(place) :] = 0
    return x


class _ToTables(torch.autograd.Function):
    """x[source]. The gradient at padding is left out: the rest is one-to-one, so that nothing need be added up."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, source: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.number = len(x)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _pick(gradient, *ctx.saved_tensors, ctx.number), None, None


class _FromTables(torch.autograd.Function):
    """`_pick`. Padding gets the gradient of a token of no sample, which is 0."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, source: torch.Tensor, place: torch.Tensor, number: int) -> torch.Tensor:
        ctx.save_for_backward(source)
        return _pick(y, place, number)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None, None
