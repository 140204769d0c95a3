"""Virtual streams: the samples of a training as a function of the recipe and the shards, whoever reads them.

Sample t of a run comes from virtual stream t mod V. In every epoch a stream reads its share of the shards, which are permuted
by the seed and the epoch; a buffer of W rows is filled, given in an order that depends on the seed, the stream and the number
of fillings, and filled again. So a stream's place is a few integers, and nothing depends on processes, workers or restarts.
"""

import dataclasses
import fractions
import functools
import hashlib
import itertools
import math
import pickle
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from samestep.contrib.streaming.shards import BadRow, DamagedShard, Reader, Shard, warn
from samestep.cut.order import Order, permute
from samestep.errors import UsageError

NUM_STREAMS, BUFFER_SIZE = 64, 256
"""V and W where nothing else is said."""
ENDLESS = 2**62
"""Number of samples of a stream, as an order counts them: more than any training uses."""
GROUP = 2048  # samples of a mixture that are dealt at once, about
CHUNK = 16  # rows that are converted at once
NUM_MARKS = 64  # of the last samples of a stream, to which it can go back
MAX_PERIOD = 10_000  # samples after which the shares of a mixture are exact at most


class Mark(NamedTuple):
    """A place of a stream, from which the samples after it can be read.

    Attributes:
        done: samples before it.
        epoch, turn, offset: place of the first row of the buffer: the epoch, the number of the shard among those of the stream,
            and the offset in it.
        filling: number of the buffer's filling, from which the seed of its order is made.
        row: rows of the buffer that are used.
        used: tokens of the next row that are used.
    """

    done: int = 0
    epoch: int = 0
    turn: int = 0
    offset: int = 0
    filling: int = 0
    row: int = 0
    used: int = 0


class LeftOut(str):
    """Says by which rule of the recipe a row is left out; it comes in the place of the row."""


class Taken(NamedTuple):
    """A sample, and the places of the rows of which it is made."""

    value: Any
    places: tuple[str, ...]


class Assemble(Protocol):
    """Takes the next sample from a stream."""

    def __call__(self, stream: "Stream") -> Any:
        """Return the sample; it advances the stream."""


