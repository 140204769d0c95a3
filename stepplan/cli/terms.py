"""Reads what the user says of hardware, and for each of money, time and disks."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from samestep.cli.flags import OutputSettings
from samestep.errors import UsageError
from samestep.recipe.reading import format_name, format_value, read_yaml
from samestep.recipe.settings import LARGEST, choice, limit, setting
from stepplan import answer
from stepplan.costs import DISK, MAX_PER_DAY, Terms, read_start
from stepplan.hardware import NETWORK, QUANTITY, Hardware, find_device, read_bandwidth


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareSettings(OutputSettings):
    """Choose the hardware, and what is written for it"""

    on: str | None = setting(
        "hardware, as [NODESx]COUNTxNAME: 4xt4, 2x8xa100-80, 1xMINE.yaml; chooses N, b, k, the precision and how it fits; "
        "several with commas are compared",
        default=None,
    )
    write_config: str | None = setting("launch file of Accelerate to write for it", default=None)
    write_recipe: str | None = setting(
        "recipe file to write, with what flags change; the command names it", default=None
    )
    html: str | None = setting("page to write about it, with charts; of several hardware about the first", default=None)
    price_per_hour: str | None = setting(
        "dollars for an hour of one device; with several hardware one, or one each, with commas; or a .yaml file of "
        "`DEVICE: DOLLARS` lines",
        default=None,
    )
    sort: str | None = setting(
        "order of several hardware; none: cost with prices, else time", choice(*answer.SORTS), default=None
    )
    start: str | None = setting("date, or date and time, at which it starts: 2026-11-28T09:30; none: now", default=None)
    interruptions_per_day: float | None = setting(
        "interruptions of all machines in a day, as of spot instances; none: not known",
        limit(MAX_PER_DAY, 1e-3),
        default=None,
    )
    disk: str | None = setting("rate at which checkpoints are written: 2GB/s; none: 1GB/s, assumed", default=None)
    host_memory: str | None = setting(
        "memory of a machine's host: 2TB, 512GB; none: as machines with the device have, see its file", default=None
    )
    network: str | None = setting(NETWORK, default=None)


def read_terms(settings: HardwareSettings, hardware: list[Hardware]) -> list[Terms]:
    """Read what the user says of money, time and disks, for each hardware."""
    disk = DISK if settings.disk is None else read_bandwidth("disk", settings.disk, "2GB/s, 500MB/s")
    return [
        Terms(
            price_per_hour=price,
            start=read_start(settings.start),
            interruptions_per_day=settings.interruptions_per_day,
            disk_gb_per_s=disk,
            host_gb=None if settings.host_memory is None else read_size("host_memory", settings.host_memory),
        )
        for price in read_prices(settings.price_per_hour, hardware)
    ]


def read_size(field: str, text: str) -> float:
    """Read a number of bytes, in GB.

    >>> read_size("host_memory", "2TB"), read_size("host_memory", "512 GB")
    (2000.0, 512.0)
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([GT])i?B", text)
    value = float(match[1]) * {"G": 1, "T": 1000}[match[2]] if match else 0.0
    if not QUANTITY.holds(value):
        raise UsageError(f"{field} is {format_value(text)}, must be a memory, more than 0: for example 512GB, 2TB")
    return value


def read_prices(value: str | None, hardware: list[Hardware]) -> list[float | None]:
    """Read the price of each hardware; None: none is given."""
    if value is None:
        return [None] * len(hardware)
    if value.endswith((".yaml", ".yml")):
        return _read_price_file(value, hardware)
    texts = value.split(",")
    prices = [_read_price(text, text if len(texts) == 1 else f"{text} in {value}") for text in texts]
    if len(prices) not in (1, len(hardware)):
        raise UsageError(f"--price_per_hour has {len(prices)} prices for {len(hardware)} hardware: give 1, or one each")
    return prices if len(prices) == len(hardware) else prices * len(hardware)


def _read_price(text: Any, value: str) -> float:
    try:
        price = float(text)
    except (TypeError, ValueError, OverflowError):
        price = 0.0
    if not 0 < price <= LARGEST or isinstance(text, bool):
        raise UsageError(
            f"price_per_hour is {format_name(value)}, must be a number greater than 0, dollars for an hour of one "
            "device. Leave it out where nothing is paid"
        )
    return price


def _read_price_file(file: str, hardware: list[Hardware]) -> list[float]:
    """Read a file of prices, in which devices may be spelled as in --on."""
    values = read_yaml(Path(file), f"price_per_hour {format_name(file)}")
    prices = {}
    for name, price in values.items():
        device = name if name in {each.device.name for each in hardware} else find_device(name)
        prices[device] = _read_price(price, f"{name}: {format_value(price)}")
    if missing := sorted({each.device.name for each in hardware} - prices.keys()):
        raise UsageError(
            f"price_per_hour {format_name(file)} has no price of {', '.join(missing)}: add a line for each"
        )
    return [prices[each.device.name] for each in hardware]
