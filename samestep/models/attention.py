"""Compute BERT over samples that lie end to end, with no padding between them, and only as far as it is needed.

Most of a transformer's work on short samples is in products that do not depend on where samples begin: embeddings, projections,
feed-forward layers. They take a micro-batch's tokens as one long row, [1, M, width]. Only attention needs samples: queries,
keys and values are gathered into tables [S, heads, T, d], padded to the longest sample, and its outputs go back into the row,
all tables of a micro-batch at once; or a kernel of variable length takes the row as it is. No number of a sample depends on the
other samples.

`attend` computes attention inside the samples of a row for all of our models: a mask says which keys a query sees. BERT and
ModernBERT see both sides (here), causal models what is before (`sequences`).

A head reads a few tokens of each sample: a classifier the first one, pretraining the first and the masked ones. They are the
queries of the last layer; all other tokens are only keys and values there. So the last layer's queries, feed-forward layer and
normalisations are computed for these tokens alone: the same numbers, and the same gradient. Where each sample has one query, as
in a classifier, keys and values are not computed either (`_attention_alone`).
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from samestep._internals.transformers_models import attention_kernel
from samestep.data.ragged import Rows, Tables, make_rows, make_tables, split_by_length
from samestep.models import cpu_matmul
from samestep.recipe.task_settings import LanguageModelSettings
from samestep.step import noise

Model = TypeVar("Model", bound=PreTrainedModel)

PREFIX = "unpadded_"
"""Prefix of a kernel's name in the config of a model that sees both sides."""
BY_LENGTH = "_by_length"
KERNELS = ("sdpa", "eager", "sdpa" + BY_LENGTH, "eager" + BY_LENGTH, "varlen")
"""sdpa: torch's kernels over a padded table. eager: plain products over it. _by_length: the same over several tables, each for
samples of about the same length. varlen: torch's kernel for samples of any length (CUDA only)."""


def unpad(model: Model, kernel: str = "eager") -> Model:
    """Prepare transformers' BERT for `last_hidden_at`, and return it. Its own forward can no longer be called.

    Args:
        model: with a BertModel as `model.bert`.
        kernel: one of `KERNELS`.
    """
    model.set_attn_implementation(PREFIX + kernel)
    last = model.bert.encoder.layer[-1]
    last.forward = functools.partial(_last_layer, last)
    return model


def kernel_candidates(
    model: PreTrainedModel, device: torch.device, mixed_precision: str, settings: LanguageModelSettings
) -> dict[str, Callable[[], object]]:
    """List the kernels of attention and of matmuls for a model that sees both sides, as `SummedLosses.kernel_candidates`.

    Where attn_implementation is set, that kernel is the only one. A compiled model has one table, and products of its own.
    """
    kernel, names = settings.attn_implementation, ["sdpa"]
    is_noisy = bool(getattr(model.config, "attention_probs_dropout_prob", 0))
    if device.type == "cpu":
        kinds = ["eager"] if is_noisy else ["eager", "sdpa"]  # sdpa draws noise of its own
        names = kinds + [name + BY_LENGTH for name in kinds if not settings.torch_compile]
    if device.type == "cuda" and mixed_precision != "no" and not is_noisy:
        names.append("varlen")
    names = [kernel] if kernel else names
    candidates: dict[str, Callable[[], object]] = {
        name: functools.partial(model.set_attn_implementation, PREFIX + name) for name in names
    }
    return candidates if settings.torch_compile else cpu_matmul.add_onednn(candidates, model, device, mixed_precision)


