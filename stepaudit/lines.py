"""Finds the line of a program, outside of installed packages and of the audit, that is computed now."""

import inspect
import types
from pathlib import Path


def find_place() -> str:
    """Find the line of the program, outside of installed packages, that is computed now: file and number."""
    frame: types.FrameType | None = inspect.currentframe()
    own, place = str(Path(__file__).parent), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((own, "<")):
            place = place or f"{Path(name).name}, line {frame.f_lineno}"
            if not is_installed(name):
                return f"{Path(name).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return place


def find_line_of_program() -> str:
    """Return the line that has called a function in whose place one of the recorder is; empty where a library has called it."""
    caller: types.FrameType | None = inspect.currentframe()
    for _ in range(3):  # this function, the recorder's and `replace`'s
        caller = caller.f_back if caller is not None else None
    if caller is None:
        return ""
    name = caller.f_code.co_filename
    return f"{Path(name).name}, line {caller.f_lineno}" if is_own(name) else ""


def is_own(name: str) -> bool:
    """Tell whether a file is of the program, and neither of a library nor of the audit."""
    return not is_installed(name) and Path(name).parent != Path(__file__).parent


def is_installed(name: str) -> bool:
    """Tell whether a file is of an installed package, and not of a program."""
    return "site-packages" in name or "dist-packages" in name
