"""Balances the experts of a mixture over a whole step, however it is cut (a recipe's `router_loss`).

Let token t of a step choose k of E experts by the logits z_t of a router, and let p_ti be its scores, which add up to 1: the
softmax of z_t, or sigmoid(z_ti) / sum_j sigmoid(z_tj) where the router weights experts by sigmoids. Of each layer

    global    E sum_i f_i P_i,   f_i = (tokens of the step that chose i) / n,   P_i = sum_t p_ti / n    (2101.03961, 2501.11873)
    sequence  sum_i f_i P_i of each sequence of T tokens, f_i = E / (k T) (tokens of it that chose i)   (2412.19437, 17 to 20)
    z         sum_t logsumexp(z_t)^2 / n                                                                (2202.08906)

and the loss is the mean over layers, of `sequence` over the sequences of the step, too. f has no gradient. So with f of the
whole step, which a pass without gradient counts before the first backward, `global` is a sum over tokens like the others: each
micro-batch adds its own. `bias` is no loss: after the step b_i += u sign(mean load - load_i) moves the bias with which the
router chooses (2408.15664). Tokens count that are trained, as in the loss of tokens: no prompts, no padding.
"""

import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from samestep.contrib.whole_batch.routers import BIAS, Output, Routers, compare_scores, has_bias, is_known
from samestep.errors import RunError, UsageError
from samestep.step.batch_norm import StepStatistics
from samestep.step.exact_sum import add_exactly
from samestep.training.capacity import is_out_of_memory
from samestep.training.launch import waits_in_forward
from samestep.training.parts import Part
from samestep.training.reduction import RepeatStep
from samestep.training.report import round_to_6
from samestep.training.run import Run
from samestep.training.run_step import RunStep


def _repeat(error: Exception | None) -> NoReturn:
    raise RepeatStep


@dataclasses.dataclass
class Noted:
    """Sums over this process's micro-batches of a step so far.

    Attributes:
        loads: int64 [E] of each layer, how many tokens chose an expert; empty: nothing yet.
        values: of each micro-batch, floating [2]: its part of the router loss, and of the z-loss, without their weights.
    """

    loads: list[torch.Tensor] = dataclasses.field(default_factory=list)
    values: list[torch.Tensor] = dataclasses.field(default_factory=list)


