"""Warns in the log while a run goes wrong, by those rules of the doctor that hold of a part of a run, too."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from samestep.contrib.doctor.curve import make_curve
from samestep.contrib.doctor.findings import choose
from samestep.contrib.doctor.history import make_history
from samestep.contrib.doctor.norms import LayerNorms
from samestep.contrib.doctor.rules import RULES
from samestep.training.parts import Part
from samestep.training.run import Run

LIVE = ("dead_layer", "exploding_layer", "divergence", "rate", "clipping")
"""Kinds that are warned of. What a whole run must show (plateau, overfitting, order) is left to the command."""
FIRST, GROWTH = 50, 1.5
"""Steps of a session before the first judgement, and how much later each next one is."""
KEPT = 2000
"""Last steps that are looked at."""


class Warnings(Part):
    """Judges the last steps now and then, and writes each kind of finding once in a session, as an event."""

    def __init__(self, run: Run):
        self.run, self.named = run, set[str]()
        self.lines: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.count, self.next = 0, FIRST
        self.norms = next((part for part in run.parts if isinstance(part, LayerNorms)), None)

    def lines_written(self, lines: Sequence[dict[str, Any]]) -> None:
        if not self.run.accelerator.is_main_process:
            return
        self.lines.extend(lines)
        self.count += len(lines)
        if self.count < self.next:
            return
        self.next = int(self.count * GROWTH) if self.count < KEPT else self.count + KEPT // 2
        recipe = self.run.recipe
        facts = {"max_grad_norm": recipe.max_grad_norm, "global_batch_size": recipe.global_batch_size}
        layers = [] if self.norms is None else list(self.norms.recent)
        curve = make_curve(make_history(list(self.lines), layers, facts))
        found = [finding for kind in LIVE if (finding := RULES[kind](curve)) is not None]
        for finding in choose(found):
            if finding.kind not in self.named:
                self.named.add(finding.kind)
                values = {name: value for name, value in finding.evidence.items() if value is not None}
                self.run.log.add_event(finding.step, f"doctor: {finding.saw}; change {finding.knob}", **values)
