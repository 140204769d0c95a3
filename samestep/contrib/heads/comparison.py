"""Compares Trainer's steps with a head, plain and exact, with plain PyTorch.

Nothing is learned (the rate is 0), so that the gradient of each step is that of the first weights. The truth is the head's own
loss of a step's samples in one batch. Trainer's gradient is compared with it, and with the sum and the mean of the
micro-batches' gradients: a head is called k times too large, or a mean of means, only where one of these is what Trainer has.
"""

import dataclasses
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from samestep.contrib.heads.samples import Samples
from samestep.contrib.heads.verdicts import EXACT, FIRST_LABELS, MEAN_OF_MEANS, OTHER, SHARED, TIMES_K, TIMES_ONE_KTH
from samestep.errors import UsageError
from samestep.models import packing
from samestep.step.losses import IGNORED
from samestep.training.trainer import exact

STEPS = ((0, 1, 2, 3), (4, 5, 6))
"""Samples of each step."""
CUTS = ((2, 2), (1, 4))
"""b, k."""
SAME = 1e-4
"""Relative error of a gradient that a formula gives."""


class NotMeasuredError(Exception):
    """A head whose gradient says nothing: not finite, zero, or another one each time."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The steps that Trainer takes with a head, as it is and made exact.

    Attributes:
        verdict: of Trainer as it is.
        error: of its gradient, relative, the largest of all steps and cuts.
        norms: its norm over the true one, in a full step, for each of `CUTS`.
        exact_error: of the exact trainer's gradient; None: it refused.
        refusal: what it said then.
        divisor: what the loss was found to be a mean over; empty where it is computed from the logits.
        packing: how a row of several sequences differs from each alone; empty: it does not, or is not of a causal model.
    """

    verdict: str
    error: float
    norms: tuple[float, ...]
    exact_error: float | None = None
    refusal: str = ""
    divisor: str = ""
    packing: str = ""


class _Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.all: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.all.append(_join(model))


def _join(model: nn.Module) -> torch.Tensor:
    """Join the gradients; 0 where there is none, as of experts that got no token."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    return torch.cat([part.flatten() for part in parts])


def measure_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Compute |a - b| / |b|."""
    return (torch.dist(a, b) / b.norm()).item()


def compare(build: Callable[[], nn.Module], samples: Samples) -> Comparison:
    """Compare the steps with a head.

    Args:
        build: makes it, with the same weights each time, in float32, without noise.
        samples: that it gets.

    Raises:
        NotMeasuredError: its gradient says nothing. Else what the head raises.
    """
    model = build()

    def join(numbers: tuple[int, ...]) -> dict[str, Any]:
        return samples.join([samples.draw(number) for number in numbers])

    values: dict[tuple[int, ...], float] = {}

    def compute(numbers: tuple[int, ...]) -> torch.Tensor:
        model.zero_grad()
        loss = find_loss(model.train()(**join(numbers)))
        loss.backward()
        values[numbers] = loss.item()
        return _join(model)

    whole = [compute(step) for step in STEPS]
    if not all(gradient.isfinite().all() and gradient.norm() > 0 for gradient in whole):
        raise NotMeasuredError("its gradient is not finite, or 0, on these samples")
    if max(measure_distance(compute(step), gradient) for step, gradient in zip(STEPS, whole, strict=True)) > 1e-6:
        raise NotMeasuredError("it draws at random, also without dropout")
    verdicts, errors, norms = set(), [], []
    for b, k in CUTS:
        cuts = [[step[first : first + b] for first in range(0, len(step), b)] for step in STEPS]
        parts = [torch.stack([compute(part) for part in cut]) for cut in cuts]
        counts = [[_count_labels(join(part)) for part in cut] for cut in cuts]
        gradients, _ = _train(build(), samples, Trainer, b, k)
        is_sum = _is_sum(values[STEPS[0]], [values[part] for part in cuts[0]])
        verdicts.add(_find_formula(gradients, whole, parts, counts, is_sum))
        errors += [measure_distance(x, y) for x, y in zip(gradients, whole, strict=True)]
        norms.append((gradients[0].norm() / whole[0].norm()).item())
    wrong = verdicts - {EXACT}
    found = Comparison(OTHER if len(wrong) > 1 else min(wrong, default=EXACT), max(errors), tuple(norms))
    if samples.kind == "causal language model":
        found = dataclasses.replace(found, packing=_find_leak(build()))
    try:
        ours = [_train(build(), samples, exact(Trainer), b, k) for b, k in CUTS]
    except UsageError as error:
        return dataclasses.replace(found, refusal=str(error))
    errors = [measure_distance(x, y) for gradients, _ in ours for x, y in zip(gradients, whole, strict=True)]
    return dataclasses.replace(found, exact_error=max(errors), divisor=ours[0][1].loss_divisor)


