"""Lets the batch grow with the noise that is measured while it trains (`batch_schedule` noise)."""

import math
from typing import Any

from accelerate.utils import broadcast_object_list

from samestep.contrib.growing.batch_schedule import BatchSchedule, Stage, make_sizes
from samestep.contrib.noise.scale import NoiseScale
from samestep.contrib.noise.signal_share import find_largest, find_signal_share
from samestep.recipe.batch_size import Measurement
from samestep.training.parts import Part, find_part
from samestep.training.report import round_to_6
from samestep.training.run import Run
from samestep.training.run_step import RunStep

MEASUREMENTS = 8
"""Measured steps between two decisions of a batch that follows the noise; each looks at twice as many."""


class Growth(Part):
    """Lets the batch grow where the noise of a measured step says so; later steps are others then."""

    def __init__(self, run: Run):
        assert run.recipe.batch_schedule is not None
        self.run, self.scale = run, find_part(run.parts, NoiseScale)
        growth = run.recipe.batch_schedule
        self.follower = NoiseFollower(growth, run.recipe.global_batch_size, run.start.state.growth)

    def end_step(self, step: RunStep) -> None:
        """Decide on the batch from the next step on. Called by all processes."""
        noise, run, follower = self.scale.find_noise(step), self.run, self.follower
        if noise is None:
            return
        signal, own = noise.layers.sum(1).tolist()
        size = None
        if math.isfinite(signal + own):
            numbers = map(round_to_6, (signal, own * step.data.num_samples))
            size = follower.add(Measurement(step.index + 1, *numbers))
        (size,) = broadcast_object_list([size])  # process 0 decides, whatever others have in their last digit
        if size is None:
            return
        follower.grow(run.plan.order.spans.find(step.index + 1)[0], size)
        run.plan.lay_out(run.plan.order.num_samples, run.plan.order.mixture, follower.stages)
        run.recovery.steps.order = run.plan.order
        if run.accelerator.is_main_process:
            run.log.write_session()
        text = follower.describe(follower.growth.rate)
        run.log.add_event(
            step.index + 1, "the batch grows with the noise", batch=size, num_steps=run.plan.num_steps, so_far=text
        )

    def state(self) -> dict[str, Any]:
        return {"growth": self.follower.record}


class NoiseFollower:
    """Decides how a batch grows with the noise that is measured while it trains (`batch_schedule` noise).

    After every `MEASUREMENTS` measured steps it finds the largest batch that takes `more_tokens` more than the first batch, by
    the upper end of the interval of the signal's share, over twice as many steps. The batch never shrinks.

    What was decided, and the measurements that the next decision looks at, are plain numbers, for a checkpoint: a run that goes
    on from it has the same stages up to there, and decides on from the same measurements.

    Args:
        growth: what the recipe says.
        largest: global_batch_size.
        record: of an earlier session, see `record`; None: there is none.

    Attributes:
        stages: so far.
    """

    def __init__(self, growth: BatchSchedule, largest: int, record: dict[str, Any] | None = None):
        self.growth, self.sizes = growth, make_sizes(growth.smallest, largest)
        record = record or {"stages": [(0, growth.smallest)], "measurements": [], "since": 0}
        self.stages = [Stage(*stage) for stage in record["stages"]]
        self.measurements = [Measurement(*measurement) for measurement in record["measurements"]]
        self.since = record["since"]

    @property
    def record(self) -> dict[str, Any]:
        """Stages and measurements as plain JSON values."""
        measurements = [list(measurement) for measurement in self.measurements]
        return {"stages": [list(stage) for stage in self.stages], "measurements": measurements, "since": self.since}

    def add(self, measurement: Measurement) -> int | None:
        """Note a measured step; the batch from the next step on, None if it stays."""
        self.measurements = [*self.measurements, measurement][-2 * MEASUREMENTS :]
        self.since += 1
        if self.since < MEASUREMENTS:
            return None
        self.since, first = 0, self.growth.smallest
        share = find_signal_share([self.measurements], first)
        if not share.is_known:
            return None
        assert self.growth.more_tokens is not None, "a batch that follows the noise has it"
        allowed = first * find_largest(share.high, self.growth.more_tokens)
        size = max(size for size in self.sizes if size <= max(allowed, first))
        return size if size > self.stages[-1].size else None

    def grow(self, place: int, size: int) -> None:
        """Note that steps from a place of the stream of samples on have another size."""
        self.stages = [stage for stage in self.stages if stage.place < place] + [Stage(place, size)]

    def describe(self, rate: str | None) -> str:
        """Write the stages as a `batch_schedule`, which repeats them: `rate` as there."""
        first, *others = self.stages
        parts = [f"{first.size}", *(f"{size} at {place} samples" for place, size in others)]
        return ", ".join(parts + ([f"rate by {rate}"] if rate else []))
