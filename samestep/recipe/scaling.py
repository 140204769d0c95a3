"""The change of the optimizer's numbers when the global batch differs from the one they were tuned at.

Every rule is a pure function of (tuned, tuned_batch_size, global_batch_size) and speaks of one ratio,

    kappa = global_batch_size / tuned_batch_size,

both in samples per optimizer step. Products are taken on the decimals as written, so 3 x 2e-4 is 6e-4 in every log,
and at kappa = 1 every rule gives back the tuned numbers bit by bit.
No rule suits every model: numbers measured at the batch in use come first, and then the rule is `none`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, NamedTuple

from samestep.errors import UsageError, nearest


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers whose best values depend on the global batch.

    Args:
        learning_rate: peak learning rate, at least 0.
        adam_beta1: decay of Adam's first moment per step, in [0, 1); None where the optimizer is not Adam.
        adam_beta2: decay of Adam's second moment per step, in [0, 1); None likewise.
        adam_epsilon: Adam's epsilon, in units of the gradient, at least 0; None likewise.
        warmup_epochs: length of the warm-up in epochs; None leaves the recipe's own. Only `conservative` sets it.

    Raises:
        UsageError: a value is outside its range; all of them at once.
    """

    learning_rate: float
    adam_beta1: float | None
    adam_beta2: float | None
    adam_epsilon: float | None
    warmup_epochs: float | None = None

    def __post_init__(self) -> None:
        ends = {"adam_beta1": 1, "adam_beta2": 1, "adam_epsilon": math.inf, "warmup_epochs": math.inf}
        ends = {"learning_rate": math.inf} | {
            name: end for name, end in ends.items() if getattr(self, name) is not None
        }
        if problems := [
            f"{name} {getattr(self, name)!r} must be a number in [0, {end}): correct it."
            for name, end in ends.items()
            if not _is_number(getattr(self, name), end)
        ]:
            raise UsageError(problems)


class Range(NamedTuple):
    """A row of the conservative table: (low, high) of the learning-rate factor and of the warm-up in epochs."""

    learning_rate_factor: tuple[float, float]
    warmup_epochs: tuple[float, float]


CONSERVATIVE_RANGES = {
    2: Range(learning_rate_factor=(1.5, 2.0), warmup_epochs=(3, 5)),
    4: Range(learning_rate_factor=(2.0, 3.0), warmup_epochs=(5, 10)),
    8: Range(learning_rate_factor=(2.0, 4.0), warmup_epochs=(10, 20)),
    16: Range(learning_rate_factor=(3.0, 5.0), warmup_epochs=(20, 30)),
}
"""kappa -> the range that practice has found safe; one row per doubling of the batch."""


def kappa(tuned_batch_size: int, global_batch_size: int) -> Fraction:
    """Compute the ratio of the batch in use to the batch of the tuning, exactly.

    Args:
        tuned_batch_size: samples per step at which the numbers were tuned.
        global_batch_size: samples per step now.

    Raises:
        UsageError: a batch size is not a whole number of at least 1.

    >>> kappa(256, 256), kappa(256, 1024), kappa(1536, 512)
    (Fraction(1, 1), Fraction(4, 1), Fraction(1, 3))
    """
    sizes = {"tuned_batch_size": tuned_batch_size, "global_batch_size": global_batch_size}
    if problems := [
        f"{name} {size!r} must be a whole number of samples, at least 1: correct it."
        for name, size in sizes.items()
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1
    ]:
        raise UsageError(problems)
    return Fraction(global_batch_size, tuned_batch_size)


def none(tuned: Hyperparameters, tuned_batch_size: int, global_batch_size: int) -> Hyperparameters:
    """Keep the tuned numbers at any batch.

    >>> none(Hyperparameters(0.1, 0.9, 0.999, 1e-8), 256, 1024).learning_rate
    0.1
    """
    kappa(tuned_batch_size, global_batch_size)  # a bad batch is an error under every rule
    return tuned


def linear(tuned: Hyperparameters, tuned_batch_size: int, global_batch_size: int) -> Hyperparameters:
    """Scale the learning rate in proportion to the batch, for SGD; warm up over the first epochs (5 in the paper).

        learning_rate' = kappa * learning_rate

    >>> [linear(Hyperparameters(0.1, 0.9, 0.999, 1e-8), 256, batch).learning_rate for batch in (256, 1024, 8192)]
    [0.1, 0.4, 3.2]

    Reference: Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017, arXiv:1706.02677.
    """
    return replace(tuned, learning_rate=_multiply(tuned.learning_rate, kappa(tuned_batch_size, global_batch_size)))


