"""Compute RMS normalisations of transformers' models in few passes over memory, on CPUs in float32 or wider.

Their own forward reads and writes all numbers seven times, and its backward twelve times: a quarter of the time of a small
model. Here it is three and six times. The function is the same; sums are rounded otherwise, and numbers of float64 stay
float64, which transformers rounds to float32 there.
"""

import functools

import torch
from torch import nn

from samestep._internals.torch_tracing import is_fake


def use_few_passes(model: nn.Module) -> int:
    """Let the RMS normalisations in a model be computed by `RowNorm`, where they have the usual form; return their number.

    The usual form is Llama's, weight * x / sqrt(mean(x^2) + eps). Each is compared with its own forward before it is replaced.
    """
    count = 0
    for module in model.modules():
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or eps is None or is_fake(weight):
            continue
        x = torch.linspace(-1, 2, 2 * len(weight), dtype=weight.dtype, device=weight.device).view(2, -1)
        with torch.no_grad():
            own = module.forward(x)
            is_usual = weight.device.type == "cpu" and torch.allclose(own, RowNorm.apply(x, weight, eps), rtol=1e-5)
        if is_usual:
            module.forward = functools.partial(_normalise, module, module.forward)
            count += 1
    return count


def _normalise(module: nn.Module, own_forward, x: torch.Tensor) -> torch.Tensor:
    is_same = x.dtype == module.weight.dtype and x.dtype in (torch.float32, torch.float64)
    if not is_same or x.device.type != "cpu" or is_fake(x):
        return own_forward(x)
    return RowNorm.apply(x, module.weight, module.variance_epsilon)


class RowNorm(torch.autograd.Function):
    """Computes weight * x r, r = 1 / sqrt(mean(x^2) + eps) of each row: [..., n] and [n] -> [..., n].

    With the gradient g of a row, t = g * weight and n numbers in a row

        of x        r t - x r^3 (t . x) / n
        of weight   the sum over all rows of g * x r
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        n = x.shape[-1]
        products = (gradient * x).reshape(-1, n)
        of_weight = scale.reshape(1, -1) @ products
        dots = (products @ weight).view_as(scale)
        of_x = (gradient * weight).mul_(scale)
        of_x.addcmul_(x, dots * scale.pow(3), value=-1 / n)
        return of_x, of_weight.view(n), None
