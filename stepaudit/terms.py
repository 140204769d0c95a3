"""Splits a loss into its terms, and gives the gradient of each: a term may have a denominator of its own, or no samples.

A loss is split where its graph is linear: sums, means, stacks, products with constants. For the terms l_j, whatever they are,

    grad l = sum_j grad l_j,

so a step's gradient under another cut is a sum of the same gradients of terms with other weights.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, Node

TOLERANCE = 1e-5  # relative; terms are rounded
MAX_TERMS = 6
MAX_NODES = 200
# Operations that are linear in what they are given, if one or all of their inputs have gradients.
LINEAR = {
    "AddBackward0", "SubBackward0", "NegBackward0", "SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1",
    "StackBackward0", "CatBackward0", "ToCopyBackward0", "CloneBackward0", "ViewBackward0", "ReshapeAliasBackward0",
    "UnsafeViewBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "ExpandBackward0", "SelectBackward0",
}  # fmt: skip
Grad = Callable[..., Sequence[torch.Tensor | None]]


def take_gradients(
    loss: torch.Tensor, parameters: list[torch.Tensor], grad: Grad
) -> list[list[torch.Tensor | None]] | None:
    """Take the gradient of each term of a loss. The graph is left as it is.

    Args:
        loss: the scalar that a backward starts from.
        parameters: with respect to which the terms are differentiated.
        grad: `torch.autograd.grad`.

    Returns:
        For each term the gradients of the parameters, in the scale of the loss; None where the loss is one term. Of many terms
        the last ones are taken as one.
    """
    edges, has_leaves = _split(loss)
    if len(edges) + has_leaves < 2:
        return None
    scales = grad(loss, edges, retain_graph=True, allow_unused=True) if edges else []
    gradients = [
        list(grad([edge], parameters, [scale], retain_graph=True, allow_unused=True))
        for edge, scale in zip(edges, scales, strict=True)
        if scale is not None
    ]
    if has_leaves:  # parameters that are terms themselves: what the other terms leave of the whole
        rest = list(grad(loss, parameters, retain_graph=True, allow_unused=True))
        for term in gradients:
            rest = [_subtract(whole, part) for whole, part in zip(rest, term, strict=True)]
        gradients.append(rest)
    return gradients if len(gradients) > 1 else None


def adds_up(parts: list[np.ndarray], whole: np.ndarray | None) -> bool:
    """Tell whether the terms' gradients are the whole one: not where one term goes into another one, too."""
    if whole is None:
        return False
    return bool(np.linalg.norm(sum(parts) - whole) <= TOLERANCE * sum(np.linalg.norm(part) for part in parts))


def _subtract(whole: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    return whole if part is None else -part if whole is None else whole - part


def _split(loss: torch.Tensor) -> tuple[list[GradientEdge], bool]:
    """Find the places of the graph behind which it is not linear, and whether parameters are reached by linear steps alone.

    The outermost sums are split first, until there are `MAX_TERMS`: a penalty of many parameters stays one term then.
    """
    pending: deque[tuple[Node, int]] = deque([(loss.grad_fn, loss.output_nr)] if loss.grad_fn is not None else [])
    edges: dict[tuple[int, int], GradientEdge] = {}
    has_leaves, visited = False, 0
    while pending and visited < MAX_NODES:
        node, number = pending.popleft()
        visited += 1
        parents = [(parent, index) for parent, index in node.next_functions if parent is not None]
        # Linear if one input alone has a gradient; a quotient, if it is the one in front
        is_scaled = node.name() == "MulBackward0" or (
            node.name() == "DivBackward0" and node.next_functions[0][0] is not None
        )
        num_terms = len(edges) + len(pending) + has_leaves + len(parents)
        if (node.name() in LINEAR or (is_scaled and len(parents) == 1)) and (
            len(parents) < 2 or num_terms <= MAX_TERMS
        ):
            pending += parents
        elif node.name().endswith("AccumulateGrad"):
            has_leaves = True
        else:
            edges[id(node), number] = GradientEdge(node, number)
    return ([], False) if pending else (list(edges.values()), has_leaves)
