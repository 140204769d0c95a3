"""A workload on 1, 2, 4, ... devices, on paper: the same step on more devices (strong), and a larger step (weak)."""

import dataclasses
from typing import Any

from samestep.errors import UsageError
from samestep.printing import format_count
from stepplan.hardware import MAX_DEVICES, Device, Hardware, load_device, names_by_memory
from stepplan.placement import Placement, try_placement
from stepplan.workload import Workload

MOST_DEVICES = 128
"""Largest number of devices that `find_hardware` tries."""
PER_NODE = 8
"""Devices of a node, where the devices fill more than one node."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The results for one number of devices.

    Attributes:
        num_devices: number of devices.
        strong: the workload's own global batch; None where it does not fit, or where a device would have no sample.
        weak: a global batch in proportion to the devices, equal to the workload's on the first number of devices that fits;
            None where it does not fit.
        strong_efficiency, weak_efficiency: samples per second and device / samples per second and device of the first number.
    """

    num_devices: int
    strong: Placement | None
    weak: Placement | None
    strong_efficiency: float | None
    weak_efficiency: float | None


def grow(workload: Workload, device: Device, up_to: int) -> list[Row]:
    """Make rows for powers of two.

    Args:
        workload: the computation.
        device: the kind of all devices.
        up_to: largest number of devices.

    Raises:
        UsageError: `up_to` below 1 or too large, or a workload that fits no number of devices.
    """
    if not 1 <= up_to <= MAX_DEVICES:
        raise UsageError(f"--up_to is {up_to}, must be 1 to {MAX_DEVICES:,} devices")
    rows, first = [], None
    for exponent in range(up_to.bit_length()):
        num_devices = 2**exponent
        nodes = -(-num_devices // PER_NODE)
        hardware = Hardware(device, num_devices // nodes, nodes)
        if first is None:
            first = _try_placement(workload, hardware)
            placements = first, first
        else:
            batch = workload.global_batch_size * num_devices // first.hardware.num_processes
            weak = dataclasses.replace(workload, global_batch_size=batch)
            placements = _try_placement(workload, hardware), _try_placement(weak, hardware)
        rows.append(Row(num_devices, *placements, *(_efficiency(placement, first) for placement in placements)))
    if first is None:
        raise UsageError(
            f"{workload.name} does not fit up to {up_to} x {device.name}: take larger devices, or raise --up_to"
        )
    return rows


def make_remarks(rows: list[Row]) -> list[str]:
    """Say from which number of devices the step is not cut, waiting takes long, the batch is too large, devices stay idle."""
    remarks, strong_rows = [], [row for row in rows if row.strong]
    uncut = next((row for row in strong_rows if row.strong.layout.gradient_accumulation_steps == 1), None)
    if uncut:
        devices = format_count(uncut.num_devices, "device")
        remarks.append(f"k falls to 1 at {devices}: more of them cut what a device computes at once")
    for name, kind in (("this batch", "strong"), ("a batch that grows with the devices", "weak")):
        times = {row.num_devices: getattr(row, kind).time for row in rows if getattr(row, kind)}
        slow = next((n for n, time in times.items() if time.exposed_communication > 0.1 * time.total), None)
        if slow:
            remarks.append(
                f"with {name}, waiting for communication takes more than 10 % of a step from {slow} devices on"
            )
    critical = next((row.weak.workload.critical_batch_size for row in rows if row.weak), None)
    wasteful_rows = [
        row for row in rows if row.weak and critical is not None and row.weak.workload.global_batch_size > critical
    ]
    if wasteful_rows:
        first = wasteful_rows[0].weak.workload.global_batch_size
        remarks.append(
            f"a batch that grows with the devices passes the critical size of {critical:g} samples at "
            f"{wasteful_rows[0].num_devices} devices ({first} samples)"
        )
    if strong_rows and strong_rows[-1] is not rows[-1]:
        last = strong_rows[-1].strong.workload.global_batch_size
        remarks.append(f"more than {strong_rows[-1].num_devices} devices do not help: the step has {last} samples")
    return remarks


def find_hardware(workload: Workload, hardware: Hardware, **options: Any) -> list[Hardware]:
    """Find hardware for a workload that does not fit.

    Args:
        workload: the computation.
        hardware: what it does not fit on.
        options: those of `placement.place`.

    Returns:
        The smallest number of the same device that it fits on, and as many of the smallest other device of its maker, whose
        torch is the same; none, one or both.
    """
    device, found = hardware.device, []
    counts = [*range(2, PER_NODE + 1), *range(2 * PER_NODE, MOST_DEVICES + 1, PER_NODE)]
    larger = (
        Hardware(device, min(n, PER_NODE), -(-n // PER_NODE))
        for n in counts
        if hardware.num_processes < n <= workload.global_batch_size
    )
    others = (
        dataclasses.replace(hardware, device=other)
        for other in map(load_device, names_by_memory())
        if other.cores is None and other.memory_bytes > device.memory_bytes and _maker(other) == _maker(device)
    )
    for candidates in (larger, others):
        found += [next((each for each in candidates if _try_placement(workload, each, **options)), None)]
    return [each for each in found if each is not None]


def _maker(device: Device) -> str:
    return device.description.partition(" ")[0]


def _try_placement(workload: Workload, hardware: Hardware, **options: Any) -> Placement | None:
    if workload.global_batch_size < hardware.num_processes:
        return None
    return try_placement(lambda: workload, hardware, **options)


def _efficiency(placement: Placement | None, first: Placement | None) -> float | None:
    if placement is None or first is None:
        return None
    speed, first_speed = (
        p.time.samples_per_second(p.workload.global_batch_size) / p.hardware.num_processes for p in (placement, first)
    )
    return speed / first_speed
