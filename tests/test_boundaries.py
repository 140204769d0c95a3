"""Imports go one way between rooms, the lower ones work without torch, and the audit knows nothing of the recipes."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = [
    ["errors", "interrupt"],
    ["extras"],
    ["recipe", "cut"],
    ["planner", "step"],
    ["data"],
    ["models"],
    ["training"],
    ["cli"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
WITHOUT_TORCH = {"errors", "extras", "interrupt", "recipe", "cut", "planner"}
OF_AUDIT = {
    "stepaudit",
    "torch",
    "numpy",
    "cloudpickle",
    "pytest",
    "transformers",
}  # the last for its Trainer's loss only
MODULES = sorted(path.relative_to(ROOT) for path in (ROOT / "samestep").rglob("*.py"))
AUDIT = sorted(path.relative_to(ROOT) for path in (ROOT / "stepaudit").rglob("*.py"))


def imports(path: Path) -> set[tuple[str, ...]]:
    """Dotted names that a module imports, anywhere in it; `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {(*node.module.split("."), alias.name) for alias in node.names}
    return found


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_go_one_way(module):
    room = module.parts[1].removesuffix(".py")
    if room == "__init__":
        return
    for name in imports(module):
        if name[0] == "samestep" and name[1] not in ("__version__", room):
            assert FLOOR[name[1]] < FLOOR[room], f"{module} imports {'.'.join(name)}"
        if room in WITHOUT_TORCH:
            assert name[0] in sys.stdlib_module_names | {"samestep", "stepaudit", "numpy", "yaml"}, (
                f"{module}: {name[0]}"
            )


@pytest.mark.parametrize("module", AUDIT, ids=str)
def test_the_audit_stands_alone(module):
    assert {name[0] for name in imports(module)} <= OF_AUDIT | sys.stdlib_module_names


def test_rooms_are_few():
    assert len(FLOOR) <= 12
    assert len(FLOORS) <= 8
    found = {
        path.stem for path in (ROOT / "samestep").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert found == {*FLOOR, "__init__"}


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_can_be_read_in_one_go(script):
    assert len(script.read_text().splitlines()) <= 215
