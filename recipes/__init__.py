"""The catalog of recipes, and the arithmetic of a recipe on a hardware: effective batch, layout, learning rate.

Four classic cases, the same step each time it is cut otherwise:

>>> effective_batch(8, 4), layout(32, per_device_train_batch_size=8).gradient_accumulation_steps  # on one card
(32, 4)
>>> effective_batch(64, 1, 4), layout(256, 4).shares  # on four
(256, (64, 64, 64, 64))
>>> print(layout(512, 8, 16))  # on eight
global batch 512 = 8 processes x 64 samples, in 4 micro-batches of at most 16
>>> large = layout(3072, 3, 768)  # on three
>>> large.gradient_accumulation_steps, tails(large), learning_rate(1e-3, 1536, 3072)
(2, (256, 256, 256), 0.002)

`python -m recipes` is the command `samestep`; the engine is the package `samestep`.
"""

from samestep.cut.layout import Layout, check_sizes, solve_layout
from samestep.recipe.scaling import Hyperparameters, scale


def effective_batch(
    per_device_train_batch_size: int, gradient_accumulation_steps: int = 1, num_processes: int = 1
) -> int:
    """Compute the samples of one optimizer step, B = N b k. Raises UsageError for what is no whole number or below 1."""
    b, k, n = per_device_train_batch_size, gradient_accumulation_steps, num_processes
    check_sizes(per_device_train_batch_size=b, gradient_accumulation_steps=k, num_processes=n)
    return n * b * k


def layout(global_batch_size: int, num_processes: int = 1, per_device_train_batch_size: int | None = None) -> Layout:
    """Cut a global batch: b, k = ceil(ceil(B / N) / b), N, and the samples of each process (`shares`).

    Args:
        global_batch_size: B, samples of one optimizer step.
        num_processes: N, one for each device.
        per_device_train_batch_size: b, the most samples that fit into one forward; None: each process's whole share.

    Raises:
        UsageError: a number that is not whole, or below 1.

    >>> layout(10, 3).shares, tails(layout(10, 3, 3))
    ((4, 3, 3), (1, 3, 3))
    >>> layout(2.5)
    Traceback (most recent call last):
    samestep.errors.UsageError: global_batch_size is 2.5, must be a whole number, 1 or more
    """
    return solve_layout(
        num_processes=num_processes,
        global_batch_size=global_batch_size,
        per_device_train_batch_size=per_device_train_batch_size,
    )


def tails(cut: Layout) -> tuple[int, ...]:
    """Count the samples in the last micro-batch of each process: fewer than b where b does not divide its share."""
    b = cut.per_device_train_batch_size
    return tuple(share - b * max(0, -(-share // b) - 1) for share in cut.shares)


def learning_rate(tuned: float, tuned_batch_size: int, global_batch_size: int, rule: str = "linear") -> float:
    """Scale a learning rate to another global batch, by a rule of `samestep.recipe.scaling`.

    Args:
        tuned: learning rate that was found best at `tuned_batch_size`.
        tuned_batch_size, global_batch_size: samples of one optimizer step, then and now.
        rule: none, linear (SGD; Goyal et al. 2017, arXiv:1706.02677), sqrt (Adam; Malladi et al. 2022, arXiv:2205.10287), ...

    Raises:
        UsageError: an unknown rule, a number out of its range, or a batch too far away for the rule.

    >>> learning_rate(0.1, 256, 1024), learning_rate(0.1, 256, 1024, "sqrt")
    (0.4, 0.2)
    """
    adam = (None, None, None) if rule == "linear" else (0.9, 0.999, 1e-8)  # torch's; a rule may not suit them
    return scale(rule, Hyperparameters(tuned, *adam), tuned_batch_size, global_batch_size).learning_rate
