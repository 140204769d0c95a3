"""Whether a loss that should be a sum is a mean, as its autograd graph tells."""

import torch

from samestep._internals import torch_autograd

MOST_NODES = 64  # looked at
LINEAR = {
    f"{name}Backward{number}"
    for name in (
        *("Add", "Sub", "Neg", "Stack", "Cat", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Select"),
        *("Expand", "ToCopy", "Clone", "Alias", "Sum", "Unbind", "Permute", "T", "Index", "Slice"),
    )
    for number in range(4)
} | {"_DDPSinkBackward"}
"""Nodes that pass a mean on as a mean, and a sum as a sum."""


def find_mean(sums: torch.Tensor, counts: list[list[int]]) -> str | None:
    """Say how a supposed sum was averaged; None where nothing of the kind is seen.

    The graph is walked from the loss through linear nodes, and the scalar factors on the way are multiplied. Three things are
    found: a loss function with reduction "mean", `Tensor.mean` to a single number, and a division by a number of targets. A
    mean times the number of targets is a sum, and is let through.

    What is not seen: a mean inside a custom autograd function or compiled code, a mean over a part of the dimensions (which may
    be meant: the mean over a picture's pixels), a division by a number that is no number of targets given or by 2 (which may be
    meant: half the squared error), a product with its inverse, and a mean below anything that is not linear.

    Args:
        sums: scalar or [terms], with a gradient.
        counts: for each term the numbers that it may have been divided by: targets of the micro-batch, of the step.
    """
    if sums.grad_fn is None:
        return None
    every = [count for of in counts for count in of]
    todo, seen = [(sums.grad_fn, 1.0, 1.0, every)], 0
    while todo and seen < MOST_NODES:
        node, factor, divisor, own = todo.pop()
        seen += 1
        name = node.name().rsplit(".", 1)[-1]
        if name in LINEAR:
            is_terms = name.startswith("Stack") and seen == 1 and len(node.next_functions) == len(counts)
            for place, (parent, _) in enumerate(node.next_functions):
                if parent is not None:
                    todo.append((parent, factor, divisor, counts[place] if is_terms else own))
            continue
        if name.startswith(("MulBackward", "DivBackward")) and (scalar := _scalar(node)) is not None:
            if name.startswith("Div"):
                factor, divisor = factor / scalar if scalar else factor, divisor * scalar
            else:
                factor *= scalar
            todo.append((node.next_functions[0][0], factor, divisor, own))
            continue
        if _averages(node, name):
            if not any(abs(factor - count) <= 1e-3 * count for count in own):
                return f"{name} averages"
        elif count := next((of for of in own if of > 2 and abs(divisor - of) <= 1e-3 * of), None):
            return f"it is divided by {count}"
    return None


def _scalar(node: torch.autograd.graph.Node) -> float | None:
    """The number that a node multiplies or divides by, which has no gradient; None if it is anything else."""
    parents = node.next_functions
    if parents[0][0] is None or (len(parents) > 1 and parents[1][0] is not None):
        return None
    other = torch_autograd.other_operand(node)
    if isinstance(other, torch.Tensor):
        return other.item() if other.numel() == 1 else None
    return other if isinstance(other, (int, float)) else None


def _averages(node: torch.autograd.graph.Node, name: str) -> bool:
    if name.startswith("MeanBackward"):
        return not torch_autograd.output_shape(node)  # to a single number
    return torch_autograd.is_mean_of_losses(node)
