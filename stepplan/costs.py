"""Money, bytes, dates and interruptions that come with a training, beyond the hours and the memory of a device.

What arithmetic does not give is assumed, and said so where it is printed: the constants below.
"""

import dataclasses
import datetime
import math
from typing import Any

from samestep.errors import UsageError
from samestep.recipe.reading import format_name
from samestep.recipe.run_settings import RunSettings, choose_interval
from stepplan.convnet import ConvNet
from stepplan.memory import count_trained
from stepplan.placement import Placement

DISK = 1.0
"""Rate at which checkpoints are written, GB/s. Assumed: a disk of a rented machine, or a fast network file system."""
RESTART_SECONDS = 180.0
"""Seconds from an interruption to the next step on a machine at hand: processes, data, weights, first kernels. Assumed."""
BYTES_PER_TOKEN = 8
"""Bytes of a token of data on disk: 4 of text, assumed, and 4 of the token's number in the cache."""
BYTES_PER_PHOTOGRAPH = 110e3
"""Bytes of a photograph as JPEG: the 138 GB of ImageNet's 1.28 million."""
KEPT_CHECKPOINTS = 2
"""Checkpoints on disk at once, as the programs keep them."""
MAX_PER_DAY = 1440.0
"""Interruptions of a day at most: one a minute."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """A user's terms: the machines and the time, beside the hardware.

    Attributes:
        price_per_hour: dollars for an hour of one device; None: not known.
        start: when the training starts; None: not said.
        interruptions_per_day: interruptions of all machines in a day, as of spot instances; None: not said.
        disk_gb_per_s: rate at which checkpoints are written.
        host_gb: memory of a machine's host, GB; None: as the device's file says, if it does.
    """

    price_per_hour: float | None = None
    start: datetime.datetime | None = None
    interruptions_per_day: float | None = None
    disk_gb_per_s: float = DISK
    host_gb: float | None = None


def read_start(text: str | None) -> datetime.datetime | None:
    """Read the date, or the date and the time, at which a training starts.

    >>> read_start("2026-11-28"), read_start("2026-11-28 09:30")
    (datetime.datetime(2026, 11, 28, 0, 0), datetime.datetime(2026, 11, 28, 9, 30))
    """
    if text is None:
        return None
    try:
        return datetime.datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        raise UsageError(
            f"start is {format_name(text)}, must be a date, or a date and a time: for example 2026-11-28 or 2026-11-28T09:30"
        ) from None


def find_end(start: datetime.datetime, seconds: float) -> datetime.datetime | None:
    """Find when a training ends, to the minute; None: later than calendars go.

    >>> find_end(datetime.datetime(2026, 11, 25, 17, 0), 3 * 86400 + 4 * 3600)
    datetime.datetime(2026, 11, 28, 21, 0)
    """
    try:
        return (start + datetime.timedelta(seconds=seconds)).replace(second=0, microsecond=0)
    except OverflowError:
        return None


def best_interval(checkpoint_seconds: float, seconds_between_interruptions: float) -> float:
    """Compute the seconds between checkpoints that lose the least: sqrt(2 C M) for checkpoints of C and interruptions every M.

    Reference: Young, A first order approximation to the optimum checkpoint interval, 1974.

    >>> best_interval(50, 10_000)
    1000.0
    """
    return math.sqrt(2 * checkpoint_seconds * seconds_between_interruptions)


def describe_costs(placement: Placement, terms: Terms) -> dict[str, Any]:
    """Describe dollars, dates, bytes on disk, checkpoints and interruptions of a placement.

    Interruptions: each loses half an interval between checkpoints, and `RESTART_SECONDS`; checkpoints themselves take their
    seconds out of every interval, and count in all hours and dollars to the end. With a rate of interruptions the interval is
    `best_interval`, else the programs' own.
    """
    workload, trained, price = placement.workload, placement.seconds_to_end, terms.price_per_hour
    model, batch = workload.model, workload.global_batch_size
    dollars_per_second = None if price is None else price * placement.hardware.num_processes / 3600

    def cost(value: float | None) -> float | None:
        return None if value is None or dollars_per_second is None else value * dollars_per_second

    num_samples = None if workload.steps_per_epoch is None else workload.steps_per_epoch * batch
    epoch = None if workload.steps_per_epoch is None else workload.steps_per_epoch * placement.time.total
    sample = placement.time.total / batch
    billion = sample / model.length * 1e9 if model.unit == "token" else None
    checkpoint_bytes = round((4 + workload.moment_bytes) * count_trained(model))
    write = checkpoint_bytes / (terms.disk_gb_per_s * 1e9)
    interval = max(choose_interval(RunSettings.checkpointing_minutes, write), placement.time.total)
    rate = None if terms.interruptions_per_day is None else terms.interruptions_per_day / 86400
    if rate:
        interval = max(best_interval(write, 1 / rate), placement.time.total)
    saving = None if trained is None else write * math.ceil(trained / interval)  # the last one is at the end
    seconds = None if trained is None or saving is None else trained + saving
    lost = min(interval, interval if seconds is None else seconds) / 2 + RESTART_SECONDS
    stretched = None
    if rate is not None and trained is not None:
        useful = 1 - write / (interval + write) - rate * lost  # share of the time that goes forward
        stretched = trained / useful if useful > 0 else None  # nothing goes forward
    data = _count_data_bytes(placement, num_samples)
    end = find_end(terms.start, seconds) if terms.start is not None and seconds is not None else None
    host, why = count_host_bytes(placement, checkpoint_bytes)
    room = terms.host_gb or (placement.hardware.device.host_gb or 0) * placement.hardware.num_devices
    return {
        "price_per_hour": price,
        "seconds_to_end": seconds,
        "saving_seconds": saving,
        "host_memory": host,
        "host_memory_why": why,
        "memory_of_host": room * 1e9 or None,
        "cost": cost(seconds),
        "seconds_per_epoch": epoch,
        "cost_per_epoch": cost(epoch),
        "seconds_per_billion_tokens": billion,
        "cost_per_billion_tokens": cost(billion),
        "cost_per_million_samples": cost(1e6 * sample),
        "start": None if terms.start is None else terms.start.isoformat(timespec="minutes"),
        "end": None if end is None else end.isoformat(timespec="minutes"),
        "data_bytes": data,
        "disk_bytes": KEPT_CHECKPOINTS * checkpoint_bytes + 4 * count_trained(model) + (data or 0),
        "disk_gb_per_s": terms.disk_gb_per_s,
        "download_bytes": workload.download_bytes,
        "checkpoint_seconds": write,
        "checkpointing_seconds": interval,
        "interruptions_per_day": terms.interruptions_per_day,
        "interruption_seconds": lost,
        "interruption_cost": cost(lost),
        "seconds_with_interruptions": stretched,
        "cost_with_interruptions": cost(stretched),
    }


def count_host_bytes(placement: Placement, checkpoint_bytes: int) -> tuple[float, str]:
    """Count the bytes of memory that the fullest machine needs on its host, and say for what.

    Weights that are read by shards are not whole on any host: a process reads its rows. A checkpoint is copied to the host, by
    process 0, or by the processes that each hold a part. To go on from one each process reads it, of divided weights process 0,
    which at the end has the whole model, to save it.
    """
    workload, hardware = placement.workload, placement.hardware
    whole = 4 * workload.model.num_parameters
    owners = placement.num_shards or hardware.num_processes if placement.sharded else 1
    start = hardware.num_devices * whole / owners, "the rows of its processes, as they are read"
    if not (placement.sharded and workload.reads_shards):
        start = hardware.num_devices * whole, "whole weights for each of its processes, at the start"
    saved = checkpoint_bytes * min(hardware.num_devices, owners) / owners
    again = checkpoint_bytes * (1 if placement.sharded else hardware.num_devices)
    who = "process 0" if placement.sharded or hardware.num_devices == 1 else "each of its processes"
    return max(
        start,
        (saved, "the copy of a checkpoint, as it is saved"),
        (again, f"a whole checkpoint, which {who} reads where a run goes on"),
        (4 * count_trained(workload.model), "the whole model, at the end"),
    )


def _count_data_bytes(placement: Placement, num_samples: float | None) -> float | None:
    """Count the bytes of the data and its cache on disk, by their number of samples; None: nobody has counted them yet."""
    model = placement.workload.model
    if num_samples is None:
        return None
    if not isinstance(model, ConvNet):
        return BYTES_PER_TOKEN * model.length * num_samples
    return BYTES_PER_PHOTOGRAPH * num_samples if model.has_photographs else None
