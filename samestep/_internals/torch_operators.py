"""Operators that torch uses in its own optimizers and layers without documenting them."""

import warnings
from collections.abc import Callable

import torch

# torch 2.13. One call for lists of tensors, on GPUs a few kernels: `foreach_add_(a, b, alpha=c)` is `a_i.add_(b_i, alpha=c)`
# for every i, and so on. torch's optimizers and `torch.nn.utils.clip_grad_norm_` are made of them; what is documented works on
# one tensor.
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_sqrt = torch._foreach_sqrt
foreach_norm = torch._foreach_norm


def has_onednn() -> bool:
    """Tell whether torch 2.13 is built with `linear_by_onednn`, as it is for x86 CPUs."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear_by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x weight^T + bias in float32 by oneDNN: [M, K], [N, K] and [N] -> [M, N].

    torch 2.13, `mkldnn::_linear_pointwise`, which TorchInductor calls: `torch.nn.functional.linear` takes MKL for float32,
    whatever is set, which is slower on some CPUs (see `models.cpu_matmul`).
    """
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def embedding_backward(
    gradient: torch.Tensor, ids: torch.Tensor, num_rows: int, padding_idx: int | None
) -> torch.Tensor:
    """Add up the gradient of looked-up rows, in its own type: [..., h] and int64 [...] -> [num_rows, h].

    torch 2.13, `aten::embedding_dense_backward`, the backward of `torch.nn.functional.embedding`. What is documented,
    `Tensor.index_add_`, adds in another order each time on a GPU.

    Args:
        padding_idx: row whose gradient is 0; None: no row.
    """
    padding = -1 if padding_idx is None else padding_idx
    return torch.ops.aten.embedding_dense_backward(gradient, ids, num_rows, padding, False)


def replace_on_cpus(**kernels: Callable[..., torch.Tensor]) -> torch.library.Library:
    """Compute operators of `aten` by other kernels on CPUs, backwards included, as long as the returned library exists.

    torch 2.13: `torch.library.Library` is documented for a user's own operators. It is not documented that it overrides torch's
    operators, nor that these come back when it is deleted. Its warning that it overrides them is silenced.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
    return library