def last_hidden_at(
    bert: nn.Module,
    input_ids: torch.Tensor,
    token_type_ids: torch.Tensor,
    position_ids: torch.Tensor,
    ends: torch.Tensor,
    source: torch.Tensor,
    place: torch.Tensor,
    is_token: torch.Tensor | None,
    queries: torch.Tensor,
    query_ends: torch.Tensor,
    query_source: torch.Tensor,
    query_place: torch.Tensor,
) -> torch.Tensor:
    """Compute the last hidden states at the queries, [W, width]; at the spare queries, of no sample, they mean nothing.

    Args:
        bert: transformers' BertModel, after `unpad`.
        input_ids, ...: see `make_micro_batch`.
    """
    parts, query_parts = [Rows(ends, source, place, is_token)], [Rows(query_ends, query_source, query_place, None)]
    kernel = attention_kernel(bert.config)
    if kernel.endswith(BY_LENGTH):
        # Both are cut between the same samples: tokens per sample, and queries per sample.
        lengths = split_by_length(ends.diff().numpy())
        num_queries = np.split(query_ends.diff().numpy(), np.cumsum([len(part) for part in lengths])[:-1])
        parts, query_parts = make_parts(lengths), make_parts(num_queries)
    num_groups = bert.config.num_attention_heads if "eager" in kernel else 1
    token_tables, query_tables = make_tables(parts, num_groups), make_tables(query_parts, num_groups)
    _name_rows(bert.embeddings.dropout, position_ids, ends, queries)
    hidden = bert.embeddings(input_ids, token_type_ids, position_ids)
    *layers, last = bert.encoder.layer
    for layer in layers:
        hidden = layer(hidden, token_tables=token_tables)
    is_alone = "varlen" not in kernel and all(part.source.shape[1] == 1 for part in query_parts)
    if is_alone:
        token_tables, query_tables = make_tables(parts, 1), make_tables(query_parts, 1)
    return last(hidden, queries=queries, token_tables=token_tables, query_tables=query_tables, is_alone=is_alone)[0]


def _name_rows(dropout: nn.Module, position_ids: torch.Tensor, ends: torch.Tensor, queries: torch.Tensor) -> None:
    """Tell the noise which rows of [1, M, width] and of [W, width] are which tokens of which samples."""
    if isinstance(dropout, noise.Dropout) and dropout.training:
        shape, num_samples = tuple(position_ids.shape), len(ends) - 1
        # int64 [M]: the sample of each token; S for tokens of no sample
        sample = torch.searchsorted(ends[1:], torch.arange(shape[1], device=ends.device, dtype=ends.dtype), right=True)
        dropout.noise.set_rows(shape, sample, position_ids[0], num_samples)
        dropout.noise.rows[tuple(queries.shape)] = dropout.noise.rows[shape][0, queries]


def make_parts(lengths: Sequence[np.ndarray]) -> list[Rows]:
    """Build the index tables of parts of a micro-batch, given the lengths of each part's samples."""
    *firsts, end = accumulate((int(part.sum()) for part in lengths), initial=0)
    return [make_rows(part, first, end) for part, first in zip(lengths, firsts, strict=True)]


def _last_layer(
    layer: nn.Module,
    hidden: torch.Tensor,
    *,
    queries: torch.Tensor,
    token_tables: Tables,
    query_tables: Tables,
    is_alone: bool = False,
) -> torch.Tensor:
    """Compute a BertLayer's forward at the queries, [1, M, width] -> [1, W, width].

    Args:
        is_alone: no sample has more than one query, and tables are of whole tokens.
    """
    hidden, module = hidden[0], layer.attention.self
    query_hidden = hidden.index_select(0, queries)
    if is_alone:
        y = _attention_alone(module, query_hidden, hidden, query_tables, token_tables)
    else:
        inputs = ((module.query, query_hidden), (module.key, hidden), (module.value, hidden))
        q, k, v = (project(x).unflatten(1, (-1, module.attention_head_size)) for project, x in inputs)
        kernel = attention_kernel(module.config).removeprefix(PREFIX)
        attended = _see_both_sides(module, tuple(queries.shape))
        y = attend(kernel, attended, q, k, v, query_tables, token_tables, token_tables.is_token)
    y = layer.attention.output(y.flatten(1), query_hidden)
    return layer.output(layer.intermediate(y), y)[None]


