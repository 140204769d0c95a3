"""The routers of a model's mixtures of experts: what they return in the forwards of a step."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from samestep._internals.transformers_models import find_routers

BIAS = "e_score_correction_bias"
"""Name in transformers of the bias with which a router chooses, and does not weight, experts."""
FITS = 0.05
"""Largest difference of the logarithms of a router's weights from those of scores, which 16 bits may round."""
Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits [tokens, E] of a router, weights and indices [tokens, k] of the experts that it chose."""


class Routers:
    """The routers of a model, and what they returned in its latest forward of a step.

    Args:
        model: of sequences, without DistributedDataParallel around it; `locate_targets` says which tokens count.

    Attributes:
        modules: the routers.
        is_in_step: whether forwards are noted; those of evaluations never are.
        called: routers in the order of the latest forward, that of the layers.
    """

    def __init__(self, model: nn.Module):
        self.model, self.modules = model, list(find_routers(model))
        self.is_in_step = self._is_open = False
        self.called: list[nn.Module] = []
        self._outputs: list[Output] = []
        self._micro_batch: dict[str, Any] = {}
        self._hooks = [
            model.register_forward_pre_hook(self._open, with_kwargs=True),
            *(router.register_forward_hook(self._capture) for router in self.modules),
            model.register_forward_hook(self._shut),
        ]

    def take(self) -> tuple[list[Output], dict[str, Any]]:
        """Return what the routers returned in the latest forward, and its micro-batch, and let go of both."""
        taken = self._outputs, self._micro_batch
        self._outputs, self._micro_batch = [], {}
        return taken

    @torch.no_grad()
    def run(self, micro_batch: dict[str, Any]) -> list[Output]:
        """Compute what routers return of a micro-batch, without gradient, and without the head: there are no labels."""
        self.model(**{name: value[:0] if "label" in name else value for name, value in micro_batch.items()})
        return self.take()[0]

    def close(self) -> None:
        """Let go of the model."""
        for hook in self._hooks:
            hook.remove()

    def _open(self, model: nn.Module, arguments: tuple, micro_batch: dict[str, Any]) -> None:
        """Begin to note what routers return: in a step, but not where activations are computed again."""
        if self.is_in_step and model.training:
            self._is_open, self._outputs, self._micro_batch, self.called = True, [], micro_batch, []

    def _capture(self, router: nn.Module, arguments: tuple, output: Output) -> None:
        if self._is_open:
            self._outputs.append(output)
            self.called.append(router)

    def _shut(self, model: nn.Module, arguments: tuple, output: Any) -> None:
        self._is_open = False


def has_bias(router: nn.Module) -> bool:
    """Tell whether a router chooses by a bias that no gradient moves, and that checkpoints have."""
    return BIAS in dict(router.named_buffers(recurse=False)) and BIAS in router.state_dict()


def is_known(output: Any) -> bool:
    """Tell whether a router returned logits [tokens, E], weights and indices [tokens, k]."""
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(part, torch.Tensor) for part in output):
        return False
    logits, weights, indices = output
    has_shapes = logits.ndim == indices.ndim == 2 and len(logits) == len(indices) and weights.shape == indices.shape
    return has_shapes and logits.is_floating_point() and not indices.is_floating_point()


def compare_scores(logits: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Count the tokens whose experts are weighted as softmax would, and as sigmoids would; int64 [2].

    A router may divide its weights by their sum, and multiply them: with k > 1 ratios are compared. What fits both counts for
    the nearer one if it is nearer by half.
    """
    z, own = logits.double(), weights.double().log()
    errors = []
    for scores in (z.log_softmax(1), F.logsigmoid(z)):
        difference = own - scores.gather(1, indices)
        if indices.shape[1] > 1:
            difference = difference - difference.mean(1, keepdim=True)
        errors.append(difference.abs().amax(1))
    soft, sigmoid = errors
    return torch.stack([(a <= FITS).logical_and(a < b / 2).sum() for a, b in ((soft, sigmoid), (sigmoid, soft))])
