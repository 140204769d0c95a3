"""Finds what went wrong in a run: the list of the rules, a function for each kind of finding.

The thresholds lie between runs that were broken on purpose and sound ones (benchmarks/doctored). A sound run that is accused
costs more than a broken one that is not named, so each lies nearer to the broken runs.
"""

from collections.abc import Callable

import numpy as np

from samestep.contrib.doctor.curve import Curve, make_curve
from samestep.contrib.doctor.data_rules import find_one_class, find_order, find_overfitting
from samestep.contrib.doctor.findings import Finding
from samestep.contrib.doctor.history import History
from samestep.contrib.doctor.layer_rules import find_dead_layer, find_exploding_layer, find_high_rate, find_plateau
from samestep.contrib.doctor.loss_rules import (
    find_clipping,
    find_divergence,
    find_oscillation,
    find_short_warm_up,
    find_spike,
)

MIN_STEPS = 20
"""Steps with a loss that a judgement needs."""
RULES: dict[str, Callable[[Curve], Finding | None]] = {
    "dead_layer": find_dead_layer,
    "order": find_order,
    "exploding_layer": find_exploding_layer,
    "divergence": find_divergence,
    "rate": find_high_rate,
    "warm_up": find_short_warm_up,
    "oscillation": find_oscillation,
    "spike": find_spike,
    "overfitting": find_overfitting,
    "clipping": find_clipping,
    "plateau": find_plateau,
    "one_class": find_one_class,
}
"""Kind of finding -> the function that finds it, the most telling first."""


def judge(history: History) -> list[Finding]:
    """Find what is wrong with a run, by all rules; of fewer than `MIN_STEPS` steps nothing is said."""
    if np.isfinite(history.loss).sum() < MIN_STEPS:
        return []
    curve = make_curve(history)
    found = (rule(curve) for rule in RULES.values())
    return [finding for finding in found if finding is not None]
