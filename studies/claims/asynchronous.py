"""Asynchronous training, simulated: workers that deliver gradients of old parameters, and wait for nobody.

What is measured is here, what follows from it in asynchronous_claims.py: a change there computes nothing anew.
"""

from typing import Any

import numpy as np
from language import Row, train

Result = dict[str, Any]
WORKERS = (2, 3, 5, 9)
"""Of asynchronous rows: the staleness is one less, in turn always and at random on average."""
RANDOM = (5, 9)

# ---------------------------------------------------------------------------------------------------------------------
# Trainings


def momentum_by_age(workers: int, beta: float = 0.9) -> float:
    """Momentum whose gradients are as old on average as without staleness: beta' / (1 - beta') = beta / (1 - beta) - staleness.

    A rule of ours for what Mitliagkas et al. 2016 (arXiv:1605.09774) say: asynchrony is momentum, so that less is to be added.

    >>> [round(momentum_by_age(workers), 3) for workers in (1, 5, 9)]
    [0.9, 0.833, 0.5]
    """
    age = beta / (1 - beta) - (workers - 1)
    return age / (1 + age)


def name_of(row: Row, method: str) -> str:
    """How results name a training, without its rate."""
    if row.workers == 1:
        return f"{row.optimizer}, alone"
    way = "waiting" if row.waiting else f"{row.order}, {method}"
    return f"{row.optimizer}, {row.workers} workers, {way}"


def make_rows(settings: Result) -> list[tuple[str, Row]]:
    """All trainings, by name."""
    found = []
    for factor in settings["factors"]:
        rows = [("none", Row(factor, optimizer)) for optimizer in ("sgd", "adamw")]
        for workers in WORKERS:
            for optimizer in ("sgd", "adamw"):
                rows.append(("none", Row(factor, optimizer, workers, waiting=True)))
                rows.append(("none", Row(factor, optimizer, workers)))
            for order in ("in turn", "at random") if workers in RANDOM else ("in turn",):
                of = {"workers": workers, "order": order}
                if workers > 2:  # with a staleness of 1 it is the same training
                    rows.append(("rate", Row(factor, correction="rate", **of)))
                rows.append(("age", Row(factor, beta1=momentum_by_age(workers), **of)))
                if order == "in turn":
                    rows.append(("compensated", Row(factor, correction="compensated", **of)))
                else:
                    rows.append(("none", Row(factor, **of)))
        found += [(name_of(row, method), row) for method, row in rows]
    return found


def asynchronous(settings: Result, seed: int) -> Result:
    """Held-out losses of all trainings, replays, implicit momentum, and times of steps with stragglers."""
    named_rows = make_rows(settings)
    curves, _ = train([row for _, row in named_rows], settings, seed)
    runs: Result = {}
    for (name, row), curve in zip(named_rows, curves, strict=True):
        keep = row.waiting or name.endswith(("alone", "in turn, none"))  # others are judged by their end alone
        runs.setdefault(name, {})[f"{row.factor:g}"] = curve if keep else curve[-1:]
    return {
        "runs": runs,
        "replay": replay(settings, seed),
        "momentum": implicit_momentum(settings, seed),
        "speed": speeds(settings, seed),
    }


def replay(settings: Result, seed: int) -> Result:
    """Digests of the last parameters of short trainings: twice the same, and with other arrivals."""
    short = settings | {"micro_steps": settings["replayed"]}
    digests = {}
    for name, order in (("first", "in turn"), ("again", "in turn"), ("at random", "at random"), ("too", "at random")):
        digests[name] = train([Row(0.125, workers=5, order=order)], short, seed)[1][:16]
    return digests


def implicit_momentum(settings: Result, seed: int) -> Result:
    """Distance of the mean path of asynchronous SGD on x^2 / 2 from SGD with momentum 1 - 1 / N and a rate of 1 / N.

    Of the mean path's own size, over `path` updates, without noise, no momentum of its own, rate 0.1.
    """
    rng, found, rate = np.random.default_rng((seed, 2)), {}, 0.1
    runs, every = settings["chains"], np.arange(settings["chains"])
    for workers in RANDOM:
        for order in ("at random", "in turn"):
            x = np.ones(runs)
            copies, path = np.ones((workers, runs)), [1.0]
            for step in range(settings["path"]):
                who = rng.integers(0, workers, runs) if order == "at random" else np.full(runs, step % workers)
                x = x - rate * copies[who, every]
                copies[who, every] = x
                path.append(float(x.mean()))
            told, velocity = [1.0, 1 - rate], -rate
            for _ in range(settings["path"] - 1):
                velocity = (1 - 1 / workers) * velocity - rate / workers * told[-1]
                told.append(told[-1] + velocity)
            gap = np.array(path) - np.array(told)
            found[f"{workers} workers, {order}"] = float(np.linalg.norm(gap) / np.linalg.norm(told))
    return found


def speeds(settings: Result, seed: int) -> Result:
    """Seconds per gradient, of one worker alone 1, when N wait for the slowest, and when they do not.

    Times of a gradient: log-normal of mean 1, or one worker always half as fast. Sending is free in both.
    """
    rng, found = np.random.default_rng((seed, 3)), {}
    for scatter in settings["scatter"]:
        sigma = np.sqrt(np.log1p(scatter**2))
        for workers in WORKERS:
            times = np.exp(sigma * rng.standard_normal((settings["draws"], workers)) - sigma**2 / 2)
            found[f"scatter {scatter:g}, {workers} workers"] = {
                "waiting": float(times.max(1).mean() / workers),
                "free": float(times.mean() / workers),
            }
    for workers in WORKERS:
        found[f"one half as fast, {workers} workers"] = {"waiting": 2 / workers, "free": 1 / (workers - 0.5)}
    return found