class RouterLoss(StepStatistics):
    """Adds to a micro-batch's loss its part of the whole step's router loss.

    Args:
        model: of sequences, without DistributedDataParallel around it; `locate_targets` says which tokens count.
        kind: global, sequence, bias; None: the z-loss alone.
        weight: of the loss; of bias its update rate u.
        z_weight: weight of the z-loss; 0: none.
        repeat: leaves a step in which memory ran out here (with that error) or on another process (None) before its first
            backward, so that it is done again in smaller micro-batches.
        is_lockstep: whether a process's forward waits for the others', so that one that failed cannot tell them.

    Attributes:
        noted: of the present step.

    Raises:
        UsageError: the model has no routers, or none that this can balance.
    """

    replays_noise = True

    def __init__(
        self,
        model: nn.Module,
        kind: str | None,
        weight: float | None,
        z_weight: float = 0.0,
        *,
        repeat: Callable[[Exception | None], NoReturn] = _repeat,
        is_lockstep: bool = False,
    ):
        self.kind, self.weight, self.z_weight = kind, weight, z_weight
        self.repeat, self.is_lockstep = repeat, is_lockstep
        self.routers, self.noted = Routers(model), Noted()
        if not self.routers.modules:
            raise self._refuse("has no routers that transformers names: set it to null, or choose a mixture of experts")
        if kind == "bias" and not all(map(has_bias, self.routers.modules)):
            raise self._refuse("has routers without a bias to choose by: set it to global or sequence")
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        # Its collectives must not mix with DistributedDataParallel's
        self.group = None if is_alone else dist.new_group()
        self._sizes: list[int] | None = None  # E of each layer; None: no router has been seen yet
        self._has_sigmoid = False
        self._loads: list[torch.Tensor] = []  # of the whole step, int64 [E] of each layer; empty: not known yet

    def is_needed(self, num_micro_batches: int, is_exact: bool) -> bool:
        return True

    def prepare(self, micro_batches: Any, loss: Any, *, numbers: Any = None, num_cells: int | None = None) -> None:
        """Count what the loss needs to know of the whole step. Called by all processes.

        Args:
            micro_batches: this process's, with the noise with which they are trained.
            loss, num_cells: not used.
            numbers: places of the micro-batches in the step; None: bits may depend on the cut.
        """
        self.routers.take()  # of a step that is done again
        self.noted, self._loads, self.routers.is_in_step = Noted(), [], True
        sizes = self._look(micro_batches) if self._sizes is None else self._sizes
        # In one micro-batch of one process the forward of the training has the loads itself
        is_passed = self.kind == "global" and not (self.group is None and len(micro_batches) == 1 and numbers is None)
        totals, error = torch.zeros(4 + sum(sizes) * is_passed, dtype=torch.int64, device=self._device), None
        try:
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                for micro_batch in micro_batches:
                    rows, sequences, num_sequences = self.routers.model.locate_targets(micro_batch)
                    totals[2] += len(rows)
                    has_tokens = totals.new_zeros(num_sequences).index_fill(0, sequences, 1)
                    totals[3] += has_tokens.sum()
                    if is_passed:
                        totals[4:] += torch.cat(_count(self.routers.run(micro_batch), rows))
        except Exception as failure:
            error = failure
        totals = self._agree(totals, error)
        self._num_tokens, self._num_sequences = totals[2:4].clamp(min=1)
        if is_passed:
            self._loads = list(totals[4:].split(sizes))

    def correction(self) -> torch.Tensor:
        """Return the part of the router loss of the latest forward's micro-batch, scalar. To be called once per forward."""
        outputs, micro_batch = self.routers.take()
        rows, sequences, num_sequences = self.routers.model.locate_targets(micro_batch)
        loads = _count(outputs, rows)
        values = []
        for (logits, _, indices), load in zip(outputs, self._loads or loads, strict=True):
            z = logits[rows].to(torch.promote_types(logits.dtype, torch.float32))
            balance = z.new_zeros(())
            if self.kind == "global":
                shares = load.to(z) / self._num_tokens
                balance = z.shape[1] * (shares * self._score(z).sum(0)).sum() / self._num_tokens
            elif self.kind == "sequence":
                scores = self._score(z)
                balance = _balance_sequences(scores, indices[rows], sequences, num_sequences) / self._num_sequences
            z_loss = z.logsumexp(1).square().sum() / self._num_tokens if self.z_weight else z.new_zeros(())
            values.append(torch.stack([balance, z_loss]))
        value = torch.stack(values).mean(0)
        self.noted.loads = [sum(pair) for pair in zip(self.noted.loads or [0] * len(loads), loads, strict=True)]
        self.noted.values.append(value.detach())
        weight = 0.0 if self.weight is None or self.kind == "bias" else self.weight
        return weight * value[0] + self.z_weight * value[1]

    def finish(self) -> None:
        """Add up the loads of all processes, where biases follow them."""
        self.routers.is_in_step = False
        if self.kind == "bias":
            loads = torch.cat(self.noted.loads)
            if self.group is not None:
                dist.all_reduce(loads, group=self.group)
            self._loads = list(loads.split([len(layer) for layer in self.noted.loads]))

    @torch.no_grad()
    def move_biases(self, is_taken: torch.Tensor) -> None:
        """Move the biases after the step: b_i += u sign(mean load - load_i).

        Args:
            is_taken: bool scalar on the device, whether the optimizer has taken the step.
        """
        if self.kind != "bias":
            return
        for router, loads in zip(self.routers.called, self._loads, strict=True):
            bias = getattr(router, BIAS)
            bias += self.weight * torch.sign(loads.sum() - len(loads) * loads).to(bias) * is_taken

    def _look(self, micro_batches: Iterable[dict[str, Any]]) -> list[int]:
        """Look at what routers return of the first micro-batch, and what scores them; return the experts of each layer."""
        votes, error, outputs = torch.zeros(4, dtype=torch.int64, device=self._device), None, []
        try:
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                outputs = self.routers.run(next(iter(micro_batches)))
            if not outputs or not all(map(is_known, outputs)):
                raise self._refuse(
                    "has routers that do not return logits [tokens, experts], weights and indices [tokens, chosen]: set it to "
                    "null, or update transformers"
                )
            votes[2:] = sum(compare_scores(*output) for output in outputs)
        except Exception as failure:
            error = failure
        num_softmax, num_sigmoid = self._agree(votes, error)[2:].tolist()
        self._has_sigmoid = num_sigmoid > num_softmax
        self._sizes = [logits.shape[1] for logits, _, _ in outputs]
        return self._sizes

    def _score(self, z: torch.Tensor) -> torch.Tensor:
        return F.softmax(F.logsigmoid(z) if self._has_sigmoid else z, dim=1)

    def _agree(self, totals: torch.Tensor, error: Exception | None) -> torch.Tensor:
        """Add up integers over all processes, the first two of which say whether memory ran out, or anything else failed."""
        if error is not None:
            if self.is_lockstep:
                raise error
            totals = torch.zeros_like(totals)
            totals[0 if is_out_of_memory(error) else 1] = 1
        if self.group is not None:
            dist.all_reduce(totals, group=self.group)
        if error is None and self.group is None:
            return totals
        is_out, has_failed = totals[:2].tolist()
        if is_out and not has_failed:
            if error is not None:
                traceback.clear_frames(error.__traceback__)
            self.repeat(error)
        if error is not None:
            raise error
        if has_failed:
            raise RunError("another process failed while the loads of experts were counted")
        return totals

    def _refuse(self, problem: str) -> UsageError:
        field = f"router_loss is {self.kind}" if self.kind else f"router_z_loss_weight is {self.z_weight:g}"
        model = getattr(self.routers.model, "causal_lm", self.routers.model)
        return UsageError(f"{field}, but {type(model).__name__} {problem}")

    @property
    def _device(self) -> torch.device:
        return next(self.routers.model.parameters()).device