def sqrt(tuned: Hyperparameters, tuned_batch_size: int, global_batch_size: int) -> Hyperparameters:
    """Keep Adam's stochastic differential equation the same at another batch, as long as gradient noise dominates.

        learning_rate' = sqrt(kappa) * learning_rate      beta' = 1 - kappa (1 - beta), for both
        epsilon'       = epsilon / sqrt(kappa)

    Raises:
        UsageError: kappa (1 - beta) reaches 1, where a moment would remember nothing; all such fields at once.

    >>> sqrt(Hyperparameters(1e-4, 0.9, 0.999, 1e-8), 256, 1024)
    Hyperparameters(learning_rate=0.0002, adam_beta1=0.6, adam_beta2=0.996, adam_epsilon=5e-09, warmup_epochs=None)
    >>> sqrt(Hyperparameters(1e-4, 0.9, 0.999, 1e-8), 256, 2560)
    Traceback (most recent call last):
    samestep.errors.UsageError: global_batch_size 2560 is too large for sqrt scaling of adam_beta1 0.9 tuned at 256. ...

    Reference: Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms, 2022, arXiv:2205.10287.
    """
    ratio = kappa(tuned_batch_size, global_batch_size)
    beta1, beta2, epsilon = _adam_numbers("sqrt", tuned)
    rates = {"adam_beta1": 1 - _to_fraction(beta1), "adam_beta2": 1 - _to_fraction(beta2)}
    largest = {name: max(tuned_batch_size, math.ceil(tuned_batch_size / rate) - 1) for name, rate in rates.items()}
    if problems := [
        f"global_batch_size {global_batch_size} is too large for sqrt scaling of {name} {getattr(tuned, name)} "
        f"tuned at {tuned_batch_size}. 1 - {name} = {float(rates[name]):g}, times {float(ratio):g}, by which the batch "
        f"is larger, must stay below 1. Use a batch of {size} or less, or --lr_scaling_rule none, linear or beta2_half_life."
        for name, size in largest.items()
        if global_batch_size > size
    ]:
        raise UsageError(problems)
    return replace(
        tuned,
        learning_rate=_multiply(tuned.learning_rate, math.sqrt(ratio)),
        adam_epsilon=_multiply(epsilon, math.sqrt(1 / ratio)),
        **{name: float(1 - ratio * rate) for name, rate in rates.items()},
    )


def beta2_half_life(tuned: Hyperparameters, tuned_batch_size: int, global_batch_size: int) -> Hyperparameters:
    """Keep the half-life of Adam's second moment in samples (for a language model, tokens), and the learning rate.

        beta2' = beta2 ** kappa,  so that  half-life = global_batch_size * log(1/2) / log(beta2')  samples stays

    >>> [round(beta2_half_life(Hyperparameters(1e-4, 0.9, 0.95, 1e-8), 512, b).adam_beta2, 4) for b in (512, 1024, 1)]
    [0.95, 0.9025, 0.9999]

    Reference: Marek et al., Small Batch Size Training for Language Models: When Vanilla SGD Works, and Why Gradient
    Accumulation Is Wasteful, 2025, arXiv:2507.07101.
    """
    ratio = kappa(tuned_batch_size, global_batch_size)
    _, beta2, _ = _adam_numbers("beta2_half_life", tuned)
    return replace(tuned, adam_beta2=beta2 ** float(ratio))


