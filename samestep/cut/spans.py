"""The part of the stream of samples that each step holds, where steps may grow: any step at once, no state.

The stream are the epochs one after the other; place p of it is sample p % n of epoch p // n, in that epoch's order. Steps of a
stage follow each other without a gap, but for what `drop` leaves out at the end of an epoch.
"""

import bisect
import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Spans:
    """The spans of all steps.

    Attributes:
        num_samples: n, samples of an epoch.
        epoch_end: carry, keep or drop, as in `order.Order`.
        stages: (place, size) in order, the first at place 0: steps that begin there or later have this size, until the next
            stage. See a recipe's `batch_schedule`.

    >>> spans = Spans(num_samples=10, epoch_end="carry", stages=((0, 4), (6, 8)))
    >>> [spans.find(step) for step in range(4)], spans.count(24)
    ([(0, 4), (4, 8), (8, 16), (16, 24)], 4)
    >>> [Spans(10, "keep", ((0, 4), (6, 8))).find(step) for step in range(5)]
    [(0, 4), (4, 8), (8, 10), (10, 18), (18, 20)]
    """

    num_samples: int
    epoch_end: str
    stages: tuple[tuple[int, int], ...]

    @functools.cached_property
    def _pieces(self) -> tuple[list[int], list[int], list[int]]:
        """Return the first step of each stage that has steps, the place where that begins, and the size of its steps."""
        pieces, step, place = [(0, 0, self.stages[0][1])], 0, 0
        for first, size in self.stages[1:]:
            number = self._count_from(place, pieces[-1][2], first)
            if number == 0:
                pieces.pop()  # no step begins in the stage before
            step, place = step + number, self._begin(place, pieces[-1][2], number) if number else place
            pieces.append((step, place, size))
        steps, places, sizes = map(list, zip(*pieces, strict=True))
        return steps, places, sizes

    def find(self, step: int) -> tuple[int, int]:
        """Find where a step begins, and where it ends, in the stream."""
        steps, places, sizes = self._pieces
        number = bisect.bisect_right(steps, step) - 1
        first = self._begin(places[number], sizes[number], step - steps[number])
        last = first + sizes[number]
        return first, last if self.epoch_end == "carry" else min(
            last, (first // self.num_samples + 1) * self.num_samples
        )

    def find_size(self, step: int) -> int:
        """Find the size of the stage that a step is in; the step itself has fewer samples at the end of an epoch (`keep`)."""
        steps, _, sizes = self._pieces
        return sizes[bisect.bisect_right(steps, step) - 1]

    def count(self, place: int) -> int:
        """Count the steps that begin before a place of the stream."""
        steps, places, sizes = self._pieces
        number = max(0, bisect.bisect_left(places, place) - 1)
        return steps[number] + self._count_from(places[number], sizes[number], place)

    def list_sizes(self, num_steps: int) -> list[tuple[int, int]]:
        """List the sizes of the first `num_steps` steps: (steps, size) of each stage that has steps."""
        steps, _, sizes = self._pieces
        ends = [min(step, num_steps) for step in [*steps[1:], num_steps]]
        return [(end - step, size) for step, end, size in zip(steps, ends, sizes, strict=True) if end > step]

    def _per_epoch(self, size: int) -> int:
        n = self.num_samples
        return -(-n // size) if self.epoch_end == "keep" else n // size

    def _count_head(self, place: int, size: int) -> int:
        """Count the steps of `size` from a place to the end of its epoch; 0 at the beginning of one."""
        left = -place % self.num_samples
        return -(-left // size) if self.epoch_end == "keep" else left // size

    def _begin(self, place: int, size: int, number: int) -> int:
        """Find where step `number` of the steps of `size` from a place on begins."""
        n = self.num_samples
        if self.epoch_end == "carry":
            return place + number * size
        head = self._count_head(place, size)
        if number < head:
            return place + number * size
        epochs, step = divmod(number - head, self._per_epoch(size))
        return -(-place // n) * n + epochs * n + step * size

    def _count_from(self, place: int, size: int, end: int) -> int:
        """Count the steps of `size` from a place on that begin before `end`."""
        if self.epoch_end == "carry":
            return max(0, -(-(end - place) // size))
        n, head = self.num_samples, self._count_head(place, size)
        gap = end - -(-place // n) * n  # from the first epoch that begins at the place or after it
        if gap <= 0:
            return min(head, max(0, -(-(end - place) // size)))
        epochs, rest = divmod(gap, n)
        per_epoch = self._per_epoch(size)
        return head + epochs * per_epoch + min(per_epoch, -(-rest // size))
