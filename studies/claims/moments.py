"""Adam's second moment, when it accumulates the squares of micro-batch gradients instead of the square of their mean."""

import math
import sys
from typing import Any

import numpy as np
import torch
from drawing import COLOURS, canvas, png
from torch import nn
from verdicts import Claim, Experiment, column, equal, spread

from samestep.contrib.optim import accumulating
from samestep.step.optim import AccumulatingAdamW

HERE = (sys.modules[__name__], accumulating)
Result = dict[str, Any]
VARIANTS = {
    "mean_of_squares": "mean of squares",
    "sum_of_squares": "sum of squares of g / k",
    "unbiased": "unbiased estimate",
}
SIGNALS = {"stationary": 0, "period 2": 2, "period 20": 20}
"""How the mean of the gradient goes: constant, or a cosine of so many steps."""


def theory(variant: str, rho: np.ndarray, k: int) -> np.ndarray:
    """Expected second moment over Adam's, for stationary gradients."""
    of = {"mean_of_squares": 1 + rho, "sum_of_squares": (1 + rho) / k, "unbiased": 1 + rho / k}
    return of[variant] / (1 + rho / k)


def second_moment(settings: Result, seed: int) -> Result:
    """Second moment and step length over those of torch's AdamW on the mean gradient: signal -> k -> variant -> per rho."""
    found: Result = {}
    for signal, period in SIGNALS.items():
        found[signal] = {}
        for k in settings["k"]:
            runs = {variant: _run(settings, seed, k, period, variant) for variant in (None, *VARIANTS)}
            true = runs.pop(None)
            found[signal][str(k)] = {
                variant: {key: (sums[key] / true[key]).tolist() for key in ("v", "step")}
                for variant, sums in runs.items()
            }
    return found


def _run(settings: Result, seed: int, k: int, period: int, variant: str | None) -> dict[str, np.ndarray]:
    """Mean over coordinates and the second half of the steps, per rho: v and |mhat| / sqrt(vhat); None: torch's AdamW."""
    rho, size, steps, betas = torch.tensor(settings["rho"]), settings["d"], settings["steps"], settings["betas"]
    generator = torch.Generator().manual_seed(1000 * seed + k)
    parameter = nn.Parameter(torch.zeros(len(rho), size))
    options = {"lr": 0.0, "betas": tuple(betas), "eps": 0.0, "weight_decay": 0.0}
    if variant is None:
        optimizer = torch.optim.AdamW([parameter], **options)
    else:
        optimizer = AccumulatingAdamW([parameter], second_moment=variant, gradient_accumulation_steps=k, **options)
    sums = {"v": np.zeros(len(rho)), "step": np.zeros(len(rho))}
    for step in range(1, steps + 1):
        mean = math.cos(2 * math.pi * step / period) if period else 1.0
        for _ in range(k):
            gradient = mean + rho.sqrt()[:, None] * torch.randn(len(rho), size, generator=generator)
            (parameter * gradient / k).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step > steps // 2:
            state = optimizer.state[parameter]
            m, v = (state[name] / (1 - beta**step) for name, beta in zip(("exp_avg", "exp_avg_sq"), betas, strict=True))
            sums["v"] += v.double().mean(1).numpy()
            sums["step"] += (m.abs() / v.sqrt()).double().mean(1).numpy()
    return sums


def mean_of(results: list[Result], signal: str, k: str, variant: str, key: str) -> np.ndarray:
    """Per rho, over the seeds."""
    return np.array(column(results, signal, k, variant, key)).mean(0)


