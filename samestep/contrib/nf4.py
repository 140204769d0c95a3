"""Hold frozen weights in 4 bits: NF4 with double quantisation (QLoRA, 2305.14314).

A weight is cut into blocks of 64 numbers. Each block has a scale, its largest magnitude, and each number the place of the
nearest of 16 levels between -1 and 1. The scales, less their mean, are cut into blocks of 256, and have 8 bits each, with one
of 32 bits for each block: 4.13 bits per number in all. The format, its levels and the kernels that read it are bitsandbytes'.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from samestep._internals.torch_tracing import is_fake
from samestep.errors import UsageError
from samestep.models.quantization import FrozenLinear
from samestep.recipe import extras

BLOCK, SCALE_BLOCK = 64, 256
"""Numbers that share a scale, and scales that share one."""


class Nf4Linear(FrozenLinear):
    """Holds a weight in 4 bits.

    Args:
        linear: layer whose weight is rounded; its bias is kept as it is.

    Attributes:
        weight: places of the levels, two in a byte, uint8 [out * in / 2, 1].
        scale_codes, scale_steps, scale_mean: the scales: uint8 [blocks], float32 [blocks / 256] and scalar.
    """

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)  # not that of nn.Linear, which would allocate the weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        names = ("weight", "scale_codes", "scale_steps", "scale_mean")
        for name, tensor in zip(names, quantize(linear.weight.detach()), strict=True):
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", linear.bias)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if is_fake(self.weight):  # with the scales of its blocks, as the kernel takes them
            scales = self.scale_codes.to(torch.float32)
            return scales.new_empty(self.out_features, self.in_features, dtype=dtype)
        from bitsandbytes import functional  # takes a second

        steps, mean = self.scale_steps.float(), self.scale_mean.float()
        levels = functional.create_dynamic_map().to(self.weight.device)
        state = functional.QuantState(
            absmax=self.scale_codes,
            # As one row: in 0.50.2 the kernel of CPUs is wrong where a block ends inside a row
            shape=torch.Size((1, self.out_features * self.in_features)),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=torch.float32 if dtype == torch.float64 else dtype,
            offset=mean,
            state2=functional.QuantState(absmax=steps, code=levels, blocksize=SCALE_BLOCK, dtype=torch.float32),
        )
        return functional.dequantize_4bit(self.weight, state).view(self.out_features, self.in_features).to(dtype)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight to 4 bits as bitsandbytes' `quantize_4bit` does, in torch: the same numbers on every device, and
    7 times faster on a CPU. Scales that are equally near to two levels may get the other one.

    Args:
        weight: floating, [out, in].

    Returns:
        weight, scale_codes, scale_steps, scale_mean of `Nf4Linear`.
    """
    if is_fake(weight):
        num_blocks = -(-weight.numel() // BLOCK)
        packed, codes = (
            weight.new_empty(size, dtype=torch.uint8) for size in ((weight.numel() // 2, 1), (num_blocks,))
        )
        return packed, codes, weight.new_empty(-(-num_blocks // SCALE_BLOCK)), weight.new_empty(())
    from bitsandbytes import functional

    nf4 = functional.get_4bit_type("nf4", device="cpu")
    places, scales = _round(weight.float().flatten(), nf4.to(weight.device), BLOCK)
    places = F.pad(places, (0, len(places) % 2), value=int(nf4.abs().argmin()))
    packed = (places[::2] << 4 | places[1::2]).to(torch.uint8)[:, None]
    mean = scales.mean()
    codes, steps = _round(scales - mean, functional.create_dynamic_map().to(weight.device), SCALE_BLOCK)
    return packed, codes.to(torch.uint8), steps, mean


def _round(values: torch.Tensor, levels: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the nearest level of each value divided by the largest magnitude in its block of `size`; int64 [n], and these
    magnitudes, float32 [blocks]."""
    blocks = F.pad(values, (0, -len(values) % size)).view(-1, size)
    scales = blocks.abs().amax(1)
    factors = torch.where(scales > 0, 1 / scales, 0.0)
    places = torch.bucketize(blocks * factors[:, None], (levels[1:] + levels[:-1]) / 2)
    return places.flatten()[: len(values)], scales


def quantize_base(model: PreTrainedModel, modules_to_save: Any = None) -> str:
    """Round the linear layers of a model to 4 bits in place, all but its head and those that are trained whole.

    Args:
        model: of transformers, without adapters.
        modules_to_save: names of modules that are trained whole; None: none.

    Returns:
        A line for the log: which share of the weights has 4 bits.

    Raises:
        UsageError: bitsandbytes is not installed, or the model has no linear layers.
    """
    if not is_fake(next(model.parameters())):
        extras.require("quantized", "base_quantization nf4")
    heads = {id(model.get_output_embeddings()), id(getattr(model, "score", None))}
    kept, total = tuple(modules_to_save or ()), sum(parameter.numel() for parameter in model.parameters())
    num_rounded = 0
    for name, module in list(model.named_modules()):
        is_trained = any(name == other or name.endswith(f".{other}") for other in kept)
        if type(module) is nn.Linear and id(module) not in heads and not is_trained:
            num_rounded += module.weight.numel()
            model.set_submodule(name, Nf4Linear(module))
    if not num_rounded:
        raise UsageError(
            f"base_quantization is nf4, but {type(model).__name__} has no linear layers of torch: set it to null, or choose "
            "another architecture"
        )
    return f"{num_rounded / total:.1%} of the base's weights are held in 4 bits (nf4), the others as they are"