def _attention_alone(
    module: nn.Module, query_hidden: torch.Tensor, hidden: torch.Tensor, query_tables: Tables, token_tables: Tables
) -> torch.Tensor:
    """Compute a BertSelfAttention of one query per sample, without keys and values: [W, width], [M, width] -> [W, heads, d].

    For a head with key weights K and value weights V, [d, width], biases b and c, query q and probabilities p over tokens X

        q (X K^T + b)^T = (q K) X^T + a constant, which softmax cancels;  p (X V^T + c) = (p X) V^T + sum(p) c

    so that K and V are multiplied by one vector per head and sample instead of one per token. Under dropout sum(p) is not 1.
    The gradient of b is 0.
    """
    heads = module.num_attention_heads
    key, value = (
        project.weight.unflatten(0, (heads, -1)) for project in (module.key, module.value)
    )  # [heads, d, width]
    q = torch.einsum("whd,hdn->whn", module.query(query_hidden).unflatten(1, (heads, -1)), key)
    x = hidden[:, None].to(q.dtype)
    outputs = []
    layer = _see_both_sides(module, (len(q),))
    keys = _row_keys(layer, query_tables, heads, 1)
    tables = zip(to_tables(q, query_tables), to_tables(x, token_tables), token_tables.is_token, keys, strict=True)
    for query, tokens, is_token, row_keys in tables:  # [S', heads, 1, width], [S', 1, T, width]
        p = _drop(layer, scores(query.transpose(1, 2), tokens, is_token, layer.scaling).softmax(-1), row_keys)
        outputs.append(torch.cat([p @ tokens, p.sum(-1, keepdim=True)], -1).transpose(1, 2))
    y = from_tables(outputs, query_tables, len(q))  # [W, heads, width + 1]: p X and sum(p)
    y, total = y.split([y.shape[-1] - 1, 1], -1)
    bias = module.value.bias.unflatten(0, (heads, -1)) + 0 * module.key.bias.sum()
    return torch.einsum("whn,hdn->whd", y, value) + total * bias


class Layer(NamedTuple):
    """Holds how a layer attends, apart from its kernel, its queries, keys and values, and the masks of tables.

    Attributes:
        scaling: factor of q k^T.
        is_causal: whether a query sees no token behind its own; torch's kernels see to it where there is no mask. Plain
            products then keep probabilities in q's dtype, also under autocast: the backward needs no other copy.
        softcap: c of scores that become c tanh(scores / c); of plain products, as `sinks`.
        sinks: a score of each head that takes part in the softmax and has no value, floating [heads].
        dropout: the module whose noise may be by sample.
        rate: probability of dropping a probability.
        rows: shape by which the noise knows the rows of the queries.
        window: keys that a query sees on each side, its own included, which varlen asks for and masks have; None: all.
    """

    scaling: float
    is_causal: bool = False
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: nn.Module | None = None
    rate: float = 0.0
    rows: tuple[int, ...] = ()
    window: int | None = None


def _see_both_sides(module: nn.Module, rows: tuple[int, ...], window: int | None = None) -> Layer:
    """Describe a layer of BERT, [heads, d] of its tokens; or of ModernBERT, which has no dropout of probabilities."""
    dropout = getattr(module, "dropout", None)
    rate = dropout.p if dropout is not None and module.training else 0.0
    scaling = getattr(module, "scaling", None) or module.head_dim**-0.5
    return Layer(scaling, dropout=dropout, rate=rate, rows=rows, window=window)


def _interface(kernel: str):
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        token_tables: Tables,
        sliding_window: int | None = None,
        narrow_masks: Sequence[torch.Tensor | None] = (),
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention as transformers calls it: query, key, value [1, heads, M, d] -> [1, M, heads, d]."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        layer = _see_both_sides(module, (1, len(q)), sliding_window)
        masks = token_tables.is_token if sliding_window is None else narrow_masks
        return attend(kernel, layer, q, k, v, token_tables, token_tables, masks)[None], None

    return attention


for _kernel in KERNELS:
    # Transformers makes no mask for a kernel that AttentionMaskInterface does not know
    AttentionInterface.register(PREFIX + _kernel, _interface(_kernel))


def _attend_by_ends(layer: Layer, q, k, v, query_tables: Tables, token_tables: Tables) -> torch.Tensor:
    """Compute `attend` by the kernel for samples of any length, where both sides are seen; 0 for tokens of no sample."""
    assert not layer.rate, "the kernel has no dropout"
    longest = query_tables.sources[0].shape[2], token_tables.sources[0].shape[2]
    (num_queries,), (num_tokens,) = query_tables.place.shape, token_tables.place.shape  # without spare ones
    window = -1 if layer.window is None else layer.window - 1
    options = {"scale": layer.scaling, "window_size": (window, window)}
    ends, rest = (query_tables.ends, token_tables.ends), len(q) - num_queries
    y = varlen_attn(q[:num_queries], k[:num_tokens], v[:num_tokens], *ends, *longest, **options)
    return torch.cat([y, y.new_zeros(rest, *y.shape[1:])])


