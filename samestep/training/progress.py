"""The progress bar, and the seconds of steps: what evaluations and checkpoints take is in neither."""

import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from samestep.recipe.recipe import Recipe
from samestep.training.plan import Plan


class Progress:
    """The progress bar of a run.

    It counts steps or, where the batch grows, samples, so that it knows the time that is left.

    Args:
        recipe: what is trained.
        plan: the steps of the training.
        device: whose peak memory is shown.

    Attributes:
        num_units, seconds: tokens (or samples) of the steps of this session that were read, and their time.
    """

    def __init__(self, recipe: Recipe, plan: Plan, device: torch.device):
        self.recipe, self.plan, self.device = recipe, plan, device
        self.num_units, self.seconds = 0, 0.0
        self.bar: tqdm | None = None
        self.clock = time.perf_counter()

    def start(self, first_step: int, is_shown: bool) -> None:
        """Start the clock and the bar.

        Args:
            first_step: steps before the first one of the session.
            is_shown: whether this process shows the bar.
        """
        total, initial, unit = self.plan.num_steps, first_step, "steps"
        if self.plan.spans is not None:
            spans = self.plan.spans
            total, initial, unit = spans.find(total - 1)[1], spans.find(initial)[0], "samples"
        self.bar = tqdm(total=total, initial=initial, desc="Training", unit=unit, disable=not is_shown)
        self.clock = time.perf_counter()

    def take_seconds(self) -> float:
        """Return the seconds since the last step."""
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        return seconds

    def advance(self, num_samples: int) -> None:
        """Count a step of so many samples."""
        assert self.bar is not None, "it was started"
        self.bar.update(1 if self.plan.spans is None else num_samples)

    def jump(self, step: int) -> None:
        """Go on after `step` steps, of which others have done some."""
        if self.bar is not None:
            self.bar.update((step if self.plan.spans is None else self.plan.spans.find(step)[0]) - self.bar.n)

    def show(self, lines: Sequence[dict[str, Any]], more: Sequence[str]) -> None:
        """Show the last of the lines that were read, and the speed of all of them; the last words need most room.

        Args:
            lines: of steps.
            more: what parts of the run say.
        """
        unit = self.recipe.unit
        num_units, seconds = (
            sum(line.get(f"{unit}s", line["samples"]) for line in lines),
            sum(line["seconds"] for line in lines),
        )
        self.num_units, self.seconds = self.num_units + num_units, self.seconds + seconds
        if not seconds or self.bar is None:
            return
        line = lines[-1]
        numbers = [
            f"loss {line['loss']:.3f}",
            f"{num_units / seconds:,.0f} {unit}s/s",
            f"lr {line['learning_rate']:.1e}",
        ]
        if self.plan.spans is not None:
            numbers = [f"batch {line['samples']}", *numbers]
        numbers += [*more, f"{peak_memory(self.device) / 1e9:.2f} GB"]
        self.bar.set_postfix_str(", ".join(numbers), refresh=False)

    def restart_clock(self) -> None:
        """Leave the time since the last step (a checkpoint, an evaluation) out of the next one's, and out of the bar's rate."""
        seconds = self.take_seconds()
        if self.bar is not None and not self.bar.disable:
            self.bar.start_t += seconds
            self.bar.last_print_t += seconds

    def close(self) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.close()


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process, bytes: of tensors on a GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
