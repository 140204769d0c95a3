"""Claims about asynchronous training: what staleness costs, what corrections mend, when it pays."""

from statistics import fmean
from typing import Any

import asynchronous
import language
import numpy as np
from asynchronous import RANDOM, WORKERS
from drawing import COLOURS, canvas, png
from language import POINTS
from verdicts import Case, Claim, Experiment, at_best, at_least, column, less, named, near, so, spread, within

Result = dict[str, Any]
NEVER = 10.0
"""Times the tokens of a run: stands for a loss that is never reached."""
METHODS = {
    "none": "no correction",
    "rate": "rate / staleness",
    "compensated": "delay compensation",
    "age": "less momentum",
}


def ends(results: list[Result], name: str) -> list[dict[str, float]]:
    """Last held-out losses of each seed, by rate."""
    return [{factor: curve[-1] for factor, curve in each["runs"][name].items()} for each in results]


def tokens_until(curve: list[float], loss: float, first: float = float(np.log(96))) -> float:
    """The share of a run's tokens at which its held-out loss first is `loss`; NEVER if it is not.

    >>> tokens_until([3.0, 2.0], 2.5, first=4.0)
    0.75
    """
    before = first
    for place, after in enumerate(curve):
        if after <= loss:
            return (place + (before - loss) / (before - after)) / len(curve)
        before = after
    return NEVER


def shares(results: list[Result], name: str, target: str) -> list[float]:
    """Tokens until the loss at which `target` ends, over those of the whole run, both at their best rates."""
    goals, own = at_best(ends(results, target))[0], at_best(ends(results, name))[1]
    return [tokens_until(each["runs"][name][rate], goal) for each, goal, rate in zip(results, goals, own, strict=True)]


def replay_claim(results: list[Result]) -> Claim:
    def same(a: str, b: str) -> bool:
        return all(each["replay"][a] == each["replay"][b] for each in results)

    return Claim(
        "Asynchronous training can be repeated to the bit.",
        (
            so("the same seed and arrivals, in turn", "the same bits", same("first", "again")),
            so("the same seed and arrivals, at random", "the same bits", same("at random", "too")),
            so(
                "the same seed, other arrivals",
                "other bits" if not same("first", "at random") else "the same bits",
                same("first", "at random"),
            ),
        ),
        "It can if the order in which gradients arrive is part of the recipe, as here. On devices it follows from their speed.",
    )


def loss_claim(results: list[Result]) -> Claim:
    cases: list[Case] = []
    for optimizer in ("sgd", "adamw"):
        alone = ends(results, f"{optimizer}, alone")
        values, rates = at_best(alone)
        for workers in WORKERS:
            stale = ends(results, f"{optimizer}, {workers} workers, in turn, none")
            same = [each[rate] for each, rate in zip(stale, rates, strict=True)]
            cases.append(less(f"{optimizer}, staleness {workers - 1}, the same rate", values, same))
            cases.append(
                less(f"{optimizer}, staleness {workers - 1}, each at its best rate", values, at_best(stale)[0])
            )
    return Claim(
        "Updates of workers that do not wait conflict: the loss is higher after as many tokens than without staleness.",
        tuple(cases),
        "A training that diverged counts 100.",
    )


def correction_claims(results: list[Result]) -> list[Claim]:
    texts = {
        "rate": "A rate divided by the staleness lowers the loss of asynchronous training.",
        "compensated": "Delay compensation (DC-ASGD) lowers the loss of asynchronous training.",
        "age": "Less momentum, for asynchrony is momentum, lowers the loss of asynchronous training.",
    }
    alone = ends(results, "sgd, alone")
    _, rates = at_best(alone)
    found = []
    for method, text in texts.items():
        cases = []
        for order, sizes in (("in turn", WORKERS), ("at random", RANDOM)):
            for workers in sizes:
                name = f"sgd, {workers} workers, {order}"
                if f"{name}, {method}" not in results[0]["runs"]:
                    continue
                plain, ours = ends(results, f"{name}, none"), ends(results, f"{name}, {method}")
                case = f"staleness {workers - 1}, {order}"
                pairs = [[each[rate] for each, rate in zip(of, rates, strict=True)] for of in (ours, plain)]
                cases.append(less(f"{case}, the rate that is best without staleness", *pairs))
                cases.append(less(f"{case}, each at its best rate", at_best(ours)[0], at_best(plain)[0]))
        right = "Where its own best rate is known, a rule for the rate adds nothing." if method == "rate" else ""
        found.append(Claim(text, tuple(cases), right))
    return found


