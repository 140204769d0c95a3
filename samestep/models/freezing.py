"""Freeze parts of a model by name: their weights have no gradient, no moments, and no adapters.

Torch records nothing of a forward whose inputs and weights need no gradient. So a frozen part with nothing trained below it
saves nothing for a backward, as under `torch.no_grad`; one above trained weights passes their gradient on.
"""

from collections.abc import Collection
from typing import Any

from torch import nn

from samestep.errors import UsageError
from samestep.recipe.tasks.freezing import ROLES, find_frozen


def find_frozen_modules(model: nn.Module, freeze: Collection[str] | None) -> set[str]:
    """Find the names of the modules of a model that a recipe freezes, see `find_frozen`.

    Args:
        model: of transformers, without adapters.
        freeze: of the recipe.
    """
    names = [name for name, _ in model.named_modules() if name]
    own = {part for name in names for part in name.split(".")}
    linked = [role for role, others in ROLES.items() if own & set(others) and own & set(ROLES["vision_tower"])]
    return find_frozen(freeze or (), names, type(model).__name__, linked)


def freeze_modules(model: nn.Module, freeze: Collection[str] | None) -> None:
    """Freeze the weights of the modules that a recipe names, in place.

    Weights that another module has, too, such as an embedding that encoder and decoder share, stay trained.

    Args:
        model: of transformers, without adapters.
        freeze: of the recipe.

    Raises:
        UsageError: a name that no module has, or nothing is left to train.
    """
    frozen = find_frozen_modules(model, freeze)
    modules = dict(model.named_modules())
    own = {name: list(module.parameters(recurse=False)) for name, module in modules.items()}
    others = {id(parameter) for name, parameters in own.items() if name not in frozen for parameter in parameters}
    for name in frozen:
        for parameter in own[name]:
            parameter.requires_grad_(id(parameter) in others and parameter.requires_grad)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"freeze names {', '.join(freeze or ())}, which is all of the model: leave a part to train")


def describe_trained(model: Any) -> str:
    """Say in a line how many of a model's parameters are trained."""
    sizes = [(parameter.requires_grad, parameter.numel()) for parameter in model.parameters()]
    trained, total = sum(size for is_trained, size in sizes if is_trained), sum(size for _, size in sizes)
    return f"{trained:,} of {total:,} parameters are trained"
