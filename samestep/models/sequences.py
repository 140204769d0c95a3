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
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from samestep._internals.torch_tracing import is_fake
from samestep.data.ragged import Rows, Tables, make_rows, make_tables, split_by_length
from samestep.models.attention import Layer, attend, make_parts

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

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    @functools.cached_property
    def ends(self) -> torch.Tensor:
        """Ends of the sequences that are not empty, and of the spare tokens as one sequence more, int32 [Q' + 2]."""
        ends = np.concatenate([[0], np.cumsum(self.lengths), [self.num_tokens]])
        return torch.from_numpy(ends.astype(np.int32)).to(self.device, non_blocking=True)

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

    def mask(self, length: int, window: int | None, num_repeats: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what `num_repeats` queries per token see, with a window the last `window` keys, their own included.

        Returns:
            torch.bool: whether a key is seen, [T num_repeats, T]; another dtype: 0 or -infinity, added to scores,
                [1, 1, T num_repeats, T].
        """
        key = length, window, num_repeats, dtype
        if key not in self._masks:
            seen = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
            mask = seen if window is None else seen.triu(1 - window)
            if dtype != torch.bool:
                zeros = torch.zeros(length, length, dtype=dtype, device=self.device)
                mask = zeros.masked_fill_(~mask, -torch.inf).repeat_interleave(num_repeats, 0)[None, None]
            self._masks[key] = mask
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
        rate = dropout if module.training else 0.0
        is_eager = kernel == "eager" or softcap is not None or s_aux is not None or bool(rate)
        if kernel == "varlen" and not is_eager:
            ends, longest = sequences.ends, sequences.longest
            window, is_grouped = -1 if sliding_window is None else sliding_window - 1, q.shape[1] != k.shape[1]
            options = {"scale": scaling, "window_size": (window, 0), "enable_gqa": is_grouped}
            return varlen_attn(q, k, v, ends, ends, longest, longest, **options)[None], None
        tables, masks = sequences.tables(k.shape[1] if is_eager else 1), []
        for length in (source.shape[2] for source in tables.sources):
            limit = sliding_window if sliding_window is not None and sliding_window < length else None
            if is_eager:
                masks.append(sequences.mask(length, limit, q.shape[1] // k.shape[1], dtype))
            else:
                masks.append(None if limit is None else sequences.mask(length, limit, 1, torch.bool))
        own_dropout = getattr(module, "attn_dropout", None)
        layer = Layer(scaling, True, softcap, s_aux, own_dropout, rate, (1, len(q)))
        return attend("eager" if is_eager else "sdpa", layer, q, k, v, tables, tables, masks)[None], None

    return attention


for _kernel in KERNELS:
    # Transformers makes no mask for a kernel that AttentionMaskInterface does not know
    AttentionInterface.register(PREFIX + _kernel, _interface(_kernel))


def register_beside(kernel: str, other: str) -> str:
    """Register a kernel that is one of `KERNELS` within `within`, and transformers' `other`, with its masks, elsewhere.

    Args:
        kernel: of `KERNELS`.
        other: name of a kernel that transformers registered, sdpa for example.

    Returns:
        its name, for `set_attn_implementation`.
    """
    inside, outside, mask = _interface(kernel), ALL_ATTENTION_FUNCTIONS[other], ALL_MASK_ATTENTION_FUNCTIONS[other]

    def attention(*arguments: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        return (outside if _current.get() is None else inside)(*arguments, **options)

    def make_mask(*arguments: Any, **options: Any) -> torch.Tensor | None:
        return mask(*arguments, **options) if _current.get() is None else None

    name = f"{PREFIX}{kernel}_or_{other}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, make_mask)
    return name


def own_dropout(model: nn.Module) -> None:
    """Give each layer of attention whose dropout is but a number a module for it, so that its noise can be by sample."""
    for module in model.modules():
        probability = getattr(module, "attention_dropout", None)
        if isinstance(probability, float) and probability and not hasattr(module, "attn_dropout"):
            module.attn_dropout = nn.Dropout(probability)
