"""A finding of the doctor, and those that are told: at most three, one for each cause."""

import dataclasses
from collections.abc import Iterable
from typing import Any

MOST = 3
"""Findings that are told."""
EXPLAINS = {
    "exploding_layer": ("divergence", "spike", "warm_up", "oscillation", "plateau", "clipping"),
    "order": ("spike", "oscillation", "divergence", "exploding_layer", "warm_up"),
    "rate": ("spike", "oscillation", "warm_up", "plateau", "exploding_layer", "order", "dead_layer"),
    "divergence": ("spike", "oscillation", "overfitting", "warm_up", "plateau"),
    "warm_up": ("spike",),
    "oscillation": ("spike",),
    "clipping": ("plateau",),
    "dead_layer": ("plateau", "exploding_layer"),
}
"""Kind -> kinds that it explains, which are not told beside it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with a run.

    Attributes:
        kind: its name, a key of `RULES`.
        step: at which it is seen, or begins.
        saw: what was seen, a clause for people.
        knob: what to change, a sentence.
        evidence: name -> number or text, what the rule looked at.
    """

    kind: str
    step: int
    saw: str
    knob: str
    evidence: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)

    def write(self) -> list[str]:
        """Write the lines that people read."""
        evidence = ", ".join(f"{name.replace('_', ' ')} {show(value)}" for name, value in self.evidence.items())
        return [f"{self.kind.replace('_', ' ')}: {self.saw}", f"  evidence: {evidence}", f"  change: {self.knob}"]


def show(value: Any) -> str:
    """Write a number in four digits at most.

    >>> show(0.123456), show(12), show(1234567), show("wte"), show(3.2e-7)
    ('0.1235', '12', '1,234,567', 'wte', '3.2e-07')
    """
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def choose(found: Iterable[Finding]) -> list[Finding]:
    """Choose the findings that are told: none that another explains, at most `MOST`, in the order of the rules."""
    every = list(found)
    explained = {kind for finding in every for kind in EXPLAINS.get(finding.kind, ())}
    return [finding for finding in every if finding.kind not in explained][:MOST]
