"""A workload on some hardware: its precision, the cut of the step, the memory, the time, and the command that launches it.

Nothing here changes the optimizer's steps: it chooses among ways to compute the same steps.
"""

import dataclasses
import functools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samestep.cut.layout import Layout, shares, solve_layout
from samestep.errors import UsageError
from samestep.recipe.reading import is_installed, read_yaml, shipped_folder
from samestep.recipe.rules import Refusal
from stepplan.convnet import ConvNet
from stepplan.decoder import Decoder
from stepplan.hardware import Hardware
from stepplan.memory import Memory, count_trained
from stepplan.timing import (
    ALL_REDUCE,
    CALIBRATION,
    StepTime,
    count_work,
    default_software,
    reachable_link,
    step_time,
)
from stepplan.workload import Workload

CONFIGS = shipped_folder("accelerate_configs")
RESERVED = 1.2e9
"""Bytes of a device that a plan does not use: context, libraries' workspaces, buffers of collectives. Assumed."""
BAND = 0.10
"""Share by which a plan may be too small: formulas were 0.92 to 1.03 of the bytes that a CPU allocated; no GPU was measured."""
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "no": "float32 (--mixed_precision no)"}
"""Values of mixed_precision, the preferred one first, as messages say them."""
WAITING = 0.05  # share of a step that is worth a warning
OVERHEAD = 0.3  # share of a step for what a micro-batch of any size takes, that is worth a warning
WORTH = 0.05  # share of the time of a step that another way must save to be worth a word
FASTER = 0.1  # share of the time of a step that gradient checkpointing must save, where it is not asked for


class TooLargeError(UsageError):
    """A workload of which not even one sample fits on the hardware."""


class Way(NamedTuple):
    """A way to compute a micro-batch, as of `Placement`."""

    mixed_precision: str
    gradient_checkpointing: bool
    sharded: bool
    num_shards: int | None = None


