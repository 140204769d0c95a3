"""Estimates the gradient noise scale, with its interval, from the measurements of a run.

The gradient noise scale of a step with B samples is B V / |mu|^2 samples, from its noise V and its signal |mu|^2
(`samestep.contrib.noise`). Single steps say little: numerators and denominators are averaged over steps, each by itself
(McCandlish et al. 2018, arXiv:1812.06162, appendix A.1).
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

CONFIDENCE = 0.9
MIN_MEASUREMENTS = 8
"""Measurements that an interval of use needs."""


class Measurement(NamedTuple):
    """Signal and noise of one step's gradient.

    Attributes:
        step: number of the step; 1 is the first.
        signal: |mu|^2, unbiased, so that it may be negative.
        noise: noise V of the step times its samples: what one sample's gradient has.
    """

    step: int
    signal: float
    noise: float


@dataclass(frozen=True)
class Estimate:
    """A noise scale in samples, and its 90 % interval.

    Attributes:
        value: infinite where the mean signal is not above 0.
        low, high: ends of the interval; 0 and infinity where the measurements exclude nothing.
        num_measurements: steps that were measured.
    """

    value: float
    low: float
    high: float
    num_measurements: int

    def __str__(self) -> str:
        """Write the value and the interval: 130 (95-190)."""
        low, high = format_size(self.low), format_size(self.high)
        return f"{format_size(self.value)} ({low}-{high})" if self.num_measurements > 1 else format_size(self.value)


def format_size(value: float) -> str:
    """Write a number of samples in three digits at least.

    >>> format_size(math.inf), format_size(0.123), format_size(12.34), format_size(1234.5)
    ('inf', '0.12', '12.3', '1,234')
    """
    if math.isinf(value):
        return "inf"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def read_measurements(lines: Iterable[Mapping[str, Any]], term: str | None = None) -> list[Measurement]:
    """Read the measurements in lines of metrics.jsonl: of the whole gradient, or of a loss term's."""
    prefix = "" if term is None else f"{term}_"
    names = f"{prefix}grad_signal", f"{prefix}grad_noise", "samples"
    return [
        Measurement(line["step"], line[names[0]], line[names[1]] * line["samples"])
        for line in lines
        if all(isinstance(line.get(name), int | float) for name in names)
    ]


def estimate_layers(lines: Sequence[Mapping[str, Any]]) -> dict[str, "Estimate"]:
    """Estimate the noise scale of each layer's gradient over the second half of the lines of noise.jsonl."""
    lines, layers = lines[len(lines) // 2 :], {}
    for name in lines[0]["layers"] if lines else ():
        rows = [
            line["layers"][name] | {"step": line["step"], "samples": line["samples"]}
            for line in lines
            if name in line["layers"]
        ]
        if measurements := read_measurements(rows):
            layers[name] = estimate(measurements)
    return layers


def t_quantile(probability: float, degrees: int) -> float:
    """Compute a quantile of Student's t distribution, above 0.5, to 1 % from 2 degrees of freedom on.

    Cornish and Fisher's expansion around the normal quantile (Abramowitz and Stegun 1964, 26.7.5); exact for 1 and 2 degrees.

    >>> [round(t_quantile(0.95, degrees), 2) for degrees in (1, 2, 4, 9, 100)]
    [6.31, 2.92, 2.13, 1.83, 1.66]
    """
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        a = 2 * probability - 1
        return a * math.sqrt(2 / (1 - a * a))
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / degrees**power for power, term in enumerate(terms)))


def estimate(measurements: Sequence[Measurement], confidence: float = CONFIDENCE) -> Estimate:
    """Estimate the noise scale of some steps: the mean noise of a sample over the mean signal, in samples.

    The interval holds each ratio r for which the mean of noise - r signal does not differ from 0 by Student's t (Fieller 1954,
    Some problems in interval estimation, JRSS B 16(2)). Unlike a standard error of the ratio, it is right where the signal is
    hardly told from 0: then it has no upper end. It takes steps as independent; where the noise scale changes between them, it
    is an interval of their mean. One step has no interval.

    >>> print(estimate([Measurement(step, 1.0 + step % 2 / 10, 100.0) for step in range(10)]))
    95.2 (92.5-98.1)
    >>> print(estimate([Measurement(1, 0.5, 100.0)]), estimate([Measurement(step, (-1.0) ** step, 9.0) for step in range(4)]))
    200 inf (6.64-inf)
    """
    n = len(measurements)
    signal = sum(m.signal for m in measurements) / n
    noise = sum(m.noise for m in measurements) / n
    value = max(noise, 0.0) / signal if signal > 0 else math.inf
    if n == 1:
        return Estimate(value, 0.0, math.inf, n)
    # Variances and the covariance of the means, times t^2
    factor = t_quantile(0.5 + confidence / 2, n - 1) ** 2 / n / (n - 1)
    signal_variance = factor * sum((m.signal - signal) ** 2 for m in measurements)
    noise_variance = factor * sum((m.noise - noise) ** 2 for m in measurements)
    covariance = factor * sum((m.signal - signal) * (m.noise - noise) for m in measurements)
    # The ratios r with  a r^2 - 2 b r + c <= 0
    a, b, c = signal**2 - signal_variance, signal * noise - covariance, noise**2 - noise_variance
    discriminant = b * b - a * c
    if a > 0 and signal > 0:
        root = math.sqrt(max(discriminant, 0.0))
        return Estimate(value, max((b - root) / a, 0.0), max((b + root) / a, 0.0), n)
    if a >= 0 or discriminant <= 0 or c <= 0:
        return Estimate(value, 0.0, math.inf, n)
    # All r but those between two roots of unequal sign; below the negative one the signal would be negative
    return Estimate(value, max((b - math.sqrt(discriminant)) / a, (b + math.sqrt(discriminant)) / a), math.inf, n)


def split(measurements: Sequence[Measurement], num_windows: int = 5) -> list[Sequence[Measurement]]:
    """Split the measurements of a training into windows of about as many each, at least `MIN_MEASUREMENTS`, in order.

    >>> [len(window) for window in split([Measurement(step, 1.0, 1.0) for step in range(35)])]
    [8, 9, 9, 9]
    """
    number = min(num_windows, max(1, len(measurements) // MIN_MEASUREMENTS))
    ends = [len(measurements) * place // number for place in range(number + 1)]
    return [measurements[first:last] for first, last in itertools.pairwise(ends)]
