"""A workload on 1, 2, 4, ... devices, on paper: the same step on more of them (strong), and a larger step (weak)."""

import dataclasses

from samestep.errors import UsageError
from samestep.planner.hardware import MOST, Device, Hardware
from samestep.planner.placement import Placement, place
from samestep.planner.workload import Workload

PER_NODE = 8
"""Devices of a node, where there are more than that."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One number of devices.

    Attributes:
        strong: the workload's own global batch; None where it does not fit, or where a device would have no sample.
        weak: so many times the samples as devices, as many for each as on the first number that fits; None if that does not.
        strong_efficiency, weak_efficiency: samples per second and device, beside the first number's.
    """

    num_devices: int
    strong: Placement | None
    weak: Placement | None
    strong_efficiency: float | None
    weak_efficiency: float | None


def grow(workload: Workload, device: Device, up_to: int) -> list[Row]:
    """Rows for powers of two.

    Raises:
        UsageError: `up_to` below 1 or too large, or a workload that fits none of them.
    """
    if not 1 <= up_to <= MOST:
        raise UsageError(f"--up_to is {up_to}, must be 1 to {MOST:,} devices")
    rows, first = [], None
    for exponent in range(up_to.bit_length()):
        num_devices = 2**exponent
        nodes = -(-num_devices // PER_NODE)
        hardware = Hardware(device, num_devices // nodes, nodes)
        if first is None:
            first = _placed(workload, hardware)
            placements = first, first
        else:
            batch = workload.global_batch_size * num_devices // first.hardware.num_processes
            weak = dataclasses.replace(workload, global_batch_size=batch)
            placements = _placed(workload, hardware), _placed(weak, hardware)
        rows.append(Row(num_devices, *placements, *(_efficiency(of, first) for of in placements)))
    if first is None:
        raise UsageError(
            f"{workload.name} does not fit up to {up_to} x {device.name}: take larger devices, or raise --up_to"
        )
    return rows


def remarks(rows: list[Row]) -> list[str]:
    """Where the cut ends, where waiting shows, where devices are left over."""
    found, placed = [], [row for row in rows if row.strong]
    whole = next((row for row in placed if row.strong.layout.gradient_accumulation_steps == 1), None)
    if whole:
        several = f"{whole.num_devices} device{'s' * (whole.num_devices > 1)}"
        found.append(f"k falls to 1 at {several}: more of them cut what a device computes at once")
    for name, kind in (("this batch", "strong"), ("a batch that grows with the devices", "weak")):
        of = {row.num_devices: getattr(row, kind) for row in rows if getattr(row, kind)}
        late = next((n for n, p in of.items() if p.time.exposed_communication > 0.1 * p.time.total), None)
        if late:
            found.append(
                f"with {name}, waiting for communication takes more than 10 % of a step from {late} devices on"
            )
    critical = next((row.weak.workload.critical_batch_size for row in rows if row.weak), None)
    wasteful = [
        row for row in rows if row.weak and critical is not None and row.weak.workload.global_batch_size > critical
    ]
    if wasteful:
        first = wasteful[0].weak.workload.global_batch_size
        found.append(
            f"a batch that grows with the devices passes the critical size of {critical:g} samples at "
            f"{wasteful[0].num_devices} devices ({first} samples)"
        )
    if placed and placed[-1] is not rows[-1]:
        last = placed[-1].strong.workload.global_batch_size
        found.append(f"more than {placed[-1].num_devices} devices do not help: the step has {last} samples")
    return found


def _placed(workload: Workload, hardware: Hardware) -> Placement | None:
    if workload.global_batch_size < hardware.num_processes:
        return None
    try:
        return place(workload, hardware)
    except UsageError:
        return None


def _efficiency(placement: Placement | None, first: Placement | None) -> float | None:
    if placement is None or first is None:
        return None
    speeds = [
        of.time.samples_per_second(of.workload.global_batch_size) / of.hardware.num_processes
        for of in (placement, first)
    ]
    return speeds[0] / speeds[1]