@dataclasses.dataclass(frozen=True)
class Placement:
    """A way to compute a workload on some hardware.

    Attributes:
        workload: the computation.
        hardware: the devices.
        layout: the cut of the step.
        mixed_precision: no, fp16 or bf16.
        gradient_checkpointing: whether activations are computed again in the backward.
        sharded: whether weights, gradients and moments are divided between the processes (FSDP2).
        num_shards: processes that divide them, where each node has all of them (HSDP); None: all processes divide them.
        memory: planned memory of one process.
        strategy: direct, accumulate, data parallel, or data parallel and accumulate.
        reason: reason for the strategy, in words.
        warnings: facts to know before the start.
        time: seconds of a step, by cause; predicted for this repository's scripts.
    """

    workload: Workload
    hardware: Hardware
    layout: Layout
    mixed_precision: str
    gradient_checkpointing: bool
    sharded: bool
    memory: Memory
    strategy: str
    reason: str
    warnings: tuple[str, ...]
    time: StepTime
    num_shards: int | None = None

    @property
    def seconds_to_end(self) -> float | None:
        """Seconds to the last step, without evaluations and saving; None where the number of steps depends on the data."""
        workload = self.workload
        if workload.num_steps is None:
            return None
        if not workload.sizes:
            return workload.num_steps * self.time.total
        return sum(number * self._predict_step(size).total for number, size in workload.sizes)

    def _predict_step(self, size: int) -> StepTime:
        """Predict a step of another size, in micro-batches as large as those of the global batch."""
        layout = _solve(self.hardware, size, self.layout.per_device_train_batch_size)
        return _predict_time(self.workload, self.hardware, layout, self._way)

    @property
    def options(self) -> dict[str, Any]:
        """Fields that the user may ask for, by name."""
        return {name: getattr(self, name) for name in ("mixed_precision", "gradient_checkpointing", "sharded")}

    @property
    def _way(self) -> Way:
        return Way(**self.options, num_shards=self.num_shards)

    @property
    def needed_bytes(self) -> float:
        """Bytes that a device should have: the plan, its error band, and `RESERVED`."""
        return _add_margins(self.memory)

    @property
    def fits(self) -> bool:
        """Whether the device has the needed bytes."""
        return self.needed_bytes <= self.hardware.device.memory_bytes

    def with_micro_batch(self, b: int) -> "Placement":
        """Make the same placement in micro-batches of b samples, even if it does not fit; reason and warnings stay."""
        layout, memory = _cut(self.workload, self.hardware, b, self._way)
        time = _predict_time(self.workload, self.hardware, layout, self._way)
        return dataclasses.replace(self, layout=layout, memory=memory, time=time)

    def compute(self, workload: Workload) -> "Placement":
        """Make the placement of another workload in the same cut, of which the time is predicted and nothing else changes."""
        time = _predict_time(workload, self.hardware, self.layout, self._way)
        return dataclasses.replace(self, workload=workload, time=time)

    @property
    def config_file(self) -> Path | None:
        """The launch file that ships for this hardware; None: it has to be written (`config`)."""
        names = [str(self.hardware), str(self.hardware).rpartition("-")[0] or str(self.hardware)]
        if self.hardware.num_processes == 1:
            names.append(self.hardware.device.name)
        files = (CONFIGS / f"{self._prefix}{name}.yaml" for name in names)
        return next((file for file in files if file.exists()), None)

    @property
    def all_reduce_seconds(self) -> dict[str, float]:
        """Seconds to sum the whole gradient over all devices by each algorithm, on links at their full rate.

        Over several nodes the network is taken for every message. A broadcast takes half of `naive` or of `tree`.
        """
        device, num_bytes = self.hardware.device, 4 * count_trained(self.workload.model)
        link = device.link_gb_per_s * 1e9, device.link_latency_us / 1e6
        if self.hardware.num_nodes > 1:
            bandwidth = min(device.link_gb_per_s, self.hardware.network_gb_per_s)
            link = bandwidth * 1e9, device.network_latency_us / 1e6
        processes = self.hardware.num_processes
        return {name: algorithm(processes, num_bytes, *link) for name, algorithm in ALL_REDUCE.items()}

    @property
    def written_file(self) -> str:
        """Name for a launch file that has to be written."""
        return f"{self._prefix}{self.hardware}.yaml"

    @property
    def _prefix(self) -> str:
        return "" if not self.sharded else "fsdp2_" if self.num_shards is None else "hsdp_"

    def command(self, config_file: str | None = None, *, is_of_job: bool = False) -> str | None:
        """Write the command that launches the recipe's script, to paste into a shell; None: this repository has no script.

        It holds every field that the recipe was changed in, the precision where the launch file of the package has another
        one, and on a CPU the number of threads.

        Args:
            config_file: name of the launch file; None: the package's own, or `written_file` if it has none for this hardware.
            is_of_job: whether a cluster runs it, in a checkout that is somewhere else: paths are those of the checkout.
        """
        if self.workload.script is None:
            return None
        file, cores, has_other_precision = config_file or self.written_file, self.hardware.device.cores, False
        if config_file is None and (own_file := self.config_file) is not None:
            file = str(own_file) if is_installed() else _from_here(own_file)
            has_other_precision = read_yaml(own_file, file)["mixed_precision"] != self.mixed_precision
        script = Path("scripts", self.workload.script)
        words = [
            *("accelerate", "launch", "--config_file", file),
            *(["--mixed_precision", self.mixed_precision] if has_other_precision else []),
            str(script) if is_of_job or is_installed() else _from_here(CONFIGS.parent / script),
            *self.workload.script_words,
            *("--per_device_train_batch_size", str(self.layout.per_device_train_batch_size)),
        ]
        words += ["--gradient_checkpointing"] if self.gradient_checkpointing else []
        words += ["--torch_compile"] if self.workload.model.kernels == "compiled" else []
        words += ["--attn_implementation", "eager"] if self.workload.model.eager_attention else []
        return (f"OMP_NUM_THREADS={cores} " if cores else "") + shlex.join(words)

    def config(self, config_file: str | None = None, *, is_of_job: bool = False) -> str:
        """Write a launch file for Accelerate, as YAML.

        Args:
            config_file: its name, for the command in it; None: `written_file`.
            is_of_job: whether it is part of a job, whose flags say which machine is which.
        """
        hardware, file = self.hardware, config_file or self.written_file
        kind = "FSDP" if self.sharded else hardware.device.distributed_type if hardware.num_processes > 1 else '"NO"'
        command = (
            self.command(file, is_of_job=is_of_job)
            or f"accelerate launch --config_file {shlex.quote(file)} YOUR_SCRIPT"
        )
        lines = [
            *(f"# {line}" for line in f"{hardware}: {hardware.device.description}".splitlines()),
            *(f"# {line}" for line in command.splitlines()),
            "# No key here changes the step beyond its rounding.",
            "compute_environment: LOCAL_MACHINE",
            f"distributed_type: {kind}",
            f"num_machines: {hardware.num_nodes}",
            f"num_processes: {hardware.num_processes} # of all machines",
            f'mixed_precision: "{self.mixed_precision}"',
        ]
        if hardware.num_nodes > 1 and not is_of_job:
            lines += [
                "machine_rank: 0 # 0 on the first machine, 1 on the next",
                "main_process_ip: 127.0.0.1 # of the first machine: to be filled in",
                "main_process_port: 29500",
            ]
        elif hardware.num_nodes == 1 and hardware.num_processes > 1:
            lines.append("main_process_port: 0 # any free port")
        if hardware.device.cores:
            lines.append("use_cpu: true # not the GPU if there is one")
            lines += ['gpu_ids: "-1,-1" # tells the processes so'] * (hardware.num_processes > 1)
        if self.sharded:
            lines += [
                "fsdp_config:",
                "  fsdp_version: 2",
                "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
                "  fsdp_reshard_after_forward: true",
                "  fsdp_cpu_ram_efficient_loading: false",
            ]
        if self.num_shards is not None:
            lines += [
                "parallelism_config: # weights divided within a machine, and a copy on each",
                f"  parallelism_config_dp_replicate_size: {hardware.num_processes // self.num_shards}",
                f"  parallelism_config_dp_shard_size: {self.num_shards}",
            ]
        return "\n".join(lines) + "\n"


