"""Claims about Adam's and momentum's coefficients when the batch grows by k."""

import math
import sys
from collections.abc import Callable
from typing import Any

import language
import numpy as np
from language import Row, train
from verdicts import Case, Claim, Experiment, at_best, column, less, named, near, so, within

HERE = (sys.modules[__name__], language)
Result = dict[str, Any]
RULES: dict[str, Callable[[float, int], float]] = {
    "unchanged": lambda beta, k: beta,
    "1 - (1 - b) / k": lambda beta, k: 1 - (1 - beta) / k,
    "b^(1/k)": lambda beta, k: beta ** (1 / k),
    "b^k": lambda beta, k: beta**k,
    "1 - k (1 - b)": lambda beta, k: 1 - k * (1 - beta),
}
"""What becomes of a coefficient b when the batch is k times as large."""
TOLD = {
    "unchanged": "",
    "1 - (1 - b) / k": "told for accumulation in the moments, where every micro-batch decays them.",
    "b^(1/k)": "exact for k decays that together are one of b: for micro-batches, not for larger ones.",
    "b^k": "Recipes have it for beta2: lr_scaling_rule beta2_half_life (Marek et al. 2025, arXiv:2507.07101).",
    "1 - k (1 - b)": "Recipes have it: lr_scaling_rule sqrt (Malladi et al. 2022, arXiv:2205.10287).",
}
BETA = {"sgd": (0.9, 0.999), "adamw": (0.9, 0.99)}
SCALED = {"sgd": ("k times the rate", 1.0), "adamw": ("sqrt(k) times the rate", 0.5)}
"""The usual rule for the rate, and its power of k."""


def betas(settings: Result, seed: int) -> Result:
    """Half-lives in samples, paths on a quadratic, and trainings of a small language model, by every rule."""
    k, rows = settings["k"], []
    for factor in settings["factors"]:
        for optimizer, (beta1, beta2) in BETA.items():
            rows.append((f"{optimizer}, small", Row(factor, optimizer, beta1=beta1, beta2=beta2)))
            for name, rule in RULES.items():
                scaled = {"beta1": rule(beta1, k), "beta2": max(0.0, rule(beta2, k))}
                rows.append((f"{optimizer}, {name}", Row(factor, optimizer, k, waiting=True, **scaled)))
    curves, _ = train([row for _, row in rows], settings, seed)
    runs: Result = {}
    for (name, row), curve in zip(rows, curves, strict=True):
        runs.setdefault(name, {})[f"{row.factor:g}"] = curve[-1]
    return {
        "runs": runs,
        "half_life": {
            f"{beta:g} {name}": k * math.log(beta) / math.log(rule(beta, k))
            for beta in (0.9, 0.99, 0.999)
            for name, rule in RULES.items()
        },
        "path": {name: path_distance(rule(0.9, k), settings) for name, rule in RULES.items()},
    }


