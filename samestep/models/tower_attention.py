"""Compute the attention of towers in few products, which transformers computes in one for each image, or window of an image.

Towers of Qwen-VL and others like it lay the patches of all images end to end in one row, without padding, and say where images,
or their windows, end. Here these parts are gathered into a few tables, each of parts of about the same length, as sequences are
(`sequences`); on CUDA, in 16 bits, torch's kernel for parts of any length takes the row as it is. Patches see all of their part.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from samestep.data.ragged import Tables
from samestep.models.attention import Layer, attend
from samestep.models.sequences import Sequences

KERNEL = "samestep_flash_parts"
"""Name of the kernel, for `set_tower_attention`, which says why "flash" is in it."""
HALVES = (torch.float16, torch.bfloat16)


@torch.compiler.disable  # the tables change with every micro-batch
def attend_in_parts(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers calls kernels of the flash family.

    Args:
        query, key, value: [1, heads, M, d] of a row of M patches.
        cu_seq_lens_q: int [parts + 1], 0 and the end of each part.

    Returns:
        [1, M, heads, d].
    """
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    if device == "cuda" and dtype in HALVES:
        ends = cu_seq_lens_q.to(torch.int32)
        longest = int(ends.diff().max())
        return varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, -1))[None], None
    tables = _make_tables(tuple(cu_seq_lens_q.tolist()), query.device)
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (q, k, v))  # a spare row, to which padding points
    layer = Layer(scaling, rate=dropout)
    return attend("sdpa", layer, q, k, v, tables, tables, tables.is_token)[None, :-1], None


@functools.lru_cache(maxsize=8)  # layers have the same parts, or take turns between images and their windows
def _make_tables(ends: tuple[int, ...], device: torch.device) -> Tables:
    tables = Sequences(torch.tensor(ends, dtype=torch.int32, device=device), ends[-1] + 1).tables(1)
    masks = tuple(None if is_token is None else is_token.to(device) for is_token in tables.is_token)
    return tables._replace(is_token=masks)


AttentionInterface.register(KERNEL, attend_in_parts)