def _from_here(path: Path) -> str:
    """Write the path of a file of the checkout: as in its documents, if the current folder is the checkout or links to it."""
    short = path.relative_to(CONFIGS.parent)
    return str(short if short.exists() and short.samefile(path) else path)


def _choose_precision(hardware: Hardware, mixed_precision: str | None, sharded: bool) -> str:
    """Choose the precision of a launch: the one that is asked for, or the best that the device has. Raises as `place`."""
    device, num_processes = hardware.device, hardware.num_processes
    if device.is_single and num_processes > 1:
        raise UsageError(
            f"{hardware} are {num_processes:,} devices, but torch trains on one {device.name} only: take 1x{device.name}"
        )
    precision = mixed_precision or next(name for name in PRECISIONS if device.tflops(name))
    if device.tflops(precision) is None:
        has = " and ".join(PRECISIONS[name] for name in PRECISIONS if device.tflops(name))
        raise UsageError(f"mixed_precision is {precision}, which {device.description} does not have: it has {has}")
    if sharded and num_processes == 1:
        raise UsageError(f"sharded needs several devices to divide the weights between, {hardware} has one")
    return precision


def _list_candidates(has_equal_layers: bool, num_processes: int, wanted: Way) -> list[Way]:
    """List ways, the fastest first: of gradient checkpointing and sharding, where they are not required, with and without.

    >>> [way[1:3] for way in _list_candidates(True, 2, Way("no", False, False))]
    [(False, False), (True, False), (False, True), (True, True)]
    >>> _list_candidates(False, 2, Way("no", False, True))
    [Way(mixed_precision='no', gradient_checkpointing=False, sharded=True, num_shards=None)]
    """
    shardings = [True] if wanted.sharded else [False, True] if num_processes > 1 and has_equal_layers else [False]
    recomputations = [True] if wanted.gradient_checkpointing else [False, True] if has_equal_layers else [False]
    return [Way(wanted.mixed_precision, again, sharded) for sharded in shardings for again in recomputations]


