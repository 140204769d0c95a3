"""Algorithms that send less than the whole gradient of every step, as a recipe's `communication` names them.

They are other algorithms than the step of the recipe without it. What they compute is decided by the recipe, not by the
hardware: the workers are the recipe's, and any number of processes computes them. In a recipe's file, and on a command line:

    {kind: local_sgd, num_workers: 4, num_steps: 8}         "local_sgd of 4 workers every 8 steps"
        workers take 8 steps on their own, then their parameters are averaged
    {kind: diloco, num_workers: 4, num_steps: 50}           "diloco of 4 workers every 50 steps"
        the same, and SGD with Nesterov's momentum takes the average as its gradient; outer_learning_rate and outer_momentum
        (", outer rate 0.4, outer momentum 0.9") replace the published 0.7 and 0.9
    {kind: power_sgd, rank: 4, first_step: 100}             "power_sgd of rank 4 from step 100"
        gradients as products of two thin matrices, with error feedback
    {kind: top_k, share: 0.01, num_workers: 4}              "top_k 0.01 of 4 workers"
        of each worker's gradient the largest 1 %, with error feedback

References: Stich, Local SGD Converges Fast and Communicates Little, 2019, arXiv:1805.09767. Douillard et al., DiLoCo:
Distributed Low-Communication Training of Language Models, 2023, arXiv:2311.08105. Vogels et al., PowerSGD, 2019,
arXiv:1905.13727. Stich et al., Sparsified SGD with Memory, 2018, arXiv:1809.07599.
"""

import dataclasses
import math
from typing import ClassVar

from samestep.contrib.kinds import COUNT, LARGEST_COUNT, NUMBER, Kinds, format_number
from samestep.recipe.settings import FRACTION, limit, setting
from samestep.recipe.variants import Algorithm

