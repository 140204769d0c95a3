"""Small trainings: a ResNet on digits, a BERT on Python's documentation; every variant takes the same micro-batches in turn.

What is measured is here, what follows from it in training_claims.py: a change there computes nothing anew.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining

from samestep.cut.order import Order
from samestep.data import images, sentence_pairs
from samestep.models.attention import last_hidden_at, unpad
from samestep.models.resnet import GroupNormResNet, GroupNormResNetConfig
from samestep.recipe.catalog import load
from samestep.step.optim import AccumulatingAdamW, AccumulatingSGD

Result = dict[str, Any]
Cell = dict[str, Tensor]
POINTS = 100  # of a curve that is kept
WINDOW = 32  # micro-batches of the moving average about which a loss oscillates
BETAS = (0.9, 0.999)
MOST = 16  # micro-steps of a window whose length follows the noise

# ---------------------------------------------------------------------------------------------------------------------
# Tasks


class Task:
    """A model, its micro-batches and what is held out, all functions of the seed.

    Attributes:
        model: with its first weights; `fresh` copies it.
        cells: the micro-batches, in order.
        layers: name -> beginnings of the names of its parameters, from the input up.
    """

    model: nn.Module
    cells: list[Cell]
    layers: dict[str, tuple[str, ...]]

    def fresh(self) -> nn.Module:
        return copy.deepcopy(self.model).train()

    def losses(self, model: nn.Module, cell: Cell) -> tuple[Tensor, Tensor]:
        """What is trained, and what is reported, both means over the micro-batch."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module) -> Result:
        """On what is held out."""
        raise NotImplementedError

    def layer_of(self, model: nn.Module) -> list[str]:
        """The layer of each parameter."""
        return [
            next(layer for layer, beginnings in self.layers.items() if name.startswith(beginnings))
            for name, _ in model.named_parameters()
        ]


class Digits(Task):
    """Handwritten digits and a ResNet with group normalisation, the recipe resnet_digits_cpu made smaller."""

    layers: ClassVar = {
        "stem": ("resnet.embedder",),
        "stage 1": ("resnet.encoder.stages.0",),
        "stage 2": ("resnet.encoder.stages.1",),
        "stage 3": ("resnet.encoder.stages.2",),
        "head": ("classifier",),
    }

    def __init__(self, settings: Result, seed: int):
        recipe = load("resnet_digits_cpu", settings["recipe"] | {"seed": seed})
        train, held_out = images.build(recipe)
        torch.manual_seed(seed)
        self.model = GroupNormResNet(GroupNormResNetConfig(**recipe.architecture))
        self.cells = _cells(train, settings, seed, 0)
        self.held_out = held_out.collate([held_out.draw(0, place) for place in range(len(held_out))])

    def losses(self, model, cell):
        loss = F.cross_entropy(model(cell["pixel_values"].contiguous()).logits, cell["labels"])
        return loss, loss

    @torch.no_grad()
    def evaluate(self, model):
        logits = model.eval()(self.held_out["pixel_values"].contiguous()).logits
        labels = self.held_out["labels"]
        return {
            "loss": float(F.cross_entropy(logits, labels)),
            "error": float((logits.argmax(-1) != labels).float().mean()),
        }


class Documentation(Task):
    """Masked tokens and next sentences of Python's documentation, the recipe bert_small_cpu made smaller."""

    layers: ClassVar = {
        "embeddings": ("bert.embeddings",),
        "layer 1": ("bert.encoder.layer.0",),
        "layer 2": ("bert.encoder.layer.1",),
        "heads": ("bert.pooler", "cls"),
    }

    def __init__(self, settings: Result, seed: int):
        recipe = load("bert_small_cpu", settings["recipe"])
        train, held_out = sentence_pairs.build(recipe)
        torch.manual_seed(seed)
        self.model = unpad(BertForPreTraining(BertConfig(**recipe.architecture)))
        self.cells = _cells(train, settings, seed, 1000 * seed)  # other pairs and masks for every seed
        number = min(len(held_out), settings["held_out"])
        self.held_out = [
            held_out.collate([held_out.draw(0, place) for place in range(first, min(first + 64, number))])
            for first in range(0, number, 64)
        ]

    def logits(self, model: nn.Module, cell: Cell) -> tuple[Tensor, Tensor]:
        targets = ("first_index", "masked_index", "masked_labels", "next_sentence_label")
        tokens = {name: value for name, value in cell.items() if name not in targets}
        hidden = last_hidden_at(model.bert, **tokens)
        pooled = model.bert.pooler(hidden[cell["first_index"]][:, None])
        return model.cls.predictions(hidden[cell["masked_index"]]), model.cls.seq_relationship(pooled)

    def losses(self, model, cell):
        tokens, pairs = self.logits(model, cell)
        masked = F.cross_entropy(tokens, cell["masked_labels"])
        return masked + F.cross_entropy(pairs, cell["next_sentence_label"]), masked

    @torch.no_grad()
    def evaluate(self, model):
        model.eval()
        sums = np.zeros(4)
        for cell in self.held_out:
            tokens, pairs = self.logits(model, cell)
            sums += [
                float(F.cross_entropy(tokens, cell["masked_labels"], reduction="sum")),
                len(tokens),
                int((pairs.argmax(-1) != cell["next_sentence_label"]).sum()),
                len(pairs),
            ]
        return {"loss": float(sums[0] / sums[1]), "error": float(sums[2] / sums[3])}


