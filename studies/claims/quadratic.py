"""Claims about noisy quadratics and other functions that are known exactly."""

import math
import sys
from typing import Any

import numpy as np
from drawing import COLOURS, canvas, png
from verdicts import Case, Claim, Experiment, at_best, column, less, named, near, so, spread, within

HERE = (sys.modules[__name__],)
Result = dict[str, Any]
POINTS = 200  # of a curve that is kept, at most

# ---------------------------------------------------------------------------------------------------------------------
# Trajectories on a quadratic

METHODS = {"standard": "an update per micro-batch", "sparse": "sparse updates", "accumulated": "accumulation"}


def trajectory(method: str, settings: Result, k: int, rate: float, noise: np.ndarray) -> np.ndarray:
    """SGD with momentum on f = 1/2 theta' Q theta with gradient noise [T, runs, 2]: theta [T + 1, runs, 2].

    standard: m = beta m + (1 - beta) g and an update at every micro-step; sparse: the same m, an update at every k-th;
    accumulated: m = beta m + (1 - beta) mean of the window's g, an update at every k-th.
    """
    curvature, beta = np.array(settings["curvature"]), settings["beta"]
    theta = np.tile(np.array(settings["start"]), (noise.shape[1], 1))
    m, found = np.zeros_like(theta), [theta]
    for t, of in enumerate(noise):
        g = curvature * theta + of
        decay, share = (1 if t % k else beta, (1 - beta) / k) if method == "accumulated" else (beta, 1 - beta)
        m = decay * m + share * g
        if method == "standard" or t % k == k - 1:
            theta = theta - rate * m
        found.append(theta)
    return np.array(found)


