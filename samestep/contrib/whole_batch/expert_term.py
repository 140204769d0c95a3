"""The term of transformers' losses that balances experts, computed of the whole step; also in TRL's trainers.

    loss = ... + c E sum_i f_i P_i

f_i is the share of tokens that chose expert i, P_i the mean of its probability, over the tokens of all layers that are no
padding (`balance.expert_balance`). Models compute it of a micro-batch, in `load_balancing_loss_func`. While a trainer's own
loss is asked, that function notes what it is given, and returns its value plus z = 0; the derivative of the loss for z is c.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
TOLERANCE, SHORT_TOLERANCE = 1e-3, 3e-2
"""Relative difference of the model's balance and this one that is rounding; the latter of router logits in 16 bits."""


class ExpertTerm(WholeTerm):
    """The balance of experts of a model in a trainer's own loss.

    Args:
        model: not wrapped, or peft's model of it.
        weight: c, as its config has it.
    """

    def __init__(self, model: nn.Module, weight: float):
        self.weight, self.is_there = weight, True
        names = {type(module).__module__ for module in model.modules()}
        self._modules = [sys.modules[name] for name in sorted(names) if hasattr(sys.modules[name], FUNCTION)]
        self._whole = WholeBatch(model, self._compute, balance.expert_balance, is_sum=True)
        self._sums: Quantities | None = None  # of the batch that was asked last; None: its balance was not asked for
        self._value = self._zero = torch.zeros(())
        self._is_used = self._is_checked = False
        self._looked = 0  # micro-batches of the step that are still to be trained
        self._trainer: Any = None

    def ask(self, own_loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._noting(), self._whole.same_noise() if self._looked else contextlib.nullcontext():
            answer = own_loss(*args, **kwargs)
        if self._sums is None:
            return answer
        self._is_used = True
        loss, *outputs = answer if isinstance(answer, tuple) else (answer,)
        if loss.requires_grad and not self._is_checked:
            self.weight = self._find_weight(loss)
        loss = loss - self.weight * self._value.to(loss)
        return (loss, *outputs) if outputs else loss

    def _find_weight(self, loss: torch.Tensor) -> float:
        """Find c: 0 where a trainer leaves the term out, as with label smoothing; else what the config says."""
        (slope,) = torch.autograd.grad(loss, [self._zero], retain_graph=True, allow_unused=True)
        weight = 0.0 if slope is None else slope.item()
        if weight and abs(weight - self.weight) > TOLERANCE * abs(self.weight):
            raise UsageError(
                f"the loss has {weight:.3g} times the balance of experts, but router_aux_loss_coef of the model's config is "
                f"{self.weight:.3g}: give both the same"
            )
        return weight

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Let the model's function note its first call, which is that of the model that is trained."""
        self._sums, self._zero = None, torch.zeros((), requires_grad=True)
        with contextlib.ExitStack() as stack:
            for module in self._modules:
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
            if not self._is_checked:
                self._check_formula(gate_logits[0].dtype)
            return value + self._zero.to(value)

        return balance_experts

    def _check_formula(self, dtype: torch.dtype) -> None:
        assert self._sums is not None
        ours = balance.expert_balance(*self._sums).item()
        tolerance = SHORT_TOLERANCE if dtype.itemsize == 2 else TOLERANCE
        if abs(ours - self._value.item()) > tolerance * abs(self._value.item()):
            raise UsageError(
                f"the model balances its experts by another formula, {self._value.item():.4g} where E sum_i f_i P_i is "
                f"{ours:.4g}: set config.output_router_logits = False, or give loss= and targets="
            )

    def look(self, trainer: Any, batches: Sequence[Any]) -> None:
        if not self._is_used:  # a head without this term, though its config has a weight
            return
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped).train()
        self._is_checked = self._trainer is not None  # behind the first step
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
        sums, self._sums = self._sums, None  # nothing of the graph outlives the backward
        return self.weight * self._whole.take_part(sums)

    def show(self, sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self._sums is None:
            return sums
        term = self.weight * self._value.to(sums) * counts[0].to(sums)
        return torch.cat([sums[:1] + term, sums[1:]])
