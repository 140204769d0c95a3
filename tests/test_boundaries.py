"""Imports go one way between rooms; the lower rooms and the planner need no torch; the audit knows nothing of the rest."""

import ast
import re
import sys
from pathlib import Path

import pytest

from samestep import cli
from samestep.cut.layout import solve_layout
from samestep.errors import exit_code
from samestep.recipe.catalog import load
from samestep.recipe.prediction import predict_memory
from samestep.recipe.settings import program_name

ROOT = Path(__file__).parents[1]
FLOORS = [
    ["errors", "interrupt", "printing", "_internals"],
    ["pages", "cut"],
    ["recipe"],
    ["step"],
    ["data", "losses"],
    ["models"],
    ["training"],
    ["cli"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms} | {"contrib": len(FLOORS)}
TORCHLESS = {"errors", "interrupt", "printing", "pages", "recipe", "cut"}
PLANNED_WITH = {"cli", "errors", "printing", "pages", "recipe", "cut"}
"""Rooms that the planner may import from."""
READING_ROWS = ("samestep", "data", "row_files")
"""What counts the rows of files, which needs neither torch nor `datasets`."""
IMPORTED_LATE = {"growth_plot.py": {"matplotlib"}, "model.py": {"transformers"}}
"""What the planner imports when a chart is drawn, and when a model that it has no formula for is traced."""
WITHOUT_TORCH = sys.stdlib_module_names | {"samestep", "numpy", "yaml", "jinja2"}
AUDIT_IMPORTS = {
    "stepaudit",
    "torch",
    "numpy",
    "cloudpickle",
    "pytest",
    "transformers",
}  # the last for its Trainer's loss only
MODULES = sorted(path.relative_to(ROOT) for path in (ROOT / "samestep").rglob("*.py"))
PLANNER = sorted(path.relative_to(ROOT) for path in (ROOT / "stepplan").rglob("*.py"))
BROUGHT = "contrib/(kinds|growing/|communication/algorithms|.*exclusions|.*__init__)"
OF_RECIPES = [path for path in MODULES if re.search(BROUGHT, str(path))]
"""What contrib brings to recipes, and to their plans."""
AUDIT = sorted(path.relative_to(ROOT) for path in (ROOT / "stepaudit").rglob("*.py"))


def imports(path: Path) -> set[tuple[str, ...]]:
    """Collect the dotted names that a module imports, anywhere in it; `from a import b` counts as a.b."""
    result = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            result |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            result |= {(*node.module.split("."), alias.name) for alias in node.names}
    return result


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_go_one_way(module):
    room = module.parts[1].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    for name in imports(module):
        assert name[0] not in ("stepplan", "stepaudit"), f"{module} imports another room"
        assert room == "contrib" or name[:2] != ("samestep", "contrib"), (
            f"{module} imports a way: training/ways.py lists them"
        )
        if name[0] == "samestep" and name[1] not in ("__version__", room):
            assert FLOOR[name[1]] < FLOOR[room], f"{module} imports {'.'.join(name)}"
        if room in TORCHLESS:
            assert name[:2] != ("samestep", "_internals"), f"{module} imports what needs torch"
            assert name[0] in WITHOUT_TORCH, f"{module}: {name[0]}"


@pytest.mark.parametrize("module", OF_RECIPES, ids=str)
def test_recipes_of_all_kinds_are_read_and_planned_without_torch(module):
    for name in imports(module):
        assert name[0] in WITHOUT_TORCH, f"{module}: {name[0]}"
        if name[0] == "samestep" and name[1] != "contrib":
            assert name[1] in TORCHLESS, f"{module} imports {'.'.join(name)}"
        assert name[:2] != ("samestep", "contrib") or Path(*name[:-1]).with_suffix(".py") in OF_RECIPES, name


@pytest.mark.parametrize("module", PLANNER, ids=str)
def test_the_planner_knows_recipes_and_layouts_only(module):
    if module.name in ("trace.py", "traced.py"):  # they run the real model, on tensors without numbers
        return
    for name in imports(module):
        assert name[0] in WITHOUT_TORCH | {"stepplan"} | IMPORTED_LATE.get(module.name, set()), f"{module}: {name[0]}"
        if name[0] == "samestep":
            assert name[1] in PLANNED_WITH or name[:3] == READING_ROWS, f"{module} imports {'.'.join(name)}"


@pytest.mark.parametrize("module", AUDIT, ids=str)
def test_the_audit_stands_alone(module):
    own = {"deepspeed"} if module.name == "zero.py" else set()  # it is imported after the program has imported that
    assert {name[0] for name in imports(module)} <= AUDIT_IMPORTS | sys.stdlib_module_names | own


def names(path: Path) -> tuple[set[str], set[str]]:
    """Collect the private names that a module defines, and those that it uses or imports, names of modules included."""
    defined, uses = set(), set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            target = defined if isinstance(node.ctx, ast.Store) or ast.unparse(node.value) in ("self", "cls") else uses
            target.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
    uses |= {
        part
        for name in imports(path)
        if name[0] not in ("samestep", "stepaudit", "stepplan", "__future__")
        for part in name
    }
    return tuple(
        {name for name in group if name.startswith("_") and not name.startswith("__")} for group in (defined, uses)
    )


def test_what_is_private_of_other_libraries_has_a_room():
    """os._exit and namedtuples' methods are documented."""
    names_by_module = {module: names(module) for module in MODULES + AUDIT + PLANNER if "_internals" not in str(module)}
    ours = set().union(*(defined for defined, _ in names_by_module.values())) | {"_exit", "_asdict", "_replace"}
    assert {str(module): uses - ours for module, (_, uses) in names_by_module.items() if uses - ours} == {}


@pytest.mark.rooms
def test_rooms_are_few():
    assert len(FLOOR) <= 14
    assert len(FLOORS) <= 9
    rooms = {
        path.stem for path in (ROOT / "samestep").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms == {*FLOOR, "__init__", "__main__"}


def depth(node: ast.AST) -> int:
    """Count how many loops, conditions and context managers lie inside each other."""
    inner = max((depth(child) for child in ast.iter_child_nodes(node)), default=0)
    return inner + isinstance(node, ast.For | ast.While | ast.If | ast.With)


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_can_be_read_in_one_go(script):
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (90 if script.stem.startswith("pretrain") else 110)
    assert len({name for name in imports(script) if name[0] == "samestep"}) <= 8
    (main,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    assert depth(main) <= 5


def test_the_engine_works_where_the_planner_is_not_installed(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "stepplan"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "stepplan", None)
    recipe = load("bert_base")
    assert predict_memory(recipe, solve_layout(num_processes=1, global_batch_size=8)) is None
    assert exit_code(lambda: cli.main(["plan", "bert_base"])) == 2
    line = f"ERROR: {program_name()} plan needs the package stepplan, which is not installed: pip install samestep\n"
    assert capsys.readouterr().err == line
