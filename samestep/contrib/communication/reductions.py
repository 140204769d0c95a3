"""Other algorithms than the exact step, which send less: a recipe's `communication`."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from samestep.contrib.communication.algorithms import Communication
from samestep.contrib.communication.compression import PowerSgd, TopK
from samestep.contrib.communication.exchange import Exchange, find_own_workers
from samestep.contrib.communication.local_workers import LocalWorkers
from samestep.data.steps import MicroBatch
from samestep.errors import UsageError
from samestep.step import accumulate
from samestep.step.exact_sum import add_exactly
from samestep.training import launch
from samestep.training.checkpoint import WORKERS, State, name_parameters
from samestep.training.recovery import Attempt
from samestep.training.reduction import Unrepeatable
from samestep.training.report import RunLog
from samestep.training.run_step import RunStep


class Exchanging(Unrepeatable):
    """Workers, whose number the recipe decides, exchange what is made of their gradients once per step: PowerSGD, top-k."""

    holds_back = False  # error feedback has the gradient, or workers differ
    exchange: Exchange

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        assert isinstance(self.recipe.communication, Communication)
        self.communication = self.recipe.communication
        self.num_parts = self.communication.num_workers
        accelerator = self.accelerator
        self.own_parts = find_own_workers(self.num_parts, accelerator.num_processes, accelerator.process_index)

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, start: State
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        named_parameters = name_parameters(model)
        model, prepared = launch.prepare_unwrapped(self.accelerator, model, optimizer)
        self.exchange = self._make_exchange(named_parameters, optimizer, start.step)
        return model, prepared

    def _make_exchange(
        self, named_parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, step: int
    ) -> Exchange:
        if self.communication.kind == "power_sgd":
            return PowerSgd(self.accelerator, self.communication, named_parameters, self.recipe.seed, step)
        return TopK(self.accelerator, self.communication, named_parameters)

    def load(self, folder: Path) -> None:
        with safe_open(folder / f"{WORKERS}.safetensors", "pt") as file:
            self.exchange.set_state(file.get_tensor, set(file.keys()))

    def get_tensors(self) -> dict[str, torch.Tensor] | None:
        return self.exchange.get_state()

    def announce(self, log: RunLog, step: int) -> None:
        log.add_event(step + 1, self.communication.describe(), **self.exchange.count_bytes())

    def describe_cut(self, layout: Any) -> str:
        if not self.own_parts:
            return str(layout)
        return str(layout).replace("process(es)", f"workers on {self.accelerator.num_processes} process(es)")

    @property
    def loss_scale(self) -> int:
        return self.accelerator.gradient_accumulation_steps * self.exchange.loss_factor

    def micro_batches(self, step: RunStep) -> Iterator[MicroBatch]:
        """Iterate over the micro-batches of the workers that this process computes, one worker after the other."""
        if not step.data.micro_batches_by_part:
            yield from super().micro_batches(step)
            return
        turns = self._list_turns(step)
        stream = accumulate.iterate_micro_batches(self.accelerator, list(itertools.chain(*turns)))
        for place, (worker, turn) in enumerate(zip(self.own_parts, turns, strict=True)):
            yield from self._iterate_worker(step, worker, itertools.islice(stream, len(turn)))
            if place + 1 < len(turns):
                self.exchange.end_worker()

    def _list_turns(self, step: RunStep) -> list[list[tuple[Any, Any]]]:
        """List of each worker its micro-batches, each with its samples."""
        parts = zip(step.data.micro_batches, step.data.samples, strict=True)
        return [list(itertools.islice(parts, number)) for number in step.data.micro_batches_by_part]

    def _iterate_worker(self, step: RunStep, worker: int, parts: Iterator[tuple[Any, Any]]) -> Iterator[MicroBatch]:
        self.exchange.begin_worker(worker)
        accumulate.seed_noise(self.accelerator, self.recipe.seed, step.index, process_index=worker)
        for micro_batch, samples in parts:
            yield step.take(micro_batch, samples)

    def finish(self, attempt: Attempt) -> None:
        super().finish(attempt)
        self.exchange.reduce()

    def explain_once(self) -> str:
        return (
            f"which is not done again, as some workers may have done it (communication {self.communication}): resume "
            f"with a smaller --per_device_train_batch_size than {self._size}"
        )

    def close(self) -> None:
        self.exchange.close()


class LocalSteps(Exchanging):
    """Workers take optimizer steps of their own, and exchange parameters now and then: LocalSGD, DiLoCo.

    `accelerator.accumulate` synchronises at the last micro-batch of each worker, so that a script clips and steps for each;
    after the last one the workers exchange their parameters, if it is time.
    """

    counts: torch.Tensor | None = None  # of the worker that takes a step now

    def check_longer(self, folder: Path, num_done: int, num_steps: int) -> None:
        if num_done % self.communication.num_steps:
            raise UsageError(
                f"checkpoint {folder} is the end of a training of {num_done} steps, at which workers exchanged their "
                f"parameters. But one of {num_steps} steps has no exchange there: resume from an earlier one"
            )

    def _make_exchange(
        self, named_parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, step: int
    ) -> Exchange:
        return LocalWorkers(self.accelerator, self.communication, named_parameters, optimizer)

    def begin(self, attempt: Attempt) -> None:
        attempt.counts = attempt.data.counts.to(self.accelerator.device)
        self.counts, self.norms = None, []

    def find_counts(self, attempt: Attempt) -> torch.Tensor:
        return attempt.counts if self.counts is None else self.counts

    def micro_batches(self, step: RunStep) -> Iterator[MicroBatch]:
        data, first, turns = step.data, 0, self._list_turns(step)
        for place, (worker, turn) in enumerate(zip(self.own_parts, turns, strict=True)):
            self.counts = data.micro_batch_counts[first : first + len(turn)].sum(0).to(self.accelerator.device)
            first += len(turn)
            yield from self._iterate_worker(step, worker, accumulate.iterate_micro_batches(self.accelerator, turn))
            if place + 1 < len(turns):
                self.exchange.end_worker()
        if self.exchange.is_exchange(step.index, step.run.num_steps):
            step.attempt.confirm_gradient()
            self.exchange.exchange()

    def clip(self, step: RunStep, max_norm: float | None) -> torch.Tensor:
        """Clip the gradient of one worker; return the root of the sum of the squares of all so far."""
        self.norms.append(step.clip_whole_gradient(max_norm))
        return torch.stack(self.norms).square().sum().sqrt()

    def abandon(self, attempt: Attempt, error: BaseException) -> None:
        raise self.cannot_repeat("this process", attempt) from error

    def list_counts(self, counts: torch.Tensor, norms: torch.Tensor) -> Any:
        return counts, norms

    def join_counts(self, parts: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        squares = zip(*(norms.square().tolist() for _, norms in parts), strict=True)
        means = [add_exactly(values) / self.num_parts for values in squares]
        return sum(counts for counts, _ in parts), torch.tensor(means, dtype=torch.float64).sqrt()

    def may_save(self, step: int, num_steps: int) -> bool:
        return self.exchange.is_exchange(step, num_steps)  # what the last exchange agreed on was done then