def _fits(workload: Workload, hardware: Hardware, b: int, way: Way) -> bool:
    return _add_margins(_cut(workload, hardware, b, way)[1]) <= hardware.device.memory_bytes


def _explain_need(workload: Workload, hardware: Hardware, candidates: Sequence[Way], min_batch: int) -> UsageError:
    """Make the error for `min_batch` samples that fit by no candidate."""
    capacity = hardware.device.memory_bytes

    def find_need(b: int) -> float:
        return min(_add_margins(_cut(workload, hardware, b, way)[1]) for way in candidates)

    size = f"{find_need(1) / 1e9:.1f} GB for a single sample, of {capacity / 1e9:.1f} GB"
    if find_need(1) > capacity:
        elsewhere = _explain_elsewhere(workload, hardware, candidates[0].mixed_precision)
        return TooLargeError(f"{workload.name} needs {size} on {hardware}, at the least{elsewhere}")
    share = shares(workload.global_batch_size, hardware.num_processes)[0]
    largest = _find_largest(lambda b: find_need(b) <= capacity, share)
    return UsageError(
        f"{workload.name} needs {find_need(min_batch) / 1e9:.1f} GB for {min_batch} samples in a forward, and {size}, on "
        f"{hardware}. Leave --per_device_train_batch_size out, or set it to {largest} or less"
    )


