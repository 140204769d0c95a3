"""The steps of a stream: each process reads the virtual streams that its samples need, and a checkpoint has their places."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object

from samestep.contrib.streaming.streams import Mark, Streams
from samestep.cut.partition import deal
from samestep.data.row_report import SKIPPED_FILE, Problem
from samestep.data.steps import StepData, Steps
from samestep.printing import format_count
from samestep.recipe.reading import read_text
from samestep.training.parts import Part

if TYPE_CHECKING:
    from samestep.training.run import Run


MAX_BYTES = 2**30
"""Bytes of a list of skipped rows that is read."""


@dataclasses.dataclass(frozen=True)
class StreamStepData(StepData):
    """A step with the places of the streams that this process reads, behind the step, and the rows that were left out for it.

    Attributes:
        marks: number of a stream -> its place.
        bad: place and reason of rows with a fault, since the step before.
        num_left_out: reason -> rows that a rule of the recipe left out, since the step before.
    """

    marks: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    bad: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    num_left_out: dict[str, int] = dataclasses.field(default_factory=dict)


class StreamSteps(Steps):
    """Steps of a source with `streams`.

    Where all samples are as long (`source.is_even`), process r computes those of the streams s with s mod N = r, and reads
    no other stream. Where lengths differ, all processes read all streams: they must know the lengths to cut a step.
    """

    def __getitem__(self, step: int) -> StreamStepData:
        data = super().__getitem__(step)
        bad, counts = self._streams.take_left_out()
        return StreamStepData(**vars(data), marks=self._streams.list_marks(), bad=bad, num_left_out=dict(counts))

    @property
    def _streams(self) -> Streams:
        source: Any = self.source
        streams: Streams = (
            source if hasattr(source, "streams") else source.dataset
        ).streams  # or of a loop of one's own
        return streams

    @property
    def _is_even(self) -> bool:
        source: Any = self.source
        return bool(source.is_even if hasattr(source, "is_even") else source.length is None)

    def _draw(self, step: int) -> tuple[np.ndarray, np.ndarray, list[Any], np.ndarray]:
        if not self._is_even:
            return super()._draw(step)
        epochs, ids = self.order.samples(step)
        lengths = np.full(len(ids), max(1, self.source.max_length))
        parts, _ = self._partition(step, lengths)
        own = np.concatenate([places for part in self.own_parts or [self.process_index] for places in parts[part]])
        samples: list[Any] = [None] * len(ids)
        for place in np.sort(own).tolist():  # so that each stream is read forwards
            samples[place] = self.source.draw(0, int(ids[place]))
        return epochs, ids, samples, lengths

    def _partition(self, step: int, lengths: np.ndarray) -> tuple[list[list[np.ndarray]], list[list[int | None]]]:
        if not self._is_even or self.deals_whole or self._is_cut_at_random(step, len(lengths)):
            return super()._partition(step, lengths)
        owners = self._find_owners(step)
        size = self.layout.per_device_train_batch_size
        if self.max_tokens is not None:
            size = min(size, self.max_tokens // max(1, self.source.max_length))
        parts = []
        for process in range(self.layout.num_processes):
            own = np.flatnonzero(owners == process)
            parts.append([own[first : first + size] for first in range(0, len(own), size)] or [own])
        return parts, [[None] * len(micro_batches) for micro_batches in parts]

    def _find_owners(self, step: int) -> np.ndarray:
        """Find the process of each sample of a step, int64 [S]."""
        _, ids = self.order.samples(step)
        count = self.layout.num_processes
        if count > len(self._streams):  # several processes share a stream: each passes over the others' samples
            return ids % count
        return np.array([self._streams.find(number)[1] for number in ids.tolist()], np.int64) % count

    def cut_first_samples(self, step: int, num_samples: int, max_samples: int) -> list[Any]:
        """Cut the first samples of a step, which this process reads all, if they are others'."""
        ids = self.order.samples(step)[1][:num_samples].tolist()
        samples = [self.source.draw(0, number) for number in ids]
        places, _ = deal(
            [np.arange(len(ids))[first : first + max_samples] for first in range(0, len(ids), max_samples)], 1
        )
        micro_batches = [self.source.collate([samples[place] for place in own]) for own in places[0]]
        return [{name: value for name, value in batch.items() if name != "counts"} for batch in micro_batches]

    def stream(self, first: int, last: int, num_workers: int | None, device: torch.device) -> Iterator[StepData]:
        """Prepare steps ahead of time, in one worker at most: each would read all streams."""
        workers = int(device.type == "cuda") if num_workers is None else min(1, num_workers)
        yield from super().stream(first, last, workers, device)