class RouterLoad(Part):
    """Has a run's router loss, and writes its value and the load of experts into the lines of metrics.jsonl.

    `max_expert_load` is the largest load over the mean one, `unused_experts` the number of experts that no counted token of the
    step has chosen; both by layer.
    """

    def __init__(self, run: Run):
        self.run, recipe = run, run.recipe
        self.loss = RouterLoss(
            run.bare_model,
            recipe.router_loss,
            recipe.router_loss_weight,
            recipe.router_z_loss_weight,
            is_lockstep=waits_in_forward(run.accelerator, run.network.model),
        )
        self.pending: dict[int, Noted] = {}

    def begin_step(self, step: RunStep) -> None:
        self.loss.repeat = functools.partial(self.run.reduction.repeat, step.attempt)

    def end_step(self, step: RunStep) -> None:
        self.pending[step.index + 1] = self.loss.noted
        is_taken = (self.run.log.not_finite.has_come == 0) & step.grad_norm.isfinite()  # by the optimizer
        self.loss.move_biases(is_taken.full_tensor() if isinstance(is_taken, DTensor) else is_taken)

    def read(self, number: int) -> tuple[list[list[int]], list[list[float]]]:
        noted = self.pending.pop(number)
        return [loads.tolist() for loads in noted.loads], [value.tolist() for value in noted.values]

    def add_to_line(self, line: dict[str, Any], counts: torch.Tensor, values: Sequence[Any]) -> None:
        layers = [
            [sum(numbers) for numbers in zip(*layer, strict=True)]
            for layer in zip(*(loads for loads, _ in values if loads), strict=True)
        ]
        losses = [add_exactly(parts) for parts in zip(*(value for _, parts in values for value in parts), strict=True)]
        if self.loss.kind in ("global", "sequence"):
            line["router_loss"] = round_to_6(losses[0])
        if self.loss.z_weight:
            line["router_z_loss"] = round_to_6(losses[1])
        line["max_expert_load"] = [round(max(loads) * len(loads) / max(1, sum(loads)), 3) for loads in layers]
        line["unused_experts"] = [loads.count(0) for loads in layers]

    def close(self) -> None:
        self.loss.routers.close()


def _count(outputs: Sequence[Output], rows: torch.Tensor) -> list[torch.Tensor]:
    """Count of each layer how many tokens of `rows` chose an expert, int64 [E] each."""
    loads = []
    for logits, _, indices in outputs:
        chosen = indices[rows].flatten()
        empty = chosen.new_zeros(logits.shape[1])
        loads.append(empty.index_add(0, chosen, torch.ones_like(chosen)))
    return loads


def _balance_sequences(
    scores: torch.Tensor, indices: torch.Tensor, sequences: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """Add up over sequences sum_i f_i P_i, scalar.

    Args:
        scores: [tokens, E].
        indices: int64 [tokens, k].
        sequences: int64 [tokens], number of each one's sequence.
        num_sequences: Q; those without tokens count nothing.
    """
    num_experts, num_chosen = scores.shape[1], indices.shape[1]
    empty = scores.new_zeros(num_sequences, num_experts)
    chosen = torch.zeros_like(scores, requires_grad=False).scatter(1, indices, 1.0)
    loads, sums = empty.index_add(0, sequences, chosen), empty.index_add(0, sequences, scores)
    lengths = (loads.sum(1) / num_chosen).clamp(min=1)
    return ((loads * sums).sum(1) * num_experts / (num_chosen * lengths.square())).sum()
