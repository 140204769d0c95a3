"""Compute towers that lay the patches of all images end to end in one row, as those of Qwen-VL do, in fewer products.

Their attention is inside of an image, or of a window of it, and transformers calls its kernel for each of these parts. Here
parts are gathered into a few tables, each of parts of about the same length, as sequences are (`sequences`). On CUDA, in 16
bits, torch's kernel for parts of any length takes the row as it is. Patches see all of their part.

Their first layer is a convolution of which each patch is a whole input, hence a product of a patch and the weights: on a CPU
that takes half as long. On one core of a CPU with AVX512 both save an eighth of the time of Qwen2.5-VL's tower.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from samestep._internals.transformers_models import set_tower_attention
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


def use_large_products(model: PreTrainedModel) -> Callable[[], None]:
    """Let the towers of a model be computed in fewer products; return what undoes that.

    Args:
        model: of images and text; towers of another kind stay as they are.
    """
    own_kernels = set_tower_attention(model, KERNEL)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv3d)]
    layers = [
        layer for layer in layers if layer.groups == 1 and layer.dilation == (1, 1, 1) and layer.padding == (0, 0, 0)
    ]
    for layer in layers:
        layer.forward = functools.partial(_project, layer, layer.forward)

    def undo() -> None:
        model.set_attn_implementation(own_kernels)
        for layer in layers:
            del layer.forward

    return undo


def _project(layer: nn.Conv3d, own_forward: Callable, x: torch.Tensor) -> torch.Tensor:
    """Compute a convolution of inputs that are as large as its kernel by one product: [n, channels, t, h, w] ->
    [n, width, 1, 1, 1]."""
    if tuple(x.shape[2:]) != layer.kernel_size or x.ndim != 5:
        return own_forward(x)
    return F.linear(x.flatten(1), layer.weight.flatten(1), layer.bias)[..., None, None, None]