class StreamPosition(Part):
    """The places of the virtual streams, for checkpoints; and skipped_rows.jsonl, the rows with a fault that were left out.

    A row comes into the file with the checkpoint behind its step: who goes on from an earlier one meets it again.
    """

    def __init__(self, run: "Run"):
        self.run = run
        self.marks: dict[int, dict[int, list[int]]] = {}
        self.file = run.output_dir / SKIPPED_FILE
        self.bad: dict[str, str] = {problem.place: problem.reason for problem in _list_held_out(run.data[0])}
        self.listed: set[str] = set()
        self.counts: Counter[str] = Counter()
        if run.start.state.streams:
            run.data[0].streams.seek({int(number): mark for number, mark in run.start.state.streams.items()})
        if run.accelerator.is_main_process:
            self._read_listed()

    def _read_listed(self) -> None:
        """Read which rows the sessions before have listed; delete the file of a run that begins anew."""
        if not self.file.exists():
            return
        text = read_text(self.file, str(self.file), MAX_BYTES) if self.run.completed_steps else ""
        lines = text.splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("}\n")]  # a kill, or a full disk, may have cut the last one
        self.listed = {json.loads(line)["place"] for line in whole}
        if not whole:
            self.file.unlink()
        elif whole != lines:
            self.file.write_text("".join(whole), encoding="utf-8")

    def watch(self, stream: Iterator[StepData]) -> Iterator[StepData]:
        """Note the places behind each step, and what was left out for it."""
        for data in stream:
            kept = {step: marks for step, marks in self.marks.items() if step >= data.step - 1}
            self.marks = kept | {data.step: getattr(data, "marks", {})}
            self.bad |= dict(getattr(data, "bad", ()))
            self.counts.update(getattr(data, "num_left_out", {}))
            yield data

    def state(self) -> dict[str, Any]:
        """Collect the places of all processes behind the last step that is done. Called by all processes."""
        self._list_bad()
        marks = self.marks.get(self.run.completed_steps - 1, {})
        return {"streams": merge_marks(gather(self.run.accelerator, marks))}

    def _list_bad(self) -> None:
        """Add the rows that any process left out to the file."""
        for part in gather(self.run.accelerator, self.bad):
            self.bad |= part
        rows = {place: reason for place, reason in self.bad.items() if place not in self.listed}
        if rows and self.run.accelerator.is_main_process:
            with self.file.open("a", encoding="utf-8") as file:
                for place, reason in rows.items():
                    file.write(json.dumps({"place": place, "reason": reason}, ensure_ascii=False) + "\n")
        self.listed |= rows.keys()
        self.bad = {}

    def close(self) -> None:
        """Say what was left out. Called by all processes."""
        self._list_bad()
        parts = gather(self.run.accelerator, self.counts)
        # Where lengths differ, all processes read all rows
        counts = sum(parts, Counter()) if self.run.data[0].is_even else parts[0]
        for reason, count in counts.items():
            self.run.say(f"left out in this session: {format_count(count, 'row')}, {reason}")
        if self.listed:
            self.run.say(f"{format_count(len(self.listed), 'row')} with a fault, left out so far: {self.file}")


def _list_held_out(train: Any) -> list[Problem]:
    """List the rows of the held-out files that were left out."""
    return [problem for report in train.row_reports for problem in report.bad]


def gather(accelerator: Any, value: Any) -> list[Any]:
    """Gather what each process knows."""
    return list(gather_object([value])) if accelerator.num_processes > 1 else [value]


def merge_marks(parts: Sequence[dict[int, list[int]]]) -> dict[str, list[int]]:
    """Merge the places of all processes: of each stream the farthest one. The names are those of JSON."""
    merged: dict[int, list[int]] = {}
    for marks in parts:
        for number, mark in marks.items():
            if mark[0] > merged.get(number, [*Mark()])[0]:
                merged[number] = mark
    return {str(number): merged[number] for number in sorted(merged)}
