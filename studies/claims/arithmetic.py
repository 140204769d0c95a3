"""Claims that a few lines of arithmetic or a simulation with random numbers decide."""

import math
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from verdicts import Case, Claim, Experiment, column, equal, near, rounds, so, spread, within

from samestep.cut import layout as plan
from samestep.recipe import scaling
from samestep.recipe.schedule import Schedule

HERE = (sys.modules[__name__],)
Result = dict[str, Any]

# ---------------------------------------------------------------------------------------------------------------------
# The indicator of every k-th micro-step


def indicator(settings: Result, seed: int) -> Result:
    """How often each identity of chi(t/k) = [k divides t] fails for t = 1..T."""
    t = np.arange(1, settings["T"] + 1)

    def chi(k: int, at: np.ndarray = t) -> np.ndarray:
        return (at % k == 0).astype(int)

    return {
        "product": sum(
            int((chi(k) * chi(j) != chi(math.lcm(k, j))).sum()) for k in settings["k"] for j in settings["k"]
        ),
        "sum": sum(int((np.cumsum(chi(k)) != t // k).sum()) for k in settings["k"]),
        "neighbours": {str(k): int((chi(k, t - 1) + chi(k) > 1).sum()) for k in settings["k"]},
    }


def indicator_claims(results: list[Result]) -> list[Claim]:
    (of,) = results
    several = {k: count for k, count in of["neighbours"].items() if k != "1"}
    return [
        Claim(
            "The product of two indicators is that of the least common multiple; their sum to T is floor(T / k).",
            tuple(
                so(name, f"fails {of[key]} times", not of[key])
                for name, key in (("product", "product"), ("sum", "sum"))
            ),
        ),
        Claim(
            "An update and the start of the next window never fall on the same micro-step.",
            (
                so("k = 1", f"fails {of['neighbours']['1']} times", not of["neighbours"]["1"]),
                so("k = 2 and more", f"fails {sum(several.values())} times", not sum(several.values())),
            ),
            "Without accumulation every micro-step is both.",
        ),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Accumulation folded into momentum


def momentum_of(gradients: np.ndarray, k: int, decay_first: float, decay_later: float, share: float) -> np.ndarray:
    """Momentum after each window of k gradients [T, d]: m = decay m + share g at every micro-step.

    Args:
        gradients: [T, d], of T / k windows.
        k: micro-steps of a window.
        decay_first, decay_later: at the first micro-step of a window, and at the others.
        share: of a gradient.
    """
    m, found = np.zeros(gradients.shape[1]), []
    for t, g in enumerate(gradients):
        m = (decay_later if t % k else decay_first) * m + share * g
        if t % k == k - 1:
            found.append(m)
    return np.array(found)


def accumulated(gradients: np.ndarray, k: int, beta: float) -> np.ndarray:
    """Momentum of the windows' mean gradients: m = beta m + (1 - beta) mean."""
    means = gradients.reshape(-1, k, gradients.shape[1]).mean(1)
    return momentum_of(means, 1, beta, beta, 1 - beta)


def folded(settings: Result, seed: int) -> Result:
    """Relative error of momentum at the ends of windows, stationary gradients with variance `rho` times mean^2."""
    beta, size, found = settings["beta"], settings["d"], {}
    for k in settings["k"]:
        rng = np.random.default_rng((seed, k))
        mean = rng.standard_normal(size)
        noise = rng.standard_normal((settings["windows"] * k, size))
        gradients = mean + math.sqrt(settings["rho"]) * noise
        true = accumulated(gradients, k, beta)
        substitute = 1 - (1 - beta) / k
        ways = {
            "exact": momentum_of(gradients, k, beta, 1.0, (1 - beta) / k),
            "substitute": momentum_of(gradients, k, substitute, substitute, (1 - beta) / k),
        }
        later = slice(settings["windows"] // 2, None)  # when the first windows no longer count
        found[str(k)] = {
            way: float(np.linalg.norm(m[later] - true[later]) / np.linalg.norm(true[later])) for way, m in ways.items()
        }
    return found


def folded_claims(results: list[Result]) -> list[Claim]:
    sizes = [k for k in results[0] if k != "1"]
    return [
        Claim(
            "Momentum that decays once per window and takes (1 - beta) / k of every gradient is that of accumulation.",
            tuple(equal(f"k {k}", column(results, k, "exact"), 1e-12, "relative error: ") for k in results[0]),
        ),
        Claim(
            "One decay at every micro-step, 1 - (1 - beta) / k, gives the same momentum but for what can be neglected "
            "(here: 1 % of it).",
            tuple(
                within(f"k {k}", [100 * each for each in column(results, k, "substitute")], 0, 1, " %") for k in sizes
            ),
            "Besides the decay of a window, the gradients in it get unequal weights.",
        ),
    ]


def variances(settings: Result, seed: int) -> Result:
    """Variance and standard deviation of a step over those of the step of single micro-batches; unit noise."""
    rng, found = np.random.default_rng(seed), {}
    size, beta = settings["d"], settings["beta"]
    for k in settings["k"]:
        own, shared = rng.standard_normal((k, size)), rng.standard_normal(size)
        half = (own + shared) / math.sqrt(2)  # of correlation 0.5
        ratio = float(own.mean(0).var())
        noise = rng.standard_normal((settings["windows"] * k, size // 100))
        alone = momentum_of(noise, 1, beta, beta, 1 - beta)[20 * k :: k]
        sparse = momentum_of(noise, k, beta, beta, 1 - beta)[20:]
        folded_in = momentum_of(noise, k, beta, 1.0, (1 - beta) / k)[20:]
        found[str(k)] = {
            "independent": ratio,
            "deviation": math.sqrt(ratio),
            "correlated": float(half.mean(0).var()),
            "folded": float(folded_in.var() / alone.var()),
            "sparse": float(sparse.var() / alone.var()),
        }
    return found


def variance_claims(results: list[Result]) -> list[Claim]:
    sizes = list(results[0])

    def cases(key: str, name: str) -> tuple[Case, ...]:
        return tuple(near(f"{name}, k {k}", column(results, k, key), 1 / int(k)) for k in sizes)

    return [
        Claim(
            "Averaging k gradients divides the variance of a step by k.",
            cases("independent", "independent micro-batches") + cases("correlated", "correlation 0.5"),
            "It takes independent micro-batches; with a correlation r the variance is (1 + (k - 1) r) / k.",
        ),
        Claim(
            "Updating at every k-th micro-step divides the variance of a step with momentum by k.",
            cases("folded", "gradients averaged over the window")
            + cases("sparse", "sparse updates, decay beta at every micro-step"),
            "Momentum that decays at every micro-step averages as much with sparse updates as without: the variance of a "
            "step stays, only steps are rarer.",
        ),
        Claim(
            "The reduction is 1 / k, not 1 / sqrt(k) as for means in statistics, because updates are rarer too.",
            tuple(near(f"standard deviation, k {k}", column(results, k, "deviation"), 1 / int(k)) for k in sizes),
            "It is the same law: the variance of a mean falls as 1 / k, its standard deviation as 1 / sqrt(k), however rare "
            "updates are.",
        ),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Squares of means and means of squares


def squares(settings: Result, seed: int) -> Result:
    """Jensen's gap, and the square of the mean over the mean of squares, for gradients of unit variance."""
    rng, found = np.random.default_rng(seed), {}
    for ratio in settings["snr"]:
        for k in settings["k"]:
            g = ratio + rng.standard_normal((k, settings["d"]))
            of_means, of_squares = float((g.mean(0) ** 2).mean()), float((g**2).mean())
            found[f"{ratio:g} {k}"] = {
                "gap": of_squares - of_means,
                "within_window": float(g.var(0).mean()),
                "C": of_means / of_squares,
            }
    return found


def square_claims(results: list[Result]) -> list[Claim]:
    keys = [key.split() for key in results[0]]

    def exact(ratio: str, k: str) -> float:
        return (float(ratio) ** 2 + 1 / int(k)) / (1 + float(ratio) ** 2)

    worst = max(abs(exact(*key) / float(np.mean(column(results, " ".join(key), "C"))) - 1) for key in keys)
    return [
        Claim(
            "The mean of k squares exceeds the square of the mean by the variance of the gradient.",
            (
                equal(
                    "variance within the window (divided by k)",
                    [of["gap"] - of["within_window"] for result in results for of in result.values()],
                    1e-9,
                ),
                *(
                    near(f"variance of micro-batch gradients (1 here), k {k}", column(results, f"1 {k}", "gap"), 1.0)
                    for ratio, k in keys
                    if ratio == "1"
                ),
            ),
            "Of the gradient's variance it is on average 1 - 1 / k.",
        ),
        Claim(
            "The square of the mean is C = SNR^2 / (1 + SNR^2) of the mean of squares.",
            tuple(
                near(
                    f"SNR {ratio}, k {k}",
                    column(results, f"{ratio} {k}", "C"),
                    float(ratio) ** 2 / (1 + float(ratio) ** 2),
                )
                for ratio, k in keys
            ),
            "C = (SNR^2 + 1 / k) / (1 + SNR^2), the stated form is its limit for large k SNR^2; measured within "
            f"{worst:.1%} of it everywhere.",
        ),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The substitute coefficient, learning rates, decay


def substitute(settings: Result, seed: int) -> Result:
    """|substitute^k - beta| in a table, and how it depends on k; displacement by momentum under rules for the rate."""
    errors = {
        f"{beta:g} {k}": abs((1 - (1 - beta) / k) ** k - beta) for beta in settings["beta"] for k in settings["k"]
    }
    many = np.array([2, 4, 8, 16, 32, 64])
    falls = np.abs((1 - 0.1 / many) ** many - 0.9)
    rates = np.array([0.2, 0.1, 0.05, 0.025])  # 1 - beta at k = 4
    grows = np.abs((1 - rates / 4) ** 4 - (1 - rates))
    return {
        "errors": errors,
        "power_of_k": float(np.polyfit(np.log(many), np.log(falls), 1)[0]),
        "power_of_rate": float(np.polyfit(np.log(rates), np.log(grows), 1)[0]),
        "limit": math.exp(-0.1) - 0.9,
        "steps": {str(k): _displacement(k) for k in (2, 4, 8)},
    }


def _displacement(k: int, beta: float = 0.9, windows: int = 400) -> dict[str, float]:
    """How far a constant gradient moves a parameter per micro-step, relative to an update at every micro-step."""
    ones, substitute_beta = np.ones((windows * k, 1)), 1 - (1 - beta) / k
    plain = momentum_of(ones, 1, beta, beta, 1 - beta)[-k:].sum()
    folded_in = momentum_of(ones, k, beta, 1.0, (1 - beta) / k)[-1].sum()
    torch_plain = momentum_of(ones, 1, beta, beta, 1.0)[-k:].sum()
    torch_substitute = momentum_of(ones, k, substitute_beta, substitute_beta, 1.0)[-1].sum()
    return {
        "unchanged": float(folded_in / plain),
        "sqrt": float(math.sqrt(k) * folded_in / plain),
        "linear": float(k * folded_in / plain),
        "torch_unchanged": float(torch_substitute / torch_plain),
    }


def substitute_claims(results: list[Result]) -> list[Claim]:
    (of,) = results
    steps = of["steps"]
    stated = {"0.9 4": "0.001", "0.9 8": "0.0003", "0.99 4": "0.00001"}
    show = {key: ", ".join(f"{steps[k][key]:.3g}" for k in steps) for key in ("linear", "torch_unchanged")}
    return [
        Claim(
            "1 - (1 - beta) / k, twice over, is beta up to 0.0025 (beta 0.9).",
            (rounds("beta 0.9, k 2", of["errors"]["0.9 2"], "0.0025"),),
        ),
        Claim(
            "With more micro-steps and at 0.99 the error is smaller, by a table: 0.001, 0.0003 and 0.00001.",
            tuple(rounds(f"beta {key.replace(' ', ', k ')}", of["errors"][key], text) for key, text in stated.items()),
            f"The error grows with k, at beta 0.9 to {of['limit']:.5f}.",
        ),
        Claim(
            "That error is O(1 / k^2).",
            (near("power of k, k 2 to 64, beta 0.9", [of["power_of_k"]], -2.0),),
            f"It is O((1 - beta)^2): measured power of 1 - beta {of['power_of_rate']:.3f}.",
        ),
        Claim(
            "At k = 4 it is about 6 %.",
            (near("relative error, beta 0.9", [100 * of["errors"]["0.9 4"] / 0.9], 6.0, unit=" %"),),
            "1 / k^2 is 6 %, but that is not the error.",
        ),
        Claim(
            "Under the substitute, a learning rate alpha sqrt(k) restores the linear rule: as far per sample as without "
            "accumulation.",
            tuple(near(f"k {k}", [steps[k]["sqrt"]], 1.0) for k in steps),
            f"sqrt(k) is the square-root rule. The linear one takes k alpha (displacement {show['linear']} at k "
            f"{', '.join(steps)}); with torch's momentum, buf = beta buf + g, an unchanged alpha is the linear rule already "
            f"({show['torch_unchanged']}).",
        ),
        Claim(
            "With an unchanged rate, accumulation trains at alpha / k: parameters move 1 / k as far per sample.",
            tuple(near(f"k {k}", [steps[k]["unchanged"]], 1 / int(k)) for k in steps),
        ),
        Claim(
            "Momentum of 0.9 dissipates 10 % of the energy in a step.",
            (
                near("of the velocity", [100 * (1 - 0.9)], 10.0, unit=" %"),
                near("of the energy, velocity squared", [100 * (1 - 0.9**2)], 10.0, unit=" %"),
            ),
        ),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Numbers of the examples

LAYOUTS = {  # what it is: N, b, k, and the global batch that is stated
    "BERT-Large on one card": (1, 8, 4, 32),
    "BERT-Large on 11 GB": (1, 4, 32, 128),
    "GPT-2 1.5B on 8 cards": (8, 4, 16, 512),
    "a large GPT on 8 cards": (8, 2, 64, 1024),
    "4 cards, 64 micro-steps": (4, 8, 64, 2048),
    "ResNet-50 on 4 cards": (4, 64, 1, 256),
    "ResNet-50 on 4 cards, larger": (4, 32, 4, 512),
    "captchas on 3 cards": (3, 1024, 1, 3072),
    "captchas on 3 cards, in half the memory": (3, 512, 2, 3072),
}

ACCURACY = (84.2, 84.6, 85.1, 85.3)  # as told: as it was, the coefficient alone, sparse alone, both


def examples(settings: Result, seed: int) -> Result:
    """The arithmetic of the worked examples, by samestep.cut.layout, samestep.recipe.scaling and samestep.recipe.schedule."""
    batches = {
        name: plan.solve_layout(
            num_processes=n, per_device_train_batch_size=b, gradient_accumulation_steps=k
        ).global_batch_size
        for name, (n, b, k, _) in LAYOUTS.items()
    }
    steps = {
        end: [float(plan.steps_per_epoch(50_030, batch, end)) for batch in (1536, 3072)]
        for end in ("drop", "keep", "carry")
    }

    def linear(rate: float, tuned: int, batch: int) -> float:
        return scaling.scale("linear", scaling.Hyperparameters(rate, None, None, None), tuned, batch).learning_rate

    schedule = Schedule("cosine", peak=6e-4, num_steps=2400, num_warmup_steps=80, min_ratio=1e-6 / 6e-4)
    return {
        "batches": batches,
        "steps": steps,
        "rates": {
            "0.1 at 256 -> 1024": linear(0.1, 256, 1024),
            "0.1 at 64 -> 512": linear(0.1, 64, 512),
            "2e-4 at 64 -> 1024": linear(2e-4, 64, 1024),
            "2e-4 at 1536 -> 3072": linear(2e-4, 1536, 3072),
        },
        "end_of_first_epoch": schedule(15),
    }


def example_claims(results: list[Result]) -> list[Claim]:
    (of,) = results
    steps, rates = of["steps"], of["rates"]
    base, coefficient, sparse, both = ACCURACY
    ends = {"drop": "last batch dropped", "keep": "last batch kept", "carry": "batches across epochs"}
    table = scaling.CONSERVATIVE_RANGES[2].learning_rate_factor
    return [
        Claim(
            "Global batches of the worked examples, N b k.",
            tuple(so(name, f"{of['batches'][name]}", of["batches"][name] == LAYOUTS[name][3]) for name in LAYOUTS),
        ),
        Claim(
            "Linear rule: 0.1 at 256 becomes 0.4 at 1024; 0.1 at 64 becomes 0.8 at 512; 2e-4 at 64 becomes 0.0032 at 1024.",
            (
                rounds("0.1 at 256", rates["0.1 at 256 -> 1024"], "0.4"),
                rounds("0.1 at 64", rates["0.1 at 64 -> 512"], "0.8"),
                rounds("2e-4 at 64", rates["2e-4 at 64 -> 1024"], "0.0032"),
            ),
        ),
        Claim(
            "3 times the rate (6e-4 for 2e-4) at 2 times the batch (3,072 for 1,536) keeps the linear proportion.",
            (
                near("linear rule", [rates["2e-4 at 1536 -> 3072"]], 6e-4),
                so("conservative table, times 2", f"{table[0]:g} to {table[1]:g} times", table[0] <= 3 <= table[1]),
            ),
            f"The linear rule gives {rates['2e-4 at 1536 -> 3072']:g}.",
        ),
        Claim(
            "50,030 samples are 33 steps of 1,536.",
            tuple(rounds(text, steps[end][0], "33.0") for end, text in ends.items()),
        ),
        Claim(
            "50,030 samples are 16 steps of 3,072, 2,400 in 150 epochs.",
            tuple(rounds(text, 150 * steps[end][1], "2400") for end, text in ends.items()),
        ),
        Claim(
            "So the doubled batch takes 2.06 times fewer steps.",
            tuple(rounds(text, steps[end][0] / steps[end][1], "2.06") for end, text in ends.items()),
            "It compares a number of steps rounded up with one rounded down.",
        ),
        Claim(
            "After the first of five epochs of warm-up, of 16 steps each, the rate is 7.5e-5 of 6e-4.",
            (near("step 16 of 80", [of["end_of_first_epoch"]], 7.5e-5),),
            f"It is {of['end_of_first_epoch']:.3g}.",
        ),
        Claim(
            "Sparse updates alone are 77 % of the gain in accuracy and the coefficient 23 % (of +0.9, +0.4 and +1.1 points).",
            (
                near("sparse alone / both", [100 * (sparse - base) / (both - base)], 77.0, unit=" %"),
                near(
                    "sparse alone / sum of both alone",
                    [100 * (sparse - base) / (sparse - base + coefficient - base)],
                    77.0,
                    unit=" %",
                ),
                near("coefficient added last / both", [100 * (both - sparse) / (both - base)], 23.0, unit=" %"),
            ),
            "The told table itself says otherwise. Effects of two changes add up to 100 % only if they do not interact.",
        ),
        Claim(
            "0.52 to 0.48 is 7.7 % less; 72 to 67 hours 7 % less.",
            (
                rounds("loss", 100 * (0.52 - 0.48) / 0.52, "7.7", " %"),
                rounds("hours", 100 * (72 - 67) / 72, "7", " %"),
            ),
        ),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Dividing by k


class Windows(nn.Module):
    """A small classifier of tokens; with or without batch normalisation."""

    def __init__(self, normalised: bool):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16) if normalised else nn.Identity(), nn.Tanh(), nn.Linear(16, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def division(settings: Result, seed: int) -> Result:
    """Relative error of gradients accumulated in usual ways, beside that of the whole batch's mean loss; float64."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    k, found = settings["k"], {}
    even = [settings["targets"]] * k
    ragged = rng.integers(1, 2 * settings["targets"], k).tolist()
    cases = {
        "even": (even, False, k),
        "ragged": (ragged, False, k),
        "short window": (even[:-1], False, k),
        "batch normalisation": (even, True, k),
    }
    for name, (counts, normalised, divisor) in cases.items():
        model = Windows(normalised).double().train()
        x, y = torch.randn(sum(counts), 8, dtype=torch.float64), torch.randint(5, (sum(counts),))
        true = _gradient(model, [nn.functional.cross_entropy(model(x), y)])
        cells = list(zip(x.split(counts), y.split(counts), strict=True))
        means = [nn.functional.cross_entropy(model(a), b) / divisor for a, b in cells]
        found[name] = _relative(_gradient(model, means), true)
        if name == "even":
            whole = [nn.functional.cross_entropy(model(a), b) for a, b in cells]
            found["not divided"] = float(_gradient(model, whole).norm() / true.norm())
            first_divided = [whole[0] / k, *whole[1:]]
            found["first gradient divided"] = _relative(_gradient(model, first_divided), true)
    return found


def _gradient(model: nn.Module, parts: list[torch.Tensor]) -> torch.Tensor:
    gradients = torch.autograd.grad(sum(parts), list(model.parameters()), retain_graph=True)
    return torch.cat([g.flatten() for g in gradients])


def _relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found - true).norm() / true.norm())


def division_claims(results: list[Result]) -> list[Claim]:
    names = {
        "even": "as many targets in every micro-batch",
        "ragged": "ragged numbers of targets",
        "short window": "a last window of k - 1 micro-batches",
        "batch normalisation": "batch normalisation, as many targets",
    }
    return [
        Claim(
            "Losses divided by k, accumulated, give exactly the gradient of the whole batch; so do averages over processes.",
            tuple(equal(text, column(results, name), 1e-12, "relative error: ") for name, text in names.items()),
            "Sums divided by the targets of the whole step do, for every cut (docs/exactness.md). Errors here: "
            + "; ".join(f"{text} {spread(column(results, name))}" for name, text in list(names.items())[1:])
            + ".",
        ),
        Claim(
            "Without the division the gradient is k times too large.",
            (near("k 4, as many targets", column(results, "not divided"), 4.0),),
        ),
        Claim(
            "Dividing what has accumulated by k once, after the first micro-batch of a window, gives the mean.",
            (equal("k 4", column(results, "first gradient divided"), 1e-12, "relative error: "),),
            "It divides one gradient of k.",
        ),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Compression


def compression(settings: Result, seed: int) -> Result:
    """Bytes that each of p processes sends for a gradient of d independent normal numbers, of which each keeps the largest."""
    p, k, size = settings["p"], settings["k"], settings["d"]
    keep = size // 10
    rng, union = np.random.default_rng(seed), np.zeros(size, bool)
    for _ in range(p):
        union[np.argpartition(np.abs(rng.standard_normal(size)), -keep)[-keep:]] = True
    ring = 2 * (p - 1) / p * 4 * size
    gathered = (p - 1) * 8 * keep  # all-gather of values and places: the union is larger than a part
    return {
        "union": float(union.mean()),
        "values": k * size / keep,
        "values_and_places": k * 4 * size / (8 * keep),
        "collective": k * ring / gathered,
        "once_per_step": ring / gathered,
    }


def compression_claims(results: list[Result]) -> list[Claim]:
    names = {
        "values": "values alone, against reducing at every micro-step",
        "values_and_places": "values and their places, against reducing at every micro-step",
        "collective": "the same, 8 processes: all-gather against a ring all-reduce at every micro-step",
        "once_per_step": "the same, against a ring all-reduce once per step",
    }
    return [
        Claim(
            "k = 4 and the largest 10 % of the gradient: 40 times less communication.",
            tuple(near(text, column(results, name), 40.0) for name, text in names.items()),
            "Places cost as much as values, processes keep different ones (together "
            f"{spread([100 * each for each in column(results, 'union')])} % of the gradient), and a correct loop reduces once "
            "per step anyway.",
        ),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# k from the noise

BEST = (1, 2, 4, 8, 16)


def best_k(settings: Result, seed: int) -> Result:
    """Final loss of a noisy quadratic, SGD without momentum, after as many micro-batches, for every k, rate and noise."""
    curvature = np.geomspace(0.1, 1, settings["d"])
    found = {}
    for noise in settings["noise"]:
        rng = np.random.default_rng((seed, int(1000 * noise)))
        start = rng.standard_normal(settings["d"])
        draws = noise * rng.standard_normal((settings["micro_steps"], settings["runs"], settings["d"]))
        variation = noise * math.sqrt(settings["d"]) / np.linalg.norm(curvature * start)
        losses = {}
        for k in BEST:
            means = draws.reshape(-1, k, *draws.shape[1:]).mean(1)
            for factor in settings["factors"]:
                theta = np.tile(start, (settings["runs"], 1))
                for g in means:
                    theta = theta - settings["rate"] * factor * (curvature * theta + g)
                losses[f"{k} {factor:g}"] = float(np.minimum(0.5 * (curvature * theta**2).sum(-1), 1e6).mean())
        best = {k: min(losses[f"{k} {factor:g}"] for factor in settings["factors"]) for k in BEST}
        found[f"{noise:g}"] = {
            "variation": float(variation),
            **{
                f"rate times {factor:g}": min(BEST, key=lambda k, factor=factor: losses[f"{k} {factor:g}"])
                for factor in settings["fixed"]
            },
            "best_rate": min(BEST, key=best.__getitem__),
            "cost": {str(k): best[k] / min(best.values()) for k in BEST},
        }
    return found


def best_k_claims(results: list[Result]) -> list[Claim]:
    cases = []
    fixed = [key for key in next(iter(results[0].values())) if key.startswith("rate times")]
    for key, text in (*((key, key) for key in fixed), ("best_rate", "each k at its best rate")):
        for noise in results[0]:
            told = [math.ceil(each) for each in column(results, noise, "variation")]
            found = column(results, noise, key)
            right = [each / 2 <= best <= 2 * each for each, best in zip(told, found, strict=True)]
            measured = f"ceil(std / mean) {spread(told)}, best k {spread(found)}"
            cases.append(so(f"{text}, noise {noise}", measured, all(right)))
    first = list(results[0])[-1]
    cost = "; ".join(f"k = {k}: {spread(column(results, first, 'cost', k))}" for k in results[0][first]["cost"])
    return [
        Claim(
            "The best number of micro-steps is about ceil(std / mean) of the gradient (here: within a factor of 2 of it, for "
            "every seed).",
            tuple(cases),
            "At a fixed rate a larger k does the work of a smaller rate, and the best k depends on that rate and on the "
            "number of "
            f"samples. Each k at its best rate, noise {first}: loss over that of the best, {cost}.",
        )
    ]


EXPERIMENTS = [
    Experiment(
        "indicator",
        "The indicator of every k-th micro-step",
        "Identities of chi(t / k), counted.",
        {"T": 1000, "k": [1, 2, 3, 4, 6, 8]},
        indicator,
        indicator_claims,
        HERE,
        seeded=False,
    ),
    Experiment(
        "folded",
        "Accumulation inside momentum",
        "Random gradients of 1,000 coordinates, variance 10 mean^2, 200 windows, beta 0.9: momentum at the ends of windows "
        "beside "
        "that of the windows' mean gradients, in float64.",
        {"k": [1, 2, 4, 8], "beta": 0.9, "d": 1000, "windows": 200, "rho": 10.0},
        folded,
        folded_claims,
        HERE,
    ),
    Experiment(
        "variance",
        "Variance of a step",
        "Random gradients of unit variance, 100,000 coordinates; with momentum 0.9 1,000 of them over 400 windows.",
        {"k": [2, 4, 8], "beta": 0.9, "d": 100_000, "windows": 400},
        variances,
        variance_claims,
        HERE,
    ),
    Experiment(
        "squares",
        "The square of a mean and the mean of squares",
        "Random gradients of unit variance, 100,000 coordinates, signal-to-noise ratio of one micro-batch SNR.",
        {"snr": [0.1, 1.0, 3.0], "k": [2, 4, 8, 64], "d": 100_000},
        squares,
        square_claims,
        HERE,
    ),
    Experiment(
        "substitute",
        "A substitute for the coefficient, and the learning rate with it",
        "Arithmetic; displacement of a parameter by a constant gradient, beta 0.9, once momentum is stationary.",
        {"beta": [0.9, 0.99], "k": [2, 4, 8]},
        substitute,
        substitute_claims,
        HERE,
        seeded=False,
    ),
    Experiment(
        "examples",
        "Numbers of the worked examples",
        "Arithmetic of samestep.cut.layout, samestep.recipe.scaling and samestep.recipe.schedule.",
        {},
        examples,
        example_claims,
        HERE,
        seeded=False,
    ),
    Experiment(
        "division",
        "Dividing by k",
        "A two-layer classifier with random weights on random data, k = 4 micro-batches of 8 targets (ragged: 1 to 15), "
        "float64.",
        {"k": 4, "targets": 8},
        division,
        division_claims,
        HERE,
    ),
    Experiment(
        "compression",
        "Compressed and sparse",
        "8 processes, a gradient of 100,000 independent normal numbers in float32, places in int32.",
        {"p": 8, "k": 4, "d": 100_000},
        compression,
        compression_claims,
        HERE,
    ),
    Experiment(
        "best_k",
        "k from the coefficient of variation",
        "A quadratic of 20 dimensions, curvatures 0.1 to 1, SGD without momentum at 1/32 to 16 times the rate 0.1; 512 "
        "micro-batches whose gradients have independent normal noise; mean of 50 runs per seed.",
        {
            "d": 20,
            "noise": [0.1, 0.5, 2.0],
            "rate": 0.1,
            "factors": [0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0],
            "fixed": [0.25, 1.0, 4.0],
            "micro_steps": 512,
            "runs": 50,
        },
        best_k,
        best_k_claims,
        HERE,
    ),
]