def _cells(source: Any, settings: Result, seed: int, first_epoch: int) -> list[Cell]:
    """The micro-batches of a training, b samples each."""
    order = Order(len(source), settings["b"], seed)
    found = []
    for step in range(settings["micro_steps"]):
        epochs, ids = order.samples(step)
        samples = [
            source.draw(first_epoch + epoch, place) for epoch, place in zip(epochs.tolist(), ids.tolist(), strict=True)
        ]
        found.append(source.collate(samples))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Training


def rate_at(settings: Result, rate: float, micro_step: int) -> float:
    """Warm-up over the first tenth of the samples, then constant: the same at the same sample for every variant."""
    return rate * min(1.0, (micro_step + 1) / (settings["micro_steps"] / 10))


def train(
    task: Task,
    settings: Result,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    rate: float,
    k: int,
) -> tuple[nn.Module, list[float]]:
    """Windows of k micro-batches, each loss divided by k, then `step`: the model and every micro-batch's loss before it."""
    model = task.fresh()
    optimizer, seen = make(list(model.parameters())), []
    for number, cell in enumerate(task.cells):
        loss, reported = task.losses(model, cell)
        (loss / k).backward()
        seen.append(reported.item())
        if not math.isfinite(seen[-1]):
            return model, seen + [math.inf] * (len(task.cells) - len(seen))
        if (number + 1) % k == 0:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(settings, rate, number)
            optimizer.step()
            optimizer.zero_grad()
    return model, seen


