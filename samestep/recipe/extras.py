"""Imports packages of extras of the installation, and rooms that may be missing; says what to install where one is."""

import contextlib
import importlib
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NoReturn

from samestep.errors import UsageError

DEPENDENCIES = {
    "accelerate": "accelerate>=1.15",
    "cloudpickle": "cloudpickle>=3",
    "fsspec": "fsspec>=2025",
    "huggingface_hub": "huggingface_hub>=1.33",
    "jinja2": "jinja2>=3.1.6",
    "numpy": "numpy>=2",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "torch": "torch>=2.11",
    "tqdm": "tqdm",
    "transformers": "transformers>=5.17",
    "xxhash": "xxhash>=3",
    "yaml": "pyyaml",
}
"""Packages of every installation, as in `EXTRAS`. A checkout, and a wheel installed with --no-deps, can lack some of it."""
_DATA = {"datasets": "datasets>=5.2", "evaluate": "evaluate>=0.4.6", "matplotlib": "matplotlib", "pyarrow": "pyarrow"}
EXTRAS = {
    "text": _DATA | {"scipy": "scipy", "sklearn": "scikit-learn"},
    "images": {"PIL": "pillow", "captcha": "captcha==0.7.1"} | _DATA | {"sklearn": "scikit-learn"},
    "plots": {"matplotlib": "matplotlib"},
    "tar": {"webdataset": "webdataset>=1"},
    "speech": {"soundfile": "soundfile>=0.13", "soxr": "soxr>=1"},
    "scores": {"jiwer": "jiwer>=4", "rouge_score": "rouge_score>=0.1.2", "sacrebleu": "sacrebleu>=2.6"},
    "adapters": {"peft": "peft>=0.21"},
    "quantized": {"bitsandbytes": "bitsandbytes>=0.50"},
    "replicas": {"torchft": "torchft>=0.2"},
    "trl": {"trl": "trl>=1.12"},
}
"""Extra -> the packages that it brings: the name under which each is imported -> what pip is told, as in pyproject.toml."""


def require(extra: str | None, purpose: str) -> None:
    """Check that the packages of an extra are installed.

    Args:
        extra: one of `EXTRAS`; None: the dependencies, which every installation brings.
        purpose: what needs the packages, for the message: "training on texts".

    Raises:
        UsageError: some are not installed; it names them, the extra, and the command that installs them.
    """
    packages = DEPENDENCIES if extra is None else EXTRAS[extra]
    if missing := {name: line for name, line in packages.items() if find_spec(name) is None}:
        raise _missing(purpose, missing, "" if extra is None else f' (extra "{extra}")')


def require_for_training(task: str, extra: str | None, settings: Any) -> None:
    """Check that what a training imports is installed.

    Args:
        task: of the recipe.
        extra: the task's, as of `require`.
        settings: of the run.

    Raises:
        UsageError: some is not.
    """
    require(None, f"the task {task}")
    if settings.fault_tolerance == "step":
        require("replicas", "fault_tolerance step")
    if extra is not None:
        require(extra, f"the task {task}")
    if settings.report_to != "none" and find_spec(settings.report_to) is None:
        raise UsageError(f"report_to is {settings.report_to}, which is not installed: pip install {settings.report_to}")


def require_release(package: str, installed: str, purpose: str) -> None:
    """Check that a package is no older than what pip is asked for.

    Args:
        package: one of `DEPENDENCIES`, or of the packages of an extra, with a lower bound.
        installed: its version.
        purpose: what needs it, for the message.

    Raises:
        UsageError: it is older.

    >>> require_release("trl", "1.12.0.dev0", "exact(SFTTrainer)")
    >>> require_release("trl", "1.9.2", "exact(SFTTrainer)")
    Traceback (most recent call last):
    samestep.errors.UsageError: exact(SFTTrainer) needs trl 1.12 or newer, 1.9.2 is installed: pip install 'trl>=1.12'
    """
    line = next(packages[package] for packages in (DEPENDENCIES, *EXTRAS.values()) if package in packages)
    oldest = line.partition(">=")[2]
    if _to_numbers(installed)[: oldest.count(".") + 1] < _to_numbers(oldest):
        remedy = shlex.join(["pip", "install", line])
        raise UsageError(f"{purpose} needs {package} {oldest} or newer, {installed} is installed: {remedy}")


def _to_numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


@contextlib.contextmanager
def remedy_for_dependencies(purpose: str) -> Iterator[None]:
    """Turn the failed import of a dependency into a `UsageError`: commands need few of them, a plan no torch."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in DEPENDENCIES:
            raise
        raise _missing(purpose, {name: DEPENDENCIES[name]}) from None


def _missing(purpose: str, packages: dict[str, str], origin: str = "") -> UsageError:
    """Make the error. Its remedy names the packages, not the extra: no index is needed that has this package, too."""
    verb = "which is" if len(packages) == 1 else "which are"
    remedy = shlex.join(["pip", "install", *packages.values()])
    return UsageError(f"{purpose} needs {', '.join(packages)}{origin}, {verb} not installed: {remedy}")


def load_way(place: str, purpose: str) -> Any:
    """Import an object of another room of ours, which may be missing.

    Args:
        place: MODULE:NAME.
        purpose: what needs it, for the message.

    Raises:
        UsageError: the room is not installed.
    """
    module, name = place.split(":")
    room = "samestep.contrib" if module.startswith("samestep.") else module.partition(".")[0]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if not f"{error.name}.".startswith(f"{room}."):
            raise
        raise UsageError(f"{purpose} needs the package {room}, which is not installed: pip install samestep") from error


def is_there(place: str) -> bool:
    """Tell whether the module of MODULE:NAME was not deleted."""
    try:
        return find_spec(place.partition(":")[0]) is not None
    except ModuleNotFoundError:  # nor its package
        return False


def optional(module: str) -> Any:
    """Import a module of an extra's package.

    Returns:
        The module; if its package is not installed, an object that is false, and that raises a `UsageError` with the remedy
        when it, or anything in it, is called.
    """
    return importlib.import_module(module) if find_spec(module.partition(".")[0]) else _MissingModule(module)


class _MissingModule:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> "_MissingModule":
        return _MissingModule(f"{self._name}.{name}")

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        package = self._name.partition(".")[0]
        extra = next(extra for extra, packages in EXTRAS.items() if package in packages)
        require(extra, self._name)
        raise AssertionError(f"{package} was installed after it was looked for")

    __fspath__ = __call__
