"""Draws the dropout of models that call torch's function for it, by sample, as `samestep.step.noise` does it for modules.

Encoder-decoder models of transformers call `torch.nn.functional.dropout` in their layers, where no module could be exchanged,
and T5 calls one module twice. Here a call of the function is named by the module whose forward makes it, and by its number
among the calls of this forward. A layer that is computed again in the backward has the same names.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from samestep.step import noise


class CalledDropout(nn.Module):
    """Calls the function, as `nn.Dropout` does; its call is named by the module that calls it.

    Args:
        probability: of dropping a number.
    """

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.probability, self.training)


def call_functions(model: nn.Module) -> None:
    """Let every `nn.Dropout` of a model call the function, in place."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, CalledDropout(child.p).train(child.training))


class Frame:
    """Holds the name of a module whose forward runs now, and the number of its calls so far."""

    def __init__(self, name: str, count: int = 0):
        self.name, self.count = name, count


class Calls:
    """Knows of each call of the function by which module's forward it is made, and its number there.

    Args:
        model: gets hooks around the forwards of its modules.
    """

    def __init__(self, model: nn.Module):
        self.frames: list[Frame] = []
        self.dropouts: dict[tuple[str, float], noise.Dropout] = {}
        for name, module in model.named_modules():
            if not type(module).__module__.startswith("torch.nn.") and type(module) is not CalledDropout:
                module.register_forward_pre_hook(functools.partial(self._enter, name))
                module.register_forward_hook(self._leave)

    def _enter(self, name: str, module: nn.Module, arguments: Any) -> None:
        self.frames.append(Frame(name))

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self.frames:
            self.frames.pop()

    def find_frame(self) -> Frame:
        """Find the innermost forward that runs now, as it is now; of no module if there is none."""
        return Frame(self.frames[-1].name, self.frames[-1].count) if self.frames else Frame("")

    def drop(self, own_noise: noise.Noise, x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        """Drop numbers of a tensor [samples, ..., features] in the call that is made now."""
        if not training or not p:
            return x
        frame = self.frames[-1]
        name = f"{frame.name}({frame.count})"
        frame.count += 1
        if (name, p) not in self.dropouts:
            self.dropouts[name, p] = noise.Dropout(p, own_noise, name)
        return self.dropouts[name, p].drop(x)


class DropoutByCall(TorchFunctionMode):
    """Lets calls of the function within this context drop numbers by sample.

    Args:
        calls: of the model.
        own_noise: the model's, with the samples of the micro-batch.
        start: forward within which this context is, for a recomputation: it calls a layer's forward without hooks.
    """

    def __init__(self, calls: Calls, own_noise: noise.Noise, start: Frame):
        super().__init__()
        self.calls, self.noise, self.start = calls, own_noise, start

    def __enter__(self) -> "DropoutByCall":
        # Anew, as a recomputation ends early, within its modules
        self.calls.frames[:] = [Frame(self.start.name, self.start.count)]
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        return self._drop(*args, **(kwargs or {}))

    def _drop(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return self.calls.drop(self.noise, input, p, training)
