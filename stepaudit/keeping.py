"""Reads parameters and gradients where they are kept: by torch as whole tensors, by some libraries in parts of their own."""

from collections.abc import Callable, Iterable, Sequence

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


class FlatKeeping(Keeping):
    """Reads parameters of which an optimizer is given flat parts, on each process others.

    Let f be the flat parts, and F what makes a whole parameter of them, on all processes together; F is linear in f. What the
    optimizer is given, and what it adds, are read by F, too, while f holds them:

        gradient = F(f := f.grad) - F(f := 0),      change = F(f := after - before) - F(f := 0).

    F(0) is what other parts contribute, whose step comes earlier or later. So these are the numbers that the optimizer takes.

    Args:
        parameters: of the program; they may be empty while nothing computes.
        shapes: of the whole parameters.
        assemble: makes a whole parameter, float32; all processes call it, in the same order.
        title: see `Keeping`.
    """

    adds_up = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shapes: Sequence[Sequence[int]],
        assemble: Callable[[nn.Parameter], torch.Tensor],
        title: str = "",
    ):
        super().__init__(parameters)
        self.assemble, self.title, self.is_open = assemble, title, False
        self.templates = [torch.empty(*shape, device="meta") for shape in shapes]
        self.gradient = self.change = self._sketch_nothing()
        self.before: list[torch.Tensor] = []  # the flat parts, in front of a step of the optimizer
        self.others = self._sketch_nothing()  # what other parts contribute to what is read

    def _sketch_nothing(self) -> np.ndarray:
        return self.sketch([None] * len(self.templates))

    def read(self) -> Iterable[torch.Tensor]:
        return map(self.assemble, self.parameters)

    def sketch_gradient(self) -> np.ndarray:
        """Sketch what the optimizer was given in the present step, or in the last one."""
        return self.gradient

    def begin_step(self) -> None:
        self.is_open, self.gradient, self.change = True, self._sketch_nothing(), self._sketch_nothing()

    def end_step(self, puts_back: bool) -> np.ndarray:
        self.is_open = False
        return self.change

    def begin_part(self, parts: Sequence[torch.Tensor]) -> None:
        """Read the gradient that the optimizer is given for flat parts, before it steps."""
        self.before = [part.detach().clone() for part in parts]
        for part in parts:
            part.data.zero_()
        self.others = self.sketch(self.read())
        for part in parts:
            if part.grad is not None:
                part.data.copy_(part.grad)
        self.gradient = self.gradient + self.sketch(self.read()) - self.others
        for part, before in zip(parts, self.before, strict=True):
            part.data.copy_(before)

    def end_part(self, parts: Sequence[torch.Tensor], puts_back: bool) -> None:
        """Read what the optimizer has added to flat parts; `puts_back`: take it away again."""
        after = [part.detach().clone() for part in parts]
        for part, before in zip(parts, self.before, strict=True):
            part.data.sub_(before)
        self.change = self.change + self.sketch(self.read()) - self.others
        for part, value in zip(parts, self.before if puts_back else after, strict=True):
            part.data.copy_(value)
