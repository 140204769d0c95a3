"""Make optimizers: torch's fused ones, and others (`OTHERS`). Only matrices and filters decay, not biases and
normalisation weights.

Parameter groups carry `lr_scale`, a factor of the schedule's learning rate: 1 except with layer-wise decay.
"""

import importlib
import itertools
from typing import Any

import torch
from torch import nn

from samestep.recipe.recipe import Recipe
from samestep.recipe.scaling import Hyperparameters
from samestep.recipe.tasks.text_classification import TextClassification

OTHERS = {
    "Accumulating": "samestep.contrib.optim.folding",
    "AccumulatingAdamW": "samestep.contrib.optim.accumulating",
    "AccumulatingSGD": "samestep.contrib.optim.accumulating",
    "AdamW8bit": "samestep.contrib.optim.eight_bit",
    "Muon": "samestep.contrib.optim.muon",
    "muon": "samestep.contrib.optim.muon",
}
"""Optimizers that are not the usual way, and their modules, which are imported when one is asked for."""
__all__ = [*OTHERS, "adamw", "depths", "from_recipe", "group_parameters", "sgd"]


def import_other(name: str) -> Any:
    """Import one of `OTHERS`."""
    if name not in OTHERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(OTHERS[name]), name)


__getattr__ = import_other


def adamw(
    model: nn.Module, hyperparameters: Hyperparameters, weight_decay: float, layerwise_lr_decay: float = 1.0
) -> torch.optim.AdamW:
    """Make a fused AdamW (Loshchilov and Hutter 2019, 1711.05101) of a model's parameters that require gradients.

    Weights decay where they are matrices; layerwise_lr_decay is the learning rate of a layer over that of the layer above it
    (see `depths`).
    """
    betas = (hyperparameters.adam_beta1, hyperparameters.adam_beta2)
    groups = group_parameters(model, weight_decay, layerwise_lr_decay)
    return torch.optim.AdamW(
        groups, lr=hyperparameters.learning_rate, betas=betas, eps=hyperparameters.adam_epsilon, fused=True
    )


def sgd(model: nn.Module, learning_rate: float, momentum: float, weight_decay: float) -> torch.optim.SGD:
    """Make a fused SGD with momentum, as torch does: v = momentum * v + g + weight_decay * p, p = p - learning_rate * v."""
    return torch.optim.SGD(group_parameters(model, weight_decay), lr=learning_rate, momentum=momentum, fused=True)


def from_recipe(model: nn.Module, recipe: Any) -> torch.optim.Optimizer:
    """Make the optimizer that a recipe asks for."""
    scaled, decay = recipe.scaled_hyperparameters(), recipe.weight_decay
    layerwise = recipe.layerwise_lr_decay if isinstance(recipe, TextClassification) else 1.0
    accumulates = recipe.accumulation == "optimizer"
    if recipe.optimizer_name == "sgd":
        if accumulates:
            return import_other("AccumulatingSGD")(
                group_parameters(model, decay), scaled.learning_rate, recipe.sgd_momentum
            )
        return sgd(model, scaled.learning_rate, recipe.sgd_momentum, decay)
    if recipe.optimizer_name == "muon":
        rate = recipe.muon_learning_rate * scaled.learning_rate / recipe.learning_rate
        return import_other("muon")(model, scaled, decay, rate, recipe.muon_momentum, recipe.muon_weight_decay)
    if recipe.optimizer_name == "adamw_8bit":
        groups, betas = group_parameters(model, decay), (scaled.adam_beta1, scaled.adam_beta2)
        return import_other("AdamW8bit")(groups, scaled.learning_rate, betas, scaled.adam_epsilon, decay)
    if accumulates:
        groups, betas = group_parameters(model, decay, layerwise), (scaled.adam_beta1, scaled.adam_beta2)
        return import_other("AccumulatingAdamW")(
            groups, scaled.learning_rate, betas, scaled.adam_epsilon, second_moment=recipe.second_moment
        )
    return adamw(model, scaled, decay, layerwise)


def find_notes(recipe: Recipe) -> list[str]:
    """Say, in lines for the log, what an optimizer is not."""
    if recipe.optimizer_name != "adamw_8bit":
        return []
    return [
        "optimizer adamw_8bit is not AdamW: after each step its moments are rounded to 8 bits, in blocks of 256. The update "
        "is exact but for that; the step's gradient is the exact one"
    ]


def depths(model: nn.Module) -> dict[str, int]:
    """Count the layers above each parameter, by name: 0 of the head, 1 of the last layer, L of the first, L + 1 of embeddings.

    Layer-wise decay d gives a parameter d ** depth of the learning rate (Howard and Ruder 2018, 1801.06146; Clark et al. 2020,
    2003.10555). Layers are the items of a list called `layer`; modules called `embeddings` come before them.
    """
    places = {}
    for name, _ in model.named_parameters():
        words = name.split(".")
        layer = next((int(b) + 1 for a, b in itertools.pairwise(words) if a == "layer" and b.isdecimal()), None)
        places[name] = layer if layer is not None else 0 if "embeddings" in words else None
    num_layers = max((place for place in places.values() if place is not None), default=0)
    return {name: 0 if place is None else num_layers + 1 - place for name, place in places.items()}


def group_parameters(model: nn.Module, weight_decay: float, layerwise_lr_decay: float = 1.0) -> list[dict[str, Any]]:
    """Group parameters that decay and the others, from the head down."""
    groups, depth_by_name = [], depths(model)
    for depth in sorted(set(depth_by_name.values())) if layerwise_lr_decay < 1 else [None]:
        parameters = [
            p for name, p in model.named_parameters() if p.requires_grad and depth in (None, depth_by_name[name])
        ]
        scale = {"lr_scale": layerwise_lr_decay ** (depth or 0)}
        groups += [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay} | scale,
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0} | scale,
        ]
    return [group for group in groups if group["params"]]