def attend(
    kernel: str,
    layer: Layer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_tables: Tables,
    token_tables: Tables,
    masks: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Compute softmax(scaling q k^T + mask) v inside each sample of a row: q [W, heads, d], k and v [M, key heads, d] ->
    [W, heads, d].

    In plain products the R heads that share keys lie side by side: their queries are R rows per token of the same product.

    Args:
        kernel: of `KERNELS`; eager's tables are of a group per key head, those of the others of one group.
        masks: of each table, see `scores`; for sdpa what torch's kernels take. None: all is seen, or what is not behind.
    """
    if kernel == "varlen":
        return _attend_by_ends(layer, q, k, v, query_tables, token_tables)
    num_groups, num_repeats, is_eager = k.shape[1], q.shape[1] // k.shape[1], kernel.startswith("eager")
    row_keys, outputs = _row_keys(layer, query_tables, num_groups, num_repeats), []
    # Of each table, eager: [S', g, W', R d] and twice [S', g, T, d]; sdpa: [S', heads, W', d] and twice [S', g, T, d]
    q_tables = to_tables(q.reshape(len(q), num_groups, -1) if is_eager else q, query_tables)
    k_tables, v_tables = to_tables(k, token_tables), to_tables(v, token_tables)
    for queries, keys, values, mask, query_keys in zip(q_tables, k_tables, v_tables, masks, row_keys, strict=True):
        if is_eager:
            rows = queries.reshape(*queries.shape[:2], -1, keys.shape[3])  # [S', g, W' R, d]
            p = _drop(layer, _probabilities(layer, rows, keys, mask), query_keys)
            y = (p @ values).view(*queries.shape[:3], -1)
        else:
            if num_repeats > 1:
                keys, values = (x.repeat_interleave(num_repeats, 1) for x in (keys, values))
            sees_back = layer.is_causal and mask is None
            y = F.scaled_dot_product_attention(queries, keys, values, mask, layer.rate, sees_back, scale=layer.scaling)
        outputs.append(y)
    return from_tables(outputs, query_tables, len(q)).reshape(*q.shape[:2], -1)


def _probabilities(layer: Layer, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Compute the softmax of `attend` over a table: [S, g, W R, d], [S, g, T, d] -> [S, g, W R, T]."""
    if layer.softcap is None:
        values = scores(q, k, mask, layer.scaling)
    else:
        values = torch.tanh(q @ k.mT * (layer.scaling / layer.softcap)) * layer.softcap + mask
    if layer.sinks is not None:
        sinks = layer.sinks.to(values.dtype).view(k.shape[1], 1, -1)  # [g, 1, R], the same for each of W tokens
        sinks = sinks.expand(-1, values.shape[2] // sinks.shape[2], -1).flatten(1)[..., None]
        values = torch.cat([values, sinks.expand(len(values), -1, -1, -1)], -1)
    with torch.autocast(q.device.type, enabled=False) if layer.is_causal else contextlib.nullcontext():
        p = values.softmax(-1)  # computed in float32 inside
    return p if layer.sinks is None else p[..., :-1]


def _row_keys(layer: Layer, tables: Tables, num_groups: int, num_repeats: int) -> list[torch.Tensor | None]:
    """Return the noise's keys of the rows of probabilities: of each table of queries int64 [S', g, W' R]; None: no noise by
    sample."""
    dropout = layer.dropout
    if not isinstance(dropout, noise.Dropout) or not dropout.training or not dropout.p:
        return [None] * len(tables.sources)
    return _find_row_keys(dropout.noise, layer.rows, tables, num_groups, num_repeats)


@torch.compiler.disable  # they change with every micro-batch, and so do the shapes that the noise knows
def _find_row_keys(
    drawn: noise.Noise,
    rows: tuple[int, ...],
    tables: Tables,
    num_groups: int,
    num_repeats: int,
) -> list[torch.Tensor]:
    keys = drawn.rows[rows].flatten()
    heads = torch.arange(num_groups * num_repeats, device=keys.device).view(num_groups, 1, num_repeats)
    # [S', 1, W'], with the parts t g, ..., t g + g - 1 of token t: the first part's number / g is the token's
    tokens = [source[:, :1] // source.shape[1] for source in tables.sources]
    return [noise.mix(keys[token][..., None] + heads).flatten(2) for token in tokens]


def _drop(layer: Layer, p: torch.Tensor, row_keys: torch.Tensor | None) -> torch.Tensor:
    """Apply a layer's dropout to its probabilities."""
    return F.dropout(p, layer.rate) if row_keys is None else layer.dropout.drop(p, row_keys)


def to_tables(x: torch.Tensor, tables: Tables) -> list[torch.Tensor]:
    """Gather tokens into tables: [M, heads, d] -> of each table [S', heads, T, d]."""
    heads, d = x.shape[1:]
    num_groups = tables.sources[0].shape[1]
    # [M g, heads / g * d], one row per part of a token -> [P, heads / g * d], P places of all tables.
    y = _ToTables.apply(x.reshape(len(x) * num_groups, -1), _concatenate_sources(tables), tables.place)
    parts = [y] if len(tables.sources) == 1 else y.split([source.numel() for source in tables.sources])
    shapes = [(*source.shape, heads // num_groups, d) for source in tables.sources]  # [S', g, T, heads / g, d]
    return [part.view(shape).transpose(2, 3).flatten(1, 2) for part, shape in zip(parts, shapes, strict=True)]


def from_tables(outputs: list[torch.Tensor], tables: Tables, num_tokens: int) -> torch.Tensor:
    """Gather tokens from tables: of each table [S', heads, T, d] -> [W, heads, d], 0 for tokens of no sample."""
    heads, d = outputs[0].shape[1], outputs[0].shape[3]
    num_groups = tables.sources[0].shape[1]
    width = heads // num_groups * d
    # Of each table [S', g, T, heads / g, d], as rows [S' g T, heads / g * d].
    parts = [y.unflatten(1, (num_groups, -1)).transpose(2, 3).reshape(-1, width) for y in outputs]
    y = _FromTables.apply(_concatenate(parts), _concatenate_sources(tables), tables.place, num_tokens * num_groups)
    return y.view(num_tokens, heads, d)


def _concatenate_sources(tables: Tables) -> torch.Tensor:
    """Return, for each of the P places of all tables, the part of a token there: int64 [P]."""
    return _concatenate([source.flatten() for source in tables.sources])


def _concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """Compute scaling q k^T + mask: [S, heads, W, d], [S, heads, T, d] -> [S, heads, W, T].

    One product computes all of it: three passes over the scores would take a fifth of attention's time.

    Args:
        mask: bool [S, 1, 1, T], False at padding, where the dtype's lowest number is added; or what is added, of q's dtype,
            [S or 1, 1, W, T].
    """
    bias, beta = q.new_zeros(1, 1, 1), 0
    if mask is not None and mask.dtype == torch.bool:
        mask = q.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(q.dtype).min)
    is_large = mask is not None and mask.shape[0] > 1 and mask.shape[2] > 1  # a copy for each head would be
    if mask is not None and not is_large:
        bias, beta = mask.expand(*q.shape[:2], -1, -1).flatten(0, 1), 1
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), beta=beta, alpha=scaling)
    scores = scores.unflatten(0, q.shape[:2])
    return scores.add_(mask) if is_large else scores


def _pick(y: torch.Tensor, place: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Select y[place], and pad it with rows of 0 to `num_rows`."""
    x = y.index_select(0, F.pad(place, (0, num_rows - len(place))))
    x[len(place) :] = 0
    return x


class _ToTables(torch.autograd.Function):
    """Selects x[source]. The gradient at padding is left out: the rest is one-to-one, so that nothing need be added up."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, source: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.num_rows = len(x)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return _pick(gradient, place, ctx.num_rows), None, None


class _FromTables(torch.autograd.Function):
    """Computes `_pick`. Padding gets the gradient of a token of no sample, which is 0."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, source: torch.Tensor, place: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.save_for_backward(source)
        return _pick(y, place, num_rows)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None, None
