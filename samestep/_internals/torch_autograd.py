"""Facts that the nodes of an autograd graph keep of their operators, and the pinning of what a DataLoader collates."""

from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.data._utils import pin_memory as _pinning


def other_operand(node: Node) -> Any:
    """Return the second operand of a product or quotient (torch 2.13, `_saved_other`); None where it is not kept."""
    return getattr(node, "_saved_other", None)


def output_shape(node: Node) -> torch.Size:
    """Return the shape of a node's first output (torch 2.13, `_input_metadata`: the input of its backward)."""
    return torch.Size(node._input_metadata[0].shape)


def is_mean_of_losses(node: Node) -> bool:
    """Tell whether a loss function's reduction is "mean" (torch 2.13, `_saved_reduction`, 1 of torch's `at::Reduction`)."""
    return getattr(node, "_saved_reduction", None) == 1


def pin_memory(value: Any) -> Any:
    """Return collated values, nested or not, copied to page-locked memory, as a DataLoader with pin_memory does (torch 2.13,
    `torch.utils.data._utils.pin_memory`)."""
    return _pinning.pin_memory(value)


def find_leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Find the leaves of a tensor's graph, those that a backward gives a gradient; none where it has no graph.

    torch 2.13: nodes that accumulate gradients are the only ones with a `variable`.
    """
    nodes, seen, leaves = [tensor.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves
