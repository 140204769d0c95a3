"""Takes the steps of an audit: the exact loop, and the loop of transformers' Trainer."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from stepaudit.errors import UsageError

IGNORED = -100
Loop = Callable[[nn.Module, torch.optim.Optimizer, Iterable, int], None]


def exact_loop(loss: Callable[[nn.Module, Any], Any]) -> Loop:
    """Make the loop that takes the exact step: summed losses over the counts of all micro-batches and processes.

    Args:
        loss: (model, batch) -> sums and counts, in any form that `terms` reads.
    """

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable, k: int) -> None:
        for window in _split_into_windows(batches, k):
            with torch.no_grad():
                counts = sum(terms(loss(model, batch))[1] for batch in window)
            counts = _sum_over_processes(counts).clamp(min=1)
            for batch in window:
                sums, _ = terms(loss(model, batch))
                (_count_processes() * (sums / counts).sum()).backward()
            _average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    return loop


def trainer_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable, k: int) -> None:
    """Accumulate as transformers 5.24's Trainer: a forward with **kwargs gets `num_items_in_batch`, others are divided by k."""
    takes_number = getattr(
        model,
        "accepts_loss_kwargs",
        any(
            parameter.kind == inspect.Parameter.VAR_KEYWORD
            for parameter in inspect.signature(model.forward).parameters.values()
        ),
    )
    for window in _split_into_windows(batches, k):
        first = 1 if _shifts_labels(model) else 0
        labels = [batch["labels"][..., first:] for batch in window]
        num_items = _sum_over_processes(sum((part != IGNORED).sum() for part in labels))
        for batch in window:
            if takes_number:
                value = model(**batch, num_items_in_batch=num_items).loss * _count_processes()
            else:
                value = model(**batch).loss / len(window)
            value.backward()
        _average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def terms(returned: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn the value that a loss returns into sums [terms] and counts, int64 [terms].

    Raises:
        UsageError: the value is neither (sum, count) nor ([sums], [counts]) nor {term: (sum, count)}, or a count is negative or
            no whole number.
    """
    try:
        if isinstance(returned, Mapping):
            returned = tuple(zip(*returned.values(), strict=True))
        sums, counts = returned
        if isinstance(sums, torch.Tensor) and not sums.ndim:
            sums, counts = [sums], [counts]
        sums = sums if isinstance(sums, torch.Tensor) else torch.stack([torch.as_tensor(value) for value in sums])
        counts = [float(count) for count in counts]
        if sums.ndim != 1 or len(sums) != len(counts):
            raise ValueError
    except (TypeError, ValueError, RuntimeError):
        type_name = type(returned).__name__ if not isinstance(returned, tuple) else f"a tuple of {len(returned)}"
        message = "loss must return (sum, count), ([sums], [counts]) or {term: (sum, count)} with scalar sums"
        raise UsageError(f"{message}, not {type_name}") from None
    if any(count != int(count) or count < 0 for count in counts):
        raise UsageError(f"loss returned the counts {counts}: numbers of targets are whole and not negative")
    return sums, torch.tensor([int(count) for count in counts], dtype=torch.int64, device=sums.device)


def own_loss_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable, k: int) -> None:
    """Take the model's own mean over every batch: the truth when a batch is a whole step."""
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _split_into_windows(batches: Iterable, k: int) -> Iterable[list]:
    window: list = []
    for batch in batches:
        window.append(batch)
        if len(window) == k:
            yield window
            window = []
    if window:
        yield window


def _count_processes() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _sum_over_processes(counts: torch.Tensor) -> torch.Tensor:
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts)
    return counts


def _average_gradients(model: nn.Module) -> None:
    """Average as DistributedDataParallel does, whatever a model returns and whichever of its parameters are used."""
    for parameter in model.parameters() if torch.distributed.is_initialized() else []:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= _count_processes()


def _shifts_labels(model: nn.Module) -> bool:
    """Tell, as Trainer does, whether the first label of each row is left out of the number of targets."""
    if "transformers" not in sys.modules:
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING

    is_causal = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is LOSS_MAPPING["ForCausalLM"]
    return is_causal and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