def _train(
    model: nn.Module, samples: Samples, trainer: type[Trainer], b: int, k: int
) -> tuple[list[torch.Tensor], Any]:
    """Take the steps; return their gradients, and the trainer."""
    gradients = _Gradients()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=b,
            gradient_accumulation_steps=k,
            learning_rate=0.0,
            max_grad_norm=0.0,
            optim="sgd",
            use_cpu=True,
            train_sampling_strategy="sequential",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        data = [samples.draw(number) for step in STEPS for number in step]
        made = trainer(model, arguments, data_collator=samples.join, train_dataset=data, callbacks=[gradients])
        made.remove_callback(transformers.PrinterCallback)
        made.train()
    return gradients.all, made


def find_loss(outputs: Any) -> torch.Tensor:
    """Find the loss among what a head returned, as Trainer does."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
    if loss is None:
        raise NotMeasuredError("it returns no loss for these targets")
    return loss


def _count_labels(batch: dict[str, Any]) -> tuple[int, int]:
    """Count the labels of a batch, and those that are not the first of their row; 1 where they are no tensor."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        return 1, 1
    behind = labels[..., 1:] if labels.ndim > 1 else labels
    return int((labels != IGNORED).sum()), int((behind != IGNORED).sum())


def _is_sum(whole: float, parts: list[float]) -> bool:
    """Tell whether a loss is nearer to the sum of its parts than to their mean."""
    return abs(whole - sum(parts)) < abs(whole - sum(parts) / len(parts))


def _find_formula(
    gradients: list[torch.Tensor],
    whole: list[torch.Tensor],
    parts: list[torch.Tensor],
    counts: list[list[tuple[int, int]]],
    is_sum: bool,
) -> str:
    """Name the plain formula that gives the gradients of all steps.

    Args:
        whole: of each step in one batch.
        parts: of the micro-batches of each step, [k, n].
        counts: their labels, see `_count_labels`.
        is_sum: whether the loss is one, so that the parts' sum is right, but for what samples share.
    """
    ks, sizes = [len(each) for each in parts], [torch.tensor(each, dtype=torch.float32).T for each in counts]
    shares = [(behind.sum() / every.sum()).item() for every, behind in sizes]
    formulas = [
        (EXACT, whole),
        (SHARED if is_sum else TIMES_K, [each.sum(0) for each in parts]),
        (TIMES_ONE_KTH, [gradient / k for gradient, k in zip(whole, ks, strict=True)]),
        (TIMES_ONE_KTH if is_sum else MEAN_OF_MEANS, [each.sum(0) / k for each, k in zip(parts, ks, strict=True)]),
        (FIRST_LABELS, [gradient * share for gradient, share in zip(whole, shares, strict=True)]),
        *(
            (SHARED, [(size[way] @ each) / size[way].sum() for size, each in zip(sizes, parts, strict=True)])
            for way in (0, 1)
        ),
    ]
    for name, plain in formulas:
        if all(measure_distance(x, y) < SAME for x, y in zip(gradients, plain, strict=True)):
            return name
    return OTHER


def _find_leak(model: nn.Module) -> str:
    try:
        leak = packing.probe(model)
    except Exception as error:
        return f"not measured ({type(error).__name__})"
    return str(leak or "")
