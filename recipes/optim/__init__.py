"""Optimizers: torch's fused ones, with decay on matrices and filters only, not on biases and normalisation weights."""

from typing import Any

import torch
from torch import nn

from recipes.recipe import ImageRecipe, Recipe
from recipes.scaling import Hyperparameters


def adamw(model: nn.Module, hyperparameters: Hyperparameters, weight_decay: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, 1711.05101)."""
    betas = (hyperparameters.adam_beta1, hyperparameters.adam_beta2)
    groups = _groups(model, weight_decay)
    return torch.optim.AdamW(
        groups, lr=hyperparameters.learning_rate, betas=betas, eps=hyperparameters.adam_epsilon, fused=True
    )


def sgd(model: nn.Module, learning_rate: float, momentum: float, weight_decay: float) -> torch.optim.SGD:
    """SGD with momentum, as torch defines it: v = momentum * v + g + weight_decay * p, p = p - learning_rate * v."""
    return torch.optim.SGD(_groups(model, weight_decay), lr=learning_rate, momentum=momentum, fused=True)


def of_recipe(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer that a recipe asks for."""
    if isinstance(recipe, ImageRecipe) and recipe.optimizer == "sgd":
        return sgd(model, recipe.scaled().learning_rate, recipe.sgd_momentum, recipe.weight_decay)
    return adamw(model, recipe.scaled(), recipe.weight_decay)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters to decay and others."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
