"""The layout: how N processes, micro-batches of at most b samples and k micro-batches cut a global batch of B.

And how many steps an epoch has.
"""

import dataclasses
import fractions
import math
import reprlib
from numbers import Integral
from typing import Any

from samestep.errors import UsageError
from samestep.printing import format_count

MAX_PROCESSES = 2**17
"""Numbers for each process are kept in lists."""
LOGITS_AT_ONCE = 2**26
"""Logits that GPT-2's head holds at once, whatever the micro-batch: 256 MiB in float32."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A cut of every optimizer step. All sizes are samples.

    Attributes:
        global_batch_size: B, samples per optimizer step.
        num_processes: N.
        per_device_train_batch_size: b, the most samples that one forward may hold.
        gradient_accumulation_steps: k, micro-batches of the process with the largest share: ceil(ceil(B / N) / b).
    """

    global_batch_size: int
    num_processes: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int

    def __str__(self) -> str:
        shares = self.shares
        sizes = f"{shares[0]}" if shares[0] == shares[-1] else f"{shares[-1]} to {shares[0]}"
        return (
            f"global batch {self.global_batch_size} = {format_count(self.num_processes, 'process')} x {sizes} samples, in "
            f"{format_count(self.gradient_accumulation_steps, 'micro-batch')} of at most {self.per_device_train_batch_size}"
        )

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each process in one step; they add up to B."""
        return shares(self.global_batch_size, self.num_processes)


def shares(num_samples: int, num_parts: int) -> tuple[int, ...]:
    """Cut `num_samples` into `num_parts` whole shares that differ by at most one, larger ones first.

    >>> shares(10, 3), shares(2, 3)
    ((4, 3, 3), (1, 1, 0))
    """
    small, num_large = divmod(num_samples, num_parts)
    return (small + 1,) * num_large + (small,) * (num_parts - num_large)


def check_sizes(**sizes: Any) -> None:
    """Check numbers of samples, processes and the like: whole, and 1 or more.

    Raises:
        UsageError: with all that are not.

    >>> check_sizes(global_batch_size=32, num_processes=2.5)
    Traceback (most recent call last):
    samestep.errors.UsageError: num_processes is 2.5, must be a whole number, 1 or more
    """
    problems = []
    for name, size in sizes.items():
        if not isinstance(size, Integral) or isinstance(size, bool):
            problems.append(f"{name} is {reprlib.repr(size)}, must be a whole number, 1 or more")
        elif size < 1:
            problems.append(f"{name} is {size}, must be 1 or more")
    if not problems and (n := sizes.get("num_processes", 1)) > MAX_PROCESSES:
        problems.append(f"num_processes is {n}, must be {MAX_PROCESSES:,} or less")
    if problems:
        raise UsageError(problems)


def solve_layout(
    *,
    num_processes: int,
    global_batch_size: int | None = None,
    per_device_train_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
) -> Layout:
    """Find the layout from two of B, b and k, or from B alone (each process's share in one piece).

        k = ceil(ceil(B / N) / b),   b = ceil(ceil(B / N) / k),   B = N b k

    >>> solve_layout(num_processes=1, global_batch_size=32, per_device_train_batch_size=8).gradient_accumulation_steps
    4
    >>> solve_layout(num_processes=3, global_batch_size=10, gradient_accumulation_steps=2).per_device_train_batch_size
    2
    >>> solve_layout(num_processes=8, per_device_train_batch_size=4, gradient_accumulation_steps=16).global_batch_size
    512

    Raises:
        UsageError: a value that is no whole number or below 1, too few values, or three that contradict each other, with the
            arithmetic.
    """
    n, b_total, b, k = num_processes, global_batch_size, per_device_train_batch_size, gradient_accumulation_steps
    sizes = {
        "global_batch_size": b_total,
        "per_device_train_batch_size": b,
        "gradient_accumulation_steps": k,
    }
    check_sizes(num_processes=n, **{name: size for name, size in sizes.items() if size is not None})
    if b_total is None:
        if b is None or k is None:
            raise UsageError(
                "give two of global_batch_size, per_device_train_batch_size and gradient_accumulation_steps, "
                "or global_batch_size alone"
            )
        return Layout(n * b * k, n, b, k)
    share = -(-b_total // n)
    if b is None:
        b = -(-share // (k or 1))
    num_micro_batches = -(-share // b)
    if k is not None and k != num_micro_batches:
        raise UsageError(
            f"gradient_accumulation_steps is {k}, but global_batch_size {b_total} on {format_count(n, 'process')} is {share} "
            f"samples each. {format_count(num_micro_batches, 'micro-batch')} of at most {b} are needed ({n} x {b} x {k} = "
            f"{n * b * k}). Leave --gradient_accumulation_steps out, or set --global_batch_size {n * b * k}"
        )
    return Layout(b_total, n, b, num_micro_batches)


def steps_per_epoch(num_samples: int, global_batch_size: int, epoch_end: str) -> fractions.Fraction:
    """Compute the optimizer steps per epoch; not a whole number for `carry` when B does not divide the samples.

    Args:
        num_samples: samples of an epoch.
        global_batch_size: B.
        epoch_end: carry, keep or drop, as in `order.Order`.

    Raises:
        UsageError: numbers that are not whole or below 1, an unknown `epoch_end`, or `drop` with a batch that no epoch fills.

    >>> [float(steps_per_epoch(50_030, 3072, end)) for end in ("keep", "drop")]
    [17.0, 16.0]
    """
    check_sizes(num_samples=num_samples, global_batch_size=global_batch_size)
    if epoch_end not in ("carry", "keep", "drop"):
        raise UsageError(f"epoch_end is {epoch_end!r}, must be carry, keep or drop")
    if epoch_end == "drop" and global_batch_size > num_samples:
        raise UsageError(
            f"global_batch_size {global_batch_size} exceeds the {num_samples} samples of an epoch, and "
            "epoch_end drop leaves every incomplete batch out: use carry or keep, or a smaller batch"
        )
    exact = fractions.Fraction(num_samples, global_batch_size)
    rounding = {"keep": math.ceil, "drop": math.floor}.get(epoch_end)
    return exact if rounding is None else fractions.Fraction(rounding(exact))


def num_steps(per_epoch: fractions.Fraction, num_epochs: float) -> int:
    """Count the steps of `num_epochs` epochs, rounded up.

    >>> num_steps(steps_per_epoch(50_030, 3072, "drop"), 150)
    2400
    """
    return math.ceil(per_epoch * fractions.Fraction(num_epochs).limit_denominator(10**6))


def round_up(number: int, bits: int) -> int:
    """Round `number` up to the next number with at most `bits` significant bits: by a share of at most 2^(1 - bits).

    It is for the sizes of tensors. oneDNN, which computes bf16 on a CPU, generates code for every size that it meets, which
    takes 0.7 ms for a product of 0.1 ms; other libraries do so for a GPU. Sizes that differ in every step would never be met
    again.

    >>> [round_up(number, 3) for number in (7, 8, 9, 12, 13, 33)]
    [7, 8, 10, 12, 14, 40]
    """
    step = 1 << max(0, number.bit_length() - bits)
    return -(-number // step) * step
