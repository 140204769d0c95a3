"""The needs of a trace: fake tensors, facts about operators, and a CPU that allocates as CUDA does."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

# torch 2.13. Documented under these names, but in modules that are not: there is no other way to them.
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["FakeTensorMode", "TorchDispatchMode", "imitate_cuda", "tree_leaves"]

ATTENTION_ON_CPUS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""torch 2.13: the kernel that `scaled_dot_product_attention` takes on CPUs, of which torch's FLOP counter knows nothing."""
ATTENTION_ON_CPUS_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def silence_log() -> contextlib.AbstractContextManager:
    """Let failures on fake tensors only raise within this context (torch 2.13, `fake_tensor.log`): torch logs each one, too."""
    return mock.patch.object(fake_tensor.log, "disabled", True)


def is_fake(tensor: Tensor) -> bool:
    """Tell whether a tensor has a shape but no numbers (torch 2.13, `FakeTensor`)."""
    return tensor.is_meta or isinstance(tensor, fake_tensor.FakeTensor)


def keep_modules() -> contextlib.AbstractContextManager:
    """Let `Module.to` change nothing within this context: of fake tensors it fails even where it need not (torch 2.13)."""
    return mock.patch.object(torch.nn.Module, "to", lambda module, *_, **__: module)


def address(storage: torch.UntypedStorage) -> int:
    """Return a number that no other existing storage has, for fake tensors too (torch 2.13, `_cdata`).

    `data_ptr()`, which is documented, is no number where there is no memory.
    """
    return storage._cdata


def is_view(tensor: Tensor) -> bool:
    """Tell whether autograd counts a tensor as a view of another (torch 2.13, `_is_view`), so that no gradient is added to it
    in place."""
    return tensor._is_view()


def packet(operator: torch._ops.OpOverload) -> torch._ops.OpOverloadPacket:
    """Return an operator without its overload, `aten.mm` of `aten.mm.default` (torch 2.13): a key of torch's FLOP counter."""
    return operator._overloadpacket


def name(operator: torch._ops.OpOverload) -> str:
    """Return the operator's name without `aten::` and its overload (torch 2.13, `_opname`)."""
    return operator._opname


# What CUDA's autocast computes in float32 and the CPU's does not.
# https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-autocast-to-float32
FLOAT32_FUNCTIONS = (
    *((owner, name) for owner in (torch, Tensor) for name in ("pow", "exp", "rsqrt", "softmax", "log_softmax")),
    *((F, name) for name in ("softmax", "log_softmax", "softplus", "layer_norm", "group_norm")),
    *((F, name) for name in ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits")),
    (Tensor, "__pow__"),
)


@contextlib.contextmanager
def imitate_cuda() -> Iterator[None]:
    """Keep and free CPU tensors, real or fake, within this context as CUDA would, where the two differ (torch 2.13).

    - Dropout keeps a mask of one byte per number. The CPU keeps scaled noise in the numbers' own type.
    - `scaled_dot_product_attention` with dropout runs in a kernel that stores no [T, T] matrix. The CPU falls back to plain
      products, which store several. The kernel's dropout is left out: it keeps only the state of its generator.
    - Autocast computes `FLOAT32_FUNCTIONS` from inputs that it casts. The CPU keeps their types: gelu_new's power is in
      bfloat16.

    The functions are replaced, in all threads. A TorchFunctionMode would not do: it ends where a backward begins, and what
    is computed again there would be as on a CPU.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "dropout", _dropout))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _attention))
        for owner, function in FLOAT32_FUNCTIONS:
            stack.enter_context(mock.patch.object(owner, function, _compute_in_float32(getattr(owner, function))))
        yield


def _dropout(input, p=0.5, training=True, inplace=False):
    if inplace or not training or not 0 < p < 1:
        return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)
    return torch.native_dropout(input, p, training)[0]


sdpa = F.scaled_dot_product_attention


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
    return sdpa(query, key, value, attn_mask, 0.0, *args, **kwargs)


def _compute_in_float32(function: Callable) -> Callable:
    def widen(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

    @functools.wraps(function)
    def replacement(*args, **kwargs):
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, widen, (args, kwargs))
        return function(*args, **kwargs)

    return replacement
