"""Finds what went wrong in a run: one function for each kind of finding, with its thresholds, which docs/doctor.md explains.

The thresholds lie between runs that were broken on purpose and sound ones (benchmarks/doctored). A sound run that is accused
costs more than a broken one that is not named, so each lies nearer to the broken runs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from samestep.contrib.doctor.findings import Finding
from samestep.contrib.doctor.history import History
from samestep.contrib.doctor.signals import correlate, fill, find_level, find_scatter

MIN_STEPS = 20
"""Steps with a loss that a judgement needs."""


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


# ---------------------------------------------------------------------------------------------------------------------
# Layers

DEAD = 1e-7
"""Gradient of a layer over the largest of all, at or below which it is dead."""
EXPLODING = 100
"""Gradient of a layer over that of the median layer from which on it explodes."""


def find_dead_layer(curve: Curve) -> Finding | None:
    """Find layers whose gradient is nothing in each measurement of the second half of a run."""
    history = curve.history
    if not history.layers:
        return None
    gradients = history.layers["grad_norm"]
    is_dead = gradients <= DEAD * gradients.max(axis=1, keepdims=True)
    late = is_dead[len(is_dead) // 2 :].all(axis=0)
    if not late.any() or late.all():
        return None
    names = [name for name, dead in zip(history.layer_names, late, strict=True) if dead]
    alive = np.flatnonzero(~is_dead[:, late].all(axis=1))
    first = int(alive[-1] + 1) if len(alive) else 0
    return Finding(
        kind="dead_layer",
        step=int(history.layer_steps[first]),
        saw=f"no gradient reaches {_join(names)} from step {int(history.layer_steps[first]):,} on",
        knob="find what stops it: a detached tensor, frozen weights, a ReLU whose inputs are all negative, a part that the "
        "loss does not use",
        evidence={"layers": len(names), "of": len(history.layer_names), "measurements": len(is_dead) - first},
    )


def _join(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def find_exploding_layer(curve: Curve) -> Finding | None:
    """Find a layer whose gradient is far larger than those of the others, in half of the measurements."""
    history = curve.history
    if not history.layers or len(history.layer_names) < 3:
        return None
    gradients = history.layers["grad_norm"]
    shares = gradients / np.maximum(np.median(gradients, axis=1, keepdims=True), 1e-300)
    usual = np.median(shares, axis=0)
    worst = int(usual.argmax())
    if usual[worst] < EXPLODING:
        return None
    first = int((shares[:, worst] >= EXPLODING).argmax())
    name = history.layer_names[worst]
    return Finding(
        kind="exploding_layer",
        step=int(history.layer_steps[first]),
        saw=f"the gradient of {name} is {usual[worst]:,.0f} times that of the median layer",
        knob=f"the first weights of {name}, its normalisation, or a rate of its own that is lower",
        evidence={"layer": name, "times_the_median": float(usual[worst]), "measurements": len(shares)},
    )


# ---------------------------------------------------------------------------------------------------------------------
# Rate

LARGE_UPDATE = 0.06
"""Update of the median layer over its weights from which on the rate is too high."""
SMALL_UPDATE = 1e-5
"""Update over weights below which a model hardly moves."""


def find_high_rate(curve: Curve) -> Finding | None:
    """Find updates of the median layer that are large against its weights, in two measurements or more."""
    history = curve.history
    if not history.layers:
        return None
    ratios = np.median(history.layers["update_ratio"], axis=1)
    large = np.flatnonzero(ratios >= LARGE_UPDATE)
    if len(large) < 2:
        return None
    worst = int(ratios.argmax())
    step = int(history.layer_steps[large[0]])
    rates = history.columns["learning_rate"]
    rate = float(rates[np.searchsorted(history.steps, history.layer_steps[worst])])
    evidence: dict[str, Any] = {"update_over_weights": float(ratios[worst]), "measurements": len(large), "learning_rate": rate}
    peak = float(np.nanmax(rates)) if np.isfinite(rates).any() else 1.0
    knob = f"learning_rate: about {peak * LARGE_UPDATE / 3 / ratios[worst]:.1g} at the peak, instead of {peak:.2g}"
    batch = history.facts.get("global_batch_size")
    if history.noise is not None and isinstance(batch, int) and history.noise.low > batch:
        evidence |= {"global_batch_size": batch, "noise_scale": history.noise.value}
        knob += f", or a larger batch: its noise scale is {history.noise} samples, and the batch {batch:,}"
    return Finding(
        kind="rate",
        step=step,
        saw=f"the rate is too high: in step {int(history.layer_steps[worst]):,} an update moves the median layer by "
        f"{ratios[worst]:.0%} of its weights",
        knob=knob,
        evidence=evidence,
    )


def find_plateau(curve: Curve) -> Finding | None:
    """Find a loss that stays where it began, with weights that hardly move."""
    history = curve.history
    change = float(abs(curve.level[:3].mean() - curve.end))
    if change > max(2 * curve.scatter, 0.01 * abs(curve.level[0])):
        return None
    evidence: dict[str, Any] = {"first_loss": float(curve.level[0]), "last_loss": curve.end}
    if history.layers:
        ratio = float(np.median(history.layers["update_ratio"]))
        if ratio >= SMALL_UPDATE:
            return None
        evidence["update_over_weights"] = ratio
    else:
        losses = history.eval_losses[np.isfinite(history.eval_losses)]
        if len(losses) < 2 or np.ptp(losses) > STILL * abs(losses[0]):
            return None
        evidence["change_of_eval_loss"] = float(np.ptp(losses))
    return Finding(
        kind="plateau",
        step=curve.step(0),
        saw=f"the loss stays at {curve.level[0]:.4g} from the first step on, and the weights hardly move",
        knob="learning_rate: 10 times or more; see that the optimizer has the parameters, and that gradients are not scaled away",
        evidence=evidence,
    )


STILL = 1e-3
"""Change of a held-out loss over its value up to which a model has not moved."""

# ---------------------------------------------------------------------------------------------------------------------
# The loss by step

RISE = 0.25
"""Rise of the loss to the end, over its whole fall, from which on a run diverges."""
SPIKE, TAIL = 10.0, 5.0
"""Scatters above the level from which on a step's loss is a spike, and times the 95th percentile of all distances from it."""
EARLY = 0.25
"""Share of the run in which a spike is one of the warm-up."""


