"""Find out from its autograd graph whether a loss that should be a sum is a mean."""

import torch

from samestep._internals import torch_autograd

MAX_NODES = 64  # of a graph that are looked at
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
    """Say how a supposed sum was averaged; None where no average is found.

    The graph is walked from the loss through linear nodes, and the scalar factors on the way are multiplied. Three things are
    found: a loss function with reduction "mean", `Tensor.mean` to a single number, and a division by a number of targets. A
    mean times the number of targets is a sum, and is let through.

    Not found: a mean inside a custom autograd function or compiled code, a mean over a part of the dimensions (which may be
    meant: the mean over a picture's pixels), a division by a number that is not in `counts` or is 2 (which may be meant: half
    the squared error), a product with the inverse of a number, and a mean below anything that is not linear.

    Args:
        sums: scalar or [terms], with a gradient.
        counts: for each term the numbers that it may have been divided by: targets of the micro-batch, targets of the step.

    Returns:
        the node or the division that averages, as a clause for a message.
    """
    if sums.grad_fn is None:
        return None
    all_counts = [count for term_counts in counts for count in term_counts]
    todo, num_visited = [(sums.grad_fn, 1.0, 1.0, all_counts)], 0
    while todo and num_visited < MAX_NODES:
        node, factor, divisor, node_counts = todo.pop()
        num_visited += 1
        name = node.name().rsplit(".", 1)[-1]
        if name in LINEAR:
            # The outermost stack has one input per term, with the counts of that term.
            is_terms = name.startswith("Stack") and num_visited == 1 and len(node.next_functions) == len(counts)
            for place, (parent, _) in enumerate(node.next_functions):
                if parent is not None:
                    todo.append((parent, factor, divisor, counts[place] if is_terms else node_counts))
            continue
        if name.startswith(("MulBackward", "DivBackward")) and (scalar := _scalar(node)) is not None:
            if name.startswith("Div"):
                factor, divisor = factor / scalar if scalar else factor, divisor * scalar
            else:
                factor *= scalar
            todo.append((node.next_functions[0][0], factor, divisor, node_counts))
            continue
        if _is_mean(node, name):
            if not any(abs(factor - count) <= 1e-3 * count for count in node_counts):
                return f"{name} averages"
        elif count := next((n for n in node_counts if n > 2 and abs(divisor - n) <= 1e-3 * n), None):
            return f"it is divided by {count}"
    return None


def _scalar(node: torch.autograd.graph.Node) -> float | None:
    """Return the number that a node multiplies or divides by; None if the operand has a gradient or is no single number."""
    parents = node.next_functions
    if parents[0][0] is None or (len(parents) > 1 and parents[1][0] is not None):
        return None
    operand = torch_autograd.other_operand(node)
    if isinstance(operand, torch.Tensor):
        return operand.item() if operand.numel() == 1 else None
    return operand if isinstance(operand, (int, float)) else None


def _is_mean(node: torch.autograd.graph.Node, name: str) -> bool:
    if name.startswith("MeanBackward"):
        return not torch_autograd.output_shape(node)  # to a single number
    return torch_autograd.is_mean_of_losses(node)
