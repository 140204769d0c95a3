"""Digests of a training's tensors, by which `python -m recipes compare` finds the step and the tensor where two runs part.

A digest is the XXH3 hash of a tensor's bytes, 64 bits in hexadecimal: row after row, whatever the memory format. Equal digests
mean equal bits, up to a chance of 2^-64; it is no protection against forgery. `samestep.contrib.digests` takes those of a run.
"""

import platform
from pathlib import Path

import torch
import xxhash

CPUINFO = Path("/proc/cpuinfo")


def digest_tensor(tensor: torch.Tensor) -> str:
    """Digest the bytes of a tensor of any shape, type and device; 16 hexadecimal digits.

    >>> digest_tensor(torch.zeros(2, 3)) == digest_tensor(torch.zeros(3, 2)) != digest_tensor(-torch.zeros(2, 3))
    True
    """
    whole = tensor.detach().cpu().contiguous()
    return xxhash.xxh3_64_hexdigest(whole.reshape(-1).view(torch.uint8).numpy())


def read_cpuinfo(cpuinfo: Path = CPUINFO) -> dict[str, str]:
    """Read what Linux says of the first core; elsewhere nothing."""
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").partition("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    return fields


def machine_kind(cpuinfo: Path = CPUINFO) -> str:
    """Name the kind of machine on which the same CPU kernels run: torch's version, the CPU's name, its instructions.

    torch, MKL and oneDNN choose kernels by the CPU's flags, so that results on machines of two kinds differ in rounding. The
    number of threads decides, too, and is not in the name. Where there is no /proc/cpuinfo the name has no flags.
    """
    fields = read_cpuinfo(cpuinfo)
    names = [fields[name] for name in ("vendor_id", "model name") if name in fields] or [platform.machine()]
    flags = sorted(fields.get("flags", fields.get("Features", "")).split())
    parts = [f"torch {torch.__version__}", " ".join(names), torch.backends.cpu.get_cpu_capability()]
    return ", ".join([*parts, f"flags {xxhash.xxh3_64_hexdigest(' '.join(flags).encode())[:8]}"])