def derive_seed(*parts: object) -> int:
    """Derive a seed of 62 bits from a recipe's seed and what it is for."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 2


def take_row(stream: "Stream") -> Any:
    """Take a row as a sample."""
    value = stream.peek()
    stream.advance()
    return value


@dataclasses.dataclass(frozen=True)
class Source:
    """Shards of one source, and how their rows become samples.

    Attributes:
        shards: in order; at least one.
        read: reads their rows.
        name: in messages.
        weight: share of the samples of a mixture, relative to the others.
        convert: makes of rows, each with its place, what `assemble` takes, as many; a `LeftOut` in place of a row leaves it
            out, a `BadRow` is a fault.
        assemble: makes samples.
        keep: what of a row stays in the buffer, or a `LeftOut` or `BadRow`.
        on_bad_row: refuse: a row or shard that cannot be used ends the run; skip: it is left out, which a line says.
    """

    shards: Sequence[Shard]
    read: Reader
    name: str = "train_file"
    weight: float = 1.0
    convert: Callable[[list[tuple[str, Any]]], list[Any]] = lambda rows: [row for _, row in rows]
    assemble: Assemble = take_row
    keep: Callable[[Any], Any] = lambda row: row
    on_bad_row: str = "refuse"


class Rows:
    """The rows of a virtual stream, from a place on, without an end.

    Args:
        source: its shards.
        number: s, of the stream.
        num_streams: V, streams of the source.
        seed: derived from the recipe's for this source.

    Attributes:
        head: epoch, turn and offset behind the row that was read last.
        bad: place -> reason of rows and shards with a fault that were left out; of this process.
        new: of these, those that `Streams.take_left_out` has not taken.
        counts: reason -> rows that a rule of the recipe left out, since it was taken.
    """

    def __init__(self, source: Source, number: int, num_streams: int, seed: int):
        self.source, self.number, self.num_streams, self.seed = source, number, num_streams, seed
        self.bad: dict[str, str] = {}
        self.new: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.head = (0, 0, 0)

    def _find_shard(self, epoch: int, turn: int) -> Shard | None:
        """Find the shard of a stream's turn in an epoch; None: its share of the epoch is done."""
        place, num_shards = self.number + turn * self.num_streams, len(self.source.shards)
        if place >= num_shards:
            return None
        return self.source.shards[int(permute(np.array(place), num_shards, derive_seed(self.seed, "shards"), epoch))]

    def read(self, head: tuple[int, int, int]) -> Iterator[tuple[str, Any] | None]:
        """Iterate over the places and rows of the stream from a head on, without an end; None: an epoch ends."""
        self.head = head
        num_rows = int(head[1:] != (0, 0))  # since an epoch began, of which some may have been read before
        while True:
            epoch, turn, offset = self.head
            shard = self._find_shard(epoch, turn)
            if shard is None:
                if not num_rows and turn:
                    self.refuse_all()
                self.head, num_rows = (epoch + 1, 0, 0), 0
                yield None
                continue
            try:
                for end, place, values in self.source.read(shard, offset):
                    self.head = epoch, turn, end
                    row = values if isinstance(values, BadRow) else self.source.keep(values)
                    if isinstance(row, BadRow | LeftOut):
                        self.leave_out(place, row)
                    else:
                        num_rows += 1
                        yield place, row
            except DamagedShard as error:
                text = str(error).removeprefix(f"shard {shard.name} is ")
                self.leave_out(f"shard {shard.name}", BadRow(f"{text}; the rest of it is not read"))
            self.head = epoch, turn + 1, 0

    def refuse_all(self) -> NoReturn:
        """Raise a UsageError: no row can be used."""
        raise UsageError(
            f"{self.source.name}: the shards of stream {self.number} hold no row that can be used in a whole epoch"
            f"{''.join(f', {count:,} of them: {reason}' for reason, count in self.counts.most_common(1))}: give other shards, "
            "or fewer streams (--num_streams)"
        )

    def leave_out(self, place: str, why: "BadRow | LeftOut") -> None:
        """Leave out a row: count it, where a rule asks for that. Of a fault say so, once; or raise UsageError, where the source
        refuses such rows."""
        if isinstance(why, LeftOut):
            self.counts[why] += 1
            return
        if self.source.on_bad_row == "refuse":
            raise UsageError(describe_refusal(place, why))
        reason = why.removeprefix(place).removeprefix(":").strip()  # it may begin with the place
        if place not in self.bad:  # once, also where the stream went back
            self.bad[place] = reason
            self.new.append((place, reason))
            warn(f"left out: {place}: {reason}")


def describe_refusal(place: str, why: str) -> str:
    """Say why a row ends the run, and what leaves it out."""
    reason = why.removeprefix(place).removeprefix(":").strip().rstrip(".")
    return f"{place}: {reason}; --on_bad_row skip leaves out what cannot be used"


