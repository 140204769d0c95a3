"""Hardware: devices, their number, and the links between them. Facts with their sources, no measurement."""

import dataclasses
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from samestep.cut.layout import MAX_PROCESSES
from samestep.errors import UsageError
from samestep.recipe.reading import format_name, format_value, read_yaml
from samestep.recipe.settings import LARGEST, LINE, NOT_NEGATIVE, build, choice, coerce, limit, setting

NETWORK = "bandwidth between nodes, per node and direction: 25GB/s, 200Gb/s; none: the device's, see its file"
DEVICES = Path(__file__).parent / "devices"
QUANTITY = limit(LARGEST, 1e-6)
LINES = ("must be a list of lines of text", lambda value: all(map(LINE.holds, value)))
DISTRIBUTED_TYPES = """
    MULTI_CPU MULTI_GPU MULTI_HPU MULTI_MLU MULTI_MUSA MULTI_NEURON MULTI_NPU MULTI_SDAA MULTI_XPU XLA
""".split()
PART = ("must lie in [0.001, 1]", lambda value: 0.001 <= value <= 1)
MAX_DEVICES = MAX_PROCESSES
"""Largest number of devices of a plan; more than any machine has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """The device of one process: an accelerator, or cores of a CPU. Rates are decimal (1e9, 1e12), without sparsity."""

    name: str = setting("the file's name", LINE)
    description: str = setting("vendor, model, memory, form", LINE)
    memory_mib: float = setting("memory that the driver reports, MiB", QUANTITY)
    fp32_tflops: float = setting("peak of float32 products, TFLOP/s", QUANTITY)
    fp16_tflops: float | None = setting("peak of float16 products, float32 sums, TFLOP/s; null: it has none", QUANTITY)
    bf16_tflops: float | None = setting("peak of bfloat16 products, float32 sums, TFLOP/s; null: it has none", QUANTITY)
    reachable: float = setting("part of the 16-bit peak that large matrix products reach", PART)
    memory_gb_per_s: float = setting("peak bandwidth of the memory, GB/s", QUANTITY)
    link: str = setting("what connects the devices of one node", LINE)
    link_gb_per_s: float = setting("its bandwidth per device and direction, GB/s", QUANTITY)
    link_latency_us: float = setting("latency of one message over it, microseconds", NOT_NEGATIVE)
    network: str | None = setting("what connects the nodes; null: not said", LINE, default=None)
    network_gb_per_s: float = setting("bandwidth between nodes per node and direction, GB/s", QUANTITY, default=1.25)
    network_per_device: bool = setting("whether each device of a node has that bandwidth for itself", default=False)
    network_latency_us: float = setting(
        "latency of one message between nodes, microseconds", NOT_NEGATIVE, default=20.0
    )
    watts: float | None = setting("power limit, W; null: not known", QUANTITY)
    host_gb: float | None = setting(
        "memory of the host for each device, GB, as machines with it have; null: not known", QUANTITY, default=None
    )
    distributed_type: str = setting(
        "Accelerate's word for a training on several of them", choice(*DISTRIBUTED_TYPES), default="MULTI_GPU"
    )
    is_single: bool = setting("whether torch trains on one of them only", default=False)
    cores: int | None = setting("of a CPU, threads of a process; null: an accelerator", limit(2**20), default=None)
    notes: tuple[str, ...] = setting("facts to know before a training on it, a line each", LINES, default=())
    unverified: tuple[str, ...] = setting("fields whose source nobody could open", LINES, default=())
    sources: tuple[str, ...] = setting("where the numbers come from: 'FIELD, FIELD: source'", LINES)

    def problems(self) -> list[str]:
        """Say which rules between fields are broken."""
        unknown = [name for name in self.unverified if name not in {field.name for field in dataclasses.fields(self)}]
        return [f"unverified names {format_value(name)}, which is no field of a device" for name in unknown]

    def tflops(self, precision: str) -> float | None:
        """Return the peak of products in a mixed precision ("no" is float32), TFLOP/s; None if the device has none."""
        return {"no": self.fp32_tflops, "fp16": self.fp16_tflops, "bf16": self.bf16_tflops}[precision]

    @property
    def memory_bytes(self) -> int:
        """Memory in bytes: memory_mib x 2^20."""
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

    @property
    def network_gb_per_s(self) -> float:
        """Bandwidth between nodes, per node and direction, GB/s."""
        device = self.device
        return device.network_gb_per_s * (self.num_devices if device.network_per_device else 1)

    def __str__(self) -> str:
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        return f"{nodes}{self.num_devices}x{self.device.name}"


ORDER = ("memory_mib", "watts")


def device_names() -> list[str]:
    """List the names of the devices that ship with the package."""
    return sorted(path.stem for path in DEVICES.glob("*.yaml"))


def names_by_memory() -> list[str]:
    """List the devices of the package by their memory, then by watts; only these two lines of their files are read."""

    def size(name: str) -> list[float]:
        text = (DEVICES / f"{name}.yaml").read_text(encoding="utf-8")
        return [float(re.search(rf"^{field}: (.+)$", text, re.MULTILINE)[1].replace("null", "inf")) for field in ORDER]

    return sorted(device_names(), key=size)


COUNT = re.compile(r"([0-9]{1,9})(?:[xX] ?| [xX] )(?=.*[0-9.]|[^ ]{3})")
"""A number of nodes or devices: an x of a name, as of a 7900 XTX, is followed by letters, or by less than a name."""


def parse(text: str, network: str | None = None) -> Hardware:
    """Read hardware that is written as [NODESx]COUNTxNAME; NAME is a device, or the .yaml file of a device of your own.

    Args:
        text: the hardware.
        network: as of `set_network`.

    Raises:
        UsageError: another spelling, an unknown device, numbers below 1, a file that breaks a rule.
    """
    if "+" in text:
        raise UsageError(
            f"hardware {format_value(text)} mixes devices, but one kind is planned. Processes share a step evenly, so that the "
            "slowest device sets the pace: name as many of that one"
        )
    counts, name = [], text.strip()
    while match := COUNT.match(name):
        counts.append(int(match[1]))
        name = name[match.end() :]
    if len(counts) > 2 or not name or re.fullmatch(r"[0-9]+ *[xX]", name):
        raise UsageError(
            f"hardware {format_value(text)} is not [NODESx]COUNTxNAME: for example 4xt4, 2x8xa100-80, 1xmine.yaml"
        )
    if name.isdecimal() and name not in device_names() and (problem := _explain_form(text.strip())):  # 4090x4
        raise UsageError(problem)
    if 0 in counts:
        raise UsageError(f"hardware {format_value(text)} counts 0 devices or nodes: give 1 or more")
    nodes, devices = [1, 1, *counts][-2:]
    if nodes * devices > MAX_DEVICES:
        raise UsageError(
            f"hardware {format_value(text)} counts {nodes * devices:,} devices, must be {MAX_DEVICES:,} or fewer"
        )
    return Hardware(set_network(load_device(name), network), devices, nodes)


UNITS = {"GB/s": 1.0, "Gb/s": 1 / 8, "MB/s": 1e-3, "Mb/s": 1e-3 / 8}
"""Units of bandwidths, in GB/s."""


def set_network(device: Device, bandwidth: str | None) -> Device:
    """Return the device with another bandwidth between nodes, per node and direction; None: with its own.

    Raises:
        UsageError: the bandwidth is not a number with one of `UNITS`, or out of range.

    >>> set_network(load_device("3090"), "200Gb/s").network_gb_per_s
    25.0
    """
    if bandwidth is None:
        return device
    value = read_bandwidth("network", bandwidth, "25GB/s, 200Gb/s", "the bandwidth of a node and direction")
    changes: dict[str, Any] = {"network": "as asked", "network_gb_per_s": value, "network_per_device": False}
    return dataclasses.replace(device, **changes)


def read_bandwidth(field: str, text: str, examples: str, subject: str = "a bandwidth") -> float:
    """Read a bandwidth in GB/s.

    Args:
        field, examples, subject: its name, values and meaning, for the message.
        text: a number with one of `UNITS`.

    Raises:
        UsageError: another spelling, or out of range.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([GM][Bb]/s)", text)
    value = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not QUANTITY.holds(value):
        raise UsageError(f"{field} is {format_value(text)}, must be {subject}, more than 0: for example {examples}")
    return value


