"""When a program ended each of its optimizer steps: what `benchmarks/bench.py` reads of all programs alike."""

import os
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple


class Stamp(NamedTuple):
    """The end of a step.

    Attributes:
        time: of `time.perf_counter`, which all processes of a machine share.
        units: tokens without padding, or images, of the step.
        loss: of the step's whole batch.
    """

    time: float
    units: int
    loss: float


class Clock:
    """Writes a line per step; the first line is the number of the process.

    A loop calls `collated` for every batch that it loads and `step` after every optimizer step. Loaders run ahead, but in
    order.

    Args:
        file: to write.
    """

    def __init__(self, file: str | Path):
        self.file, self.coming = Path(file), deque()
        self.file.write_text(f"{os.getpid()}\n", encoding="utf-8")

    def collated(self, units: int) -> None:
        """Note that a batch was loaded."""
        self.coming.append(units)

    def step(self, loss: float, num_batches: int = 1) -> None:
        """Stamp the end of the step of the next `num_batches` batches. On a CPU its loss costs nothing to read."""
        now = time.perf_counter()
        units = sum(self.coming.popleft() for _ in range(num_batches))
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(f"{now} {units} {loss:.6g}\n")


def read(file: Path) -> tuple[int | None, list[Stamp]]:
    """Read the process, and its stamps; a line that is not whole yet is left out."""
    if not file.exists():
        return None, []
    number, *lines = file.read_text(encoding="utf-8").split("\n")[:-1] or [None]
    words = [line.split() for line in lines]
    return number and int(number), [Stamp(float(second), int(units), float(loss)) for second, units, loss in words]
