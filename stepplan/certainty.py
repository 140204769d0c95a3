"""Ranges of predicted speeds, which held nine of ten published ones to which nothing is fitted.

`make bench NAME=language_models` counts how many they hold; tests/test_timing.py compares.
"""

from typing import NamedTuple

from stepplan.decoder import Decoder
from stepplan.hardware import Hardware
from stepplan.placement import Placement

BAND = 0.25
"""Width of the range: a speed lies between the predicted one divided and multiplied by 1 + width. The same for long samples,
of which only nine rows of two sources are fitted."""
NODES_BAND = 0.17
"""The same over several nodes: nine of ten of 29 fitted speeds of six sources lie within it, each predicted by constants fitted
without its source (`make bench NAME=timing`)."""
HOST_BAND = 0.6
"""The same where starting kernels takes a quarter of the step: how much of it hides differs by program."""
UNKNOWN = 1.5
"""Factor of the width for each fact that no published speed has. Assumed."""
COMPARED = (
    "3090",
    "4090",
    "a100-40",
    "a100-40-sxm",
    "a100-80",
    "b200",
    "h100",
    "h100-pcie",
    "h200",
    "v100-16",
    "v100-32",
)
"""Devices of the published speeds."""
LONGEST, MOST_NODES = 32_768, 64
"""Longest samples and most nodes of the published speeds."""


class Certainty(NamedTuple):
    """The width of a range, and what widens it, in words."""

    band: float
    reasons: tuple[str, ...]


def judge_hardware(hardware: Hardware) -> Certainty:
    """Judge a speed on some hardware, of samples and models like the published ones."""
    reasons = [f"of {hardware.device.name}"] * (hardware.device.name not in COMPARED)
    reasons += [f"on more than {MOST_NODES} nodes"] * (hardware.num_nodes > MOST_NODES)
    return Certainty(find_band(hardware) * UNKNOWN ** len(reasons), tuple(reasons))


def find_band(hardware: Hardware) -> float:
    """Find the width by the number of nodes."""
    return NODES_BAND if hardware.num_nodes > 1 else BAND


def judge(placement: Placement) -> Certainty:
    """Judge the speed of a placement."""
    band, known = judge_hardware(placement.hardware)
    model, time = placement.workload.model, placement.time
    reasons = [f"of samples of more than {LONGEST:,} tokens"] * (model.length > LONGEST)
    reasons += ["of experts"] * (isinstance(model, Decoder) and model.shape.num_experts > 0)
    reasons += ["of a model without a formula"] * hasattr(model, "traced_layers")
    if is_host_bound(time.launches, time.total):
        band = max(band, HOST_BAND)
    return Certainty(band * UNKNOWN ** len(reasons), (*known, *reasons))


def is_host_bound(launches: float, total: float) -> bool:
    """Whether starting kernels takes a quarter of a step."""
    return launches > total / 4
