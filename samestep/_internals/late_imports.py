"""Leaves the loading of a package to its first use, where another library imports it in every process."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

BITSANDBYTES = "bitsandbytes"
"""Imported by peft 0.21's helpers, which transformers 5.24's trainer_utils import: with Inductor, a second in every process."""


class _LateModule(ModuleType):
    """A package that is loaded when a name is asked for that every module does not have.

    `importlib.util.LazyLoader` of Python 3.11 loads it for any name: also for `__file__`, for which `inspect` asks all modules.
    """

    def __getattr__(self, name: str) -> Any:
        spec = vars(self)["__spec__"]
        object.__setattr__(self, "__class__", ModuleType)
        self.__path__ = spec.submodule_search_locations
        try:
            spec.loader.exec_module(self)
        except BaseException:
            sys.modules.pop(spec.name, None)  # as `import` does
            raise
        return getattr(self, name)


def load_when_used(name: str) -> None:
    """Let `import name` return at once; the package is loaded when the first of its names is asked for.

    Nothing changes where it is loaded already, or not installed.
    """
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is None or spec.loader is None or spec.submodule_search_locations is None:
        return
    module = importlib.util.module_from_spec(spec)
    del module.__path__  # which the import of a submodule asks for
    module.__class__ = _LateModule
    sys.modules[name] = module
