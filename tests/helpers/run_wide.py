"""Trainings as `run_layouts` does them, in which models of float64 compute in float64 what they convert to float32."""

import functools

import run_layouts
import torch
from wide import Wide

from samestep.models.causal_lm import CausalLmSums


def main(folder: str, calls: str) -> None:
    """Train as `run_layouts.main` does; end the process."""
    for name in ("forward", "sequence_log_probabilities"):
        setattr(CausalLmSums, name, _widen(getattr(CausalLmSums, name)))
    run_layouts.main(folder, calls)


def _widen(method):
    @functools.wraps(method)
    def compute(self, *args, **kwargs):
        if next(self.parameters()).dtype != torch.float64:  # probed before it is converted
            return method(self, *args, **kwargs)
        with Wide():
            return method(self, *args, **kwargs)

    return compute