def path_distance(beta: float, settings: Result) -> float:
    """Distance of SGD's path with a batch k times as large, k times the rate, from the small batch's after as many samples.

    Of the latter's size, on x^2 / 2 from 1 without noise; m = beta m + (1 - beta) g, rate 0.02 and beta 0.9 before.
    """

    def path(beta: float, rate: float, updates: int) -> np.ndarray:
        x, m, found = 1.0, 0.0, []
        for _ in range(updates):
            m = beta * m + (1 - beta) * x
            x -= rate * m
            found.append(x)
        return np.array(found)

    k, samples = settings["k"], 200
    small, large = path(0.9, 0.02, samples)[k - 1 :: k], path(beta, 0.02 * k, samples // k)
    return float(np.linalg.norm(large - small) / np.linalg.norm(small))


def _same_rate(results: list[Result], optimizer: str, name: str, k: int) -> list[float]:
    """Losses at the small batch's best rate, scaled by the usual rule."""
    rates = at_best(column(results, "runs", f"{optimizer}, small"))[1]
    most = max(SETTINGS["factors"])
    return [
        each["runs"][f"{optimizer}, {name}"][f"{min(most, float(rate) * k ** SCALED[optimizer][1]):g}"]
        for each, rate in zip(results, rates, strict=True)
    ]


def beta_claims(results: list[Result]) -> list[Claim]:
    k, found = SETTINGS["k"], []
    for name in RULES:
        cases: list[Case] = [
            near(
                f"half-life in samples over that before, b {beta:g}", [results[0]["half_life"][f"{beta:g} {name}"]], 1.0
            )
            for beta in (0.9, 0.99, 0.999)
        ]
        path = [100 * results[0]["path"][name]]
        cases.append(within("SGD on a quadratic, k times the rate: distance of the paths", path, 0, 5, " %"))
        for optimizer, (rule, _) in SCALED.items():
            small = at_best(column(results, "runs", f"{optimizer}, small"))[0]
            same = _same_rate(results, optimizer, name, k)
            best, _ = at_best(column(results, "runs", f"{optimizer}, {name}"))
            for text, values in ((rule, same), ("each at its best rate", best)):
                ratios = [a / b for a, b in zip(values, small, strict=True)]
                cases.append(near(f"{optimizer}, held-out loss over that before, {text}", ratios, 1.0, 0.01))
        text = "b stays" if name == "unchanged" else f"b becomes {name}"
        found.append(
            Claim(f"When the batch grows by k, {text}, and training goes on as before.", tuple(cases), TOLD[name])
        )
    chosen = {
        optimizer: {name: at_best(column(results, "runs", f"{optimizer}, {name}")) for name in RULES}
        for optimizer in BETA
    }
    for name in list(RULES)[1:]:
        cases = []
        for optimizer, (rule, _) in SCALED.items():
            ours, plain = (_same_rate(results, optimizer, each, k) for each in (name, "unchanged"))
            cases.append(less(f"{optimizer}, {rule}", ours, plain))
            cases.append(
                less(
                    f"{optimizer}, each at its best rate", chosen[optimizer][name][0], chosen[optimizer]["unchanged"][0]
                )
            )
        rates = "; ".join(
            f"{optimizer} {named(of[name][1], list(results[0]['runs'][f'{optimizer}, small']))}"
            for optimizer, of in chosen.items()
        )
        found.append(
            Claim(
                f"When the batch grows by k, {name} ends lower than b unchanged (held-out loss).",
                tuple(cases),
                f"Best rates, as multiples of the unchanged one: {rates}.",
            )
        )
    beyond = RULES["1 - k (1 - b)"](0.9, 16)
    found.append(
        Claim(
            "1 - k (1 - b) serves every k.",
            (so("b 0.9, k 4", "0.6", True), so("b 0.9, k 16", f"{beyond:g}", beyond >= 0)),
        )
    )
    return found


SETTINGS: Result = {
    "characters": 96,
    "width": 32,
    "heads": 2,
    "length": 32,
    "b": 4,
    "held_out": 24,
    "micro_steps": 320,
    "rate": 1.0,
    "k": 4,
    "factors": [2.0**power for power in range(-3, 3)],
}
EXPERIMENTS = [
    Experiment(
        "betas",
        "Coefficients when the batch grows",
        "From 4 to 16 sequences, k = 4. The model and the data of `asynchronous`, 320 micro-batches; SGD with m = b m + "
        "(1 - b) g, b 0.9; AdamW with 0.9 and 0.99, both changed by the rule; rates of 1/8 to 4 (AdamW: a hundredth). As many "
        "samples, "
        "the same ones in the same order, and the same first weights, for all runs of a seed. Best rates are chosen on the "
        "other seeds.",
        SETTINGS,
        betas,
        beta_claims,
        HERE,
        minutes=1.0,
        quick={"micro_steps": 40, "held_out": 4},
    ),
]