def restored_claim(results: list[Result]) -> Claim:
    alone = at_best(ends(results, "sgd, alone"))[0]
    cases, rates = [], []
    for workers in WORKERS:
        for method, text in METHODS.items():
            if (name := f"sgd, {workers} workers, in turn, {method}") not in results[0]["runs"]:
                continue
            values, chosen = at_best(ends(results, name))
            ratios = [a / b for a, b in zip(values, alone, strict=True)]
            cases.append(near(f"staleness {workers - 1}, {text}", ratios, 1.0, 0.01))
            if method == "none":
                rates.append(f"staleness {workers - 1}: {named(chosen, list(results[0]['runs'][name]))}")
    rates.insert(0, f"none: {named(at_best(ends(results, 'sgd, alone'))[1], list(results[0]['runs']['sgd, alone']))}")
    return Claim(
        "With a correction asynchronous SGD ends where training without staleness does (held-out loss, 1 %, each at its best "
        "rate).",
        tuple(cases),
        f"Best rates without a correction, as multiples of the unchanged one: {'; '.join(rates)}.",
    )


def momentum_claim(results: list[Result]) -> Claim:
    names = results[0]["momentum"]
    return Claim(
        "Asynchrony is momentum: N workers move on average as SGD with momentum 1 - 1 / N and a rate of 1 / N (5 %).",
        tuple(within(name, [100 * each for each in column(results, "momentum", name)], 0, 5, " %") for name in names),
        "It is so for workers that deliver at random, each as probable: ages of gradients are then geometric.",
    )


def pays_claims(results: list[Result]) -> list[Claim]:
    faster, sooner, cut = [], [], []
    for name in results[0]["speed"]:
        workers = name.rsplit(", ", 1)[1].split()[0]
        ratio = [each["speed"][name]["waiting"] / each["speed"][name]["free"] for each in results]
        faster.append(at_least(f"{name}: samples per second, free over waiting", ratio, 1.1))
        run = f"sgd, {workers} workers"
        free = shares(results, f"{run}, in turn, none", f"{run}, waiting")
        alone = shares(results, "sgd, alone", f"{run}, waiting")
        sooner.append(within(f"{name}: time over that of N times the batch", _over(free, ratio), 0, 1))
        whole = [_one(a, b) for a, b in zip(free, alone, strict=True)]
        cut.append(within(f"{name}: time over that of one batch, cut", _over(whole, ratio), 0, 1))
    return [
        Claim("Workers that do not wait compute at least 1.1 times as many samples per second.", tuple(faster)),
        Claim(
            "Asynchronous training reaches a loss sooner than N workers that wait, each with a batch of its own.",
            tuple(sooner),
            f"The loss at which the latter end. Only computing counts, sending is free; {NEVER:g}: it is never reached.",
        ),
        Claim(
            "Asynchronous training reaches that loss sooner than N workers that wait and share one batch.",
            tuple(cut),
            "One batch of the recipe, cut on N devices, has no staleness and as many updates. It takes a batch that "
            "still fills N devices.",
        ),
    ]


def _one(a: float, b: float) -> float:
    return min(NEVER, a / b)


def _over(values: list[float], ratio: list[float]) -> list[float]:
    return [value if value >= NEVER else value / by for value, by in zip(values, ratio, strict=True)]


def claims(results: list[Result]) -> list[Claim]:
    """All of this experiment."""
    return [
        replay_claim(results),
        loss_claim(results),
        *correction_claims(results),
        restored_claim(results),
        momentum_claim(results),
        *pays_claims(results),
    ]