class Stream:
    """One virtual stream: its rows, in buffers whose order is drawn.

    Args:
        rows: its rows.
        buffer_size: W, rows of the buffer.
    """

    def __init__(self, rows: Rows, buffer_size: int):
        self.rows, self.buffer_size = rows, buffer_size
        self.seek(Mark())

    def seek(self, mark: Mark) -> None:
        """Go to a place."""
        self.first, self.index, self.filling, self.row, self.used = mark, mark.done, mark.filling, mark.row, mark.used
        self._begin = (mark.epoch, mark.turn, mark.offset)  # of the buffer
        self._coming = self.rows.read(self._begin)
        self._buffer: list[tuple[str, bytes]] = []  # places and rows, packed
        self._order = np.zeros(0, np.int64)
        self._converted: dict[int, Any] = {}
        self.places: list[str] = []

    @property
    def mark(self) -> Mark:
        """The place of the next sample."""
        return Mark(self.index, *self._begin, self.filling, self.row, self.used)

    def take(self) -> Taken:
        """Take the next sample."""
        self.places = []
        value = self.rows.source.assemble(self)
        self.index += 1
        return Taken(value, tuple(self.places))

    def peek(self) -> Any:
        """Return the next row, as converted; one that is left out is passed over."""
        last_epoch = self._begin[0] + 2
        while True:
            if not self._buffer:
                self._fill()
            if self._begin[0] > last_epoch:
                self.rows.refuse_all()
            if self.row == len(self._buffer):
                self.filling, self.row = self.filling + 1, 0
                self._begin = self.rows.head
                self._buffer = []
                continue
            if self.row not in self._converted:
                numbers = self._find_group(self.row)
                rows = [self._unpack(number) for number in numbers]
                self._converted = dict(zip(numbers, self.rows.source.convert(rows), strict=True))
            value, place = self._converted[self.row], self._buffer[self._order[self.row]][0]
            if isinstance(value, BadRow | LeftOut):
                self.rows.leave_out(place, value)
                self.advance()
                continue
            if not self.places or self.places[-1] != place:
                self.places.append(place)
            return value

    def _find_group(self, row: int) -> range:
        """Find the rows that are converted with a row: the same ones wherever a session began; the last group is larger."""
        size = len(self._buffer)
        last = max(0, size // CHUNK - 1)
        group = min(row // CHUNK, last)
        return range(group * CHUNK, size if group == last else (group + 1) * CHUNK)

    def list_neighbours(self) -> list[Any]:
        """List the rows, as converted, that were converted with the next one, without it: 15 to 30 of a buffer that has as
        many. `peek` comes first."""
        rows = [value for number, value in self._converted.items() if number != self.row]
        return [value for value in rows if not isinstance(value, BadRow | LeftOut)]

    def advance(self) -> None:
        """Go to the next row."""
        self.row, self.used = self.row + 1, 0

    def _unpack(self, number: int) -> tuple[str, Any]:
        place, packed = self._buffer[self._order[number]]
        return place, pickle.loads(zlib.decompress(packed))

    def _fill(self) -> None:
        for row in self._coming:
            if row is not None:  # a text shrinks to a third, in a tenth of the time that tokenizing it takes
                self._buffer.append((row[0], zlib.compress(pickle.dumps(row[1]), 1)))
            # A buffer holds no rows of two epochs: so each epoch has every row once
            if len(self._buffer) == self.buffer_size or (row is None and self._buffer):
                break
        seed = derive_seed(self.rows.seed, "buffer", self.rows.number)
        self._order = permute(np.arange(len(self._buffer)), len(self._buffer), seed, self.filling)
        self._converted = {}


@functools.lru_cache(8)
def _deal_periods(shares: tuple[int, ...], seed: int, group: int, count: int) -> tuple[list[int], list[int]]:
    """Deal the samples of `count` periods of a mixture at once: source of each, and samples of that source before it."""
    size = sum(shares)
    period, place = np.divmod(np.arange(group * count * size, (group + 1) * count * size), size)
    sources = np.searchsorted(np.cumsum(shares), permute(place, size, seed, period), side="right")
    ranks = np.zeros(len(place), np.int64)
    for number, share in enumerate(shares):
        ranks[sources == number] = np.arange(group * count * share, (group + 1) * count * share)
    return sources.tolist(), ranks.tolist()


class Streams:
    """The samples of a run: sample t for any t, quickly where t grows.

    Args:
        sources: of one kind of samples.
        seed: the recipe's.
        num_streams: V; of a source with fewer shards, and parts of them, as many as these.
        buffer_size: W, rows of the buffer of each stream.

    Attributes:
        shares: samples of each source in a period of a mixture.

    Raises:
        UsageError: weights whose shares are not exact in a period of `MAX_PERIOD` samples.
    """

    def __init__(
        self, sources: Sequence[Source], seed: int, num_streams: int = NUM_STREAMS, buffer_size: int = BUFFER_SIZE
    ):
        self.sources, self.seed = list(sources), seed
        self.shares = find_shares([source.weight for source in sources])
        self.streams: list[list[Stream]] = []
        for number, source in enumerate(sources):
            count = min(num_streams, len(source.shards))
            own_seed = derive_seed(seed, "source", number)
            self.streams.append([Stream(Rows(source, place, count, own_seed), buffer_size) for place in range(count)])
        self._firsts = np.cumsum([0, *map(len, self.streams)]).tolist()
        self._mixture_seed = derive_seed(seed, "mixture")
        self._starts: dict[int, Mark] = {}
        self._marks: dict[int, OrderedDict[int, Mark]] = {}

    def __len__(self) -> int:
        """Count the virtual streams of all sources."""
        return int(self._firsts[-1])

    def find(self, sample_id: int) -> tuple[int, int, int]:
        """Find the source of sample t, the stream among all, and the sample's index in that stream."""
        source, rank = 0, sample_id
        if len(self.sources) > 1:
            count = max(1, GROUP // sum(self.shares))
            group, place = divmod(sample_id, count * sum(self.shares))
            sources, ranks = _deal_periods(self.shares, self._mixture_seed, group, count)
            source, rank = sources[place], ranks[place]
        index, stream = divmod(rank, len(self.streams[source]))
        return source, self._firsts[source] + stream, index

    def draw(self, sample_id: int) -> Taken:
        """Draw sample t: reads on in its stream, or goes back in it."""
        source, number, index = self.find(sample_id)
        stream = self.streams[source][number - self._firsts[source]]
        marks = self._marks.setdefault(number, OrderedDict())
        if index != stream.index:  # the nearest place before it that is known
            known = [Mark(), self._starts.get(number, Mark()), *marks.values(), stream.mark]
            nearest = max((mark for mark in known if mark.done <= index), key=lambda mark: mark.done)
            if nearest.done != stream.index:
                stream.seek(nearest)
        while True:
            marks[stream.index] = stream.mark
            if len(marks) > NUM_MARKS:
                marks.popitem(last=False)
            taken = stream.take()
            if stream.index > index:
                return taken

    def take_left_out(self) -> tuple[list[tuple[str, str]], Counter[str]]:
        """Take what was left out since the last call: places and reasons of faults, and reasons of rules -> rows."""
        bad, counts = [], Counter[str]()
        for stream in itertools.chain.from_iterable(self.streams):
            bad += stream.rows.new
            counts += stream.rows.counts
            stream.rows.new, stream.rows.counts = [], Counter()
        return bad, counts

    def list_marks(self) -> dict[int, list[int]]:
        """List the places of all streams that have been read here: number -> integers of `Mark`.

        A stream that went back behind the place at which a session began is listed with that place.
        """
        found = {}
        for source, streams in enumerate(self.streams):
            for stream in streams:
                number = self._firsts[source] + stream.rows.number
                mark = max(self._starts.get(number, Mark()), stream.mark, key=lambda mark: mark.done)
                if mark.done:
                    found[number] = list(mark)
        return found

    def seek(self, marks: Mapping[int, Sequence[int]]) -> None:
        """Go to the places that `list_marks` listed, perhaps on other processes; streams that are not among them begin anew."""
        self._starts = {int(number): Mark(*mark) for number, mark in marks.items()}
        self._marks = {}
        for source, streams in enumerate(self.streams):
            for stream in streams:
                stream.seek(self._starts.get(self._firsts[source] + stream.rows.number, Mark()))

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits of a SHA-256 of the names and sizes of all shards, and of the shares."""
        names = [[(shard.name.rpartition("/")[2], *shard[1:]) for shard in source.shards] for source in self.sources]
        return hashlib.sha256(repr((names, self.shares)).encode()).hexdigest()[:16]


def find_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Find the samples of each source in a period, in which the shares of a mixture are exact.

    >>> find_shares([1.0]), find_shares([0.5, 0.25, 0.25]), find_shares([2, 1])
    ((1,), (2, 1, 1), (2, 1))
    """
    exact = [fractions.Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    parts = [weight / total for weight in exact]
    period = math.lcm(*(part.denominator for part in parts))
    if period > MAX_PERIOD:
        raise UsageError(
            f"mixture_weights are {', '.join(f'{weight:g}' for weight in weights)}, whose shares are exact in {period:,} "
            f"samples only, must be in {MAX_PERIOD:,} at most: round them"
        )
    return tuple(int(part * period) for part in parts)


@dataclasses.dataclass(frozen=True)
class StreamOrder(Order):
    """The order of a stream: sample t of the run has the number t. It has the interface of `Order`, and any step at once."""

    def samples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the samples of a step: epoch 0, int64 [S], and their numbers in the run, int64 [S]."""
        ids = np.arange(*self.spans.find(step), dtype=np.int64)
        return np.zeros_like(ids), ids

    def count_epochs(self, step: int) -> float:
        """Return 0: a stream's length is not known."""
        return 0.0


class DrawnShards:
    """A `Reader` of shards that are no files: row i of shard NAME is (NAME, i); for tests and measurements of any size."""

    def __call__(self, shard: Shard, offset: int) -> Iterator[tuple[int, str, Any]]:
        for number in range(offset, shard.size):
            yield number + 1, f"{shard.name}:{number}", number
