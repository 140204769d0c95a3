"""Defines what every model of a task offers to a run: summed losses, kernels to choose from, first weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from samestep._internals.transformers_models import recompute_activations
from samestep.errors import UsageError


class SummedLosses(nn.Module):
    """Returns the sums of a model's losses over a micro-batch, one per term: means must not be added up.

    `forward(**micro_batch)` returns `(sums, predictions)`: `sums` is floating [terms], in the order of the recipe's
    `loss_weights`, and no view, so that its graph can be freed when memory runs out; `predictions` is what an evaluation needs
    of the micro-batch: the number of correct predictions int64 [terms], or logits; it may be None while training.

    Attributes:
        _no_split_modules: names of the classes that FSDP2 shards one by one.
        notes: lines for the log about how the model is computed.
    """

    _no_split_modules: Sequence[str] = ()
    notes: Sequence[str] = ()

    @classmethod
    def from_recipe(cls, recipe: Any, source: Any = None) -> Self:
        """Build the model of a recipe, with random weights (of torch's seed) or those of `model_name_or_path`; here without
        arguments.

        Args:
            recipe: of the task; decides the shapes.
            source: the training data, which may decide the number of classes or the vocabulary; None: the recipe decides, as
                for the planner.
        """
        return cls()

    @classmethod
    def example(cls, recipe: Any, num_samples: int) -> dict[str, torch.Tensor | None]:
        """Make up a micro-batch of samples of the greatest length, to trace memory with; its content means nothing."""
        raise NotImplementedError

    def kernel_candidates(
        self, device: torch.device, mixed_precision: str, settings: Any
    ) -> Mapping[str, Callable[[], object]]:
        """Return, by name, functions that make the model use the kernels that may be the fastest; the safe ones come first.

        All kernels compute the same function.
        """
        return {"torch": lambda: None}

    def recompute_activations(self) -> None:
        """Keep few activations for the backward, which computes the others again.

        Raises:
            UsageError: the model cannot do this.
        """
        models = (model for model in self.children() if isinstance(model, PreTrainedModel))
        model = next((model for model in models if model.supports_gradient_checkpointing), None)
        if model is None:
            raise UsageError(
                f"gradient_checkpointing is true, but {type(self).__name__} cannot recompute its activations: set it to false"
            )
        recompute_activations(model)

    def compile_layers(self) -> None:
        """Compile each layer, once for micro-batches of all sizes."""
        for module in self.modules():
            if type(module).__name__ in self._no_split_modules:
                module.compile(dynamic=True)