def table(results: list[Result]) -> str:
    """Held-out losses at the best rates, by staleness."""
    lines = [
        "| staleness | " + " | ".join(METHODS.values()) + " | waiting, N times the batch | AdamW | AdamW, waiting |"
    ]
    lines.append("|---|" + "---|" * (len(METHODS) + 3))
    alone = [spread(at_best(ends(results, f"{optimizer}, alone"))[0]) for optimizer in ("sgd", "adamw")]
    lines.append(f"| 0 | {alone[0]} | | | | | {alone[1]} | |")
    for workers in WORKERS:
        names = [f"sgd, {workers} workers, in turn, {method}" for method in METHODS]
        names[1] = names[1] if workers > 2 else names[0]  # the same training
        names += [f"sgd, {workers} workers, waiting"]
        names += [f"adamw, {workers} workers, in turn, none", f"adamw, {workers} workers, waiting"]
        cells = [spread(at_best(ends(results, name))[0]) for name in names]
        lines.append(f"| {workers - 1} | {' | '.join(cells)} |")
    return "### Losses\n\n" + "\n".join(lines) + "\n"


def draw(results: list[Result]) -> list[bytes]:
    """Curves by staleness without a correction; losses by rate."""
    figure, (curves, rates) = canvas(2, "Asynchronous SGD, no correction")
    runs = {"0": "sgd, alone"} | {str(n - 1): f"sgd, {n} workers, in turn, none" for n in WORKERS}
    for (staleness, name), colour in zip(runs.items(), COLOURS, strict=False):
        by_rate = {
            factor: np.array(column(results, "runs", name, factor)).mean(0) for factor in results[0]["runs"][name]
        }
        best = min(by_rate.values(), key=lambda curve: curve[-1])
        curves.plot(
            np.arange(1, POINTS + 1) / POINTS, best, color=colour, label=f"staleness {staleness}", linewidth=1.3
        )
        known = {float(factor): fmean([curve[-1]]) for factor, curve in by_rate.items() if curve[-1] < 4}
        rates.semilogx(list(known), list(known.values()), "o-", color=colour, linewidth=1.3, markersize=3)
    curves.set(xlabel="share of the tokens", ylabel="held-out loss, each at its best rate")
    rates.set(xlabel="rate, times the unchanged one", ylabel="last held-out loss")
    curves.legend(fontsize="small")
    return [png(figure)]


SETTINGS: Result = {
    "characters": 96,
    "width": 32,
    "heads": 2,
    "length": 32,
    "b": 4,
    "held_out": 48,
    "micro_steps": 400,
    "rate": 1.0,
    "factors": [2.0**power for power in range(-6, 2)],
    "replayed": 40,
    "chains": 4000,
    "path": 100,
    "scatter": [0.05, 0.2, 0.5, 1.0],
    "draws": 20_000,
}
EXPERIMENTS = [
    Experiment(
        "asynchronous",
        "Asynchronous training",
        "A causal transformer of one layer x 32 on characters of Python's documentation, 400 gradients of 4 x 32 characters, "
        "SGD with m = 0.9 m + 0.1 g at rates of 1/64 to 2, AdamW at a hundredth of these, after a warm-up over the first "
        "tenth. 1 to 9 workers, simulated: each has a copy of the parameters, delivers its gradient in turn or at random, "
        "and reads the parameters anew, so that gradients are 0 to 8 updates old. The same samples in the same order, and the "
        "same first weights, for all runs of a seed. Rate / staleness: Zhang et al. 2016, arXiv:1511.05950. Delay "
        "compensation: DC-ASGD-a with lambda 2, Zheng et al. 2017, arXiv:1609.08326. Less momentum: beta' / (1 - beta') = 9 - "
        "staleness, by Mitliagkas et al. 2016, arXiv:1605.09774. Waiting: an update with the mean of N gradients. Best rates "
        "are chosen on the other seeds. Times: log-normal with a scatter (standard deviation over mean).",
        SETTINGS,
        asynchronous.asynchronous,
        claims,
        (asynchronous, language),
        minutes=1.5,
        quick={"micro_steps": 40, "factors": [0.125, 0.25], "held_out": 4, "chains": 50, "draws": 200, "replayed": 20},
        draw=draw,
        pictures=("asynchronous.png",),
        table=table,
    ),
]
