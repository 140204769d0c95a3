"""Loops that take the steps of an audit: the exact one, and the one of transformers' Trainer."""

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
    """Sums over the counts of the whole step, whatever the processes and micro-batches."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable, k: int) -> None:
        for window in _windows(batches, k):
            with torch.no_grad():
                counts = sum(terms(loss(model, batch))[1] for batch in window)
            counts = _reduced(counts).clamp(min=1)
            for batch in window:
                sums, _ = terms(loss(model, batch))
                (_num_processes() * (sums / counts).sum()).backward()
            _average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    return loop


def trainer_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable, k: int) -> None:
    """As transformers 5.23's Trainer: a forward with **kwargs gets `num_items_in_batch`, and its loss is not divided by k."""
    takes_number = getattr(
        model,
        "accepts_loss_kwargs",
        any(of.kind == inspect.Parameter.VAR_KEYWORD for of in inspect.signature(model.forward).parameters.values()),
    )
    for window in _windows(batches, k):
        first = 1 if _shifts_labels(model) else 0
        labels = [batch["labels"][..., first:] for batch in window]
        num_items = _reduced(sum((of != IGNORED).sum() for of in labels))
        for batch in window:
            if takes_number:
                value = model(**batch, num_items_in_batch=num_items).loss * _num_processes()
            else:
                value = model(**batch).loss / len(window)
            value.backward()
        _average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def terms(returned: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a loss returns, as sums [terms] and counts int64 [terms].

    Raises:
        UsageError: it is something else.
    """
    try:
        if isinstance(returned, Mapping):
            sums, counts = zip(*returned.values(), strict=True)
        else:
            sums, counts = returned
        if isinstance(sums, torch.Tensor) and not sums.ndim:
            sums, counts = [sums], [counts]
        sums = sums if isinstance(sums, torch.Tensor) else torch.stack([torch.as_tensor(value) for value in sums])
        counts = [float(count) for count in counts]
        if sums.ndim != 1 or len(sums) != len(counts):
            raise ValueError
    except (TypeError, ValueError, RuntimeError):
        what = type(returned).__name__ if not isinstance(returned, tuple) else f"a tuple of {len(returned)}"
        message = "loss must return (sum, count), ([sums], [counts]) or {term: (sum, count)} with scalar sums"
        raise UsageError(f"{message}, not {what}") from None
    if any(count != int(count) or count < 0 for count in counts):
        raise UsageError(f"loss returned the counts {counts}: numbers of targets are whole and not negative")
    return sums, torch.tensor([int(count) for count in counts], dtype=torch.int64, device=sums.device)


def own_loss_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable, k: int) -> None:
    """The model's own mean over every batch: the truth when a batch is a whole step."""
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _windows(batches: Iterable, k: int) -> Iterable[list]:
    window: list = []
    for batch in batches:
        window.append(batch)
        if len(window) == k:
            yield window
            window = []
    if window:
        yield window


def _num_processes() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _reduced(counts: torch.Tensor) -> torch.Tensor:
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts)
    return counts


def _average_gradients(model: nn.Module) -> None:
    """What DistributedDataParallel does, whatever a model returns and whichever of its parameters are used."""
    for parameter in model.parameters() if torch.distributed.is_initialized() else []:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= _num_processes()


def _shifts_labels(model: nn.Module) -> bool:
    """As Trainer decides whether the first label of each row is left out of the number."""
    if "transformers" not in sys.modules:
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING

    is_causal = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is LOSS_MAPPING["ForCausalLM"]
    return is_causal and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
