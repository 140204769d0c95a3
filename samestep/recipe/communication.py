"""Algorithms that send less than the whole gradient of every step, as a recipe's `communication` names them.

They are other algorithms than the step of the recipe without it. What they compute is decided by the recipe, not by the
hardware: the workers are the recipe's, and any number of processes computes them.

    "local_sgd of 4 workers every 8 steps"      workers take 8 steps on their own, then their parameters are averaged
    "diloco of 4 workers every 50 steps"        the same, and SGD with Nesterov's momentum takes the average as its gradient;
                                                ", outer rate 0.4, outer momentum 0.9" replaces the published 0.7 and 0.9
    "power_sgd of rank 4 from step 100"         gradients as products of two thin matrices, with error feedback
    "top_k 0.01 of 4 workers"                   of each worker's gradient the largest 1 %, with error feedback

References: Stich, Local SGD Converges Fast and Communicates Little, 2019, arXiv:1805.09767. Douillard et al., DiLoCo:
Distributed Low-Communication Training of Language Models, 2023, arXiv:2311.08105. Vogels et al., PowerSGD, 2019,
arXiv:1905.13727. Stich et al., Sparsified SGD with Memory, 2018, arXiv:1809.07599.
"""

import dataclasses
import re

EXAMPLES = (
    '"local_sgd of 4 workers every 8 steps", "diloco of 4 workers every 50 steps", "power_sgd of rank 4 from step 100" or '
    '"top_k 0.01 of 4 workers"'
)
DILOCO = 0.7, 0.9
"""Learning rate and momentum of DiLoCo's outer optimizer, as published."""
MAX_WORKERS = 4096

_COUNT = r"([1-9][0-9]{0,7})"
_NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)"
_LOCAL = re.compile(
    rf"(local_sgd|diloco) of {_COUNT} workers every {_COUNT} steps(?:, outer rate {_NUMBER}, outer momentum {_NUMBER})?"
)
_POWER = re.compile(rf"power_sgd of rank {_COUNT} from step {_COUNT}")
_TOP = re.compile(rf"top_k {_NUMBER} of {_COUNT} workers")


@dataclasses.dataclass(frozen=True)
class Communication:
    """A `communication`, read.

    Attributes:
        kind: local_sgd, diloco, power_sgd or top_k.
        num_workers: workers, each with its share of every step's samples; None for power_sgd, whose result is the same for any
            number.
        num_steps: of local_sgd and diloco, steps between two exchanges; None for the others.
        outer_learning_rate, outer_momentum: of local_sgd and diloco, how parameters follow the average of the workers.
        rank, first_step: of power_sgd, columns of each matrix, and the steps before it begins.
        share: of top_k, the share of each tensor's numbers that a worker sends.
    """

    kind: str
    num_workers: int | None = None
    num_steps: int | None = None
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    rank: int = 0
    first_step: int = 0
    share: float = 1.0

    @property
    def is_local(self) -> bool:
        """Whether workers take steps of their own between exchanges."""
        return self.num_steps is not None

    def __str__(self) -> str:
        if self.kind == "power_sgd":
            return f"power_sgd of rank {self.rank} from step {self.first_step}"
        if self.kind == "top_k":
            return f"top_k {self.share:g} of {self.num_workers} workers"
        text = f"{self.kind} of {self.num_workers} workers every {self.num_steps} steps"
        if self.kind == "diloco":
            text += f", outer rate {self.outer_learning_rate:g}, outer momentum {self.outer_momentum:g}"
        return text


def parse(text: str) -> Communication:
    """Read a recipe's `communication`.

    Raises:
        ValueError: the text breaks a rule, which the message says.

    >>> print(parse("diloco of 4 workers every 50 steps"))
    diloco of 4 workers every 50 steps, outer rate 0.7, outer momentum 0.9
    >>> parse("top_k 0.01 of 4 workers").share, parse("power_sgd of rank 4 from step 100").first_step
    (0.01, 100)
    """
    found: Communication | None = None
    if match := _LOCAL.fullmatch(text):
        outer = (1.0, 0.0) if match[1] == "local_sgd" else DILOCO
        if match[4]:
            if match[1] == "local_sgd":
                raise ValueError("local_sgd has no outer optimizer, unlike diloco")
            outer = float(match[4]), float(match[5])
        if not (0 < outer[0] <= 10 and 0 <= outer[1] < 1):
            raise ValueError("an outer rate is above 0 and at most 10, an outer momentum from 0 to below 1")
        found = Communication(match[1], int(match[2]), int(match[3]), *outer)
    elif match := _POWER.fullmatch(text):
        found = Communication("power_sgd", rank=int(match[1]), first_step=int(match[2]))
        if found.first_step < 2:
            raise ValueError("power_sgd begins at step 2 or later, as in torch")
    elif match := _TOP.fullmatch(text):
        found = Communication("top_k", int(match[2]), share=float(match[1]))
        if not 0 < found.share < 1:
            raise ValueError("top_k takes a share above 0 and below 1")
    if found is None:
        raise ValueError(f"it is written like {EXAMPLES}")
    if (found.num_workers or 1) > MAX_WORKERS:
        raise ValueError(f"there are at most {MAX_WORKERS} workers")
    return found


