"""Compute causal attention inside each of the sequences that lie end to end in one row, for any model of transformers.

A model of transformers calls the function that `AttentionInterface` knows by the name in its config. The functions here are
registered for the `KERNELS`; with them a model computes a row [1, M] that holds many sequences, as if each were alone: no token
attends to another sequence. Transformers then makes no masks of its own, which would be [M, M].

On a CPU, and for kernels of dense tables, queries, keys and values are gathered into a few tables [S, heads, T, d], each of
sequences of about the same length, and the outputs go back into the row (see `attention`). Padding is behind a sequence's
tokens, which never attend to it, so that there is no mask but the causal one.

A row's last token is spare: it belongs to no sequence, and padding in the tables points to it.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from samestep._internals.torch_tracing import is_fake
from samestep.data.ragged import Rows, Tables, make_rows, make_tables, split_by_length
from samestep.models.attention import from_tables, make_parts, to_tables
from samestep.step import noise

KERNELS = ("sdpa", "eager", "varlen")
"""sdpa: torch's kernels over tables. eager: plain products over them. varlen: torch's kernel for sequences of any length (CUDA
only). Where a layer has what a kernel cannot compute (soft caps, sinks, dropout), eager computes that layer."""
PREFIX = "sequences_"


class Sequences:
    """Holds where the sequences of a row are, and the index tables of their attention, made once for all layers.

    Args:
        ends: int32 [Q + 1], 0 and the end of each sequence; sequences may be empty. Fake, without numbers: of equal lengths.
        num_tokens: M, tokens of the row, the last one spare.
        num_used: tokens of the row that are a sequence's, where `ends` is fake; None: all but the spare one.

    Attributes:
        lengths: int [Q'], of the sequences that are not empty; one of all tokens where there are none.
        num_tokens: M.
    """

    def __init__(self, ends: torch.Tensor, num_tokens: int, num_used: int | None = None):
        self.num_tokens, self.device = num_tokens, ends.device
        num_sequences = len(ends) - 1
        if is_fake(ends):
            num_used = num_tokens - 1 if num_used is None else num_used
            lengths = np.full(num_sequences, num_used // max(1, num_sequences))
        else:
            lengths = np.diff(ends.cpu().numpy())
        lengths = lengths[lengths > 0]
        self.lengths = lengths if len(lengths) else np.array([num_tokens - 1])
        self._tables: dict[int, Tables] = {}
        self._masks: dict[tuple, torch.Tensor] = {}
        self._ends: torch.Tensor | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    @property
    def ends(self) -> torch.Tensor:
        """Ends of the sequences that are not empty, and of the spare tokens as one sequence more, int32 [Q' + 2]."""
        if self._ends is None:
            ends = np.concatenate([[0], np.cumsum(self.lengths), [self.num_tokens]])
            self._ends = torch.from_numpy(ends.astype(np.int32)).to(self.device, non_blocking=True)
        return self._ends

    def rows(self) -> Rows:
        """Return the index tables of all sequences in one table, in their order."""
        return Rows(*(None if value is None else value.to(self.device) for value in make_rows(self.lengths)))

    def tables(self, num_groups: int) -> Tables:
        """Return the index tables of tokens that are split into `num_groups` parts each, for `to_tables` and `from_tables`."""
        if num_groups not in self._tables:
            # Tables are of sequences from the longest to the shortest
            order = np.argsort(-self.lengths, kind="stable")
            starts, lengths = (np.cumsum(self.lengths) - self.lengths)[order], self.lengths[order]
            # int [n + 1]: the token at each place of the sorted row, and the spare one
            tokens = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
            token_at = torch.from_numpy(np.append(tokens, len(tokens)))
            parts = [part._replace(source=token_at[part.source]) for part in make_parts(split_by_length(lengths))]
            tables = make_tables(parts, num_groups)
            place = torch.empty_like(tables.place).view(-1, num_groups)
            place[token_at[:-1]] = tables.place.view(-1, num_groups)
            sources = tuple(source.to(self.device, non_blocking=True) for source in tables.sources)
            place = place.flatten().to(self.device, non_blocking=True)
            self._tables[num_groups] = tables._replace(sources=sources, place=place)
        return self._tables[num_groups]

    def is_seen(self, length: int, window: int | None) -> torch.Tensor:
        """Tell which keys a query sees: bool [T, T], with a window the last `window` ones, its own included."""
        key = length, window
        if key not in self._masks:
            seen = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
            self._masks[key] = seen if window is None else seen.triu(1 - window)
        return self._masks[key]

    def bias(self, length: int, window: int | None, num_repeats: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what is added to the scores of `num_repeats` heads per token: 0 or -infinity, [1, T num_repeats, T]."""
        key = length, window, num_repeats, dtype
        if key not in self._masks:
            seen = self.is_seen(length, window)
            bias = torch.zeros(length, length, dtype=dtype, device=self.device).masked_fill_(~seen, -torch.inf)
            self._masks[key] = bias.repeat_interleave(num_repeats, 0)[None]
        return self._masks[key]


_current: ContextVar[Sequences | None] = ContextVar("sequences", default=None)


@contextlib.contextmanager
def within(sequences: Sequences | None) -> Iterator[None]:
    """Let the attention of models within this context be inside these sequences."""
    token = _current.set(sequences)
    try:
        yield
    finally:
        _current.reset(token)


def recomputation() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """Return contexts of a layer's forward and of its recomputation in the backward: `context_fn` of torch's checkpoint."""
    return contextlib.nullcontext(), within(_current.get())


def _interface(kernel: str):
    @torch.compiler.disable  # the tables change with every micro-batch
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        dropout: float = 0.0,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention as transformers calls it: query [1, heads, M, d], key and value [1, key heads, M, d] ->
        [1, M, heads, d]."""
        sequences = _current.get()
        if sequences is None or query.shape[0] != 1:
            raise RuntimeError("attention inside sequences is of one row, computed within `sequences.within`")
        device = query.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
        q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        dropout = dropout if module.training else 0.0
        if kernel == "eager" or softcap is not None or s_aux is not None or dropout:
            y = _eager(module, q, k, v, sequences, scaling, sliding_window, softcap, s_aux, dropout)
        elif kernel == "varlen":
            y = _varlen(q, k, v, sequences, scaling, sliding_window)
        else:
            y = _sdpa(q, k, v, sequences, scaling, sliding_window)
        return y[None], None

    return attention


for _kernel in KERNELS:
    # Transformers makes no mask for a kernel that AttentionMaskInterface does not know
    AttentionInterface.register(PREFIX + _kernel, _interface(_kernel))


def _varlen(q, k, v, sequences: Sequences, scaling: float, window: int | None) -> torch.Tensor:
    """Compute attention by the kernel for sequences of any length: [M, heads, d], [M, key heads, d] twice -> [M, heads, d]."""
    ends, longest = sequences.ends, sequences.longest
    size = (-1 if window is None else window - 1, 0)
    is_grouped = q.shape[1] != k.shape[1]
    return varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=size, enable_gqa=is_grouped)


def _sdpa(q, k, v, sequences: Sequences, scaling: float, window: int | None) -> torch.Tensor:
    """Compute attention by torch's kernels over tables: [M, heads, d], [M, key heads, d] twice -> [M, heads, d]."""
    tables, num_repeats = sequences.tables(1), q.shape[1] // k.shape[1]
    outputs = []
    for queries, keys, values in zip(to_tables(q, tables), to_tables(k, tables), to_tables(v, tables), strict=True):
        length = queries.shape[2]
        if num_repeats > 1:
            keys, values = (x.repeat_interleave(num_repeats, 1) for x in (keys, values))
        if window is None or window >= length:
            y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling)
        else:
            seen = sequences.is_seen(length, window)
            y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scaling)
        outputs.append(y)
    return from_tables(outputs, tables, len(q))


