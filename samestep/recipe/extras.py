"""Imports packages that only an extra of the installation brings; names the extra where one is missing."""

import importlib
import shlex
from importlib.util import find_spec
from typing import Any, NoReturn

from samestep.errors import UsageError

EXTRAS = {
    "text": {
        "datasets": "datasets>=5.2",
        "evaluate": "evaluate>=0.4.6",
        "matplotlib": "matplotlib",
        "pyarrow": "pyarrow",
        "scipy": "scipy",
        "sklearn": "scikit-learn",
    },
    "images": {
        "PIL": "pillow",
        "captcha": "captcha==0.7.1",
        "datasets": "datasets>=5.2",
        "evaluate": "evaluate>=0.4.6",
        "matplotlib": "matplotlib",
        "pyarrow": "pyarrow",
        "sklearn": "scikit-learn",
    },
    "plots": {"matplotlib": "matplotlib"},
    "adapters": {"peft": "peft>=0.21"},
    "quantized": {"bitsandbytes": "bitsandbytes>=0.46"},
    "replicas": {"torchft": "torchft>=0.2"},
}
"""Extra -> the packages that it brings: the name under which each is imported -> what pip is told, as in pyproject.toml."""


def require(extra: str, purpose: str) -> None:
    """Check that the packages of an extra are installed.

    The remedy installs the packages themselves, not the extra: it is true in a checkout, after the installation of a wheel from
    a file, and from an index.

    Args:
        extra: one of `EXTRAS`.
        purpose: what needs the packages, for the message: "training on texts".

    Raises:
        UsageError: some are not installed; it names them, the extra, and the command that installs them.
    """
    packages = EXTRAS[extra]
    if missing := [package for package in packages if find_spec(package) is None]:
        verb = "which is" if len(missing) == 1 else "which are"
        remedy = shlex.join(["pip", "install", *(packages[package] for package in missing)])
        raise UsageError(f'{purpose} needs {", ".join(missing)} (extra "{extra}"), {verb} not installed: {remedy}')


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
