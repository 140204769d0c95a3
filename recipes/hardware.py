"""What hardware can do: devices, how many of them, and what connects them. Facts with their sources, no measurement."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml

from recipes.errors import UsageError, nearest
from recipes.settings import BELOW_ONE, NOT_NEGATIVE, POSITIVE, build, setting

DEVICES = Path(__file__).parent / "devices"
MOST = 2**17
"""Devices that are planned for; more than any machine has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What one process computes on: an accelerator, or cores of a CPU. Rates are decimal (1e9, 1e12), without sparsity."""

    name: str = setting("the file's name")
    description: str = setting("vendor, model, memory, form")
    memory_mib: float = setting("memory that the driver reports, MiB", POSITIVE)
    fp32_tflops: float = setting("peak of float32 products, TFLOP/s", POSITIVE)
    fp16_tflops: float | None = setting("peak of float16 products, float32 sums, TFLOP/s; null: it has none", POSITIVE)
    bf16_tflops: float | None = setting("peak of bfloat16 products, float32 sums, TFLOP/s; null: it has none", POSITIVE)
    reachable: float = setting("part of the 16-bit peak that large matrix products reach", BELOW_ONE)
    memory_gb_per_s: float = setting("peak bandwidth of the memory, GB/s", POSITIVE)
    link: str = setting("what connects the devices of one node")
    link_gb_per_s: float = setting("its bandwidth per device and direction, GB/s", POSITIVE)
    link_latency_us: float = setting("latency of one message over it, microseconds", NOT_NEGATIVE)
    network_gb_per_s: float = setting("bandwidth between nodes per node and direction, GB/s", POSITIVE, default=25.0)
    network_latency_us: float = setting(
        "latency of one message between nodes, microseconds", NOT_NEGATIVE, default=20.0
    )
    watts: float = setting("power limit, W", POSITIVE)
    cores: int | None = setting("of a CPU, threads of a process; null: an accelerator", POSITIVE, default=None)
    sources: tuple[str, ...] = setting("where the numbers come from: 'FIELD, FIELD: source'")

    def tflops(self, precision: str) -> float | None:
        """Peak of products in a mixed precision ("no" is float32); None if the hardware has none."""
        return {"no": self.fp32_tflops, "fp16": self.fp16_tflops, "bf16": self.bf16_tflops}[precision]

    @property
    def memory_bytes(self) -> int:
        """memory_mib in bytes."""
        return int(self.memory_mib * 2**20)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """`num_nodes` machines with `num_devices` devices each.

    >>> hardware = parse("2x8xa100-80")
    >>> hardware.num_nodes, hardware.num_devices, hardware.num_processes, hardware.device.name, str(hardware)
    (2, 8, 16, 'a100-80', '2x8xa100-80')
    >>> str(parse("4xt4")), str(parse("3090"))
    ('4xt4', '1x3090')
    """

    device: Device
    num_devices: int = 1
    num_nodes: int = 1

    @property
    def num_processes(self) -> int:
        """N: one process per device."""
        return self.num_devices * self.num_nodes

    def __str__(self) -> str:
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        return f"{nodes}{self.num_devices}x{self.device.name}"


def device_names() -> list[str]:
    """Devices that ship with the package."""
    return sorted(path.stem for path in DEVICES.glob("*.yaml"))


def parse(text: str) -> Hardware:
    """[NODESx]COUNTxNAME, or COUNTx and the .yaml file of a device of your own.

    Raises:
        UsageError: spelt otherwise, an unknown device, numbers below 1, a file that breaks a rule.
    """
    counts, name = [], text
    while match := re.match(r"(\d+)x(?=.)", name):
        counts.append(int(match[1]))
        name = name[match.end() :]
    if len(counts) > 2 or not name:
        raise UsageError(f"hardware {text!r} is not [NODESx]COUNTxNAME: for example 4xt4, 2x8xa100-80, 1xmine.yaml")
    if 0 in counts:
        raise UsageError(f"hardware {text!r} counts 0 devices or nodes: give 1 or more")
    nodes, devices = [1, 1, *counts][-2:]
    if nodes * devices > MOST:
        raise UsageError(f"hardware {text!r} counts {nodes * devices:,} devices, must be {MOST:,} or fewer")
    return Hardware(load_device(name), devices, nodes)


def load_device(name_or_file: str) -> Device:
    """A device of the package, or of a YAML file with the same fields.

    Raises:
        UsageError: unknown, unreadable, or breaking a rule; all problems in one error.
    """
    is_path = name_or_file.endswith((".yaml", ".yml"))
    if not is_path and name_or_file not in device_names():
        raise UsageError(
            f"unknown device {name_or_file!r}: {nearest(name_or_file, device_names())}; or give a .yaml file"
        )
    path = Path(name_or_file) if is_path else DEVICES / f"{name_or_file}.yaml"
    values = _mapping(path)
    return build(Device, {"name": path.stem} | values, f"device {name_or_file}")


def _mapping(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"device {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"device {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UsageError(f"device {path} must be a mapping of `field: value` lines")
    return values