def summary(task: Task, model: nn.Module, seen: Sequence[float]) -> Result:
    """The end and the oscillation of a curve, held-out results, and the curve at POINTS points."""
    losses = np.minimum(np.array(seen), 100.0)  # a training that diverged counts as bad, not as NaN
    half = losses[len(losses) // 2 :]
    finite = bool(np.isfinite(seen).all())
    held_out = task.evaluate(model) if finite else {}
    return {
        "end": float(losses[-len(losses) // 10 :].mean()),
        "oscillation": oscillation(half, WINDOW),
        "oscillation_of_4": oscillation(half[: len(half) // 4 * 4].reshape(-1, 4).mean(1), WINDOW // 4),
        "held_out": _number(held_out.get("loss")),
        "error": _number(held_out.get("error"), 1.0),
        "curve": [round(float(part.mean()), 4) for part in np.array_split(losses, min(POINTS, len(losses)))],
    }


def _number(value: float | None, most: float = 100.0) -> float:
    return most if value is None or not math.isfinite(value) else min(value, most)


def oscillation(losses: np.ndarray, window: int) -> float:
    """Standard deviation about the moving average of `window` losses."""
    means = np.convolve(losses, np.ones(window) / window, mode="valid")
    return float(np.std(losses[window // 2 :][: len(means)] - means))


# ---------------------------------------------------------------------------------------------------------------------
# Noise


def noise(task: Task, model: nn.Module, cells: Sequence[Cell]) -> Result:
    """Signal and noise of micro-batch gradients at these weights, in all and per layer.

    squared_mean is |mu|^2, without the noise of the mean; variance is tr Sigma.
    """
    model = copy.deepcopy(model).train()
    parameters = list(model.parameters())
    sums, squares = [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters]
    for cell in cells:
        gradients = torch.autograd.grad(task.losses(model, cell)[0], parameters)
        torch._foreach_add_(sums, gradients)
        torch._foreach_add_(squares, torch._foreach_mul(gradients, gradients))
    number, found = len(cells), {}
    for layer, total, square in zip(task.layer_of(model), sums, squares, strict=True):
        of = found.setdefault(layer, {"squared_mean": 0.0, "variance": 0.0, "size": 0})
        mean = total / number
        variance = float((square - number * mean**2).sum()) / (number - 1)
        of["variance"] += variance
        of["squared_mean"] += float((mean**2).sum()) - variance / number
        of["size"] += total.numel()
    whole = {key: sum(of[key] for of in found.values()) for key in ("squared_mean", "variance", "size")}
    return {"all": whole, "layers": found}


# ---------------------------------------------------------------------------------------------------------------------
# k per layer, k from the noise: SGD with momentum on one flat vector


def flat_sgd(
    task: Task,
    settings: Result,
    rate: float,
    windows: Callable[[Result], int] | None = None,
    of_layer: dict[str, int] | None = None,
) -> tuple[nn.Module, list[float], list[int]]:
    """SGD with momentum 0.9 whose windows follow the noise, or differ between layers.

    Args:
        rate: after warm-up.
        windows: length of the next window from `variance` and `squared_mean` of the gradient and `momentum`, the length of
            its first moment, all averaged over windows.
        of_layer: or the length of each layer's windows.

    Returns:
        The model, every micro-batch's loss, and the lengths of the windows.
    """
    model = task.fresh()
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    lengths = [2] if of_layer is None else []
    if of_layer is None:
        pieces = {"all": torch.arange(sum(sizes))}
    else:
        owners = np.repeat(np.array(task.layer_of(model)), sizes)
        pieces = {layer: torch.from_numpy(np.flatnonzero(owners == layer)) for layer in of_layer}
    theta = nn.utils.parameters_to_vector(parameters).detach()
    momentum, total = torch.zeros_like(theta), torch.zeros_like(theta)
    seen, squares = [], []
    average: Result = {"variance": 0.0, "squared_mean": 0.0}
    weight, done = 0.0, 0
    for number, cell in enumerate(task.cells):
        loss, reported = task.losses(model, cell)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        total += gradient
        squares.append(float(gradient.square().sum()))
        seen.append(reported.item())
        due = [
            (layer, k)
            for layer, k in (of_layer or {"all": lengths[-1] if lengths else 0}).items()
            if (of_layer is not None and (number + 1) % k == 0) or (of_layer is None and number + 1 - done == k)
        ]
        for layer, k in due:
            where = pieces[layer]
            mean = total[where] / k
            momentum[where] = 0.9 * momentum[where] + mean
            theta[where] -= rate_at(settings, rate, number) * momentum[where]
            total[where] = 0.0
        if due:
            nn.utils.vector_to_parameters(theta, parameters)
        if due and of_layer is None:
            k, squared = due[0][1], float(mean.square().sum())
            variance = (sum(squares) / k - squared) * k / (k - 1)
            weight = 0.9 * weight + 0.1
            for key, value in (("variance", variance), ("squared_mean", squared - variance / k)):
                average[key] = 0.9 * average[key] + 0.1 * value
            estimate = {key: value / weight for key, value in average.items()}
            estimate["momentum"] = 0.1 * float(momentum.norm())  # of (1 - beta) times the sum: a mean
            lengths.append(max(2, min(MOST, windows(estimate))))
            squares, done = [], number + 1
    return model, seen, lengths


def told_window(estimate: Result) -> int:
    """ceil(k0 (1 + sigma / |m|)) with k0 = 1."""
    return math.ceil(1 + min(MOST, math.sqrt(max(0.0, estimate["variance"])) / max(1e-12, estimate["momentum"])))


def noise_scale_window(estimate: Result) -> int:
    """B_simple = tr Sigma / |G|^2 in micro-batches (McCandlish et al. 2018, 1812.06162), rounded."""
    return round(min(MOST, max(0.0, estimate["variance"]) / max(1e-12, estimate["squared_mean"])))


def told_layers(layers: Sequence[str]) -> dict[str, int]:
    """k_l = k0 2^((L - l) / 2), k0 = 1, rounded."""
    return {layer: round(2 ** ((len(layers) - place - 1) / 2)) for place, layer in enumerate(layers)}


# ---------------------------------------------------------------------------------------------------------------------
# Experiments


def train_digits(settings: Result, seed: int) -> Result:
    """SGD with momentum 0.9, folded accumulation: every k and rate; what the told code does; noise; k per layer and from "
    "noise."""
    task, runs = Digits(settings, seed), {}

    def sgd(k: int) -> Callable:
        return lambda parameters: AccumulatingSGD(parameters, lr=0.0, momentum=0.9, gradient_accumulation_steps=k)

    for factor in settings["factors"]:
        rate = settings["rate"] * factor
        for k in settings["k"]:
            model, seen = train(task, settings, sgd(k), rate, k)
            runs[f"k {k}, rate {factor:g}"] = summary(task, model, seen)
            if k == 1 and factor == 1:
                late = noise(task, model, task.cells[: settings["noise_cells"]])
        adaptive = {
            "per layer": {"of_layer": told_layers(list(task.layers))},
            "told formula": {"windows": told_window},
            "noise scale": {"windows": noise_scale_window},
        }
        for name, how in adaptive.items() if factor in settings["adaptive_factors"] else ():
            model, seen, lengths = flat_sgd(task, settings, rate, **how)
            mean_k = len(seen) / max(1, len(lengths)) if lengths else 0.0
            runs[f"{name}, rate {factor:g}"] = summary(task, model, seen) | {"mean_k": mean_k}
    for k in (4, 8):  # the told code: (1 - beta) / k of every gradient, beside torch's SGD without (1 - beta)
        model, seen = train(task, settings, sgd(k), settings["rate"] * (1 - 0.9), k)
        runs[f"k {k}, as told"] = summary(task, model, seen)
    return {
        "runs": runs,
        "noise": {"first": _early(task, settings, sgd(1)), "last": late},
        "second_moments": second_moments(task, settings, settings["adam_rate"]),
    }


def _early(task: Task, settings: Result, make: Callable) -> Result:
    """Noise after the warm-up's first half."""
    model = task.fresh()
    optimizer = make(list(model.parameters()))
    for number, cell in enumerate(task.cells[: settings["micro_steps"] // 20]):
        task.losses(model, cell)[0].backward()
        for group in optimizer.param_groups:
            group["lr"] = rate_at(settings, settings["rate"], number)
        optimizer.step()
        optimizer.zero_grad()
    return noise(task, model, task.cells[: settings["noise_cells"]])


def second_moments(task: Task, settings: Result, rate: float) -> Result:
    """AdamW on accumulated gradients, and accumulating in its moments, k = 4, the same rate: curves, distances of weights."""
    first = nn.utils.parameters_to_vector(task.model.parameters()).detach()
    options = {"lr": 0.0, "betas": BETAS, "weight_decay": 0.0}
    k, found, ends = 4, {}, {}
    makes = {"exact": lambda parameters: torch.optim.AdamW(parameters, fused=True, **options)} | {
        variant: lambda parameters, variant=variant: AccumulatingAdamW(
            parameters, second_moment=variant, gradient_accumulation_steps=k, **options
        )
        for variant in ("mean_of_squares", "sum_of_squares", "unbiased")
    }
    for name, make in makes.items():
        model, seen = train(task, settings, make, rate, k)
        found[name] = summary(task, model, seen)
        ends[name] = nn.utils.parameters_to_vector(model.parameters()).detach()
        way = ends["exact"] - first
        found[name]["distance"] = float((ends[name] - ends["exact"]).norm() / way.norm())
        found[name]["way"] = float((ends[name] - first).norm() / way.norm())
        found[name]["curve_distance"] = float(
            np.abs(np.array(found[name]["curve"]) - np.array(found["exact"]["curve"])).mean()
        )
    return found


PRETRAINING = {  # name: beta1, k; coefficients are left as they are at every micro-step
    "baseline": (0.9, 1),
    "coefficient": (0.975, 1),
    "sparse": (0.9, 4),
    "both": (0.975, 4),
}


def train_bert(settings: Result, seed: int) -> Result:
    """AdamW: an update per micro-batch, another coefficient, sparse updates, both, and accumulation, at every rate; noise."""
    task, runs = Documentation(settings, seed), {}

    def adamw(beta1: float, k: int) -> Callable:
        options = {"lr": 0.0, "betas": (beta1, BETAS[1]), "weight_decay": 0.0}
        if k == 1:
            return lambda parameters: torch.optim.AdamW(parameters, fused=True, **options)
        return lambda parameters: AccumulatingAdamW(
            parameters,
            second_moment="mean_of_squares",
            coefficients="unchanged",
            gradient_accumulation_steps=k,
            **options,
        )

    accumulated = adamw(BETAS[0], 1)  # on the sum of 4 gradients
    for factor in settings["factors"]:
        rate = settings["rate"] * factor
        for name, (beta1, k) in PRETRAINING.items():
            model, seen = train(task, settings, adamw(beta1, k), rate, k)
            runs[f"{name}, rate {factor:g}"] = summary(task, model, seen)
            if name == "baseline" and factor == 1:
                late = noise(task, model, task.cells[: settings["noise_cells"]])
        model, seen = train(task, settings, accumulated, rate, 4)
        runs[f"accumulated, rate {factor:g}"] = summary(task, model, seen)
    return {
        "runs": runs,
        "noise": {"first": _early(task, settings, adamw(BETAS[0], 1)), "last": late},
        "second_moments": second_moments(task, settings, settings["rate"]),
    }