def _eager(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: Sequences,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Compute attention by plain products: [M, heads, d], [M, key heads, d] twice -> [M, heads, d].

    The R heads that share keys lie side by side: their queries are R rows per token of the same product.
    """
    num_groups, num_repeats = k.shape[1], q.shape[1] // k.shape[1]
    tables = sequences.tables(num_groups)
    # Of each table [S', g, T, R d] and twice [S', g, T, d]
    grouped = to_tables(q.reshape(len(q), num_groups, -1), tables)
    row_keys, outputs = _row_keys(module, tables, num_repeats, len(q)), []
    for queries, keys, values, noise_keys in zip(
        grouped, to_tables(k, tables), to_tables(v, tables), row_keys, strict=True
    ):
        num_rows, _, length, _ = queries.shape
        queries = queries.reshape(num_rows * num_groups, length * num_repeats, -1)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        limit = window if window is not None and window < length else None
        bias = sequences.bias(length, limit, num_repeats, q.dtype)
        if softcap is None:
            scores = torch.baddbmm(bias.expand(len(queries), -1, -1), queries, keys.mT, alpha=scaling)
        else:
            scores = torch.tanh(queries @ keys.mT * (scaling / softcap)) * softcap + bias
        if sinks is not None:  # one score more, of no value
            sink = (
                sinks.to(scores.dtype)
                .view(num_groups, 1, num_repeats)
                .expand(-1, length, -1)
                .reshape(num_groups, -1, 1)
            )
            scores = torch.cat([scores, sink.repeat(num_rows, 1, 1)], -1)
        with torch.autocast(q.device.type, enabled=False):
            p = scores.softmax(-1)  # computed in float32 inside, kept in q's type: the backward needs no other copy
        p = p if sinks is None else p[..., :-1]
        y = _drop(module, p, noise_keys, dropout) @ values  # [S' g, T R, d]
        outputs.append(y.view(num_rows, num_groups, length, -1))
    return from_tables(outputs, tables, len(q)).reshape(len(q), num_groups * num_repeats, -1)


def own_dropout(model: nn.Module) -> None:
    """Give each layer of attention whose dropout is but a number a module for it, so that its noise can be by sample."""
    for module in model.modules():
        probability = getattr(module, "attention_dropout", None)
        if isinstance(probability, float) and probability and not hasattr(module, "attn_dropout"):
            module.attn_dropout = nn.Dropout(probability)


def _row_keys(module: nn.Module, tables: Tables, num_repeats: int, num_tokens: int) -> list[torch.Tensor | None]:
    """Return the noise's keys of the rows of probabilities: of each table int64 [S' g, T R]; None: no noise by sample."""
    dropout = getattr(module, "attn_dropout", None)
    if not isinstance(dropout, noise.Dropout) or not module.training or not dropout.p:
        return [None] * len(tables.sources)
    num_groups = tables.sources[0].shape[1]
    keys = dropout.noise.rows[1, num_tokens][0]
    heads = torch.arange(num_groups * num_repeats, device=keys.device).view(num_groups, 1, num_repeats)
    tokens = [source[:, :1] // num_groups for source in tables.sources]  # [S', 1, T]
    return [noise.mix(keys[token][..., None] + heads).view(len(token) * num_groups, -1) for token in tokens]


def _drop(module: nn.Module, p: torch.Tensor, keys: torch.Tensor | None, dropout: float) -> torch.Tensor:
    """Apply a layer's dropout to its probabilities [S' g, T R, T]."""
    return F.dropout(p, dropout) if keys is None else module.attn_dropout.drop(p, keys)