def place(
    workload: Workload,
    hardware: Hardware,
    *,
    per_device_train_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    mixed_precision: str | None = None,
    gradient_checkpointing: bool = False,
    sharded: bool = False,
) -> Placement:
    """Find the fastest placement that fits: the largest micro-batch, activations kept and weights whole if a sample fits so.

    Where activations fit only in small micro-batches, they are recomputed if that saves a tenth of the step's time. Weights
    that have to be divided are divided within each node only if they fit so, and that saves a twentieth of the time.

    Args:
        workload: the computation.
        hardware: the devices.
        per_device_train_batch_size: b; None: the largest that fits, evened out over the micro-batches.
        gradient_accumulation_steps: k; None: as many as b needs.
        mixed_precision: no, bf16 or fp16; None: bf16, fp16 or no, the first that the hardware has.
        gradient_checkpointing, sharded: True requires it; False takes it only if nothing fits without.

    Raises:
        TooLargeError: not even one sample fits; `growth.find_hardware` finds what it fits on.
        UsageError: the hardware lacks the precision, or the micro-batch does not fit; the message says which does.
    """
    num_processes, precision = hardware.num_processes, _choose_precision(hardware, mixed_precision, sharded)
    model, batch = workload.model, workload.global_batch_size
    share = shares(batch, num_processes)[0]
    fits = functools.partial(_fits, workload, hardware)
    cuts: dict[str, Any] = {
        "per_device_train_batch_size": per_device_train_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
    }
    request = solve_layout(num_processes=num_processes, global_batch_size=batch, **cuts)
    is_free = per_device_train_batch_size is None and gradient_accumulation_steps is None
    min_batch = 1 if is_free else request.per_device_train_batch_size
    wanted = Way(precision, gradient_checkpointing, sharded)
    candidates = _list_candidates(model.has_equal_layers, num_processes, wanted)
    refusals = {way.sharded: workload.find_refusal(precision, way.sharded, num_processes) for way in candidates}
    allowed = [way for way in candidates if not refusals[way.sharded]]
    way = next((way for way in allowed if fits(min_batch, way)), None)
    refused = [way for way in candidates if refusals[way.sharded]]
    if way is None and refused and (not allowed or any(fits(min_batch, way) for way in refused)):
        refusal, is_sharded = refusals[refused[0].sharded], refused[0].sharded
        if precision != "fp16" or mixed_precision is not None:
            raise UsageError(_explain(refusal, workload, hardware, mixed_precision, sharded, is_sharded))
        flags = {"gradient_checkpointing": gradient_checkpointing, "sharded": sharded}
        placement = place(workload, hardware, **cuts, **flags, mixed_precision="no")
        reason = f"{placement.reason}; in float32, as the programs refuse fp16 here ({refusal.reason})"
        return dataclasses.replace(placement, reason=reason)
    if way is None:
        raise _explain_need(workload, hardware, allowed, min_batch)

    def try_largest(way: Way) -> tuple[Layout, Memory, StepTime]:
        b = min_batch
        if is_free:
            b = _find_largest(lambda b: fits(b, way), share)
            b = -(-share // -(-share // b))  # the smallest b with the same k: equal micro-batches
        layout, memory = _cut(workload, hardware, b, way)
        return layout, memory, _predict_time(workload, hardware, layout, way)

    def find_fastest(way: Way) -> tuple[Layout, Memory, StepTime, Way, float]:
        """Find the largest micro-batch, with activations computed again where that saves time; what it saves."""
        layout, memory, time = try_largest(way)
        recomputed = way._replace(gradient_checkpointing=True)
        may_recompute = recomputed._replace(num_shards=None) in allowed and way != recomputed
        if is_free and may_recompute and layout.gradient_accumulation_steps > 1:
            other = try_largest(recomputed)
            if (gained := 1 - other[2].total / time.total) > FASTER:
                return *other, recomputed, gained
        return layout, memory, time, way, 0.0

    names = {
        "gradient checkpointing": way.gradient_checkpointing > gradient_checkpointing,
        "sharded weights (FSDP2)": way.sharded > sharded,
    }
    layout, memory, time, chosen, gained = find_fastest(way)
    whole, saved = _cut(workload, hardware, share, chosen)[1], 0.0
    if way.sharded and 1 < hardware.num_devices < num_processes:
        groups = [each._replace(num_shards=hardware.num_devices) for each in allowed if each.sharded]
        if fitting := next((group for group in groups if fits(min_batch, group)), None):
            found = find_fastest(fitting)
            if found[2].total < (1 - WORTH) * time.total:
                saved = 1 - found[2].total / time.total
                layout, memory, time, chosen, gained = found
    strategy, reason = _choose_strategy(layout, whole, hardware)
    if gained:
        reason += f"; gradient checkpointing allows micro-batches large enough to save {gained:.0%} of the time"
    if saved:
        reason += (
            f"; weights are divided within each node, with a copy on every node (HSDP), to save {saved:.0%} of the time"
        )
    if any(names.values()):
        reason += f"; it fits only with {' and '.join(name for name, is_needed in names.items() if is_needed)}"
    return Placement(
        workload=workload,
        hardware=hardware,
        layout=layout,
        **chosen._asdict(),
        memory=memory,
        strategy=strategy,
        reason=reason,
        warnings=tuple(_make_warnings(workload, layout, chosen, hardware, time)),
        time=time,
    )


def try_placement(make: Callable[[], Workload], hardware: Hardware, **options: Any) -> Placement | None:
    """Place a workload; None: it cannot be made, or does not fit."""
    try:
        return place(make(), hardware, **options)
    except UsageError:
        return None


# What the planner can plan and no program here can run is said, never proposed


DIVIDED = {
    "tensor parallel": ("autocast_cache", "gathered", "activations", "head"),
    "context parallel": ("activations", "head"),
    "pipeline parallel": ("gathered",),
    "expert parallel": ("gathered",),
}
"""Way of other programs -> what of a plan with divided weights it divides between the devices of a node, too, about."""


def _explain_elsewhere(workload: Workload, hardware: Hardware, precision: str) -> str:
    """Say what a sample would need by ways of other programs, where it would fit so; else nothing."""
    if hardware.num_processes == 1 or workload.find_refusal(precision, True) or not workload.model.has_equal_layers:
        return ""
    layout, way = _solve(hardware, workload.global_batch_size, 1), Way(precision, True, True)._asdict()
    needs = {"CPU offload of FSDP2": _add_margins(workload.memory(layout, **way, offloaded=True))}
    memory, has_experts = (
        workload.memory(layout, **way),
        isinstance(workload.model, Decoder) and bool(workload.model.shape.num_mixtures),
    )
    num_devices = hardware.num_devices if hardware.num_devices > 1 else hardware.num_processes
    for name, items in DIVIDED.items():
        if name != "expert parallel" or has_experts:
            less = {item: getattr(memory, item) // num_devices for item in items}
            needs[f"{name} over {num_devices} devices"] = _add_margins(dataclasses.replace(memory, **less))
    fitting = [f"{name}, {need / 1e9:.1f} GB" for name, need in needs.items() if need <= hardware.device.memory_bytes]
    if not fitting:
        return ""
    return f" (about what would fit, and no program here does: {'; '.join(fitting)})"


def _explain(
    refusal: Refusal,
    workload: Workload,
    hardware: Hardware,
    mixed_precision: str | None,
    sharded: bool,
    is_sharded: bool,
) -> str:
    """Write why the programs refuse what would fit, and what works; the flags as of `place`, `is_sharded`: what would fit."""
    subject = f"{workload.name} fits only with sharded weights (FSDP2), but " if is_sharded and not sharded else ""
    others = [
        name
        for name in ("bf16", "no")
        if hardware.device.tflops(name) and not workload.find_refusal(name, is_sharded, hardware.num_processes)
    ]
    if mixed_precision is not None and others:
        return f"{subject}{refusal.reason}: set --mixed_precision to {' or '.join(others)}, or leave it out"
    return f"{subject}{refusal.reason}: {'leave --sharded out' if sharded else refusal.remedy}"


def _solve(hardware: Hardware, batch: int, b: int) -> Layout:
    return solve_layout(num_processes=hardware.num_processes, global_batch_size=batch, per_device_train_batch_size=b)


def _cut(workload: Workload, hardware: Hardware, b: int, way: Way) -> tuple[Layout, Memory]:
    """Compute layout and memory with micro-batches of b samples."""
    layout = _solve(hardware, workload.global_batch_size, b)
    return layout, workload.memory(layout, **way._asdict())


def _predict_time(workload: Workload, hardware: Hardware, layout: Layout, way: Way) -> StepTime:
    model, (precision, checkpointing, sharded, num_shards) = workload.model, way
    software = default_software(
        precision, kernels=model.kernels, optimizer_bytes=workload.optimizer_bytes, sharded=sharded
    )
    if workload.elsewhere is not None:
        software = workload.elsewhere.software(model, sharded=sharded)
    software = dataclasses.replace(software, orthogonalized=workload.orthogonalized)
    options: dict[str, Any] = {"gradient_checkpointing": checkpointing, "sharded": sharded, "num_shards": num_shards}
    return step_time(count_work(model, precision), layout, hardware, precision, software, **options)


def _choose_strategy(layout: Layout, whole: Memory, hardware: Hardware) -> tuple[str, str]:
    """Choose the strategy and say why; `whole` is the memory of a process's share in one forward.

    One device: direct if its share fits, accumulate if not. Several devices: data parallel, or both.
    """
    share, k, is_single = layout.shares[0], layout.gradient_accumulation_steps, layout.num_processes == 1
    size = (
        f"{share} samples at once need {_add_margins(whole) / 1e9:.1f} GB of {hardware.device.memory_bytes / 1e9:.1f}"
    )
    subject = "the step" if is_single else "a process's share"
    if _add_margins(whole) <= hardware.device.memory_bytes and k > 1:
        size = f"as asked; {size}"
    if k == 1:
        return "direct" if is_single else "data parallel", f"{subject} fits in one forward: {size}"
    return (
        "accumulate" if is_single else "data parallel and accumulate",
        f"{subject} is cut into {k} micro-batches: {size}",
    )


def _warn_of_link(workload: Workload, layout: Layout, way: Way, hardware: Hardware, time: StepTime) -> list[str]:
    """Say what PCIe is assumed to carry, where devices of a machine exchange over it, and what half of that does."""
    device = hardware.device
    if hardware.num_processes == 1 or hardware.num_nodes > 1 or not device.link.startswith("PCIe"):
        return []
    halved = dataclasses.replace(device, link_gb_per_s=device.link_gb_per_s / 2)
    slower = _predict_time(workload, dataclasses.replace(hardware, device=halved), layout, way).total
    if not way.sharded and slower < (1 + WORTH) * time.total:
        return []
    return [
        f"the devices exchange over {device.link}, of which {reachable_link(device) / 1e9:.3g} GB/s are taken to be reached. "
        f"At half of that, as in slots of half the lanes, a step takes {slower:.3g} seconds, not {time.total:.3g}"
    ]


def _make_warnings(workload: Workload, layout: Layout, way: Way, hardware: Hardware, time: StepTime) -> list[str]:
    precision = way.mixed_precision
    warnings, b = [], min(layout.per_device_train_batch_size, layout.shares[0])
    batch, critical = layout.global_batch_size, workload.critical_batch_size
    if layout.shares[-1] == 0:
        idle = layout.shares.count(0)
        warnings.append(
            f"{idle} of {layout.num_processes} devices get none of {layout.global_batch_size} samples in a step"
        )
    overhead = (time.weights + time.launches) / time.total
    if overhead > OVERHEAD:
        warnings.append(
            f"{overhead:.0%} of a step is reading weights and starting kernels, whatever the {b} samples of a forward: larger "
            "micro-batches, or fewer devices, use them better"
        )
    if workload.batch_normalization and layout.gradient_accumulation_steps > 1:
        num_samples = min(b * layout.num_processes, batch)
        warnings.append(
            f"batch normalisation takes its statistics from the {num_samples} samples of a micro-batch, not from {batch}. The "
            "step is not the same on other layouts (by how much: docs/exactness.md; the log measures it). Group normalisation "
            "is exact, and so is --exact_batch_norm, in 9 times the time and more"
        )
    if critical is not None and batch > critical:
        warnings.append(
            f"the global batch of {batch} is {batch / critical:.3g} times the critical one of {critical:g}. About "
            f"{1 + batch / critical:.3g} times the samples for the same loss (McCandlish et al., 2018, arXiv:1812.06162)"
        )
    if isinstance(workload.model, ConvNet) and workload.model.has_photographs:
        per_device = time.samples_per_second(batch) / layout.num_processes
        warnings.append(
            f"{per_device:,.0f} photographs per second and device: to decode and crop them takes about "
            f"{per_device * CALIBRATION.loading:.1f} cores each, not counted in the time"
        )
    if hardware.num_nodes > 1:
        warnings.append(
            "launch it on every machine, with --machine_rank 0, 1, ... and --main_process_ip (the first one's) after "
            "`accelerate launch`"
        )
    if precision == "fp16":
        warnings.append("fp16's loss scaling leaves steps out that overflow: those are not the same on other hardware")
    if hardware.num_nodes > 1:
        kind = f" ({hardware.device.network})" if hardware.device.network else ""
        warnings.append(
            f"between nodes {hardware.network_gb_per_s:g} GB/s per node and direction{kind}: --network says another, for "
            "example --network 25GB/s or 200Gb/s"
        )
    warnings += _warn_of_link(workload, layout, way, hardware, time)
    if time.exposed_communication > WAITING * time.total:
        network = "the network" if hardware.num_nodes > 1 else hardware.device.link
        waiting = time.exposed_communication / time.total
        warnings.append(
            f"{waiting:.0%} of a step is waiting for {network}: larger global batches and fewer devices wait less"
        )
    return warnings


def _add_margins(memory: Memory) -> float:
    return memory.total * (1 + BAND) + RESERVED


def _find_largest(holds: Callable[[int], bool], limit: int) -> int:
    """Find the largest number in [1, limit] for which `holds` is true; it must be true for 1, and false above a false one."""
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
