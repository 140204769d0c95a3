"""What is installed: every package and file is in the wheel, every import in the dependencies; the extras are told by name."""

import ast
import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from samestep.errors import UsageError
from samestep.recipe import catalog as recipe
from samestep.recipe import reading, run_settings
from samestep.recipe.extras import DEPENDENCIES, EXTRAS, optional, require

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUP = PROJECT["tool"]["setuptools"]
IMPORTED_AS = {"pyyaml": "yaml", "scikit-learn": "sklearn", "pillow": "PIL"}
OURS = {"samestep", "stepaudit", "stepplan"}


def imported_as(requirements: list[str]) -> set[str]:
    """Name packages as they are imported, from requirements as pip takes them."""
    names = [re.match(r"[\w.-]+", line)[0] for line in requirements]
    return {IMPORTED_AS.get(name, name) for name in names}


BASE = imported_as(PROJECT["project"]["dependencies"])
PACKAGES = {extra: imported_as(lines) for extra, lines in PROJECT["project"]["optional-dependencies"].items()}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Collect the packages that a module imports at its own import, and those that it imports later, or with `optional`."""
    first, later = set(), set()

    def visit(node: ast.AST, into: set[str]) -> None:
        for child in ast.iter_child_nodes(node):
            is_later = isinstance(child, ast.FunctionDef | ast.Lambda) or (
                isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            )
            if isinstance(child, ast.Import):
                into |= {alias.name.partition(".")[0] for alias in child.names}
            elif isinstance(child, ast.ImportFrom):
                into.add(child.module.partition(".")[0])
            elif isinstance(child, ast.Call) and ast.unparse(child.func) == "optional":
                later.add(child.args[0].value.partition(".")[0])
            visit(child, later if is_later else into)

    visit(ast.parse(path.read_text(encoding="utf-8")), first)
    return first - OURS - sys.stdlib_module_names, later - OURS - sys.stdlib_module_names


def modules(package: str) -> list[Path]:
    """List the Python files that are imported: those in packages, so not metrics, which `evaluate` loads by their path."""
    return [path for path in (ROOT / package).rglob("*.py") if (path.parent / "__init__.py").exists()]


# ---------------------------------------------------------------------------------------------------------------------
# pyproject.toml


@pytest.mark.rooms
def test_every_package_is_listed():
    folders = {str(path.parent.relative_to(ROOT)) for name in OURS for path in (ROOT / name).rglob("__init__.py")}
    mapped = {"samestep.accelerate_configs", "samestep.catalog"}
    assert {folder.replace("/", ".") for folder in folders} | mapped == set(SETUP["packages"])


@pytest.mark.rooms
def test_every_file_is_a_module_or_data():
    """And every pattern of the data matches one."""
    folders = {package: SETUP["package-dir"].get(package, package) for package in SETUP["package-data"]}
    matched = {
        (package, pattern): set((ROOT / folders[package]).glob(pattern))
        for package, patterns in SETUP["package-data"].items()
        for pattern in patterns
    }
    assert [key for key, paths in matched.items() if not paths] == []
    held = {path for paths in matched.values() for path in paths} | {path for name in OURS for path in modules(name)}
    trees = [ROOT / name for name in (*OURS, "recipes/catalog", "accelerate_configs")]
    files = {path for tree in trees for path in tree.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files - held == set()


def test_dependencies_cover_every_import():
    """What no extra is needed for is imported at once; the packages of extras later, or with `optional`."""
    extras = set().union(*(PACKAGES[extra] for extra in EXTRAS))
    for path in [*modules("samestep"), *modules("stepplan")]:
        first, later = imports(path)
        assert first <= BASE, (
            f"{path.relative_to(ROOT)}: {first - BASE} with samestep.recipe.extras.optional, or in a function"
        )
        assert later <= BASE | extras, f"{path.relative_to(ROOT)}: {later - BASE - extras} is no dependency"


def test_the_audit_needs_little():
    """torch, numpy and cloudpickle, which are dependencies; pytest for the plugin; others where a program uses them."""
    for path in modules("stepaudit"):
        first, later = imports(path)
        own = {"pytest_plugin": {"pytest"}, "zero": {"deepspeed"}}.get(path.stem, set())
        assert first <= {"torch", "numpy", "cloudpickle"} | own, path
        assert later <= {"transformers"}, path
    assert {"torch", "numpy", "cloudpickle"} <= BASE
    assert PACKAGES["test"] == {"pytest"}


def test_extras_bring_what_they_are_asked_for():
    for extra, packages in EXTRAS.items():
        assert sorted(PROJECT["project"]["optional-dependencies"][extra]) == sorted(packages.values())
        assert {imported: imported_as([line]) for imported, line in packages.items()} == {
            name: {name} for name in packages
        }
        assert not BASE & set(packages), extra
    assert {cls.extra for cls in recipe.TASKS.values()} <= EXTRAS.keys()


def test_requirements_pin_what_the_extras_ask_for():
    pinned = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert imported_as([line for line in pinned if re.match(r"\w", line)]) >= set().union(BASE, *PACKAGES.values())


# ---------------------------------------------------------------------------------------------------------------------
# What is missing


def test_what_is_missing_is_one_line_with_its_extra(monkeypatch):
    for package in ("captcha", "PIL", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)
    remedy = r"pip install pillow captcha==0\.7\.1 matplotlib$"
    with pytest.raises(UsageError, match=rf'^drawing needs PIL, captcha, matplotlib \(extra "images"\), .*: {remedy}'):
        require("images", "drawing")
    figure = optional("matplotlib.figure")
    assert not figure
    with pytest.raises(UsageError, match=r"^matplotlib\.figure\.Figure needs .*: pip install matplotlib$"):
        figure.Figure(figsize=(1, 1))
    assert optional("yaml").safe_load("[1]") == [1]


@pytest.mark.parametrize("task", recipe.TASKS)
def test_a_task_asks_for_its_extra_before_it_begins(task, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    name = next(name for name in recipe.catalog_names() if recipe.load(name).task == task)
    with pytest.raises(
        UsageError, match=rf"needs datasets \(extra .{recipe.TASKS[task].extra}.*: pip install 'datasets>=5.2'$"
    ):
        run_settings.parse(["--recipe", name], task, "")


HIDDEN_IMPORT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
sys.argv = {words!r}
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_without(missing: set[str], words: list[str]) -> subprocess.CompletedProcess:
    """Run a program of the checkout where packages are not installed."""
    program = HIDDEN_IMPORT.format(missing=sorted(missing), words=words)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)


ALL_EXTRAS = set().union(*EXTRAS.values())
PROGRAM = ["scripts/train_captcha.py", "--recipe", "captcha_cpu"]
PLOT = ["recipes/__main__.py", "scale", "bert_base", "--on", "t4", "--plot", "a.png"]
AUDIT = ["stepaudit/__main__.py", "--vary", "accum=1", "--vary", "accum=2", "--", "recipes/__init__.py"]


@pytest.mark.parametrize(
    ("words", "missing", "packages"),
    [
        (PROGRAM, ALL_EXTRAS, EXTRAS["images"]),
        (PROGRAM, {"torch", "tokenizers", "captcha"}, {"tokenizers": "tokenizers", "torch": "torch>=2.11"}),
        (PLOT, ALL_EXTRAS, EXTRAS["plots"]),
        (["recipes/__main__.py", "list"], {"yaml"}, {"yaml": "pyyaml"}),
        (
            ["samestep/__main__.py", "show-data", "sft_small_cpu"],
            {"torch", "tqdm"},
            {"torch": "torch>=2.11", "tqdm": "tqdm"},
        ),
        (AUDIT, {"torch"}, {"torch": "torch"}),
    ],
    ids=["images", "torch", "plots", "yaml", "show-data", "audit"],
)
def test_a_program_without_its_packages_says_so(words, missing, packages):
    done = run_without(missing, words)
    line = done.stderr.splitlines()[-1]  # the audit says before what it runs
    assert (done.returncode, done.stdout, done.stderr.count("\n") <= 2) == (2, "", True)
    assert line.startswith("ERROR: ")
    assert f"needs {', '.join(packages)}" in line
    assert line.endswith(f"not installed: {shlex.join(['pip', 'install', *packages.values()])}")


@pytest.mark.rooms
def test_a_job_is_written_where_nothing_trains():
    """On a laptop, for a cluster, without torch, the packages of the task, and what gets the numbers of the run."""
    words = ["recipes/__main__.py", "launch", "bert_base", "--on", "slurm:2x8xa100-80", "--", "--output_dir", "/a"]
    words += ["--report_to", "wandb"]
    done = run_without({"wandb"} | ALL_EXTRAS | DEPENDENCIES.keys() - {"yaml", "jinja2"}, words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("#!")


# ---------------------------------------------------------------------------------------------------------------------
# The wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Make a folder that holds what a wheel of this checkout holds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*sorted(OURS), "recipes", "accelerate_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.rooms
def test_the_wheel_holds_what_the_checkout_holds(installed):
    def held(*trees: Path) -> set[str]:
        return {
            str(path.relative_to(tree)) for tree in trees for path in tree.rglob("*") if path.suffix in (".py", ".yaml")
        }

    for name in OURS:
        assert held(ROOT / name) <= held(installed / name)
    for name, folder in reading.CHECKOUT_FOLDERS.items():
        assert held(ROOT / folder) - {"__init__.py", "__main__.py"} == held(installed / "samestep" / name)
    assert not (installed / "recipes").exists()
    points = configparser.ConfigParser()
    points.read(next(installed.glob("*.dist-info")) / "entry_points.txt")
    assert dict(points["console_scripts"]) == dict.fromkeys(
        ("samestep", "accelerate-recipes"), "samestep.__main__:console"
    )
    assert dict(points["pytest11"]) == {"stepaudit": "stepaudit.pytest_plugin"}


def run(installed: Path, folder: Path, program: str, *words: str) -> subprocess.CompletedProcess:
    """Run a program with the package as installed, from a folder, which comes first on the path as of `python -m`."""
    start = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(installed)!r}]; sys.argv = {[*words]!r}; {program}"
    return subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, cwd=folder)


@pytest.mark.rooms
def test_the_installed_command(installed, tmp_path):
    console = "from samestep.__main__ import console; console()"
    done = run(installed, tmp_path, console, "/bin/accelerate-recipes", "list")
    assert [line.split()[0] for line in done.stdout.splitlines()] == recipe.catalog_names()
    words = ("/bin/accelerate-recipes", "plan", "gpt2_124m", "--on", "8xa100-80")
    done = run(installed, tmp_path, console, *words)
    launch_file = installed / "samestep" / "accelerate_configs" / "8xa100.yaml"
    assert launch_file.exists()
    assert f"--config_file {launch_file} " in done.stdout
    assert "scripts/ is in the repository" in done.stdout
    done = run(installed, tmp_path, console, *words, "--write_config", "x.yaml")
    assert (done.returncode, "--config_file x.yaml " in done.stdout) == (0, True)
    assert "num_processes: 8 " in (tmp_path / "x.yaml").read_text()
    done = run(installed, tmp_path, console, *words, "--num_proc", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean --num_processes" in done.stderr


@pytest.mark.rooms
def test_a_package_called_recipes_is_no_obstacle(installed, tmp_path):
    """torchtune's raises when it is imported; the plugin is loaded in every run of pytest."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text("raise ImportError('no package to import')\n")
    (tmp_path / "test_it.py").write_text("def test_it(assert_same_step):\n    assert callable(assert_same_step)\n")
    pytest_run = "import pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider']))"
    done = run(installed, tmp_path, pytest_run, "pytest")
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    console = "from samestep.__main__ import console; console()"
    for words in (("list",), ("plan", "bert_base", "--on", "1x3090")):
        done = run(installed, tmp_path, console, "/bin/samestep", *words)
        assert (done.returncode, done.stderr, "bert_base" in done.stdout) == (0, "", True)
    imported = "import samestep.cli, stepaudit.pytest_plugin; assert 'recipes' not in sys.modules"
    assert run(installed, tmp_path, imported, "x").returncode == 0
