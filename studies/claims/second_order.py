"""Claims that accumulated gradients act as the natural gradient, on a linear regression whose Fisher matrix is known."""

import sys
from typing import Any

import numpy as np
from verdicts import Claim, Experiment, column, less, near, spread, within

HERE = (sys.modules[__name__],)
Result = dict[str, Any]
WAYS = {
    "accumulated": "mean gradient",
    "sparse": "sparse updates, momentum 0.9",
    "natural": "the natural gradient itself",
}


class Regression:
    """y = theta* x + noise of deviation 1, x normal with variances `scales`: the Fisher matrix is the diagonal of them.

    It is the Hessian, too. Parameters are given as their distance from theta*.
    """

    def __init__(self, settings: Result, seed: int):
        self.rng = np.random.default_rng(seed)
        self.scales = np.geomspace(*settings["scales"], settings["d"])

    def gradients(self, theta: np.ndarray, number: int, b: int) -> np.ndarray:
        """Mean gradients of `number` micro-batches of b samples [number, d] at theta [d], or one at each of [number, d]."""
        x = np.sqrt(self.scales) * self.rng.standard_normal((number, b, len(self.scales)))
        wrong = np.einsum("nbd,nd->nb", x, np.broadcast_to(theta, (number, len(self.scales))))
        return ((wrong + self.rng.standard_normal((number, b)))[..., None] * x).mean(1)


def natural(settings: Result, seed: int) -> Result:
    """Shape, damping and direction of the steps of k micro-batches; the matrix of their products; speeds of convergence."""
    problem, runs, b = Regression(settings, seed), settings["runs"], settings["b"]
    theta = np.ones(settings["d"])  # so that the natural direction is the same everywhere
    mean = problem.scales * theta
    found: Result = {"power": {}, "damping": {}, "angle": {}, "rates": {}}
    for k in settings["k"]:
        g = problem.gradients(theta, runs * k, b).reshape(runs, k, -1)
        m = np.zeros_like(g[:, 0])
        for place in range(k):
            m = 0.9 * m + 0.1 * g[:, place]
        steps = {"accumulated": g.mean(1), "sparse": m / (1 - 0.9**k), "natural": g.mean(1) / problem.scales}
        for way, step in steps.items():
            gain = step.mean(0) / mean
            found["power"][f"{way} {k}"] = float(np.polyfit(np.log(problem.scales), np.log(gain), 1)[0])
            found["damping"][f"{way} {k}"] = float(gain[-1] / gain[0])
        for name, to in (("natural", theta), ("plain", mean)):
            cosine = steps["accumulated"] @ to / np.linalg.norm(steps["accumulated"], axis=1) / np.linalg.norm(to)
            found["angle"][f"{name} {k}"] = float(np.degrees(np.arccos(cosine)).mean())
        for way in ("accumulated", "natural"):
            found["rates"][f"{way} {k}"] = _flat_over_sharp(problem, way, k, settings)
    found["limit"] = float(np.degrees(np.arccos(mean @ theta / np.linalg.norm(mean) / np.linalg.norm(theta))))
    found["fisher"] = {
        f"{'1 sample' if size == 1 else f'{size} samples'}, {place}": _fisher_error(problem, at, size, settings)
        for size in (1, b)
        for place, at in (("at the minimum", np.zeros_like(theta)), ("where training starts", theta))
    }
    return found