DILOCO = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
"""DiLoCo's outer optimizer, as published."""
MAX_WORKERS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication(Kinds, Algorithm):
    """A recipe's `communication`; fields of other kinds have their defaults."""

    KINDS: ClassVar = {
        "local_sgd": (("num_workers", "num_steps"), ()),
        "diloco": (("num_workers", "num_steps"), tuple(DILOCO)),
        "power_sgd": (("rank", "first_step"), ()),
        "top_k": (("share", "num_workers"), ()),
    }
    DEFAULTS: ClassVar = {"diloco": DILOCO}
    SENTENCES: ClassVar = (
        rf"(?P<kind>local_sgd|diloco) of (?P<num_workers>{COUNT}) workers every (?P<num_steps>{COUNT}) steps"
        rf"(, outer rate (?P<outer_learning_rate>{NUMBER}), outer momentum (?P<outer_momentum>{NUMBER}))?",
        rf"(?P<kind>power_sgd) of rank (?P<rank>{COUNT}) from step (?P<first_step>{COUNT})",
        rf"(?P<kind>top_k) (?P<share>{NUMBER}) of (?P<num_workers>{COUNT}) workers",
    )
    kind: str = setting("local_sgd, diloco, power_sgd or top_k")
    num_workers: int | None = setting(
        "workers, each with its share of every step's samples; None for power_sgd, whose result is the same for any number",
        limit(MAX_WORKERS),
        default=None,
    )
    num_steps: int | None = setting("steps between two exchanges", limit(LARGEST_COUNT), default=None)
    outer_learning_rate: float = setting(
        "how far parameters follow the average of the workers",
        ("must be above 0 and at most 10", lambda value: 0 < value <= 10),
        default=1.0,
    )
    outer_momentum: float = setting("momentum with which they follow it", FRACTION, default=0.0)
    rank: int = setting("columns of each matrix", limit(LARGEST_COUNT), default=0)
    first_step: int = setting("step with which it begins, 2 or later as in torch", limit(LARGEST_COUNT, 2), default=0)
    share: float = setting(
        "share of each tensor's numbers that a worker sends",
        ("must be above 0 and below 1", lambda value: 0 < value < 1),
        default=1.0,
    )

    @property
    def sentence(self) -> str:
        return str(self).removesuffix(_say_outer(**DILOCO))

    def __str__(self) -> str:
        if self.kind == "power_sgd":
            return f"power_sgd of rank {self.rank} from step {self.first_step}"
        if self.kind == "top_k":
            return f"top_k {format_number(self.share)} of {self.num_workers} workers"
        outer = _say_outer(self.outer_learning_rate, self.outer_momentum) if self.kind == "diloco" else ""
        return f"{self.kind} of {self.num_workers} workers every {self.num_steps} steps{outer}"

    def describe(self) -> str:
        """Say that it is another algorithm, and on what its result depends.

        >>> Communication.read("top_k 0.01 of 4 workers").describe()
        'another algorithm than the exact step: top_k 0.01 of 4 workers; the same on 1 to 4 processes'
        >>> Communication.read("power_sgd of rank 4 from step 100").describe()
        'another algorithm than the exact step: power_sgd of rank 4 from step 100; the same on any number of processes'
        """
        number = self.num_workers
        processes = (
            "any number of processes" if number is None else f"1 to {number} processes" if number > 1 else "1 process"
        )
        return f"another algorithm than the exact step: {self}; the same on {processes}"

    def describe_traffic(self, num_parameters: int) -> str:
        text = self.describe()
        if self.kind != "power_sgd":  # whose bytes depend on the shape of each tensor
            own, exact = (count_sent_bytes(each, [(num_parameters,)]) / 1e6 for each in (self, None))
            text += f"; a worker sends {own:,.3g} MB a step on average, in the exact step {exact:,.3g}"
        return text

    def count_kept_bytes(self, num_processes: int, moment_bytes: float) -> float:
        """Count the bytes per trained parameter that a process keeps beside those of the exact step.

        >>> diloco = Communication.read("diloco of 4 workers every 50 steps")
        >>> diloco.count_kept_bytes(4, 8)  # parameters and momentum of the outer optimizer
        8.0
        >>> diloco.count_kept_bytes(2, 8)  # one more worker
        20.0
        """
        own = -(-(self.num_workers or num_processes) // num_processes)
        if self.is_local:
            return float(4 + 4 * (self.outer_momentum > 0) + (own - 1) * (4 + moment_bytes))
        return 4.0 + 4 * own  # the flat gradient, and errors


def _say_outer(outer_learning_rate: float, outer_momentum: float) -> str:
    return f", outer rate {format_number(outer_learning_rate)}, outer momentum {format_number(outer_momentum)}"


def count_sent_bytes(communication: Communication | None, sizes: list[tuple[int, ...]], itemsize: int = 4) -> float:
    """Count the bytes that a worker hands to the process group in a step, on average.

    Args:
        communication: None: the whole gradient of every step.
        sizes: shapes of the trained tensors.
        itemsize: bytes of a number.

    Of power_sgd these are the bytes of later steps than the first, in which it sends whole gradients.

    >>> sizes, read = [(100, 10), (10,)], Communication.read
    >>> count_sent_bytes(None, sizes), count_sent_bytes(read("top_k 0.1 of 2 workers"), sizes)
    (4040.0, 808.0)
    >>> count_sent_bytes(read("diloco of 2 workers every 10 steps"), sizes)
    404.0
    >>> count_sent_bytes(read("power_sgd of rank 1 from step 2"), sizes)
    480.0
    """
    counts = [math.prod(size) for size in sizes]
    if communication is None:
        return float(itemsize * sum(counts))
    if communication.is_local:
        return itemsize * sum(counts) / (communication.num_steps or 1)
    if communication.kind == "top_k":  # each number with its place, an int32
        return float((itemsize + 4) * sum(count_largest(communication.share, count) for count in counts))
    total = 0
    for size, count in zip(sizes, counts, strict=True):
        rows, columns = size[0] if size else 1, count // (size[0] if size else 1)
        rank = min(rows, columns, communication.rank)
        # torch's rule: what would be more than half as large is sent as it is
        total += (rows + columns) * rank if (rows + columns) * rank * 2 < count else count
    return float(itemsize * total)


def count_largest(share: float, count: int) -> int:
    """Count the numbers that top_k sends of a tensor of `count` numbers: at least one.

    >>> count_largest(0.01, 1000), count_largest(0.01, 3)
    (10, 1)
    """
    return max(1, round(share * count))