def quadratic(settings: Result, seed: int) -> Result:
    """Losses, spreads and distances of the three methods, with the same noise for all."""
    curvature, k, rate = np.array(settings["curvature"]), settings["k"], settings["rate"]
    rng = np.random.default_rng(seed)
    long = settings["sd"] * rng.standard_normal((settings["long"], settings["runs"], 2))
    short = long[: settings["short"]]

    def loss(theta: np.ndarray) -> np.ndarray:
        return 0.5 * (curvature * theta**2).sum(-1).mean(1)

    found: Result = {"methods": {}, "distance": {}}
    paths = {}
    for method in METHODS:
        paths[method] = trajectory(method, settings, k, rate, short)
        whole = trajectory(method, settings, k, rate, long)
        later = whole[settings["long"] // 2 :: k]  # stationary, where parameters are updated
        by_rate = {
            f"{factor:g}": float(loss(trajectory(method, settings, k, rate * factor, short))[-50:].mean())
            for factor in settings["factors"]
        }
        found["methods"][method] = {
            "first_half": float(loss(paths[method])[: settings["short"] // 2].mean()),
            "short": float(loss(paths[method])[-50:].mean()),
            "long": float(loss(whole[settings["long"] // 2 :]).mean()),
            "by_rate": by_rate,
            "spread": float(later.var((0, 1)).sum()),
            "step": float(np.diff(later, axis=0).var((0, 1)).sum())
            if method != "standard"
            else float(np.diff(whole[settings["long"] // 2 :], axis=0).var((0, 1)).sum()),
        }
        if seed == 0:
            every = -(-len(short) // POINTS)
            found["methods"][method]["path"] = paths[method][::every, 0].round(4).tolist()
            found["methods"][method]["losses"] = loss(paths[method])[::every].round(6).tolist()
    silent = np.zeros_like(short)
    for size in settings["distances"]:
        for name, noise in (("with noise", short), ("without noise", silent)):
            sparse, accumulated = (
                trajectory(method, settings, size, rate, noise) for method in ("sparse", "accumulated")
            )
            gap = np.sqrt(((sparse - accumulated) ** 2).sum(-1).mean())
            found["distance"][f"k {size}, {name}"] = float(gap / np.sqrt((accumulated**2).sum(-1).mean()))
    return found


def quadratic_claims(results: list[Result]) -> list[Claim]:
    def of(method: str, key: str) -> list[float]:
        return column(results, "methods", method, key)

    best = {method: at_best(of(method, "by_rate")) for method in METHODS}
    grid = list(of("standard", "by_rate")[0])
    rates = "; ".join(f"{METHODS[method]}: {named(best[method][1], grid)}" for method in METHODS)
    ways = ("sparse", "accumulated")

    def ratio(method: str, key: str) -> list[float]:
        return [a / b for a, b in zip(of(method, key), of("standard", key), strict=True)]

    return [
        Claim(
            "k = 4 makes the trajectory smoother: its noise has 1 / k of the variance.",
            tuple(near(f"spread of the parameters, {METHODS[m]}", ratio(m, "spread"), 0.25, 0.1) for m in ways)
            + tuple(near(f"variance of an update, {METHODS[m]}", ratio(m, "step"), 0.25, 0.1) for m in ways),
            "Relative to an update per micro-batch. Updates that are rarer and as large spread less in all, but a single one "
            "is no smoother.",
        ),
        Claim(
            "k = 4 is slower (loss over the first half of 200 micro-steps).",
            tuple(less(METHODS[m], of("standard", "first_half"), of(m, "first_half")) for m in ways),
        ),
        Claim(
            "k = 4 ends at a lower loss.",
            tuple(
                less(f"{METHODS[m]}, {text}", of(m, key), of("standard", key))
                for m in ways
                for key, text in (("short", "after 200 micro-steps"), ("long", "after 2,000 micro-steps"))
            )
            + tuple(
                less(f"{METHODS[m]}, 200 micro-steps, each at its best rate", best[m][0], best["standard"][0])
                for m in ways
            ),
            f"At an unchanged rate, rarer updates are a lower rate per sample. Best rates: {rates}.",
        ),
        Claim(
            "Sparse updates and accumulation almost coincide (here: to 5 % of the distance from the minimum).",
            tuple(
                within(name, [100 * each for each in column(results, "distance", name)], 0, 5, " %")
                for name in results[0]["distance"]
            ),
            "They are different methods: with sparse updates momentum forgets k times as fast per update.",
        ),
    ]


def draw_quadratic(results: list[Result]) -> list[bytes]:
    figure, (left, right) = canvas(2, "A noisy quadratic, k = 4")
    for (method, text), colour, style in zip(METHODS.items(), COLOURS, ("-", "-", "--"), strict=False):
        of = results[0]["methods"][method]
        path = np.array(of["path"])
        left.plot(path[:, 0], path[:, 1], style, color=colour, label=text, linewidth=1.3)
        right.semilogy(
            np.linspace(0, 1, len(of["losses"])), of["losses"], style, color=colour, label=text, linewidth=1.3
        )
    left.set(xlabel="sharp direction (curvature 10)", ylabel="flat direction (curvature 1)")
    right.set(xlabel="share of the micro-batches", ylabel="loss")
    for axes in (left, right):
        axes.legend(fontsize="small")
    return [png(figure)]


# ---------------------------------------------------------------------------------------------------------------------
# Where SGD comes to rest


def stationary(settings: Result, seed: int) -> Result:
    """Stationary variance of SGD on h x^2 / 2 with unit noise, after a burn-in, over curvatures, rates and k."""
    rng = np.random.default_rng(seed)

    def variance(h: float, rate: float, k: int = 1, beta: float = 0.0, sparse: bool = False) -> float:
        x, m = np.zeros(settings["chains"]), np.zeros(settings["chains"])
        seen = []
        updates = settings["updates"]
        for update in range(updates):
            if sparse:
                for _ in range(k):
                    m = beta * m + (1 - beta) * (h * x + rng.standard_normal(len(x)))
            else:
                m = beta * m + (1 - beta) * (h * x + rng.standard_normal(len(x)) / math.sqrt(k))
            x = x - rate * m
            if update >= updates // 2 and update % 10 == 0:
                seen.append(float(x.var()))
        return float(np.mean(seen))

    def power(values: list[float], variances: list[float]) -> float:
        return float(np.polyfit(np.log(values), np.log(variances), 1)[0])

    h, rates, k = settings["h"], settings["rates"], settings["k"]
    by_h = [variance(each, 0.02) for each in h]
    return {
        "power_of_h": power(h, by_h),
        "flat_over_sharp": by_h[0] / by_h[-1],
        "power_of_rate": power(rates, [variance(1.0, each) for each in rates]),
        "power_of_k": power(k, [variance(1.0, 0.05, each) for each in k]),
        "power_of_k_sparse": power(k, [variance(1.0, 0.05, each, 0.9, sparse=True) for each in k]),
    }


def stationary_claims(results: list[Result]) -> list[Claim]:
    flat = column(results, "flat_over_sharp")
    return [
        Claim(
            "SGD comes to rest with a variance proportional to rate x H^-1 Sigma H^-1.",
            (
                near("power of the rate", column(results, "power_of_rate"), 1.0, 0.1),
                near("power of the curvature, Sigma the same", column(results, "power_of_h"), -2.0, 0.1),
            ),
            "It is rate / 2 x H^-1 Sigma for small rates: power -1 of the curvature.",
        ),
        Claim(
            "k micro-steps divide that variance by k.",
            (
                near("power of k, accumulation", column(results, "power_of_k"), -1.0, 0.1),
                near("power of k, sparse updates with momentum 0.9", column(results, "power_of_k_sparse"), -1.0, 0.1),
            ),
        ),
        Claim(
            "Along sharp directions the variance is large, along flat ones small.",
            (so("curvature 0.5 over curvature 8", f"variance ratio {spread(flat)}", max(flat) < 1),),
            "It is the other way round, by the told formula as well.",
        ),
    ]


def wells(settings: Result, seed: int) -> Result:
    """Share of SGD runs that end in the flat one of two equally deep parabolas, after as many micro-batches."""
    sharp, flat = settings["h"]
    places = -math.sqrt(2 / sharp), math.sqrt(2 / flat)  # both rise by 1 to where they meet, at 0
    found = {}
    for k in settings["k"]:
        for name, rate in (("same", settings["rate"]), ("times k", settings["rate"] * k)):
            rng = np.random.default_rng(seed)
            x = rng.uniform(2 * places[0], 2 * places[1], settings["runs"])
            for _ in range(settings["micro_steps"] // k):
                h, at = np.where(x < 0, sharp, flat), np.where(x < 0, places[0], places[1])
                noise = settings["noise"] / math.sqrt(k) * rng.standard_normal(len(x))
                x = x - rate * (h * (x - at) + noise)
            found[f"k {k}, {name}"] = float((x >= 0).mean())
    return found


def wells_claims(results: list[Result]) -> list[Claim]:
    sizes = sorted({int(name.split()[1].rstrip(",")) for name in results[0]} - {1})
    alone = [1 - each for each in column(results, "k 1, same")]
    cases = tuple(
        less(
            f"k {k}, {text}: share in the sharp one",
            [1 - each for each in column(results, f"k {k}, {key}")],
            alone,
        )
        for key, text in (("same", "the same rate"), ("times k", "k times the rate"))
        for k in sizes
    )
    return [
        Claim(
            "Sparse updates, being a larger batch, prefer flat minima.",
            cases,
            "Noise drives SGD out of the sharp minimum, and a larger batch has less of it (Keskar et al. 2017, 1609.04836, "
            "found "
            "sharp minima for large batches). A larger rate leaves it too, because steps there are nearly unstable: not the "
            "batch, the rate.",
        )
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Convergence


def gradient_norms(settings: Result, k: int, rate: float, noise: float, updates: np.ndarray) -> np.ndarray:
    """E |grad f|^2 after so many updates of SGD on a quadratic from theta = 1, in closed form.

    With curvature h: E theta^2 = (1 - rate h)^(2 t) (1 - rest) + rest, rest = rate noise^2 / k / (h (2 - rate h)).
    """
    h = np.geomspace(*settings["curvatures"], settings["d"])
    rest = rate * noise**2 / k / (h * (2 - rate * h))
    t = updates[:, None]
    return (h**2 * ((1 - rate * h) ** (2 * t) * (1 - rest) + rest)).sum(1)


def convergence(settings: Result, seed: int) -> Result:
    """Plateaus, the told bound, and micro-batches to an accuracy, for every k and noise."""
    found: Result = {"plateau": {}, "bound": [], "samples": {}}
    h = np.geomspace(*settings["curvatures"], settings["d"])
    for k in settings["k"]:
        found["plateau"][str(k)] = float(gradient_norms(settings, k, settings["rate"], 1.0, np.array([20_000]))[0])
        for rate in settings["rates"]:
            for noise in settings["noise"]:
                norms = gradient_norms(settings, k, rate, noise, np.arange(1000))
                variance = settings["d"] * noise**2
                bound = h.sum() / (rate * len(norms)) + h.max() * rate * variance / k
                found["bound"].append(float(norms.min() / bound))
    for noise in settings["noise"]:
        for k in settings["k"]:
            by_rate = {
                f"{rate:g}": _micro_steps(settings, k, rate, noise) for rate in (settings["rate"], *settings["rates"])
            }
            reached = [each for each in by_rate.values() if each is not None]
            found["samples"][f"{noise:g} {k}"] = {
                "same": by_rate[f"{settings['rate']:g}"],
                "best": min(reached, default=None),
            }
    return found


def _micro_steps(settings: Result, k: int, rate: float, noise: float) -> int | None:
    """Until E |grad f|^2 falls below the target; None: never."""
    updates = np.unique(np.geomspace(1, settings["most"] // k, 3000).astype(int))
    below = gradient_norms(settings, k, rate, noise, updates) <= settings["target"] * settings["d"]
    return int(k * updates[below][0]) if below.any() else None


def convergence_claims(results: list[Result]) -> list[Claim]:
    (of,) = results
    plateau, noises = of["plateau"], sorted({key.split()[0] for key in of["samples"]}, key=float)
    sizes = [k for k in plateau if k != "1"]
    cases: list[Case] = []
    for key, text in (("same", "the same rate"), ("best", "each at its best rate")):
        for noise in noises:
            for k in sizes:
                one, more = of["samples"][f"{noise} 1"][key], of["samples"][f"{noise} {k}"][key]
                name = f"noise {noise}, k {k}, {text}"
                if one is None or more is None:
                    never = " and ".join(f"k {size}" for size, of_k in (("1", one), (k, more)) if of_k is None)
                    cases.append(so(name, f"never reached with {never}", False))
                else:
                    cases.append(near(f"{name}: times as many micro-batches", [more / one], float(k), 0.1))
    return [
        Claim(
            "The stationary squared gradient at a given rate falls as 1 / k.",
            tuple(near(f"k {k} over k 1", [plateau[k] / plateau["1"]], 1 / int(k)) for k in sizes),
        ),
        Claim(
            "The smallest squared gradient of T updates is at most 2 (f0 - f*) / (rate T) + L rate sigma^2 / k.",
            (
                so(
                    f"{len(of['bound'])} settings of k, rate and noise, T = 1000",
                    f"at most {max(of['bound']):.3g} of the bound",
                    max(of["bound"]) <= 1,
                ),
            ),
        ),
        Claim(
            "The same accuracy takes k times as many samples (as many updates).",
            tuple(cases),
            "Where noise dominates and rates are chosen for each k, it takes hardly more samples; where noise at the given "
            "rate "
            "hides the target, k = 1 never reaches it.",
        ),
    ]


EXPERIMENTS = [
    Experiment(
        "quadratic",
        "Trajectories on a noisy quadratic",
        "f = (10 x^2 + y^2) / 2 from (5, 5), normal gradient noise of standard deviation 0.5, SGD with m = 0.9 m + 0.1 g, "
        "rate 0.1, "
        "k = 4, 200 and 2,000 micro-steps; the same noise for all methods; means of 20 runs per seed. Final losses: the last "
        "50 "
        "micro-steps of 200, the second half of 2,000. Best rates: 1/8 to 4 times 0.1, chosen on the other seeds.",
        {
            "curvature": [10.0, 1.0],
            "start": [5.0, 5.0],
            "sd": 0.5,
            "beta": 0.9,
            "rate": 0.1,
            "k": 4,
            "short": 200,
            "long": 2000,
            "runs": 20,
            "factors": [0.125, 0.25, 0.5, 1.0, 2.0, 4.0],
            "distances": [2, 4, 8],
        },
        quadratic,
        quadratic_claims,
        HERE,
        draw=draw_quadratic,
        pictures=("quadratic.png",),
    ),
    Experiment(
        "stationary",
        "The variance at rest",
        "SGD on h x^2 / 2, unit gradient noise, 500 chains of 4,000 updates, the second half counts. Curvatures 0.5 to 8 at "
        "rate "
        "0.02; rates 0.01 to 0.08 and k 1 to 8 (rate 0.05) at curvature 1. Powers: slopes in logarithms.",
        {
            "h": [0.5, 1.0, 2.0, 4.0, 8.0],
            "rates": [0.01, 0.02, 0.04, 0.08],
            "k": [1, 2, 4, 8],
            "chains": 500,
            "updates": 4000,
        },
        stationary,
        stationary_claims,
        HERE,
        quick={"chains": 50, "updates": 400},
    ),
    Experiment(
        "wells",
        "Sharp and flat minima",
        "Two parabolas of curvatures 25 and 1, equally deep, that meet at height 1; SGD without momentum, rate 0.01, normal "
        "gradient noise of standard deviation 6; 2,000 runs from uniform starts, 4,000 micro-batches.",
        {"h": [25.0, 1.0], "rate": 0.01, "noise": 6.0, "k": [1, 4, 8], "runs": 2000, "micro_steps": 4000},
        wells,
        wells_claims,
        HERE,
        quick={"runs": 100, "micro_steps": 400},
    ),
    Experiment(
        "convergence",
        "Convergence",
        "A quadratic of 20 dimensions, curvatures 0.05 to 1, from theta = 1, SGD without momentum, gradient noise of standard "
        "deviation 0 to 3 per coordinate; expectations in closed form. Accuracy: a mean squared gradient of 0.002 per "
        "coordinate. "
        "The same rate: 0.05; others: 34 from 0.0005 to 1.",
        {
            "d": 20,
            "curvatures": [0.05, 1.0],
            "k": [1, 2, 4, 8],
            "rate": 0.05,
            "rates": [round(float(each), 4) for each in np.geomspace(0.0005, 1.0, 34)],
            "noise": [0.0, 0.1, 1.0, 3.0],
            "target": 0.002,
            "most": 200_000,
        },
        convergence,
        convergence_claims,
        HERE,
        seeded=False,
    ),
]
