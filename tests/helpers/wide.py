"""Float64 throughout: models of transformers convert what they normalise to float32, in whatever type they are."""

import torch
from torch.overrides import TorchFunctionMode


class Wide(TorchFunctionMode):
    """Computes in float64 what models of transformers convert to float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)
