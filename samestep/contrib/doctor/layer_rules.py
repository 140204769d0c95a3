"""Finds what norms of layers show: dead and exploding layers, updates that are too large, or nothing."""

from typing import Any

import numpy as np

from samestep.contrib.doctor.curve import Curve
from samestep.contrib.doctor.findings import Finding

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


LARGE_UPDATE = 0.06
"""Update of the median layer over its weights from which on the rate is too high."""
SMALL_UPDATE = 1e-5
"""Update over weights below which a model hardly moves."""


STILL = 1e-3
"""Change of a held-out loss over its value up to which a model has not moved."""


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
    evidence: dict[str, Any] = {
        "update_over_weights": float(ratios[worst]),
        "measurements": len(large),
        "learning_rate": rate,
    }
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
        knob="learning_rate: 10 times or more; see that the optimizer has the parameters, and that gradients are not lost",
        evidence=evidence,
    )
