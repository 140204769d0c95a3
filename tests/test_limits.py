"""Classes stay small enough to be read at once: their lines, the attributes they set, what their constructors take."""

import ast
from collections.abc import Iterator

import pytest
from common import ROOT

PACKAGES = ("samestep", "stepplan", "stepaudit", "recipes", "scripts")
LIMITS = {"lines": 300, "attributes": 15, "arguments": 8}


def measure(node: ast.ClassDef) -> dict[str, int]:
    """Count the lines of a class, the names that its methods set on self, and the arguments of its constructor."""
    stored = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self"
    }
    constructor = next((part for part in node.body if getattr(part, "name", "") == "__init__"), None)
    arguments = constructor and len(
        [*constructor.args.posonlyargs, *constructor.args.args, *constructor.args.kwonlyargs]
    )
    return {
        "lines": node.end_lineno - node.lineno + 1,
        "attributes": len(stored),
        "arguments": arguments - 1 if arguments else 0,
    }


def find_large(source: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield each class of a module that is above a limit, and by which numbers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            above = {name: number for name, number in measure(node).items() if number > LIMITS[name]}
            if above:
                yield node.name, above


def test_classes_are_within_limits():
    found = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found |= {f"{name}.{cls}": above for cls, above in find_large(path.read_text(encoding="utf-8"))}
    assert not found, "split them by meaning, so that each says in a sentence what it is"


LARGE = "class Large:\n    def __init__(self, {arguments}):\n        {body}\n"


@pytest.mark.parametrize(
    ("arguments", "body", "above"),
    [
        ("a, *, b", "self.a, self.b = a, b", {}),
        ("a", "\n        ".join(["self.a = a"] * 298), {}),
        ("a", "\n        ".join(["self.a = a"] * 299), {"lines": 301}),
        ("a", "; ".join(f"self.a{number} = a" for number in range(16)), {"attributes": 16}),
        ("a, b, c, d, e, f, *, g, h, i", "pass", {"arguments": 9}),
    ],
    ids=["small", "300 lines", "301 lines", "16 attributes", "9 arguments"],
)
def test_what_is_above_a_limit_is_found(arguments, body, above):
    assert dict(find_large(LARGE.format(arguments=arguments, body=body))) == ({"Large": above} if above else {})


FILES = {"samestep/recipe": 400, "samestep/training/run.py": 400}
"""Files, or all of a folder -> lines that they have at most."""


@pytest.mark.parametrize("place", FILES)
def test_files_are_within_limits(place):
    paths = sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]
    sizes = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert not {name: size for name, size in sizes.items() if size > FILES[place]}, "split them by meaning"
