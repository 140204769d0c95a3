"""Measures the layers of a run while it trains (--watch_layers), and writes layers.jsonl.

Of each layer, every so many steps: the norm of the step's gradient before clipping, the norm of the weights, and the update
over the weights, |w' - w| / |w|. Gradients are read whole. Weights are read at `MOST` places of each tensor, evenly far from
each other, as a copy of all of them would take the memory of the model once more.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from samestep.contrib.noise.meter import find_group
from samestep.step.accumulate import row_norms
from samestep.training.parts import Part
from samestep.training.report import round_to_6
from samestep.training.run import Run
from samestep.training.run_step import RunStep

RECENT = 200
"""Lines that are kept for those who look at them while the run goes on."""
MOST = 2048
"""Places of a tensor at which its weights are read."""


def read_places(parameter: torch.Tensor) -> torch.Tensor:
    """Copy the weights of a parameter at up to `MOST` places, which are the same each time.

    Returns:
        The weights, [places], in the parameter's dtype.

    >>> read_places(torch.arange(6.0)).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    >>> len(read_places(torch.zeros(100, 1000)))
    2041
    """
    flat = parameter.detach().reshape(-1)
    return flat[:: -(-len(flat) // MOST)].clone()


class LayerNorms(Part):
    """Measures the layers in every `watch_layers`th step, and writes a line of layers.jsonl.

    A step that was taken anew counts as it was taken at last. Norms are those of the whole step on every process, so process 0
    writes its own, and nothing is sent.
    """

    def __init__(self, run: Run):
        self.run, self.every = run, run.settings.watch_layers
        trained = {name: p for name, p in run.network.parameters.items() if p.requires_grad}
        self.parameters, names = list(trained.values()), [find_group(name) for name in trained]
        self.groups = list(dict.fromkeys(names))
        device = self.parameters[0].device
        self.places = torch.tensor([self.groups.index(name) for name in names], device=device)
        self.before: list[torch.Tensor] = []
        self.gradients = torch.zeros(0, device=device)
        self.pending: dict[int, torch.Tensor] = {}
        self.records: list[dict[str, Any]] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.norms: list[float | None] = []  # of the steps since the last line

    def is_measured(self, step: RunStep) -> bool:
        """Tell whether the layers are measured in a step."""
        return bool((step.index + 1) % self.every == 0)

    def begin_step(self, step: RunStep) -> None:
        if self.is_measured(step):
            self.before = [read_places(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def gradient_reduced(self, step: RunStep) -> None:
        if not self.is_measured(step):
            return
        scaler = self.run.accelerator.scaler
        zero = self.places.new_zeros((), dtype=torch.float64)
        squares = [zero if p.grad is None else row_norms(p.grad).double().square().sum() for p in self.parameters]
        self.gradients = torch.stack(squares) / (1.0 if scaler is None else scaler.get_scale()) ** 2

    @torch.no_grad()
    def end_step(self, step: RunStep) -> None:
        if not self.is_measured(step):
            return
        sizes = self.gradients.new_tensor([parameter.numel() for parameter in self.parameters])
        after = [read_places(parameter) for parameter in self.parameters]
        weights = torch.stack([w.double().square().mean() for w in self.before]) * sizes
        pairs = zip(after, self.before, strict=True)
        updates = torch.stack([(new.double() - old.double()).square().mean() for new, old in pairs]) * sizes
        rows = torch.stack([self.gradients, weights, updates])
        self.before = []
        self.pending[step.index + 1] = rows.new_zeros(3, len(self.groups)).index_add_(1, self.places, rows).sqrt()

    def read(self, number: int) -> list[list[float]] | None:
        """Return norms of gradient, weights and update, of each layer, [3][layers]; None: the step was not measured."""
        rows = self.pending.pop(number, None)
        return None if rows is None else rows.tolist()

    def add_to_line(self, line: dict[str, Any], counts: torch.Tensor, values: Sequence[Any]) -> None:
        """Make the line of layers.jsonl of a step, if it was measured and is finite."""
        rows = values[0]
        if rows is not None and all(math.isfinite(value) for row in rows for value in row):
            layers = {
                name: {
                    "grad_norm": round_to_6(gradient),
                    "weight_norm": round_to_6(weight),
                    "update_ratio": round_to_6(update / weight) if weight else 0.0,
                }
                for name, gradient, weight, update in zip(self.groups, *rows, strict=True)
            }
            self.records.append({"step": line["step"], "layers": layers})

    def lines_written(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write the layers of these steps; each line has the share of clipped steps since the one before."""
        records, self.records = {record["step"]: record for record in self.records}, []
        most, written = self.run.recipe.max_grad_norm, list[dict[str, Any]]()
        for line in lines:
            self.norms.append(line.get("grad_norm"))
            if line["step"] in records:
                head: dict[str, Any] = {"step": line["step"]}
                if most is not None:
                    num_clipped = sum(norm is None or norm > most for norm in self.norms)
                    head["share_clipped"] = round_to_6(num_clipped / len(self.norms))
                written.append(head | records[line["step"]])
                self.norms = []
        self.recent.extend(written)
        if written:
            self.run.log.append("layers.jsonl", written)