def load_device(name_or_file: str) -> Device:
    """Load a device of the package, or of a YAML file with the same fields.

    A file of one's own may begin with `extends: NAME_OR_FILE` and then hold only what differs. Otherwise it needs memory_mib,
    memory_gb_per_s, and bf16_tflops or fp16_tflops; what else it leaves out is in `OWN`, and said in `notes`.

    Raises:
        UsageError: the device is unknown, the file unreadable, or a value breaks a rule; all problems in one error.
    """
    if not name_or_file.endswith((".yaml", ".yml")):
        path = DEVICES / f"{find_device(name_or_file)}.yaml"
        values = {"name": path.stem} | read_yaml(path, f"device {format_name(path)}")
        shipped: Device = build(Device, values, f"device {path.stem}")
        return shipped
    values = _read_file(name_or_file, ())
    for name in ("notes", "unverified", "sources"):
        if isinstance(values.get(name), str):  # one text is no list here: it is easily the beginning of one
            raise UsageError(
                f"device {format_name(name_or_file)}: {name} is {format_value(values[name])}, must be a list of texts: "
                f"[{format_value(values[name])}]"
            )
    own, peak = dict(OWN), _find_peak(values)
    if peak is not None:
        own |= {"fp16_tflops": peak, "bf16_tflops": None, "fp32_tflops": peak / FP32_SHARE}
    assumed = {name: value for name, value in own.items() if name not in values}
    if assumed and "notes" not in values:
        texts = [f"{name} {format_value(value)}" for name, value in assumed.items() if name != "sources"]
        values["notes"] = [f"{format_name(name_or_file)} leaves out, and the plan takes: {', '.join(texts)}"] * bool(
            texts
        )
    device: Device = build(Device, assumed | values, f"device {format_name(name_or_file)}")
    return device


