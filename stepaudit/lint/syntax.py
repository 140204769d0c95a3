"""Holds what the checks ask of a program's syntax tree: parents, names, what a name was assigned."""

import ast
import functools
import re
from collections.abc import Iterator
from typing import Any

Node = Any
"""A part of a syntax tree: its attributes depend on its kind."""
LOOPS = (ast.For, ast.AsyncFor, ast.While)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)


def dotted(node: Node | None) -> str:
    """Return the dotted name of an expression, with () for a call and [] for an index; empty for anything else.

    >>> dotted(ast.parse("self.optimizers[0].step", mode="eval").body)
    'self.optimizers[].step'
    """
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{dotted(node.value)}.{node.attr}"
        case ast.Subscript():
            return f"{dotted(node.value)}[]"
        case ast.Call():
            return f"{dotted(node.func)}()"
    return ""


def last_name(node: Node | None) -> str:
    """Return the last part of a dotted name, without its signs.

    >>> last_name(ast.parse("self.optimizers[0]", mode="eval").body)
    'optimizers'
    """
    return dotted(node).rpartition(".")[2].rstrip("[]()")


def receiver_of(call: ast.Call) -> Node:
    """Return what a method is called on; None for a call of a plain name."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def names_in(node: Node) -> set[str]:
    """Collect the dotted names of an expression, those of its parts, too."""
    return {dotted(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)} - {""}


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return what a call gives to a keyword; None if it does not."""
    return next((word.value for word in call.keywords if word.arg == name), None)


def targets_of(node: Node) -> Iterator[ast.expr]:
    """Yield what a statement assigns to, parts of tuples one by one."""
    match node:
        case ast.Assign():
            todo = list(node.targets)
        case ast.AugAssign() | ast.AnnAssign() | ast.For() | ast.AsyncFor() | ast.NamedExpr():
            todo = [node.target]
        case ast.withitem():
            todo = [node.optional_vars] if node.optional_vars else []
        case _:
            return
    while todo:
        target = todo.pop()
        if isinstance(target, ast.Tuple | ast.List):
            todo += target.elts
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _is_plain(node: Node, name: str) -> bool:
    """Tell whether an assignment gives a name a whole value: no part of a tuple, nothing added."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    is_assignment = isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None
    return is_assignment and any(dotted(target) == name for target in targets)


class Source:
    """A program's syntax tree, with what is looked up in it often.

    Args:
        text: the program.
        path: the file's name, as it is printed.

    Raises:
        SyntaxError, ValueError, RecursionError: it is no Python program.
    """

    def __init__(self, text: str, path: str = ""):
        self.text, self.path = text, path
        self.tree = ast.parse(text)
        self.parents: dict[Node, Node] = {}
        self.nodes: list[Node] = []
        self._changed: dict[Node, set[str]] = {}
        todo: list[Node] = [self.tree]
        while todo:
            node = todo.pop()
            self.nodes.append(node)
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                todo.append(child)
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.calls.sort(key=lambda call: (call.lineno, call.col_offset))

    def ancestors(self, node: Node, until: Node | None = None) -> Iterator[Node]:
        """Yield what a node lies in, the nearest first, up to `until`, which is left out."""
        while (node := self.parents.get(node)) is not None and node is not until:
            yield node

    def scope(self, node: Node) -> Node:
        """Return the function, class or module that a node lies in."""
        return next((outer for outer in self.ancestors(node) if isinstance(outer, SCOPES)), self.tree)

    def is_inside(self, node: Node, outer: Node) -> bool:
        return any(ancestor is outer for ancestor in self.ancestors(node))

    def statement(self, node: Node) -> ast.stmt | None:
        """Return the statement that a node is a part of."""
        if isinstance(node, ast.stmt):
            return node
        return next((outer for outer in self.ancestors(node) if isinstance(outer, ast.stmt)), None)

    @functools.cached_property
    def assigned(self) -> dict[str, list[Node]]:
        """Statements that assign to a dotted name, in the order of their lines."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for target in targets_of(node):
                statement = self.parents[node] if isinstance(node, ast.withitem) else node
                found.setdefault(dotted(target), []).append(statement)
        for nodes in found.values():
            nodes.sort(key=lambda node: getattr(node, "lineno", 0))
        return found

    def changed_in(self, loop: Node) -> set[str]:
        """Return the dotted names that a loop assigns to."""
        if loop not in self._changed:
            self._changed[loop] = {
                name
                for name, nodes in self.assigned.items()
                if any(node is loop or self.is_inside(node, loop) for node in nodes)
            }
        return self._changed[loop]

    def assignments(self, name: str, near: Node) -> list[Node]:
        """List the assignments to a name in the scope of a node, or else in one around it; of an attribute anywhere."""
        found = self.assigned.get(name, [])
        scopes = [outer for outer in self.ancestors(near) if isinstance(outer, SCOPES)]
        for scope in scopes:
            if here := [node for node in found if self.scope(node) is scope]:
                return here
            if isinstance(scope, ast.FunctionDef) and name in {argument.arg for argument in _arguments(scope)}:
                return []
        return found if "." in name else []

    def values(self, name: str, near: Node) -> list[ast.expr]:
        """List what a name is assigned by plain assignments near a node."""
        return [node.value for node in self.assignments(name, near) if _is_plain(node, name)]

    def calls_of(self, pattern: str) -> list[ast.Call]:
        """List the calls whose dotted name matches a pattern as a whole."""
        return [call for call in self.calls if re.fullmatch(pattern, dotted(call.func))]

    def has(self, pattern: str) -> bool:
        """Tell whether the program's text has a pattern."""
        return re.search(pattern, self.text) is not None

    @functools.cached_property
    def imported(self) -> set[str]:
        """Dotted names of the modules that the program imports; a dot in front for those beside it."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add("." * node.level + (node.module or ""))
        return found

    @functools.cached_property
    def flags(self) -> list[str]:
        """Names of the flags that the program adds to an argparse parser, without their dashes."""
        words = [
            part.value
            for call in self.calls
            if last_name(call.func) == "add_argument"
            for part in call.args
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        return [word.lstrip("-") for word in words if word.startswith("--")]