def find_divergence(curve: Curve) -> Finding | None:
    """Find a loss that rises and does not come back, or that is no number."""
    missing = np.flatnonzero(~np.isfinite(curve.history.loss))
    low = int(curve.level.argmin())
    rise = curve.end - float(curve.level[low])
    if len(missing) and missing[-1] >= curve.num_steps - 3:
        step = curve.step(int(missing[0]))
        saw = f"the loss is no number from step {step:,} on"
    elif rise > max(RISE * curve.fall, 4 * curve.scatter):
        above = np.flatnonzero(curve.level[low:] > curve.level[low] + rise / 2)
        step = curve.step(low + int(above[0])) if len(above) else curve.step(low)
        saw = f"the loss rises from {curve.level[low]:.4g} in step {curve.step(low):,} to {curve.end:.4g}, and stays there"
    else:
        return None
    return Finding(
        kind="divergence",
        step=step,
        saw=saw,
        knob="learning_rate: a third, with warm-up and max_grad_norm 1; adam_beta2 nearer to 1 if it is below 0.95",
        evidence={"lowest": float(curve.level[low]), "end": curve.end, "scatter": curve.scatter},
    )


def _find_spikes(curve: Curve) -> np.ndarray:
    """Find the places of spikes: steps that rise above the level by many scatters, and by a tenth of the fall.

    Scatters are those of the run or, if larger, of the steps around, as noise may fall with the loss. A spike is also far above
    what one step in twenty has, so that the long tail of a noisy loss is none.
    """
    usual = max(TAIL * float(np.quantile(np.abs(curve.rest), 0.95)), 0.1 * curve.fall)
    places = np.flatnonzero(curve.rest[1:] > max(SPIKE * curve.scatter, usual)) + 1
    around = max(10, curve.num_steps // 8)
    local = [find_scatter(curve.loss[max(0, place - around) : place + around]) for place in places]
    return places[curve.rest[places] > SPIKE * np.array(local)] if len(places) else places


def find_short_warm_up(curve: Curve) -> Finding | None:
    """Find a loss that leaps up in the first part of a run, where the rate is rising or at its peak."""
    rates, spikes = curve.history.columns["learning_rate"], _find_spikes(curve)
    last = int(EARLY * curve.num_steps)
    early = spikes[spikes < last]
    if not len(early):
        return None
    worst = int(early[curve.rest[early].argmax()])
    evidence: dict[str, Any] = {"loss": float(curve.loss[worst]), "scatters_above": float(curve.rest[worst] / curve.scatter)}
    if np.isfinite(rates[worst]):
        evidence["learning_rate"] = float(rates[worst])
    return Finding(
        kind="warm_up",
        step=curve.step(worst),
        saw=f"the warm-up is too short, or the rate too high: the loss leaps to {curve.loss[worst]:.4g} in step {curve.step(worst):,}",
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
    loss, n, rates = curve.loss, curve.num_steps, curve.history.columns["learning_rate"]
    places, edges = _find_edges(loss)
    if not len(places):
        return None
    ups = places[edges > max(HIGHER * curve.scatter, 0.3 * curve.fall)]
    ups = ups[(ups >= EARLY * n) & (ups < n - 3 * SIDE)]
    if not len(ups) or np.count_nonzero(np.diff(ups) > SIDE):
        return None
    up = int(ups[edges[ups - places[0]].argmax()])
    before, top = loss[up - 3 * SIDE : up], float(np.median(loss[up : up + SIDE]))
    height = top - float(np.median(before))
    medians = find_level(loss, SIDE)
    back = np.flatnonzero(medians[up:] < top - 0.6 * height)
    has_restarted = rates[min(up + SIDE, n - 1)] > 1.5 * rates[up - SIDE]
    if not len(back) or has_restarted or find_scatter(before) * HIGHER > height:
        return None
    first, last = curve.step(up), curve.step(up + int(back[0]))
    return Finding(
        kind="spike",
        step=first,
        saw=f"the loss leaps from {np.median(before):.4g} to {top:.4g} in step {first:,}, and is back in step {last:,}",
        knob=f"look at the samples of steps {first:,} to {last:,}; if they are as the others, max_grad_norm: lower",
        evidence={"before": float(np.median(before)), "top": top, "scatters": height / curve.scatter},
    )


def _find_edges(loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the median of the `SIDE` steps from each place on less that of as many before, and the places; both [places]."""
    places = np.arange(SIDE, len(loss) - SIDE)
    medians = find_level(loss, SIDE)
    return places, medians[places + SIDE // 2] - medians[places - SIDE // 2 - 1]


WILDER, PERIODIC = 25.0, 0.6
"""Growth of the scatter from the calmest part to a later one, and correlation of the loss with itself a period later."""


def find_oscillation(curve: Curve) -> Finding | None:
    """Find a loss that goes up and down ever more, or with a period."""
    width = max(20, curve.num_steps // 5)
    starts = range(0, curve.num_steps - width + 1, width)
    scatters = [find_scatter(curve.loss[start : start + width]) for start in starts]
    knob = "adam_beta2: 0.95 or more, adam_beta1 (or sgd_momentum): 0.9; then learning_rate: half"
    for number, scatter in enumerate(scatters[1:], 1):
        calm = max(min(scatters[:number]), 1e-6 * abs(curve.end))
        if scatter > WILDER * calm and scatter > 0.25 * curve.fall:
            step = curve.step(starts[number])
            saw = f"the loss goes up and down from step {step:,} on, {scatter / calm:.0f} times as far as before"
            return Finding(
                kind="oscillation", step=step, saw=saw, knob=knob, evidence={"scatter": scatter, "scatter_before": calm}
            )
    period, correlation = _find_period(curve)
    if correlation < PERIODIC:
        return None
    saw = f"the loss goes up and down with a period of {period} steps"
    return Finding(
        kind="oscillation", step=curve.step(0), saw=saw, knob=knob, evidence={"period": period, "correlation": correlation}
    )


def _find_period(curve: Curve) -> tuple[int, float]:
    """Find the lag after which the loss is most like itself, behind one at which it is unlike; and the correlation there."""
    rest = curve.loss - find_level(curve.loss, curve.num_steps // 4 | 1)
    rest = np.clip(rest, -4 * curve.scatter, 4 * curve.scatter)  # a single spike has no period
    longest = min(curve.num_steps // 4, 500)
    lags = np.array([correlate(rest[:-lag], rest[lag:]) for lag in range(1, longest + 1)])
    unlike = np.flatnonzero(lags < 0)
    if not len(unlike) or unlike[0] + 1 >= len(lags):
        return 0, 0.0
    best = int(lags[unlike[0] :].argmax() + unlike[0])
    return best + 1, float(lags[best])


# ---------------------------------------------------------------------------------------------------------------------
# Clipping

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


# ---------------------------------------------------------------------------------------------------------------------
# Data

WORSE, GAP = 0.05, 0.5
"""Rise of the held-out loss from its lowest, and its distance to the training loss, over the fall of the training loss."""


def find_overfitting(curve: Curve) -> Finding | None:
    """Find a held-out loss that rises, or stays behind, while the training loss falls."""
    steps, losses = curve.history.eval_steps, curve.history.eval_losses
    known = np.isfinite(losses)
    steps, losses = steps[known], losses[known]
    if len(losses) < 3:
        return None
    low = int(losses.argmin())
    place = min(int(np.searchsorted(curve.history.steps, steps[low])), curve.num_steps - 1)
    rise, fall_since = float(losses[-1] - losses[low]), float(curve.level[place] - curve.end)
    has_risen = low < len(losses) - 2 and rise > max(WORSE * curve.fall, 2 * curve.scatter)
    has_risen = has_risen and fall_since > 4 * curve.scatter
    is_from_start = steps[0] <= curve.history.steps[0]
    offset = float(losses[0] - curve.loss[0]) if is_from_start else 0.0
    gap = float(losses[-1] - curve.end) - offset
    has_gap = is_from_start and gap > GAP * curve.fall and fall_since >= 0 and curve.fall > 4 * curve.scatter
    if not (has_risen or has_gap):
        return None
    first = int(steps[low])
    saw = (
        f"the held-out loss is lowest in step {first:,} ({losses[low]:.4g}), and {losses[-1]:.4g} at the end, while the training "
        f"loss falls to {curve.end:.4g}"
    )
    return Finding(
        kind="overfitting",
        step=first,
        saw=saw,
        knob=f"stop at step {first:,}, or fewer epochs; more data, dropout, weight_decay",
        evidence={"lowest_eval_loss": float(losses[low]), "last_eval_loss": float(losses[-1]), "training_loss": curve.end},
    )


REPEATED, CERTAIN = 0.35, 4.0
"""Correlation of the loss with that of an epoch before, and its distance from 0 in standard errors, that random orders lack."""


def find_order(curve: Curve) -> Finding | None:
    """Find traces of the order of the data: a pattern that comes again in each epoch, or a stretch that is unlike the rest."""
    return _find_repeated(curve) or _find_stretch(curve)


def _find_repeated(curve: Curve) -> Finding | None:
    epochs = curve.history.columns["epoch"]
    if not np.isfinite(epochs).all() or epochs[-1] < 2 or (np.diff(epochs) <= 0).any():
        return None
    per_epoch = curve.num_steps / float(epochs[-1] - epochs[0] + (epochs[1] - epochs[0]))
    if per_epoch < 6:
        return None
    rest = curve.loss - find_level(curve.loss, int(per_epoch) | 1)
    later = np.flatnonzero(epochs >= epochs[0] + 1)
    before = np.interp(epochs[later] - 1, epochs, rest)
    correlation = correlate(before, rest[later])
    certainty = correlation * float(np.sqrt(len(later)))
    if correlation < REPEATED or certainty < CERTAIN:
        return None
    return Finding(
        kind="order",
        step=curve.step(int(later[0])),
        saw="the loss has the same pattern in each epoch: the samples come in the same order",
        knob="shuffle the data anew in each epoch",
        evidence={"correlation_of_epochs": correlation, "steps_per_epoch": float(per_epoch), "steps": len(later)},
    )


LEAP, LONGEST = 3.0, 0.4
"""Scatters by which a stretch is above what is before and behind it, and its longest share of the run."""
SIDE, MANY, UNEVEN = 5, 4, 4
"""Steps on both sides of an edge that are looked at; leaps from which on a loss is wild, whatever its samples; and scatter around
an edge, over that of the run, from which on it is, too."""


def _find_stretch(curve: Curve) -> Finding | None:
    """Find a stretch of steps, between two sharp edges, with a higher loss than before and behind."""
    loss, n = curve.loss, curve.num_steps
    if n < 6 * SIDE:
        return None
    places, edges = _find_edges(loss)
    bound = max(LEAP * curve.scatter, 0.15 * curve.fall)
    ups, downs = places[edges > bound], places[edges < -bound]
    if np.count_nonzero(np.diff(ups) > SIDE) >= MANY:
        return None
    for up in ups:
        down = next((place for place in downs if place >= up + SIDE), None)
        if down is None or down - up > LONGEST * n or up < SIDE * 2:
            continue
        inside, before, behind = loss[up:down], loss[max(0, up - 3 * SIDE) : up], loss[down : down + 3 * SIDE]
        bound = max(bound, LEAP * find_scatter(before))
        is_even = max(map(find_scatter, (before, inside, behind))) <= UNEVEN * curve.scatter
        if is_even and np.quantile(inside, 0.1) - max(np.median(before), np.median(behind)) > bound / 2:
            return Finding(
                kind="order",
                step=curve.step(int(up)),
                saw=f"steps {curve.step(int(up)):,} to {curve.step(int(down) - 1):,} have a higher loss than those before and "
                "behind, with sharp edges: their samples are others",
                knob="look at the samples of these steps (a file, a source, labels); shuffle the data",
                evidence={
                    "before": float(np.median(before)),
                    "inside": float(np.median(inside)),
                    "behind": float(np.median(behind)),
                },
            )
    return None


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
}
"""Kind of finding -> the function that finds it, the most telling first."""


def judge(history: History) -> list[Finding]:
    """Find what is wrong with a run, by all rules; of fewer than `MIN_STEPS` steps nothing is said."""
    if np.isfinite(history.loss).sum() < MIN_STEPS:
        return []
    curve = make_curve(history)
    found = (rule(curve) for rule in RULES.values())
    return [finding for finding in found if finding is not None]
