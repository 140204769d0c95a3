"""Style that a pattern sees: nouns of docstrings, and tests that reach into modules."""

import ast
import re

import pytest
from common import ROOT

NO_NOUN = re.compile(r"(What|Which|Who|Whose|Where|When|How|Why|Those|These|Them|It|Its|Their|Of|For|In|From)\b")
"""First words of a docstring that leave out of what it speaks."""
MOST_PATCHES = 79
"""Places of tests that replace an attribute of a module or a class; fewer is better."""


def read_docstrings(text: str) -> list[str]:
    """List the docstrings of a module, its classes and functions, and the strings below its constants."""
    bodies = [node.body for node in ast.walk(ast.parse(text)) if isinstance(getattr(node, "body", None), list)]
    values = [line.value for body in bodies for line in body if isinstance(line, ast.Expr)]
    return [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


@pytest.mark.parametrize("folder", ["samestep", "stepplan", "stepaudit", "recipes", "scripts"])
def test_a_docstring_begins_with_its_noun(folder):
    assert [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in read_docstrings(path.read_text(encoding="utf-8"))
        if NO_NOUN.match(text)
    ] == []


def test_that_it_would_be_noticed():
    text = 'VALUE = 1\n"""Of a model."""\ndef find():\n    """What is there."""\ndef make():\n    """The noun."""\n'
    assert [bool(NO_NOUN.match(found)) for found in read_docstrings(text)] == [True, True, False]


def count_patches(text: str) -> int:
    """Count the places that replace an attribute by pytest's `setattr`, whatever its fixture is called, or by `mock.patch`."""
    names = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    return sum(name.attr == "setattr" or ast.unparse(name).endswith("patch.object") for name in names)


def test_tests_replace_few_parts_of_modules():
    """A test passes objects in, or runs the real thing."""
    files = (ROOT / "tests").rglob("*.py")
    found = sum(count_patches(path.read_text(encoding="utf-8")) for path in files)
    assert found <= MOST_PATCHES, "pass an object in, or run the real thing"


def test_that_a_patch_would_be_counted():
    text = "bare.setattr(a, 'b', 1)\nblank(monkeypatch.setattr)\nmock.patch.object(a, 'b')\nsetattr(a, 'b', 1)\na.object()\n"
    assert count_patches(text) == 3
