"""The answers of `plan` and `scale` as plain JSON values: the numbers behind the text, the page and the plot."""

import dataclasses
from typing import Any

from samestep.cut.layout import Layout
from stepplan.certainty import Certainty, judge, judge_hardware
from stepplan.convnet import ConvNet
from stepplan.costs import Terms, describe_costs
from stepplan.decoder import Decoder
from stepplan.growth import Row, grow, make_remarks
from stepplan.hardware import Device, Hardware
from stepplan.image_text import ImageText
from stepplan.memory import Memory, count_trained
from stepplan.methods import Fit
from stepplan.placement import Placement
from stepplan.stacks import EncoderDecoder
from stepplan.transformer import Transformer
from stepplan.workload import Workload

POINTS = 100
"""Points of the learning rate's curve."""
DRIVER = "torch 2.13 of PyPI is built for CUDA 13, which needs an NVIDIA driver of 580 or newer (nvidia-smi shows it)"
NO_TERMS = Terms()
PHASES = ("forward", "backward", "optimizer_step")


def describe_plan(workload: Workload, layout: Layout, memory: Memory, options: dict[str, Any]) -> dict[str, Any]:
    """Describe the cut of the step, the model, and the memory of one process.

    Args:
        workload: the computation.
        layout: the cut of its step.
        memory: planned memory of one process.
        options: mixed_precision, gradient_checkpointing and sharded.
    """
    peaks = {phase: getattr(memory, phase) for phase in PHASES}
    answer = dataclasses.asdict(layout) | {"shares": layout.shares} | _describe_model(workload) | options
    return answer | {"memory": memory.items | {"total": memory.total}, "memory_peaks": peaks}


def describe_trace(trace: Any, workload: Workload, layout: Layout, options: dict[str, Any]) -> dict[str, Any]:
    """Describe a `trace.Trace` of one process with whole weights, and the relative error of the plan.

    The error is None where the model has no formula, because then the plan is made of a trace.
    """
    has_formula = isinstance(workload.model, Transformer | Decoder | ConvNet | EncoderDecoder)
    has_formula = has_formula or hasattr(workload.model, "traced_layers")
    planned = workload.memory(layout, **options | {"sharded": False}).total if has_formula else None
    peaks = {phase: getattr(trace, phase) for phase in PHASES}
    answer = {"num_parameters": trace.num_parameters, "flops": trace.flops, "peak": trace.peak, "memory_peaks": peaks}
    error = None if planned is None else planned / trace.peak - 1
    return {"trace": answer | {"planned": planned, "error": error}}


def describe_placement(
    placement: Placement,
    command: str | None,
    *,
    write_command: str | None = None,
    job_command: str | None = None,
    terms: Terms = NO_TERMS,
) -> dict[str, Any]:
    """Describe what the hardware adds to a plan: seconds, bytes, samples, dollars; `time` and `memory` by item.

    Args:
        placement: the workload on its hardware.
        command: launches it.
        write_command: writes the launch file that `command` names; None: it is there.
        job_command: writes a job for the nodes of a cluster; None: there is one node.
        terms: price, start, interruptions.
    """
    time, hardware, workload = placement.time, placement.hardware, placement.workload
    batch, watts, costs = workload.global_batch_size, hardware.device.watts, describe_costs(placement, terms)
    seconds = costs["seconds_to_end"]
    device_hours = None if seconds is None else seconds / 3600 * hardware.num_processes
    certainty = judge(placement)
    return {
        "hardware": str(hardware),
        "device": hardware.device.description,
        "num_devices_used": min(hardware.num_processes, batch),
        "unverified": list(hardware.device.unverified),
        "notes": list(hardware.device.notes) or [DRIVER] * ("NVIDIA" in hardware.device.description),
        "write_command": write_command,
        "job_command": job_command,
        **_describe_certainty(certainty),
        "seconds_to_end_range": _spread(seconds, certainty.band),
        **costs,
        "cost_range": _spread(costs["cost"], certainty.band),
        "strategy": placement.strategy,
        "reason": placement.reason,
        "num_shards": placement.num_shards,
        "warnings": [*filter(None, [_describe_communication(workload)]), *placement.warnings],
        "memory_needed": placement.needed_bytes,
        "memory_of_device": hardware.device.memory_bytes,
        "time": dataclasses.asdict(time) | {"total": time.total},
        "all_reduce_seconds": placement.all_reduce_seconds if hardware.num_processes > 1 else None,
        "samples_per_second": time.samples_per_second(batch),
        "tokens_per_second": time.tokens_per_second(batch, workload.model.length)
        if workload.model.unit == "token"
        else None,
        "share_of_peak": time.share_of_peak,
        "network": f"{hardware.network_gb_per_s:g} GB/s" if hardware.num_nodes > 1 else None,
        "energy_kwh": None if device_hours is None or watts is None else device_hours * watts / 1000,
        "command": command,
        "micro_batches": _describe_micro_batches(placement),
    }


