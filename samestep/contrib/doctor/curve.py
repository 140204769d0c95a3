"""Takes the loss of a run apart: its level, the scatter around it, how far it fell, its edges."""

import dataclasses

import numpy as np

from samestep.contrib.doctor.history import History
from samestep.contrib.doctor.signals import fill, find_level, find_scatter

SIDE = 5
"""Steps on both sides of an edge that are looked at."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """The loss of a run, taken apart.

    Attributes:
        history: of the run.
        loss: float64 [steps], gaps filled.
        level: its median over neighbouring steps, [steps].
        scatter: standard deviation of a step's loss around its level.
        fall: how far the level came down from the first steps at most, at least one scatter.
    """

    history: History
    loss: np.ndarray
    level: np.ndarray
    scatter: float
    fall: float

    @property
    def rest(self) -> np.ndarray:
        """The loss less its level, [steps]."""
        return self.loss - self.level

    @property
    def num_steps(self) -> int:
        return len(self.loss)

    @property
    def end(self) -> float:
        """Median loss of the last tenth of the steps."""
        return float(np.median(self.loss[-max(5, self.num_steps // 10) :]))

    def has_restarted(self, first: int, last: int) -> bool:
        """Tell whether the rate was raised by half or more between two places; False where it is unknown."""
        rates = self.history.columns["learning_rate"]
        return bool(rates[first : last + 1].max() > 1.5 * rates[first])

    @property
    def restarts(self) -> np.ndarray:
        """Places behind the first tenth of the steps at which the rate leaps up by half or more."""
        rates = self.history.columns["learning_rate"]
        places = np.flatnonzero(rates[1:] > 1.5 * rates[:-1]) + 1
        return places[places > self.num_steps // 10]

    def step(self, place: int) -> int:
        """Return the number of the step at a place of the arrays."""
        return int(self.history.steps[place])


def make_curve(history: History) -> Curve:
    """Take the loss of a run apart."""
    loss = fill(history.loss)
    level = find_level(loss, max(5, min(101, len(loss) // 12) | 1))
    scatter = max(find_scatter(loss), 1e-6 * max(1e-6, float(np.abs(loss).max())))
    fall = max(float(level[:3].mean() - level.min()), scatter)
    return Curve(history, loss, level, scatter, fall)


def find_edges(loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the median of the `SIDE` steps from each place on less that of as many before, and the places; both [places]."""
    places = np.arange(SIDE, len(loss) - SIDE)
    medians = find_level(loss, SIDE)
    return places, medians[places + SIDE // 2] - medians[places - SIDE // 2 - 1]
