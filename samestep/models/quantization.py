"""Hold frozen weights in fewer bits: in 16, as their files do, or in 4 (`contrib.nf4`).

All that makes up a weight is a frozen parameter, so that checkpoints leave it out and digests of the base hold all of it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from samestep._internals.torch_tracing import is_fake


class FrozenLinear(nn.Linear):
    """Computes x W^T + b with a frozen W that is held in fewer bits, in the type of x, or that of autocast.

    W in that type exists for the time of a matmul only.
    """

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Compute the weight, [out, in]."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y = _Matmul.apply(x.to(dtype), self)
        return y if self.bias is None else y + self.bias.to(dtype)


class HalfLinear(FrozenLinear):
    """Holds a weight in the 16 bits of its file, which gives the numbers of a copy in float32 in half of its memory.

    Attributes:
        weight: bfloat16 or float16 [out, in].
    """

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.weight.to(dtype)


class HalfEmbedding(nn.Embedding):
    """Holds a frozen embedding in the 16 bits of its file; its rows are float32, as those of a copy in float32 are.

    Attributes:
        weight: bfloat16 or float16 [rows, width].
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).to(torch.promote_types(self.weight.dtype, torch.float32))


HALVES = {nn.Linear: HalfLinear, nn.Embedding: HalfEmbedding}
"""Class of a layer -> the one that holds its weight in 16 bits."""


class _Matmul(torch.autograd.Function):
    """Multiplies by the weight of a layer, which the backward computes again instead of keeping it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, layer: FrozenLinear) -> torch.Tensor:
        ctx.layer = layer
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, layer.dequantize(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.autocast(gradient.device.type, enabled=False):
            return gradient @ ctx.layer.dequantize(gradient.dtype), None


def hold_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Hold frozen matrices in a type of 16 bits instead, in place, where it has their numbers.

    Args:
        model: peft's, with adapters, which would be rounded to that type if they came later.
        dtype: bfloat16 or float16, that of the base's files.
    """
    halves: dict[int, nn.Parameter] = {}  # one for head and embedding, where they are tied
    for name, module in model.named_modules():
        # A copy of what is trained whole, for the model without adapters, stays as it is
        if type(module) not in HALVES or module.weight.requires_grad or name.endswith(".original_module"):
            continue
        weight = module.weight
        if id(weight) not in halves:
            half = weight.detach().to(dtype)
            if not is_fake(half) and not torch.equal(half.to(weight.dtype), weight):
                continue
            halves[id(weight)] = nn.Parameter(half, requires_grad=False)
        module.weight, module.__class__ = halves[id(weight)], HALVES[type(module)]


def dequantize_base(model: nn.Module) -> None:
    """Give layers that are held in fewer bits their weights in float32 instead, in place."""
    wholes: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if type(module) in HALVES.values():
            weight = module.weight
            if weight not in wholes:
                whole = weight.to(torch.promote_types(weight.dtype, torch.float32))
                wholes[weight] = nn.Parameter(whole, requires_grad=False)
            module.weight = wholes[weight]
            module.__class__ = next(plain for plain, half in HALVES.items() if half is type(module))
        elif isinstance(module, FrozenLinear):
            linear = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
            linear.weight = nn.Parameter(module.dequantize(), requires_grad=False)
            if module.bias is not None:
                linear.bias = module.bias
            model.set_submodule(name, linear)
