"""Finds what the data do to a run: overfitting, and traces of the order of the samples."""

import numpy as np

from samestep.contrib.doctor.curve import SIDE, Curve, find_edges
from samestep.contrib.doctor.findings import Finding
from samestep.contrib.doctor.loss_rules import find_spike
from samestep.contrib.doctor.signals import correlate, find_level, find_scatter
from samestep.recipe.run_fields import is_finite

WORSE, GAP = 0.05, 0.5
"""Rise of the held-out loss from its lowest, and its distance to the training loss, over the fall of the training loss."""
KNOWN_BY_HEART, KNOWN_GAP = 0.1, 0.15
"""Training loss over the held-out one up to which samples are known by heart, and the distance, over the fall, that this
needs where the held-out loss falls no more."""
GROWN, RISES = 1.25, 3
"""Held-out loss at the end over its lowest, and the evaluations in a row that rise to it, which a small loss needs."""


def find_overfitting(curve: Curve) -> Finding | None:
    """Find a held-out loss that rises, or stays behind, while the training loss falls."""
    steps, losses = curve.history.eval_steps, curve.history.eval_losses
    known = np.isfinite(losses)
    steps, losses = steps[known], losses[known]
    epochs = curve.history.columns["epoch"]
    # Of samples that come once the training loss is a held-out one. A stream does not know its epochs, and has 0
    if len(losses) < 3 or 0 < epochs[-1] <= 1:
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
    is_known = 0 <= curve.end < KNOWN_BY_HEART * losses[-1] and gap > max(KNOWN_GAP * curve.fall, 4 * curve.scatter)
    is_known = is_known and low < len(losses) - 1 and fall_since > 0
    rises = np.diff(losses[low:])
    has_grown = len(rises) >= RISES and (rises > 0).all() and losses[-1] > GROWN * losses[low] > GROWN * curve.end >= 0
    if not (has_risen or has_gap or is_known or has_grown):
        return None
    first = int(steps[low])
    saw = (
        f"the held-out loss is lowest in step {first:,} ({losses[low]:.4g}), and {losses[-1]:.4g} at the end, while the "
        f"training loss falls to {curve.end:.4g}"
    )
    return Finding(
        kind="overfitting",
        step=first,
        saw=saw,
        knob=f"stop at step {first:,}, or fewer epochs; more data, dropout, weight_decay",
        evidence={
            "lowest_eval_loss": float(losses[low]),
            "last_eval_loss": float(losses[-1]),
            "training_loss": curve.end,
        },
    )


REPEATED, CERTAIN = 0.35, 4.0
"""Correlation of the loss with that of an epoch before, and its distance from 0 in standard errors, that random orders lack."""


def find_order(curve: Curve) -> Finding | None:
    """Find traces of the order of the data: a pattern that comes again in each epoch, or a stretch that is unlike the rest."""
    return _find_repeated(curve) or _find_stretch(curve) or _find_higher_part(curve)


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
MANY, UNEVEN = 4, 4
"""Leaps from which on a loss is wild, whatever its samples; and scatter around an edge, over that of the run, from which on it
is, too."""


def _find_stretch(curve: Curve) -> Finding | None:
    """Find a stretch of steps, between two sharp edges, with a higher loss than before and behind."""
    loss, n = curve.loss, curve.num_steps
    if n < 6 * SIDE:
        return None
    places, edges = find_edges(loss)
    bound = max(LEAP * curve.scatter, 0.15 * curve.fall)
    ups, downs = places[edges > bound], places[edges < -bound]
    if np.count_nonzero(np.diff(ups) > SIDE) >= MANY:
        return None
    for up in ups:
        down = next((place for place in downs if place >= up + SIDE), None)
        if down is None or down - up > LONGEST * n or up < SIDE * 2 or curve.has_restarted(up - SIDE, up + SIDE):
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


ERRORS = 4.0
"""Standard errors by which the mean loss of a part is above those before and behind it."""


def _find_higher_part(curve: Curve) -> Finding | None:
    """Find a part of a run whose mean loss is higher than before and behind it, though no step of it stands out.

    Parts are 1/15 to 1/5 of the run. Their errors are those of 10 to 30 steps, also where they are longer: the loss of a long
    run wanders. A leap that comes down slowly is a spike.
    """
    loss, n = curve.loss, curve.num_steps
    unit = n // 30
    if unit < 2 or find_spike(curve) is not None:
        return None
    best, found, side = ERRORS, None, 3 * unit
    for length in range(2 * unit, 7 * unit, unit):
        error = float(np.sqrt(1 / min(length, 5 * (length // unit)) + 1 / min(side, 15)))
        for start in range(side, n - length - side + 1, max(1, unit // 5)):
            end = start + length
            before, inside, behind = loss[start - side : start], loss[start:end], loss[end : end + side]
            height = float(inside.mean() - max(before.mean(), behind.mean()))
            if height <= best * curve.scatter * error or curve.has_restarted(start - side, end - 1):
                continue
            errors = height / (max(curve.scatter, *map(find_scatter, (before, inside, behind))) * error)
            if errors > best:
                best, found = errors, (start, end)
    if found is None:
        return None
    first, last = curve.step(found[0]), curve.step(found[1] - 1)
    return Finding(
        kind="order",
        step=first,
        saw=f"steps {first:,} to {last:,} have a higher mean loss than those before and behind: their samples are others",
        knob="look at the samples of these steps (a file, a source, labels); shuffle the data",
        evidence={"inside": float(loss[slice(*found)].mean()), "standard_errors": best},
    )


def find_one_class(curve: Curve) -> Finding | None:
    """Find a classifier whose accuracy is that of the largest class for every held-out sample, to less than a sample."""
    names = ("eval_accuracy", "eval_majority_accuracy", "eval_samples")
    accuracy, majority, num_samples = (curve.history.results.get(name) for name in names)
    if not (is_finite(accuracy) and is_finite(majority) and is_finite(num_samples)):
        return None
    if abs(accuracy - majority) * num_samples >= 0.5:
        return None
    return Finding(
        kind="one_class",
        step=curve.step(-1),
        saw=f"eval_accuracy is {accuracy:.4g}, as of the largest class for every sample: the model tells no classes apart",
        knob="num_train_epochs: more, or a higher learning_rate; look at some texts or images beside their labels",
        evidence={"eval_accuracy": float(accuracy), "largest_class": float(majority), "samples": int(num_samples)},
    )
