"""Imports run downward only: floor 0 without torch, floor 1 without accelerate, and no model class in the package."""

import ast
import sys
from pathlib import Path

import pytest

import recipes

ROOT = Path(recipes.__file__).parent
FLOORS = [
    {
        "errors",
        "interrupt",
        "settings",
        "scaling",
        "schedule",
        "reading",
        "recipe",
        "order",
        "partition",
        "answer",
        "configs",
        "convnet",
        "memory",
        "growth",
        "text",
        "transformer",
        "workload",
        "hardware",
        "page",
        "placement",
        "timing",
        "plan",
        "run",
        "__init__",
    },
    {
        "losses",
        "optim",
        "sketch",
        "data",
        "models",
        "networks",
        "resnet",
        "batch_norm",
        "trace",
        "metrics",
        "attention",
        "products",
    },
    {
        "__main__",
        "accumulate",
        "audit",
        "capacity",
        "checkpoint",
        "evaluation",
        "kernels",
        "launch",
        "plots",
        "pytest_plugin",
        "recovery",
        "rehearsal",
        "report",
    },
]
THIRD_PARTY = [
    {"numpy", "yaml"},
    {
        "torch",
        "datasets",
        "tokenizers",
        "transformers",
        "huggingface_hub",
        "pyarrow",
        "sklearn",
        "scipy",
        "evaluate",
        "captcha",
        "PIL",
        "tqdm",
    },
    {"accelerate", "safetensors", "matplotlib", "cloudpickle", "pytest"},
]
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def imports(path: Path) -> set[tuple[str, ...]]:
    """Dotted names that a module imports, anywhere in it; `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {(*node.module.split("."), alias.name) for alias in node.names}
    return found


def floor(top: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if top in names)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_run_downward(module):
    own = floor(module.parts[0].removesuffix(".py"))
    allowed = set().union(*THIRD_PARTY[: own + 1])
    for name in imports(ROOT / module):
        if name[0] == "recipes":
            assert floor(name[1]) <= own, f"{module} (floor {own}) imports {'.'.join(name)}"
        else:
            assert name[0] in allowed | sys.stdlib_module_names, f"{module} (floor {own}) imports {name[0]}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_scripts_name_model_classes(module):
    models = [name for name in imports(ROOT / module) if name[0] == "transformers" and "For" in name[-1]]
    assert not models or module.name == "resnet.py"  # which is a model class itself


@pytest.mark.parametrize("script", sorted((ROOT.parent / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_can_be_read_in_one_go(script):
    assert len(script.read_text().splitlines()) <= 210