def _find_peak(values: dict[str, Any]) -> float | None:
    """Find the 16-bit peak, from which others are computed; None: none is given.

    One that breaks its rule counts as 1: `build` refuses it, and says nothing of those that would be computed from it.
    """
    for name in ("bf16_tflops", "fp16_tflops"):
        if values.get(name) is not None:
            try:
                peak = float(coerce(values[name], float))
            except TypeError:
                return 1.0
            return peak if QUANTITY.holds(peak) else 1.0
    return None


FP32_SHARE = 16
"""16-bit peak / float32 peak of a device whose file leaves the second out: as of data-center devices."""
OWN = {
    "reachable": 0.75,
    "link": "PCIe 4.0 x16",
    "link_gb_per_s": 31,
    "link_latency_us": 10,
    "watts": None,
    "sources": ["the file's author"],
}
"""Values of fields that a device file of one's own may leave out."""


def _read_file(file: str, descendants: tuple[str, ...]) -> dict[str, Any]:
    """Read the values of a device file, laid over those of the device that it extends."""
    path = Path(file)
    values = read_yaml(path, f"device {format_name(path)}")
    base = values.pop("extends", None)
    if base is None:
        return {"name": path.stem, "description": path.stem} | values
    if not isinstance(base, str):
        raise UsageError(
            f"device {format_name(path)}: extends is {format_value(base)}, must be a device's name or file"
        )
    if str(path) in descendants:
        raise UsageError(f"device {format_name(path)} extends itself: remove one `extends`")
    if base.endswith((".yaml", ".yml")):
        inherited = _read_file(str(path.parent / base), (*descendants, str(path)))
    else:
        inherited = read_yaml(DEVICES / f"{find_device(base)}.yaml", f"device {format_name(base)}")
    names = {"name": path.stem, "description": f"{path.stem}, which extends {base}"}
    return inherited | names | values


