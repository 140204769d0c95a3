"""Imports packages that only an extra of the installation brings; names the extra where one is missing."""

import importlib
from importlib.util import find_spec
from typing import Any, NoReturn

from samestep.errors import UsageError

EXTRAS = {
    "text": ("datasets", "evaluate", "matplotlib", "pyarrow", "scipy", "sklearn"),
    "images": ("PIL", "captcha", "datasets", "evaluate", "matplotlib", "pyarrow", "sklearn"),
    "plots": ("matplotlib",),
    "adapters": ("peft",),
    "quantized": ("bitsandbytes",),
    "replicas": ("torchft",),
}
"""Extra -> the packages that it brings, by the names under which they are imported."""


def require(extra: str, purpose: str) -> None:
    """Check that the packages of an extra are installed.

    Args:
        extra: one of `EXTRAS`.
        purpose: what needs the packages, for the message: "training on texts".

    Raises:
        UsageError: some are not installed; it names them, and the command that installs them.
    """
    if missing := [package for package in EXTRAS[extra] if find_spec(package) is None]:
        verb = "which is" if len(missing) == 1 else "which are"
        raise UsageError(f'{purpose} needs {", ".join(missing)}, {verb} not installed: pip install "samestep[{extra}]"')


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