def conservative(tuned: Hyperparameters, tuned_batch_size: int, global_batch_size: int) -> Hyperparameters:
    """Take the cautious end of `CONSERVATIVE_RANGES`: the lowest learning rate and the longest warm-up of each row.

    Between rows both are linear in log2(kappa). The factor starts from 1 at kappa = 1, where the warm-up stays the same;
    for 1 < kappa < 2 the warm-up of kappa = 2 holds. A rule of thumb from practice, not a theorem.

    Raises:
        UsageError: kappa is outside [1, 16], beyond the table.

    >>> tuned = Hyperparameters(0.1, 0.9, 0.999, 1e-8)
    >>> scaled = [conservative(tuned, 256, batch) for batch in (256, 257, 512, 1024, 2048, 4096)]
    >>> [(round(s.learning_rate, 4), s.warmup_epochs) for s in scaled]
    [(0.1, None), (0.1003, 5.0), (0.15, 5.0), (0.2, 10.0), (0.2, 20.0), (0.3, 30.0)]
    """
    ratio = kappa(tuned_batch_size, global_batch_size)
    if not 1 <= ratio <= max(CONSERVATIVE_RANGES):
        raise UsageError(
            f"global_batch_size {global_batch_size} is {float(ratio):g} times the tuned {tuned_batch_size}, "
            f"but conservative scaling knows 1 to {max(CONSERVATIVE_RANGES)} times. "
            f"Use a batch from {tuned_batch_size} to {max(CONSERVATIVE_RANGES) * tuned_batch_size}, or "
            "--lr_scaling_rule none or linear."
        )
    if ratio == 1:
        return tuned
    factors = [min(row.learning_rate_factor) for row in CONSERVATIVE_RANGES.values()]
    warmups = [max(row.warmup_epochs) for row in CONSERVATIVE_RANGES.values()]
    return replace(
        tuned,
        learning_rate=_multiply(tuned.learning_rate, _interpolate_doublings([1.0, *factors], ratio)),
        warmup_epochs=_interpolate_doublings([warmups[0], *warmups], ratio),
    )


Rule = Callable[[Hyperparameters, int, int], Hyperparameters]
RULES: dict[str, Rule] = {rule.__name__: rule for rule in (none, linear, sqrt, beta2_half_life, conservative)}


def scale(rule: str, tuned: Hyperparameters, tuned_batch_size: int, global_batch_size: int) -> Hyperparameters:
    """Scale tuned numbers to another batch by a rule of `RULES`.

    Args:
        rule: a name in `RULES`.
        tuned: the numbers, good at `tuned_batch_size`.
        tuned_batch_size: samples per step at which they were tuned.
        global_batch_size: samples per step now.

    Raises:
        UsageError: the rule is unknown, a batch size is not a whole number of at least 1, the rule does not reach, or a
            result is too large for a float.

    >>> scale("linear", Hyperparameters(0.1, 0.9, 0.999, 1e-8), 64, 512).learning_rate
    0.8
    >>> scale("liner", Hyperparameters(0.1, 0.9, 0.999, 1e-8), 64, 512)
    Traceback (most recent call last):
    samestep.errors.UsageError: scaling rule 'liner' is unknown: did you mean linear?
    """
    if not isinstance(rule, str) or rule not in RULES:
        raise UsageError(f"scaling rule {rule!r} is unknown: {nearest(str(rule), RULES)}")
    try:
        return RULES[rule](tuned, tuned_batch_size, global_batch_size)
    except OverflowError:
        raise UsageError(
            f"learning_rate {tuned.learning_rate}, scaled by {rule} to global_batch_size, is too large for a float: correct "
            "learning_rate, tuned_batch_size or global_batch_size."
        ) from None


def _adam_numbers(rule: str, tuned: Hyperparameters) -> tuple[float, float, float]:
    """Return Adam's betas and epsilon, which the rule needs."""
    if tuned.adam_beta1 is None or tuned.adam_beta2 is None or tuned.adam_epsilon is None:
        raise UsageError(
            f"scaling rule {rule} changes Adam's numbers, and this optimizer has none: use linear, or none"
        )
    return tuned.adam_beta1, tuned.adam_beta2, tuned.adam_epsilon


def _is_number(value: Any, end: float) -> bool:
    """Tell whether `value` is a number in [0, end); NaN is not."""
    return issubclass(type(value), Real) and not isinstance(value, bool) and 0 <= value < end


def _to_fraction(value: float) -> Fraction:
    """Convert a number to the fraction that people wrote: 1/10 for 0.1."""
    return Fraction(str(value))


def _multiply(value: float, factor: float | Fraction) -> float:
    """Multiply a number, as written, by a factor, and round once.

    >>> 3 * 2e-4, _multiply(2e-4, 3)
    (0.0006000000000000001, 0.0006)
    """
    return float(_to_fraction(value) * Fraction(factor))


def _interpolate_doublings(values: list[float], ratio: Fraction) -> float:
    """Interpolate linearly in log2(ratio) between values[i] at ratio 2**i.

    >>> [_interpolate_doublings([1.0, 1.5, 4.0], Fraction(2) ** i) for i in (0, 1, 2)]
    [1.0, 1.5, 4.0]
    """
    doublings = math.log2(ratio)
    i = min(int(doublings), len(values) - 2)
    return values[i] + (values[i + 1] - values[i]) * (doublings - i)
