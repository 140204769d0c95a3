"""Walks through the graph of a loss."""

from collections.abc import Iterable
from typing import Any


def list_nodes(roots: Iterable[Any]) -> set:
    """List the nodes of the graph that some nodes (`tensor.grad_fn`) depend on, with themselves."""
    visited = {root for root in roots if root is not None}
    pending_nodes = list(visited)
    while pending_nodes:
        new = {parent for parent, _ in pending_nodes.pop().next_functions if parent is not None} - visited
        visited |= new
        pending_nodes += new
    return visited
