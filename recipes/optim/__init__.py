"""Optimizers."""

import torch
from torch import nn

from recipes.scaling import Hyperparameters


def adamw(model: nn.Module, hyperparameters: Hyperparameters, weight_decay: float) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov and Hutter 2019, 1711.05101) with decay on matrices only, not on biases and norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (hyperparameters.adam_beta1, hyperparameters.adam_beta2)
    return torch.optim.AdamW(
        groups, lr=hyperparameters.learning_rate, betas=betas, eps=hyperparameters.adam_epsilon, fused=True
    )
