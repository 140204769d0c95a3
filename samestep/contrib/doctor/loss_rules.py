"""Finds what the loss and the norms of the steps show: divergence, leaps, oscillation, clipping."""

from typing import Any

import numpy as np

from samestep.contrib.doctor.curve import SIDE, Curve, find_edges
from samestep.contrib.doctor.findings import Finding
from samestep.contrib.doctor.signals import correlate, find_level, find_scatter

RISE = 0.25
"""Rise of the loss to the end, over its whole fall, from which on a run diverges."""
SPIKE, TAIL = 10.0, 5.0
"""Scatters above the level from which on a step's loss is a spike, and times the 95th percentile of all distances from it."""
EARLY = 0.25
"""Share of the run in which a spike is one of the warm-up."""


def find_divergence(curve: Curve) -> Finding | None:
    """Find a loss that rises and does not come back, or that is no number."""
    missing = np.flatnonzero(~np.isfinite(curve.history.loss))
    side = max(2, curve.num_steps // 24)  # at the ends the level is that of few steps
    low = side + int(curve.level[side : curve.num_steps - side].argmin())
    rise = curve.end - float(curve.level[low])
    if len(missing) and missing[-1] >= curve.num_steps - 3:
        step = curve.step(int(missing[0]))
        saw = f"the loss is no number from step {step:,} on"
    elif rise > max(RISE * curve.fall, 4 * max(curve.scatter, _find_scatter_around(curve, low, curve.num_steps - 1))):
        above = np.flatnonzero(curve.level[low:] > curve.level[low] + rise / 2)
        step = curve.step(low + int(above[0])) if len(above) else curve.step(low)
        saw = f"the loss rises from {curve.level[low]:.4g} in step {curve.step(low):,} to {curve.end:.4g}, and stays there"
    elif (worse := _find_worse(curve)) is not None and find_spike(curve) is None:
        low, held_out = worse
        step = curve.step(low)
        saw = f"from step {step:,} on the loss rises, to {curve.end:.4g} at the end, and the held-out loss by {held_out:.2g}"
    else:
        return None
    return Finding(
        kind="divergence",
        step=step,
        saw=saw,
        knob="learning_rate: a third, with warm-up and max_grad_norm 1; adam_beta2 nearer to 1 if it is below 0.95",
        evidence={"lowest": float(curve.level[low]), "end": curve.end, "scatter": curve.scatter},
    )


BOTH = 0.03
"""Rise of both losses, of training and held-out samples, over the fall, from which on a run gets worse."""


def _find_worse(curve: Curve) -> tuple[int, float] | None:
    """Find a training loss and a held-out one that both rise to the end: its place, and the rise of the held-out loss.

    A rise of both is no noise of batches, and no overfitting, even where it is small. After a restart of the rate both rise
    for a while, which is none.
    """
    history, n = curve.history, curve.num_steps
    width = max(10, n // 8)
    losses = history.eval_losses
    if len(losses) < 5 or not np.isfinite(losses).all() or n < 5 * width:
        return None
    starts = range(width // 2, n - width, max(1, width // 20))
    levels = [float(np.median(curve.loss[start : start + width])) for start in starts]
    low = starts[int(np.argmin(levels))] + width // 2
    rise = float(np.median(curve.loss[-width:])) - min(levels)
    lowest = int(losses.argmin())
    held_out = float(np.median(losses[-2:]) - losses[lowest])
    error = 1.25 * curve.scatter * float(np.sqrt(2 / width))  # of two medians; that of a median is 1.25 of a mean's
    bound = max(BOTH * curve.fall, 2 * error)
    has_restarted = bool((curve.restarts > low).any())
    is_late = low >= n - 2 * width or lowest >= len(losses) - 2
    return None if has_restarted or is_late or rise < bound or held_out < BOTH * curve.fall else (low, held_out)


def _find_scatter_around(curve: Curve, *places: int) -> float:
    """Find the largest scatter of the loss around some places: noise may grow as a model learns."""
    around = max(10, curve.num_steps // 8)
    return max(find_scatter(curve.loss[max(0, place - around) : place + around]) for place in places)


def _find_spikes(curve: Curve) -> np.ndarray:
    """Find the places of spikes: steps that rise above the level by many scatters, and by a tenth of the fall.

    Scatters are those of the run or, if larger, of the steps around, as noise may fall with the loss. A spike is also far above
    what one step in twenty has, so that the long tail of a noisy loss is none.
    """
    usual = max(TAIL * float(np.quantile(np.abs(curve.rest), 0.95)), 0.1 * curve.fall)
    places = np.flatnonzero(curve.rest[1:] > max(SPIKE * curve.scatter, usual)) + 1
    local = [_find_scatter_around(curve, int(place)) for place in places]
    return places[curve.rest[places] > SPIKE * np.array(local)] if len(places) else places


def find_short_warm_up(curve: Curve) -> Finding | None:
    """Find a loss that leaps up in the first part of a run, where the rate is rising or at its peak."""
    rates, spikes = curve.history.columns["learning_rate"], _find_spikes(curve)
    last = int(EARLY * curve.num_steps)
    early = spikes[spikes < last]
    if not len(early):
        return None
    worst = int(early[curve.rest[early].argmax()])
    evidence: dict[str, Any] = {
        "loss": float(curve.loss[worst]),
        "scatters_above": float(curve.rest[worst] / curve.scatter),
    }
    if np.isfinite(rates[worst]):
        evidence["learning_rate"] = float(rates[worst])
    return Finding(
        kind="warm_up",
        step=curve.step(worst),
        saw=f"the warm-up is too short, or the rate too high: in step {curve.step(worst):,} the loss leaps to "
        f"{curve.loss[worst]:.4g}",
        knob=f"num_warmup_steps: {max(4 * worst, curve.num_steps // 10):,} or more, or half of the learning_rate",
        evidence=evidence,
    )


def find_spike(curve: Curve) -> Finding | None:
    """Find a step whose loss is far above that of its neighbours, behind the first part of a run."""
    spikes = _find_spikes(curve)
    late = spikes[spikes >= int(EARLY * curve.num_steps)]
    if not len(late):
        return _find_hill(curve)
    worst = int(late[curve.rest[late].argmax()])
    return Finding(
        kind="spike",
        step=curve.step(worst),
        saw=f"the loss leaps to {curve.loss[worst]:.4g} in step {curve.step(worst):,}, from {curve.level[worst]:.4g}",
        knob="max_grad_norm: lower; look at the samples of this step; adam_beta2: 0.95",
        evidence={"scatters_above": float(curve.rest[worst] / curve.scatter), "spikes": len(late)},
    )


HIGHER = 4.0
"""Scatters by which several steps leap up, and come down slowly."""


def _find_hill(curve: Curve) -> Finding | None:
    """Find a leap of several steps that the loss comes down from: a shock, or other samples that the model learns meanwhile."""
    loss, n = curve.loss, curve.num_steps
    places, edges = find_edges(loss)
    if not len(places):
        return None
    below = find_level(loss, SIDE)[places - SIDE // 2 - 1]  # a loss that doubles has leapt, wherever it began
    ups = places[edges > np.maximum(HIGHER * curve.scatter, np.minimum(0.3 * curve.fall, np.abs(below)))]
    ups = ups[(ups >= EARLY * n) & (ups < n - 3 * SIDE)]
    if not len(ups) or np.count_nonzero(np.diff(ups) > SIDE):
        return None
    up = int(ups[edges[ups - places[0]].argmax()])
    before, top = loss[up - 3 * SIDE : up], float(np.median(loss[up : up + SIDE]))
    height = top - float(np.median(before))
    medians = find_level(loss, SIDE)
    back = np.flatnonzero(medians[up:] < top - 0.6 * height)
    if not len(back) or curve.has_restarted(up - SIDE, up + SIDE) or find_scatter(before) * HIGHER > height:
        return None
    first, last = curve.step(up), curve.step(up + int(back[0]))
    return Finding(
        kind="spike",
        step=first,
        saw=f"the loss leaps from {np.median(before):.4g} to {top:.4g} in step {first:,}, and is back in step {last:,}",
        knob=f"look at the samples of steps {first:,} to {last:,}; if they are as the others, max_grad_norm: lower",
        evidence={"before": float(np.median(before)), "top": top, "scatters": height / curve.scatter},
    )


WILDER, PERIODIC = 25.0, 0.6
"""Growth of the scatter from the calmest part to a later one, and correlation of the loss with itself a period later."""
LONGEST_PERIOD = 500
"""Steps of a period that is looked for, at most: a median over a share of a long run would take minutes."""


def find_oscillation(curve: Curve) -> Finding | None:
    """Find a loss that goes up and down ever more, or with a period."""
    width = max(20, curve.num_steps // 5)
    starts = range(0, curve.num_steps - width + 1, width)
    scatters = [find_scatter(curve.loss[start : start + width]) for start in starts]
    levels = [float(np.median(curve.loss[start : start + width])) for start in starts]
    knob = "adam_beta2: 0.95 or more, adam_beta1 (or sgd_momentum): 0.9; then learning_rate: half"
    for number, scatter in enumerate(scatters[1:], 1):
        calmest = int(np.argmin(scatters[:number]))
        calm = max(scatters[calmest], 1e-6 * abs(curve.end))
        # A loss that has not begun to fall has no noise; one that falls has
        has_begun = levels[number] < levels[calmest] - scatter / 2
        if scatter > WILDER * calm and scatter > 0.25 * curve.fall and not has_begun:
            step = curve.step(starts[number])
            saw = f"the loss goes up and down from step {step:,} on, {scatter / calm:.0f} times as far as before"
            return Finding(
                kind="oscillation", step=step, saw=saw, knob=knob, evidence={"scatter": scatter, "scatter_before": calm}
            )
    period, correlation = _find_period(curve)
    if correlation < PERIODIC or len(curve.restarts) > 1:  # a rate that restarts gives the loss its period
        return None
    saw = f"the loss goes up and down with a period of {period} steps"
    return Finding(
        kind="oscillation",
        step=curve.step(0),
        saw=saw,
        knob=knob,
        evidence={"period": period, "correlation": correlation},
    )


def _find_period(curve: Curve) -> tuple[int, float]:
    """Find the lag after which the loss is most like itself, behind one at which it is unlike; and the correlation there."""
    longest = min(curve.num_steps // 4, LONGEST_PERIOD)
    rest = curve.loss - find_level(curve.loss, min(curve.num_steps // 4, 4 * LONGEST_PERIOD) | 1)
    rest = np.clip(rest, -4 * curve.scatter, 4 * curve.scatter)  # a single spike has no period
    lags = np.array([correlate(rest[:-lag], rest[lag:]) for lag in range(1, longest + 1)])
    unlike = np.flatnonzero(lags < 0)
    if not len(unlike) or unlike[0] + 1 >= len(lags):
        return 0, 0.0
    best = int(lags[unlike[0] :].argmax() + unlike[0])
    return best + 1, float(lags[best])


CLIPPED, FACTOR = 0.95, 20
"""Share of steps that are clipped, and median norm over the bound, from which on clipping decides the step."""


def find_clipping(curve: Curve) -> Finding | None:
    """Find a bound of the gradient's norm that nearly every step is far above."""
    bound, norms = curve.history.facts.get("max_grad_norm"), curve.history.columns["grad_norm"]
    norms = norms[np.isfinite(norms)]
    if not isinstance(bound, int | float) or bound <= 0 or not len(norms):
        return None
    share, factor = float((norms > bound).mean()), float(np.median(norms)) / bound
    if share < CLIPPED or factor < FACTOR:
        return None
    return Finding(
        kind="clipping",
        step=curve.step(0),
        saw=f"{share:.0%} of the steps are clipped, to {1 / factor:.2g} of their gradient in the median",
        knob=f"max_grad_norm: {float(np.median(norms)):.2g}, the median norm, or none",
        evidence={"share_clipped": share, "median_norm": float(np.median(norms)), "max_grad_norm": float(bound)},
    )