def _flat_over_sharp(problem: Regression, way: str, k: int, settings: Result) -> float:
    """Updates that take the flattest direction half the way, over those of the sharpest; nothing is random but the samples."""
    theta = np.tile(np.ones(len(problem.scales)), (settings["runs"] // 10, 1))
    rate, path = 0.1, [np.ones(len(problem.scales))]
    for _ in range(settings["updates"]):
        g = sum(problem.gradients(theta, len(theta), settings["b"]) for _ in range(k)) / k
        theta = theta - rate * (g / problem.scales if way == "natural" else g)
        path.append(theta.mean(0))
    speed = -np.polyfit(np.arange(8), np.log(np.abs(np.array(path[:8]))), 1)[0]
    return float(speed[-1] / speed[0])


def _fisher_error(problem: Regression, theta: np.ndarray, b: int, settings: Result) -> float:
    """Relative distance of the mean of g g' over many micro-batches from the Fisher matrix."""
    g = problem.gradients(theta, settings["many"], b)
    fisher = np.diag(problem.scales)
    return float(np.linalg.norm(g.T @ g / len(g) - fisher) / np.linalg.norm(fisher))


def natural_claims(results: list[Result]) -> list[Claim]:
    names = list(results[0]["power"])

    def text(name: str) -> str:
        way, k = name.split()
        return f"{WAYS[way]}, k {k}"

    ours = [name for name in names if not name.startswith("natural")]
    sizes = [name.split()[1] for name in names if name.startswith("accumulated")]
    control = spread([value for k in sizes for value in column(results, "power", f"natural {k}")])
    angle = {name: column(results, "angle", name) for name in results[0]["angle"]}
    return [
        Claim(
            "Accumulation over k micro-batches is nearly the natural gradient: steps are the gradient's over the Fisher "
            "information (power -1).",
            tuple(near(text(name), column(results, "power", name), -1.0, 0.1) for name in ours),
            f"A mean has no preconditioner: its power is 0 for every k. The natural gradient's, measured alike: {control}.",
        ),
        Claim(
            "Directions in which gradients vary more are damped by it (here: to half, the noisiest beside the quietest).",
            tuple(within(text(name), column(results, "damping", name), 0, 0.5) for name in ours),
            "A mean damps the noise of a step, in all directions alike, and none of its expectation.",
        ),
        Claim(
            "With a larger k the step is nearer to the direction of the natural gradient.",
            tuple(
                less(f"degrees, k {k} beside k {sizes[0]}", angle[f"natural {k}"], angle[f"natural {sizes[0]}"])
                for k in sizes[1:]
            ),
            f"It comes nearer to the plain gradient, which is {results[0]['limit']:.0f} degrees from the natural one.",
        ),
        Claim(
            "It ends in the direction of the natural gradient (within 10 degrees).",
            (within(f"k {sizes[-1]}", angle[f"natural {sizes[-1]}"], 0, 10, " degrees"),),
            f"It ends in that of the plain gradient: {spread(angle[f'plain {sizes[-1]}'])} degrees from it, and "
            f"{results[0]['limit']:.0f} are between the two.",
        ),
        Claim(
            "All directions converge at the same speed (20 %), as with the natural gradient.",
            tuple(
                near(f"sharpest over flattest, {text(name)}", column(results, "rates", name), 1.0, 0.2)
                for name in results[0]["rates"]
                if name.startswith("accumulated")
            ),
            "Speeds differ as curvatures do, for every k. With the natural gradient itself: "
            f"{spread([each for k in sizes for each in column(results, 'rates', f'natural {k}')])}.",
        ),
        Claim(
            "The mean of g g' over micro-batches is the Fisher matrix (10 %).",
            tuple(
                within(
                    f"micro-batches of {name}", [100 * each for each in column(results, "fisher", name)], 0, 10, " %"
                )
                for name in results[0]["fisher"]
            ),
            "Of single samples, where the model fits; the noise of a mean of b samples has 1 / b of it, and away from the "
            "minimum the gradient's own square is added. Accumulation never forms the matrix: it keeps the mean of g.",
        ),
    ]


EXPERIMENTS = [
    Experiment(
        "natural",
        "Accumulation and the natural gradient",
        "A linear regression of 20 inputs of variances 0.05 to 1, noise of deviation 1, parameters at distance 1 of the right "
        "ones in each; k micro-batches of 8 samples. Power: slope of step over gradient against the Fisher information, in "
        "logarithms. Speeds: 8 updates at rate 0.1.",
        {
            "d": 20,
            "scales": [0.05, 1.0],
            "b": 8,
            "k": [1, 4, 16, 64],
            "runs": 2000,
            "updates": 8,
            "many": 100_000,
        },
        natural,
        natural_claims,
        HERE,
        minutes=0.3,
        quick={"runs": 100, "k": [1, 4], "many": 2000},
    ),
]