def _describe_certainty(certainty: Certainty) -> dict[str, Any]:
    return {"speed_band": certainty.band, "never_compared": list(certainty.reasons)}


def _spread(value: float | None, band: float) -> list[float] | None:
    """Return the range of a value that is inversely proportional to the speed."""
    return None if value is None else [value / (1 + band), value * (1 + band)]


def _describe_model(workload: Workload) -> dict[str, Any]:
    """Describe the model, FLOPs and activations of a sample, and the schedule."""
    model, schedule, num_steps = workload.model, workload.schedule, workload.num_steps
    answer: dict[str, Any] = {
        "num_parameters": model.num_parameters,
        "num_trained": count_trained(model),
        "states": workload.state_bytes,
        "accumulation": "gradient" if workload.gradient_bytes else "optimizer",
        "second_moment": workload.second_moment,
        "communication": _describe_communication(workload),
        "flops_per_sample": model.flops_per_sample,
        "saved_bytes_per_sample": {p: model.saved_bytes(autocast=p != "no") for p in ("no", "bf16")},
        **({"traced_layers": model.traced_layers} if hasattr(model, "traced_layers") else {}),
        "num_steps": num_steps,
        "batch_sizes": [list(pair) for pair in workload.sizes] or None,
        "missing": None if num_steps is not None else "num_train_samples" if workload.script else "max_train_steps",
        "hint": None if workload.script else workload.hint,
        "is_adapter": count_trained(model) < model.num_parameters,
        "model_bytes": 4 * count_trained(model),
        "checkpoint_bytes": round((4 + workload.moment_bytes) * count_trained(model)),
        "steps_per_epoch": workload.steps_per_epoch,
        "num_warmup_steps": None,
        "learning_rates": None,
        "critical_batch_size": workload.critical_batch_size,
    }
    if isinstance(model, ImageText):
        answer["images"] = {"sizes": [list(size) for size in model.images], "tokens": model.image_tokens}
    if model.unit == "token":
        answer |= {
            "flops_per_token": model.flops_per_sample / model.length,
            "tokens_per_step": workload.global_batch_size * model.length,
            "num_tokens": None if num_steps is None else workload.num_samples * model.length,
        }
    if schedule is not None:
        steps = {0, schedule.num_warmup_steps, num_steps, *(num_steps * i // POINTS for i in range(POINTS))}
        answer["num_warmup_steps"] = schedule.num_warmup_steps
        answer["learning_rates"] = [[step, schedule(step)] for step in sorted(steps) if step <= num_steps]
    return answer


def _describe_communication(workload: Workload) -> str | None:
    """Say that the recipe's `communication` is another algorithm, and what a worker sends; None: the exact step."""
    if workload.communication is None:
        return None
    text = workload.communication.describe_traffic(count_trained(workload.model))
    return f"{text}. Times and batches are planned as for the exact step"


def _describe_micro_batches(placement: Placement) -> list[dict[str, Any]]:
    """Describe memory and seconds of other micro-batches: powers of two, the process's share, and the placement's own."""
    layout, micro_batches = placement.layout, []
    own_size, share = min(layout.per_device_train_batch_size, layout.shares[0]), layout.shares[0]
    for b in sorted({own_size, share, *(2**i for i in range(share.bit_length()))}):
        other = placement.with_micro_batch(b)
        micro_batches.append(
            {
                "per_device_train_batch_size": b,
                "gradient_accumulation_steps": other.layout.gradient_accumulation_steps,
                "memory": other.memory.items | {"total": other.memory.total},
                "needed": other.needed_bytes,
                "fits": other.fits,
                "seconds": other.time.total if other.fits else None,
            }
        )
    return micro_batches


SORTS = ("cost", "time")
"""Orders of a comparison."""


def sort_rows(rows: list[dict[str, Any]], order: str | None) -> list[dict[str, Any]]:
    """Sort the rows of a comparison, those that do not fit last.

    Args:
        rows: answers of `describe_plan` and `describe_placement`, or a `problem`.
        order: cost or time, of a sample; None: cost, if all prices are known, else time.
    """
    placed = [row for row in rows if "problem" not in row]
    if order is None:
        order = "cost" if all(row["price_per_hour"] is not None for row in placed) else "time"
    keys = {"cost": lambda row: row["cost_per_million_samples"], "time": lambda row: -row["samples_per_second"]}
    return sorted(placed, key=keys[order]) + [row for row in rows if "problem" in row]


def describe_fits(
    hardware: Hardware, fits: list[Fit], others: list[str], price_per_hour: float | None
) -> dict[str, Any]:
    """Describe the models, methods and lengths that fit on some hardware."""
    return {
        "hardware": str(hardware),
        "device": hardware.device.description,
        "price_per_hour": price_per_hour,
        **_describe_certainty(judge_hardware(hardware)),
        "rows": [_describe_fit(fit, price_per_hour) for fit in fits],
        "too_large": others,
    }


def _describe_fit(fit: Fit, price_per_hour: float | None) -> dict[str, Any]:
    workload = fit.typical.workload
    answer = {"model": fit.model, "num_parameters": workload.model.num_parameters, "method": fit.method.name}
    answer |= {"changes": dict(fit.method.changes), "global_batch_size": workload.global_batch_size}
    for name, placement in (("typical", fit.typical), ("longest", fit.longest)):
        length, batch = placement.workload.model.length, placement.workload.global_batch_size
        answer[name] = {
            "length": length,
            "tokens_per_second": placement.time.tokens_per_second(batch, length),
            "per_device_train_batch_size": placement.layout.per_device_train_batch_size,
            "mixed_precision": placement.mixed_precision,
            "gradient_checkpointing": placement.gradient_checkpointing,
            "sharded": placement.sharded,
            "memory_needed": placement.needed_bytes,
            "memory_of_device": placement.hardware.device.memory_bytes,
            "cost_per_billion_tokens": describe_costs(placement, Terms(price_per_hour=price_per_hour))[
                "cost_per_billion_tokens"
            ],
        }
    return answer


def describe_growth(workload: Workload, device: Device, up_to: int) -> dict[str, Any]:
    """Describe a workload on 1, 2, 4, ... up to `up_to` devices: the rows of `scale`, and remarks.

    Raises:
        UsageError: as `growth.grow`.
    """
    rows = grow(workload, device, up_to)
    return {
        "recipe": workload.name,
        "device": device.name,
        "global_batch_size": workload.global_batch_size,
        "remarks": make_remarks(rows),
        "rows": [_describe_row(row) for row in rows],
    }


def _describe_row(row: Row) -> dict[str, Any]:
    def describe(placement: Placement | None, efficiency: float | None) -> dict[str, Any] | None:
        if placement is None:
            return None
        layout, time = placement.layout, placement.time
        return dataclasses.asdict(layout) | {
            "gradient_checkpointing": placement.gradient_checkpointing,
            "sharded": placement.sharded,
            "seconds": time.total,
            "samples_per_second": time.samples_per_second(layout.global_batch_size),
            "efficiency": efficiency,
            "exposed_communication": time.exposed_communication,
        }

    return {
        "num_devices": row.num_devices,
        "strong": describe(row.strong, row.strong_efficiency),
        "weak": describe(row.weak, row.weak_efficiency),
    }
