"""Times what each process needs for a step by itself, and names a process that is slower than the others.

Processes wait for each other in every step, so that the time of a whole step is the same on all of them. What tells them apart
is the time from the step's begin to the end of the last backward's computation, before the gradients are added up over the
processes, and the time for which a process waits for its data. Each process notes both; they are gathered with the losses, when
these are read from the device, so no step has another collective.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from samestep.recipe.run_files import TIMES
from samestep.training.parts import Part
from samestep.training.report import round_to_6
from samestep.training.run import Run
from samestep.training.run_step import RunStep

SLOWER, LEAST_SECONDS, NUM_WINDOWS = 1.25, 0.02, 5
"""A process is a straggler when it needs so many times as long as the median process, and so much longer, in so many reads
of the losses one after the other."""


class Marks:
    """The times at which a step begins, and at which the last backward's computation ends.

    A parameter holds this object by its hook, which Python's garbage collector does not see: it must know nothing of the run.

    Args:
        is_cuda: whether times are those of the GPU.
    """

    def __init__(self, is_cuda: bool):
        self.is_cuda = is_cuda
        self.begun: Any = None
        self.ended: Any = None

    def begin(self) -> None:
        """Mark the begin of a step."""
        self.begun, self.ended = self._now(), None

    def end(self, parameter: torch.Tensor) -> None:
        """Mark that the gradient of a parameter is computed."""
        self.ended = self._now()

    def _now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Stragglers(Part):
    """Times the steps of each process, adds the times to the lines of metrics.jsonl, and names who is slow.

    The gradient of the model's first parameter is the last that a backward computes.
    """

    def __init__(self, run: Run):
        self.run, self.marks = run, Marks(run.accelerator.device.type == "cuda")
        self.data_seconds = 0.0
        self.pending: dict[int, tuple[Any, Any, float]] = {}
        self.steps: list[list[tuple[float, float]]] = []
        self.watcher = StragglerWatch()
        first = next((parameter for parameter in run.bare_model.parameters() if parameter.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self.marks.end)

    def watch(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Iterate over a stream, and note how long each item took to come."""
        while True:
            begin = time.perf_counter()
            try:
                item = next(stream)
            except StopIteration:
                return
            self.data_seconds = time.perf_counter() - begin
            yield item

    def begin_step(self, step: RunStep) -> None:
        self.marks.begin()

    def end_step(self, step: RunStep) -> None:
        self.pending[step.index + 1] = self.marks.begun, self.marks.ended, self.data_seconds

    def read(self, number: int) -> tuple[float, float]:
        """Return the seconds of computation and those for data in a step, for which the device has been waited."""
        begin, end, data_seconds = self.pending.pop(number)
        if begin is None or end is None:  # sharded weights have no gradients of their own
            return 0.0, data_seconds
        return (end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3), data_seconds

    def add_to_line(self, line: dict[str, Any], counts: torch.Tensor, values: Sequence[tuple[float, float]]) -> None:
        self.steps.append(list(values))
        line |= {name: round_to_6(value) for name, value in summarize(self.steps[-1]).items()}

    def lines_written(self, lines: Sequence[dict[str, Any]]) -> None:
        straggler, self.steps = self.watcher.add(self.steps[: len(lines)]), []
        if straggler is not None:
            process, own, median = straggler
            values = {"seconds_per_step": round_to_6(own), "median_of_all": round_to_6(median)}
            message = f"process {process} is slower than the others, which wait for it"
            self.run.log.add_event(lines[-1]["step"], message, **values)


def summarize(times: list[tuple[float, float]]) -> dict[str, Any]:
    """Summarize the times of all processes in a step as `TIMES`; those of computation only where they are known.

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
    return dict(zip(TIMES, (min(compute), mean, max(compute), max(data), both.index(max(both))), strict=True))


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