def count_sent_bytes(communication: Communication | None, sizes: list[tuple[int, ...]], itemsize: int = 4) -> float:
    """Count the bytes that a worker hands to the process group in a step, on average.

    Args:
        communication: None: the whole gradient of every step.
        sizes: shapes of the trained tensors.
        itemsize: bytes of a number.

    Of power_sgd these are the bytes of later steps than the first, in which it sends whole gradients.

    >>> count_sent_bytes(None, [(100, 10), (10,)]), count_sent_bytes(parse("top_k 0.1 of 2 workers"), [(100, 10), (10,)])
    (4040.0, 808.0)
    >>> count_sent_bytes(parse("diloco of 2 workers every 10 steps"), [(100, 10), (10,)])
    404.0
    >>> count_sent_bytes(parse("power_sgd of rank 1 from step 2"), [(100, 10), (10,)])
    480.0
    """
    counts = [_product(size) for size in sizes]
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


def count_kept_bytes(communication: Communication, num_processes: int, moment_bytes: float) -> float:
    """Count the bytes per trained parameter that a process keeps beside those of the exact step.

    Args:
        communication: the recipe's.
        num_processes: N; the first process computes the most workers.
        moment_bytes: bytes per parameter that the optimizer remembers.

    >>> count_kept_bytes(parse("diloco of 4 workers every 50 steps"), 4, 8)  # parameters and momentum of the outer optimizer
    8.0
    >>> count_kept_bytes(parse("diloco of 4 workers every 50 steps"), 2, 8)  # one more worker
    20.0
    """
    own = -(-(communication.num_workers or num_processes) // num_processes)
    if communication.is_local:
        return float(4 + 4 * (communication.outer_momentum > 0) + (own - 1) * (4 + moment_bytes))
    return 4.0 + 4 * own  # the flat gradient, and errors


def describe(communication: Communication) -> str:
    """Say that it is another algorithm, and on what its result depends.

    >>> describe(parse("top_k 0.01 of 4 workers"))
    'another algorithm than the exact step: top_k 0.01 of 4 workers; the same on 1 to 4 processes'
    >>> describe(parse("power_sgd of rank 4 from step 100"))
    'another algorithm than the exact step: power_sgd of rank 4 from step 100; the same on any number of processes'
    """
    number = communication.num_workers
    processes = (
        "any number of processes" if number is None else f"1 to {number} processes" if number > 1 else "1 process"
    )
    return f"another algorithm than the exact step: {communication}; the same on {processes}"


def describe_reduce_dtype(reduce_dtype: str, num_processes: int) -> str:
    """Say what a run's `reduce_dtype` does to the step.

    >>> describe_reduce_dtype("bf16", 1)
    'reduce_dtype bf16: one process sends no gradients, so nothing is rounded; on several the step is not exact'
    """
    if num_processes == 1:
        return (
            f"reduce_dtype {reduce_dtype}: one process sends no gradients, so nothing is rounded; on several the step is not "
            "exact"
        )
    return (
        f"reduce_dtype {reduce_dtype}: not the exact step; the gradients of {num_processes} processes, and their sum, are "
        f"rounded to {reduce_dtype}, otherwise for each number of processes; half of the bytes of float32 are sent"
    )


def count_largest(share: float, count: int) -> int:
    """Count the numbers that top_k sends of a tensor of `count` numbers: at least one.

    >>> count_largest(0.01, 1000), count_largest(0.01, 3)
    (10, 1)
    """
    return max(1, round(share * count))


def _product(size: tuple[int, ...]) -> int:
    count = 1
    for length in size:
        count *= length
    return count
