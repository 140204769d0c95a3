"""Heads of transformers whose loss balances experts, with that term computed of the whole step.

    loss = cross-entropy + router_aux_loss_coef * E sum_i f_i P_i

f_i is the share of tokens that chose expert i, P_i the mean of its probability, over the tokens of all layers that are no
padding (`balance.expert_balance`). Trainer takes both over a micro-batch, so that the loss depends on the cut.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from samestep.contrib.whole_batch import balance
from samestep.contrib.whole_batch.quantities import Quantities, WholeBatch
from samestep.errors import UsageError
from samestep.training.head_loss import BALANCES, HeadLoss, find_balance_weight
from samestep.training.trainer import Placeholder


class BalancedHead(HeadLoss):
    """Computes summed losses of a head that returns router logits, and its term that balances experts as the last one.

    In evaluation that term is the mean of the batches', as before.

    Args:
        model: not wrapped.
        label_smoothing: see `cross_entropy_sum`.
    """

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0):
        super().__init__(model, label_smoothing)
        self.weight = find_balance_weight(self.config)
        self.num_chosen = self.config.get_text_config().num_experts_per_tok
        self._whole = WholeBatch(model, self._ask_routers, balance.expert_balance, is_sum=True)
        self._num_parts: torch.Tensor | None = None  # micro-batches of the step; None: it is not trained

    def targets(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Count the targets of a batch, int64 [terms]; the balance has 1 in each."""
        counts = super().targets(batch)
        return torch.cat([counts, counts.new_ones(1)])

    def is_all_of(self, ask: Callable[[], torch.Tensor], model: nn.Module, batch: Mapping[str, torch.Tensor]) -> bool:
        """Tell that these sums are all of a trainer's own loss of a batch. Raises UsageError: it balances otherwise."""
        if not super().is_all_of(ask, model, batch):
            raise UsageError(BALANCES.format(self.name))
        return True

    def look(self, trainer: Any, batches: Sequence[Any], total: torch.Tensor) -> None:
        """Count the choices of all tokens of a step, before its first micro-batch; see `WholeLoss`."""
        self._num_parts = total[-1]
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped).train()
        prepared = ((trainer._prepare_inputs(batch), isinstance(batch, Placeholder)) for batch in batches)
        with trainer.compute_loss_context_manager():
            self._whole.look_at(model, prepared)

    def _ask(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        with self._whole.same_noise() if self._is_trained(model) else contextlib.nullcontext():
            return super()._ask(model, batch)

    def _compute_more(self, outputs: Any, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        sums = self._sum_routing(outputs, batch)
        if not self._is_trained(model):
            return [self.weight * balance.expert_balance(*sums)]
        return [self.weight * self._num_parts * self._whole.take_part(sums)]

    def _is_trained(self, model: nn.Module) -> bool:
        return model.training and self._num_parts is not None

    def _ask_routers(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Quantities:
        return self._sum_routing(super()._ask(model, batch), batch)

    def _sum_routing(self, outputs: Any, batch: Mapping[str, torch.Tensor]) -> Quantities:
        return balance.sum_routing(outputs["router_logits"], self.num_chosen, batch.get("attention_mask"))