def second_moment_claims(results: list[Result]) -> list[Claim]:
    rho = np.array(SETTINGS["rho"])
    sizes = list(results[0]["stationary"])

    def off(signal: str, variant: str, key: str, k: str) -> list[float]:
        return (mean_of(results, signal, k, variant, key) - 1).tolist()

    def at(signal: str, variant: str, key: str, k: str, place: int) -> str:
        return spread([each[place] for each in column(results, signal, k, variant, key)])

    k = sizes[-1]
    noisy, clean = f"rho {rho[-1]:g}", f"rho {rho[0]:g}"
    failing = "; ".join(
        f"{signal}, k {k}, {clean}: second moment {at(signal, 'unbiased', 'v', k, 0)}, steps "
        f"{at(signal, 'unbiased', 'step', k, 0)}"
        for signal in list(SIGNALS)[1:]
    )
    return [
        Claim(
            "Squares of micro-batch gradients, accumulated, give Adam's second moment, up to what can be neglected (here: 5 % "
            "at every noise).",
            tuple(
                equal(f"{VARIANTS['mean_of_squares']}, k {k}", off("stationary", "mean_of_squares", "v", k), 0.05)
                for k in sizes
            ),
            "They give (1 + rho) / (1 + rho / k) of it, rho = variance / mean^2 of a micro-batch gradient: with k "
            f"{k} {at('stationary', 'mean_of_squares', 'v', k, -1)} at {noisy}, where steps are "
            f"{at('stationary', 'mean_of_squares', 'step', k, -1)} of Adam's. C is no constant.",
        ),
        Claim(
            "Sums of squares of g / k give Adam's second moment (5 % at every noise).",
            tuple(
                equal(f"{VARIANTS['sum_of_squares']}, k {k}", off("stationary", "sum_of_squares", "v", k), 0.05)
                for k in sizes
            ),
            "They do where noise dominates; where the signal does, steps are too long, with k "
            f"{k} {at('stationary', 'sum_of_squares', 'step', k, 0)} of Adam's at {clean}.",
        ),
        Claim(
            "Theory: the second moment is too large by (1 + rho) / (1 + rho / k) with the mean of squares, and by "
            "((1 + rho) / k) / (1 + rho / k) with the sum (stationary gradients, 5 %).",
            tuple(
                equal(
                    f"{VARIANTS[variant]}, k {k}",
                    (mean_of(results, "stationary", k, variant, "v") / theory(variant, rho, int(k)) - 1).tolist(),
                    0.05,
                )
                for variant in ("mean_of_squares", "sum_of_squares")
                for k in sizes
            ),
        ),
        Claim(
            "The unbiased estimate of samestep.step.optim has Adam's second moment at every noise (5 %).",
            tuple(
                equal(f"{signal}, k {k}", off(signal, "unbiased", "v", k), 0.05) for signal in SIGNALS for k in sizes
            ),
            f"It takes a mean that lasts as long as the first moment remembers. {failing}.",
        ),
        Claim(
            "With it, steps are as long as Adam's at every noise (5 %).",
            tuple(
                equal(f"{signal}, k {k}", off(signal, "unbiased", "step", k), 0.05) for signal in SIGNALS for k in sizes
            ),
            "As for the second moment.",
        ),
    ]


def draw_second_moment(results: list[Result]) -> list[bytes]:
    rho, sizes = np.array(SETTINGS["rho"]), list(results[0]["stationary"])
    figure, axes = canvas(len(sizes), "Step length over Adam's, stationary gradients: measured, and theory (lines)")
    fine = np.geomspace(rho[0], rho[-1], 100)
    for each, k in zip(axes, sizes, strict=True):
        for (variant, text), colour in zip(VARIANTS.items(), COLOURS, strict=False):
            each.plot(rho, mean_of(results, "stationary", k, variant, "step"), "o", color=colour, label=text)
            each.plot(fine, theory(variant, fine, int(k)) ** -0.5, color=colour, linewidth=1)
        each.set(
            xscale="log", yscale="log", xlabel="rho = variance / mean^2 of a micro-batch gradient", title=f"k = {k}"
        )
    axes[0].legend(fontsize="small")
    others, axes = canvas(len(SIGNALS) - 1, f"Second moment over Adam's where the mean oscillates, k = {sizes[-1]}")
    for each, signal in zip(axes, list(SIGNALS)[1:], strict=True):
        for (variant, text), colour in zip(VARIANTS.items(), COLOURS, strict=False):
            each.plot(
                rho, mean_of(results, signal, sizes[-1], variant, "v"), "o-", color=colour, label=text, linewidth=1
            )
        each.axhline(1, color="0.4", linestyle=":")
        each.set(xscale="log", yscale="log", xlabel="rho at the largest mean", title=f"{signal} steps")
    axes[0].legend(fontsize="small")
    return [png(figure), png(others)]


SETTINGS = {
    "rho": [0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0],
    "k": [2, 4, 8],
    "d": 1000,
    "steps": 200,
    "betas": [0.9, 0.95],
}
EXPERIMENTS = [
    Experiment(
        "second_moment",
        "Adam's second moment",
        "Normal gradients of mean 1 and variance rho, 9 values of rho from 0.01 to 1000, 1,000 coordinates each, betas 0.9 "
        "and 0.95, "
        "200 steps, of which the second 100 count: means over coordinates and steps, over those of torch's AdamW on the same "
        "mean "
        "gradients. Then with a mean that is a cosine of 2 or 20 steps.",
        SETTINGS,
        second_moment,
        second_moment_claims,
        HERE,
        draw=draw_second_moment,
        pictures=("second_moment.png", "second_moment_oscillating.png"),
        minutes=0.2,
        quick={"d": 50, "steps": 40},
    ),
]
