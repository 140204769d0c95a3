"""One recipe, the same optimizer step on any hardware."""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "ExactTrainer": "samestep.training.trainer",
    "PackedLoss": "samestep.training.packed_loss",
    "Run": "samestep.training.run",
    "audit_step": "stepaudit",
    "evaluate": "samestep.training.own_loop",
    "exact": "samestep.training.trainer",
    "exact_steps": "samestep.training.own_loop",
    "exact_windows": "samestep.training.own_loop",
    "noise_by_sample": "samestep.step.noise",
    "per_sample": "samestep.data.per_sample",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    """Import a public name when it is first used: planning needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, which are imported when they are first used."""
    return sorted([*__all__, "__version__"])
