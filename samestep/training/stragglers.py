"""Times what each process needs for a step by itself, and names a process that is slower than the others.

Processes wait for each other in every step, so that the time of a whole step is the same on all of them. What tells them apart
is the time from the step's begin to the end of the last backward's computation, before the gradients are added up over the
processes, and the time for which a process waits for its data. Each process notes both; they are gathered with the losses, when
these are read from the device, so no step has another collective.
"""

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `compare` and `watch` need the names only, and no torch
    from accelerate import Accelerator
    from torch import nn

KEYS = ("compute_seconds_min", "compute_seconds_mean", "compute_seconds_max", "data_seconds_max", "slowest_process")
"""Fields that a line of metrics.jsonl has of it, if there are several processes."""
SLOWER, LEAST_SECONDS, NUM_WINDOWS = 1.25, 0.02, 5
"""A process is a straggler when it needs so many times as long as the median process, and so much longer, in so many reads
of the losses one after the other."""


class StepClock:
    """Times the steps of this process.

    Args:
        accelerator: the run's.
        model: its first parameter's gradient is the last that a backward computes.
    """

    def __init__(self, accelerator: "Accelerator", model: "nn.Module"):
        self.is_cuda = accelerator.device.type == "cuda"
        self.data_seconds = 0.0
        self.begin_mark: Any = None
        self.end_mark: Any = None
        first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
        if first is not None and accelerator.num_processes > 1:
            first.register_post_accumulate_grad_hook(lambda _: self._end())

    def time_data(self, stream: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a stream, and note how long each item took to come."""
        items = iter(stream)
        while True:
            begin = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            self.data_seconds = time.perf_counter() - begin
            yield item

    def begin(self) -> None:
        """Note that a step begins."""
        self.begin_mark, self.end_mark = self._mark(), None

    def _end(self) -> None:
        self.end_mark = self._mark()

    def _mark(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> tuple[Any, Any, float]:
        """Return the marks of the last step, for `read`, and the seconds for its data."""
        return self.begin_mark, self.end_mark, self.data_seconds


def read(begin: Any, end: Any, data_seconds: float) -> tuple[float, float]:
    """Return the seconds of computation and those for data; on a GPU the step must have been waited for."""
    if begin is None or end is None:  # sharded weights have no gradients of their own
        return 0.0, data_seconds
    return (end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3), data_seconds


def summarize(times: list[tuple[float, float]]) -> dict[str, Any]:
    """Summarize the times of all processes in a step as `KEYS`; those of computation only where they are known.

    Args:
        times: of each process (seconds of computation, seconds for data).

    >>> summarize([(0.5, 0.0), (1.0, 0.125)])
    {'compute_seconds_min': 0.5, 'compute_seconds_mean': 0.75, 'compute_seconds_max': 1.0, 'data_seconds_max': 0.125, \
'slowest_process': 1}
    """
    compute, data = zip(*times, strict=True)
    if not any(compute):
        return {"data_seconds_max": max(data), "slowest_process": data.index(max(data))}
    both = [sum(pair) for pair in times]
    mean = statistics.fmean(compute)
    return dict(zip(KEYS, (min(compute), mean, max(compute), max(data), both.index(max(both))), strict=True))


class StragglerWatch:
    """Finds a process that stays slower than the others; says each once in a session."""

    def __init__(self) -> None:
        self.suspect, self.count, self.named = -1, 0, set()

    def add(self, steps: list[list[tuple[float, float]]]) -> tuple[int, float, float] | None:
        """Take the times of the steps of one read of the losses, each a list over the processes; see `summarize`.

        Returns:
            The process, its seconds per step, the median of all processes; None: nobody is to be named.
        """
        if not steps or len(steps[0]) < 2:
            return None
        means = [statistics.fmean(sum(pair) for pair in times) for times in zip(*steps, strict=True)]
        slowest, median = means.index(max(means)), statistics.median_low(means)
        is_slow = means[slowest] > SLOWER * median and means[slowest] - median > LEAST_SECONDS
        self.count = (self.count + 1 if slowest == self.suspect else 1) if is_slow else 0
        self.suspect = slowest if is_slow else -1
        if self.count < NUM_WINDOWS or slowest in self.named:
            return None
        self.named.add(slowest)
        return slowest, means[slowest], median
