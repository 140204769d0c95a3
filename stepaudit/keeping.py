"""Reads parameters and gradients where they are kept: by torch as whole tensors, by some libraries in parts of their own."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from stepaudit.random_projection import sketch


class Keeping:
    """Reads the parameters of a track, and their gradients, as torch keeps them: whole, in the program's own tensors.

    What a library keeps otherwise is read by a class of its own (`libraries.Library.make_keeping`).

    Args:
        parameters: of the program, in the order of the sketches.

    Attributes:
        templates: tensors of the shapes and dtypes of the whole parameters.
        adds_up: `.grad` holds the sum of a step's micro-batches, and in the end what the optimizer takes.
        title: library, version and mode; empty for torch alone.
    """

    adds_up = True
    title = ""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        self.templates: list[torch.Tensor] = list(parameters)
        self.previous: list[torch.Tensor] = []  # the parameters before a step

    def sketch(self, tensors: Iterable[torch.Tensor | None]) -> np.ndarray:
        """Sketch a tensor for each parameter: float64 [numbers of the sketch]."""
        return sketch(tensors, self.templates).numpy()

    def read(self) -> Iterable[torch.Tensor]:
        """Read the whole parameters, one after the other."""
        return self.parameters

    def sketch_gradient(self) -> np.ndarray:
        """Sketch the present gradient. Versions of tensors do not show every change: `.data` and all_reduce leave them."""
        return self.sketch([parameter.grad for parameter in self.parameters])

    def sketch_unclipped(self) -> np.ndarray | None:
        """Sketch the gradient before the library clips it by itself; None: it does not."""
        return None

    def begin_step(self) -> None:
        """Note the parameters before the optimizer's step."""
        if not self.previous:
            self.previous = [torch.empty_like(parameter, requires_grad=False) for parameter in self.parameters]
        with torch.no_grad():
            for value, parameter in zip(self.previous, self.parameters, strict=True):
                value.copy_(parameter)  # new memory would cost several times as much

    def end_step(self, puts_back: bool) -> np.ndarray:
        """Sketch what the step has added to the parameters; `puts_back`: take it away again."""
        with torch.no_grad():
            pairs = list(zip(self.parameters, self.previous, strict=True))
            subtract = torch.Tensor.sub_ if puts_back else torch.Tensor.sub
            change = self.sketch(subtract(parameter, value) for parameter, value in pairs)
            for parameter, value in pairs if puts_back else []:
                parameter.copy_(value)
        return change
