"""The term of transformers' losses that balances experts, computed of the whole step; also in TRL's trainers.

    loss = ... + c E sum_i f_i P_i

f_i is the share of tokens that chose expert i, P_i the mean of its probability, over the tokens of all layers that are no
padding (`balance.expert_balance`). Models compute it of a micro-batch, in `load_balancing_loss_func`. While a trainer's own
loss is asked, that function notes what it is given, and returns its value plus z = 0; the derivative of the loss for z is c.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from samestep.contrib.whole_batch import balance
from samestep.contrib.whole_batch.quantities import Quantities, WholeBatch
from samestep.errors import UsageError
from samestep.training.measured_loss import unnoted
from samestep.training.trainer import Placeholder
from samestep.training.whole_term import WholeTerm

FUNCTION = "load_balancing_loss_func"
TOLERANCE = 1e-3


class ExpertTerm(WholeTerm):
    """The balance of experts of a model in a trainer's own loss.

    Args:
        model: not wrapped, or peft's model of it.
        weight: c, as its config has it.
    """

    def __init__(self, model: nn.Module, weight: float):
        self.weight, self.is_there = weight, True
        self._whole = WholeBatch(model, self._compute, balance.expert_balance, is_sum=True)
        self._sums: Quantities | None = None
        self._value = self._zero = torch.zeros(())
        self._looked = 0  # micro-batches of the step that are still to be trained
        self._trainer: Any = None

    def ask(self, own_loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._noting(), self._whole.same_noise() if self._looked else contextlib.nullcontext():
            answer = own_loss(*args, **kwargs)
        loss, *outputs = answer if isinstance(answer, tuple) else (answer,)
        if self._sums is None:
            return answer
        if loss.requires_grad:
            (slope,) = torch.autograd.grad(loss, [self._zero], retain_graph=True, allow_unused=True)
            weight = 0.0 if slope is None else slope.item()
            if weight and abs(weight - self.weight) > TOLERANCE * abs(self.weight):
                raise UsageError(
                    f"the loss has {weight:.3g} times the balance of experts, but router_aux_loss_coef of the model's config "
                    f"is {self.weight:.3g}: give both the same"
                )
            self.weight = weight
        loss = loss - self.weight * self._value.to(loss)
        return (loss, *outputs) if outputs else loss

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Let the models' function note its first call, which is that of the model that is trained."""
        self._sums, self._zero = None, torch.zeros((), requires_grad=True)
        with contextlib.ExitStack() as stack:
            for module in _list_modules():
                stack.callback(setattr, module, FUNCTION, getattr(module, FUNCTION))
                setattr(module, FUNCTION, self._note(getattr(module, FUNCTION)))
            yield

    def _note(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def balance_experts(
            gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: torch.Tensor | None = None
        ) -> Any:
            with torch.no_grad():
                value = own(gate_logits, num_experts, top_k, attention_mask)
            if self._sums is not None or not isinstance(gate_logits, tuple):
                return value
            self._sums, self._value = balance.sum_routing(gate_logits, top_k, attention_mask), value
            ours = balance.expert_balance(*self._sums)
            if abs(ours - value) > TOLERANCE * abs(value):
                raise UsageError(f"the model balances experts by {value:.4g} where this program computes {ours:.4g}")
            return value + self._zero.to(value)

        return balance_experts

    def look(self, trainer: Any, batches: Sequence[Any]) -> None:
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped).train()
        self._trainer, self._looked = trainer, 0
        prepared = ((trainer._prepare_inputs(batch), isinstance(batch, Placeholder)) for batch in batches)
        with unnoted(trainer), trainer.compute_loss_context_manager():
            self._whole.look_at(model, prepared)
        self._looked = len(batches)

    def _compute(self, model: nn.Module, batch: Mapping[str, Any]) -> Quantities:
        """Compute what the balance must know of a batch, by the trainer's own loss."""
        with torch.enable_grad():
            self._trainer._ask_own_loss(model, batch)
        assert self._sums is not None
        return tuple(value.detach() for value in self._sums)

    def part(self) -> torch.Tensor | float:
        if not self._looked or self._sums is None:
            return 0.0
        self._looked -= 1
        return self.weight * self._whole.take_part(self._sums)

    def show(self, sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self._sums is None:
            return sums
        term = self.weight * self._value.to(sums) * counts[0].to(sums)
        return torch.cat([sums[:1] + term, sums[1:]])


def _list_modules() -> list[ModuleType]:
    """List the loaded modules of models that balance experts."""
    return [module for name, module in list(sys.modules.items()) if ".modeling_" in name and hasattr(module, FUNCTION)]
