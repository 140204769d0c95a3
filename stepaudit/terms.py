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

from stepaudit.graph import list_nodes

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
) -> tuple[list[list[torch.Tensor | None]], list[float]] | None:
    """Take the gradient of each term of a loss. The graph is left as it is.

    Args:
        loss: the scalar that a backward starts from.
        parameters: with respect to which the terms are differentiated.
        grad: `torch.autograd.grad`.

    Returns:
        For each term the gradients of the parameters, in the scale of the loss, and the number that it is multiplied by in the
        loss (of a mean or a sum of several numbers, the sum of theirs); None where the loss is one term. Of many terms the last
        ones are taken as one.
    """
    for max_terms in range(MAX_TERMS, 1, -1):
        edges, has_leaves = _split(loss, max_terms)
        if len(edges) + has_leaves < 2:
            return None
        if not _are_nested(edges):
            break
    scales = grad(loss, edges, retain_graph=True, allow_unused=True) if edges else []
    pairs = [(edge, scale) for edge, scale in zip(edges, scales, strict=True) if scale is not None]
    gradients = [list(grad([e], parameters, [scale], retain_graph=True, allow_unused=True)) for e, scale in pairs]
    factors = [float(scale.double().sum()) if not scale.is_complex() else 0.0 for _, scale in pairs]
    if has_leaves:  # parameters that are terms themselves: what the other terms leave of the whole
        rest = list(grad(loss, parameters, retain_graph=True, allow_unused=True))
        for term in gradients:
            rest = [_subtract(whole, part) for whole, part in zip(rest, term, strict=True)]
        gradients.append(rest)
        factors.append(0.0)
    return (gradients, factors) if len(gradients) > 1 else None


def adds_up(parts: list[np.ndarray], whole: np.ndarray | None) -> bool:
    """Tell whether the terms' gradients are the whole one: not where one term goes into another one, too."""
    if whole is None:
        return False
    return bool(np.linalg.norm(sum(parts) - whole) <= TOLERANCE * sum(np.linalg.norm(part) for part in parts))


def _subtract(whole: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    return whole if part is None else -part if whole is None else whole - part


def _are_nested(edges: list[GradientEdge]) -> bool:
    """Tell whether a term is computed from another one: its gradient would be in both."""
    nodes = {edge.node for edge in edges}
    return any(nodes & (list_nodes([edge.node]) - {edge.node}) for edge in edges)


def _split(loss: torch.Tensor, max_terms: int) -> tuple[list[GradientEdge], bool]:
    """Find the places of the graph behind which it is not linear, and whether parameters are reached by linear steps alone.

    The outermost sums are split first, until there are `max_terms`: a penalty of many parameters stays one term then.
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
            len(parents) < 2 or num_terms <= max_terms
        ):
            pending += parents
        elif node.name().endswith("AccumulateGrad"):
            has_leaves = True
        else:
            edges[id(node), number] = GradientEdge(node, number)
    return ([], False) if pending else (list(edges.values()), has_leaves)