def find_device(text: str) -> str:
    """Find the device of the package that a spelling means: capitals, spaces, vendor and gigabytes are free.

    Raises:
        UsageError: no device, or several.

    >>> [find_device(text) for text in ("T4", "RTX 3090", "NVIDIA A100 80GB", "Tesla-V100-32GB", "RTX 6000 Ada", "H100 SXM")]
    ['t4', '3090', 'a100-80', 'v100-32', 'rtx6000ada', 'h100']
    >>> [find_device(text) for text in ("RX 7900 XTX", "TPU v5e", "Titan RTX", "RTX PRO 6000", "DGX Spark", "H200 NVL")]
    ['7900xtx', 'tpu-v5e', 'titan-rtx', 'rtxpro6000', 'dgx-spark', 'h200-nvl']
    >>> [find_device(text) for text in ("NVIDIA H100 80GB HBM3", "H100 PCIe", "A100-PCIE-40GB", "AMD MI300X OAM", "M4 Max")]
    ['h100', 'h100-pcie', 'a100-40', 'mi300x', 'm4-max']
    """
    names, words = device_names(), _split_name(text)
    for name in names:
        if "".join(words) == "".join(_split_name(name)):
            return name
    first, *others = words or [""]
    matches = []
    for name in names:  # memory and form may be given too, as in its description: H100 80GB, A100-SXM4-80GB
        known, *_ = own_words = _split_name(name)
        if first == known:
            own_words += _split_name(str(read_yaml(DEVICES / f"{name}.yaml", name)["description"]))
            matches += [name] * all(any(own.startswith(word) for own in own_words) for word in others)
    matches = [name for name in matches if all(other.startswith(name) for other in matches)] or matches
    if len(matches) == 1:  # the plain one of several forms: H100 80GB is not the PCIe card
        return matches[0]
    if matches:
        raise UsageError(f"device {format_value(text)} may be {' or '.join(matches)}: name one of them")
    near = get_close_matches("".join(words), names, n=3, cutoff=0.5)
    known = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names)}."
    raise UsageError(
        _explain_form(text)
        or f"unknown device {format_value(text)}: {known} One of your own is a .yaml file, which may begin with `extends: "
        f"{near[0] if near else 'NAME'}` and then says what differs (docs/devices.md)"
    )


SWAPPED = (
    re.compile(r"(?P<count>[0-9]{1,9})[ *]*(?P<name>[a-z].*)", re.IGNORECASE),
    re.compile(r"(?P<name>.*[^ *:x]) *[ x*:] *(?P<count>[0-9]{1,9})", re.IGNORECASE),
)
"""Other ways to write a number of devices: 8h100, h100x8."""


def _explain_form(text: str) -> str | None:
    """Say how hardware is written, of a text that has a known device, a count and an engine in other places; None: it has not.

    >>> _explain_form("h100x8")
    "'h100x8' is no device: hardware is [NODESx]COUNTxNAME, here 8xh100"
    >>> _explain_form("slurm:4x8xh100")
    "'slurm:4x8xh100' is no device: slurm: is for launch; here 4x8xh100"
    >>> _explain_form("8xh100")
    "'8xh100' is a number of devices: one is named here, as h100"
    >>> _explain_form("h100y8") is None
    True
    """
    engine, colon, rest = text.partition(":")
    if colon and engine.isalpha() and len(engine) > 1:  # not a drive of Windows
        return f"{format_value(text)} is no device: {engine}: is for launch; here {format_name(rest)}"
    known = {"".join(_split_name(name)) for name in device_names()}
    if (match := COUNT.match(text)) and "".join(_split_name(rest := text[match.end() :])) in known:
        return f"{format_value(text)} is a number of devices: one is named here, as {format_name(rest.lower())}"
    for form in SWAPPED:
        match = form.fullmatch(text)
        if match is not None and "".join(_split_name(match["name"])) in known:
            here = f"{match['count']}x{match['name'].lower()}"
            return f"{format_value(text)} is no device: hardware is [NODESx]COUNTxNAME, here {here}"
    return None


def _split_name(text: str) -> list[str]:
    """Split a device's name into its words, in small letters and without vendor, series and GB."""
    plain = re.sub(
        r"\b(nvidia|amd|intel|habana|apple|google|radeon|rx)\b|geforce|tesla|quadro|instinct|rtx|gtx", " ", text.lower()
    )
    plain = re.sub(r"\boam\b|\bhbm\w+|(?<=[0-9]) ?gi?b\b", " ", plain)
    return re.findall(r"[^\s_,-]+", plain)
