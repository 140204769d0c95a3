"""A stream as the dataset of a loop of one's own, for `exact_steps`."""

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.contrib.streaming.shards import FileReader, Retries, cut_shards, find_shards
from samestep.contrib.streaming.steps import StreamSteps, gather, merge_marks
from samestep.contrib.streaming.streams import BUFFER_SIZE, ENDLESS, NUM_STREAMS, Source, StreamOrder, Streams


class StreamDataset:
    """A dataset whose samples are read as the training goes. `stream` makes one of files.

    Attributes:
        streams: what it reads.
        steps_class: what cuts its steps.
    """

    steps_class = StreamSteps

    def __init__(self, streams: Streams):
        self.streams = streams
        self._first: Any = None

    def __len__(self) -> int:
        """Return a number of samples that no training reaches."""
        return ENDLESS

    def __getitem__(self, sample_id: int) -> Any:
        """Return sample t of the run; quickly where t grows."""
        if sample_id:
            return self.streams.draw(sample_id).value
        if self._first is None:  # kept, as it stands for others in micro-batches that count nothing
            self._first = self.streams.draw(0).value
        return self._first

    def make_order(self, global_batch_size: int, seed: int, epoch_end: str) -> StreamOrder:
        """Make the order of the steps, which the streams' own seed decides."""
        return StreamOrder(ENDLESS, global_batch_size, seed)

    def state_dict(self, steps: Any) -> dict[str, Any]:
        """Return the places of all streams behind the last step that was given, plain numbers. Called by all processes.

        Args:
            steps: what `exact_steps` returned.
        """
        marks = {} if steps.last is None else steps.last.marks
        return {"streams": merge_marks(gather(steps.accelerator, marks))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to places that `state_dict` returned, perhaps on another number of processes; then give `first_step`."""
        self.streams.seek({int(number): mark for number, mark in state["streams"].items()})


def stream(
    files: str | Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    seed: int = 0,
    num_streams: int = NUM_STREAMS,
    shuffle_buffer_size: int = BUFFER_SIZE,
    columns: Sequence[str] | None = None,
    on_bad_row: str = "refuse",
    retries: Retries | None = None,
) -> StreamDataset:
    """Stream the rows of shards: jsonl, txt, Parquet, tar, perhaps compressed; on a disk, or by URLs of fsspec.

    Args:
        files: paths, URLs, globs and folders.
        weights: of each entry of `files`, its share of the samples, exact; None: all files are one source.
        seed: decides the order.
        num_streams: V, virtual streams of each source.
        shuffle_buffer_size: W, rows of a stream that are shuffled at once.
        columns: columns of Parquet that are read; None: all.
        on_bad_row: refuse, or skip: leave out what cannot be used, with a line for each.
        retries: how often a part of a file is asked for.

    Returns:
        A dataset of rows, mappings of their columns.

    Raises:
        UsageError: files that are missing or of unknown kind.
    """
    entries = [files] if isinstance(files, str) else list(files)
    groups = [[entry] for entry in entries] if weights is not None else [entries]
    sources = [
        Source(
            cut_shards(find_shards(group, retries), num_streams, retries),
            FileReader(columns, retries=retries),
            ", ".join(group),
            weight,
            on_bad_row=on_bad_row,
        )
        for group, weight in zip(groups, weights or [1.0], strict=True)
    ]
    return StreamDataset(Streams(sources, seed, num_streams, shuffle_buffer_size))
