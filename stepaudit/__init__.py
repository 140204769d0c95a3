"""Checks whether a training loop takes the step that it says: `audit_step` for loops, `python -m stepaudit` for programs.

Needs torch, numpy and cloudpickle only.
"""

import importlib

_MODULES = {
    "CAUSES": "causes",
    "Audit": "step",
    "Comparison": "judge",
    "Cut": "step",
    "Finding": "causes",
    "MaskReport": "masks",
    "assert_same_step": "step",
    "audit_packing": "packing",
    "audit_step": "step",
    "default_cuts": "step",
    "report_mask": "masks",
}
__all__ = list(_MODULES)


def __getattr__(name: str):
    """Import a public name when it is first used: pytest loads the plugin in every run, and few of them need torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
