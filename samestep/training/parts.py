"""Parts that watch a run or add to it, and decide no gradient.

A part has some of the methods of `Part`, which do nothing here. It is made by its class, called with the run, when the model
and the optimizer are prepared; `samestep.training.ways` lists the parts, in the order in which they are called. A step calls
`begin_step`, `gradient_computed`, `gradient_reduced` and `end_step`. What a part has to say of a step may be on the device
still: it is read later, with the losses of several steps, by `read`, `add_to_line` and `lines_written`.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from samestep.data.steps import StepData

if TYPE_CHECKING:  # who has parts
    from samestep.training.run import Run
    from samestep.training.run_step import RunStep


class Part:
    """A part that does nothing.

    Args:
        run: of which it is a part.
    """

    def __init__(self, run: "Run"):
        pass

    def start(self) -> None:
        """Begin, when all that a run says before its first step is said."""

    def watch(self, stream: Iterator[StepData]) -> Iterator[StepData]:
        """Iterate over a stream of steps, as it is."""
        return stream

    def begin_step(self, step: "RunStep") -> None:
        """Note that a step, or an attempt of it, begins, whose counts are known."""

    def gradient_computed(self, step: "RunStep") -> None:
        """Note that this process has computed its part of a step's gradient, which the others do not have yet."""

    def gradient_reduced(self, step: "RunStep") -> None:
        """Note that the parameters have the whole step's gradient, not clipped yet."""

    def end_step(self, step: "RunStep") -> None:
        """Note that a step is done."""

    def read(self, number: int) -> Any:
        """Return plain values of this process for the line of step `number` (1 is the first), which the device has computed."""
        return None

    def add_to_line(self, line: dict[str, Any], counts: torch.Tensor, values: Sequence[Any]) -> None:
        """Add to a step's line of metrics.jsonl.

        Args:
            line: of the step.
            counts: targets of the whole step, int64 [terms] on the host.
            values: what `read` returned on each process.
        """

    def lines_written(self, lines: Sequence[dict[str, Any]]) -> None:
        """Note that these lines of steps were written."""

    def score(self) -> dict[str, float]:
        """Return further scores of an evaluation that is about to be written; a source's as SOURCE/NAME.

        Called by all processes.
        """
        return {}

    def evaluated(self, line: dict[str, Any]) -> None:
        """Note that an evaluation was written."""

    def describe(self) -> str:
        """Say something for the progress bar; empty: nothing."""
        return ""

    def state(self) -> dict[str, Any]:
        """Return fields of `checkpoint.State`: what a later session goes on from."""
        return {}

    def close(self) -> None:
        """End, after the last step and evaluation of the session."""

    def publish(self, results: dict[str, Any], evaluations: Sequence[dict[str, Any]], usage: str) -> None:
        """Write pages about the finished run. Called by process 0.

        Args:
            results: name -> number or text, as in all_results.json.
            evaluations: lines of those up to the saved model, in order.
            usage: lines of Python that load the model; OUTPUT_DIR stands for its folder.
        """

    def upload(self) -> None:
        """Send what was published elsewhere, when all is said of it. Called by process 0."""


P = TypeVar("P", bound=Part)


def find_part(parts: Sequence[Part], kind: type[P]) -> P:
    """Find the part of a kind."""
    return next(part for part in parts if isinstance(part, kind))


def collect_state(parts: Sequence[Part]) -> dict[str, Any]:
    """Collect what all parts have for `checkpoint.State`."""
    return {name: value for part in parts for name, value in part.state().items()}
