"""`python -m recipes list | plan RECIPE | scale RECIPE | audit-script`; all but the last answer without torch.

Exit code 0 fine, 1 a check failed, 2 bad usage.
"""

import dataclasses
import json
import sys
from pathlib import Path

from recipes import recipe as recipes
from recipes.errors import UsageError, exit_code, nearest
from recipes.growth import Row, grow, remarks
from recipes.hardware import parse
from recipes.memory import model_of, planned_memory
from recipes.placement import BAND, RESERVED, Placement, place
from recipes.plan import solve_layout
from recipes.settings import POSITIVE, build, one_of, parse_flags, setting

TIMES = "products memory_traffic weights launches optimizer loading exposed_communication".split()
USAGE = """usage: python -m recipes list
       python -m recipes plan RECIPE --on HARDWARE [--write_config FILE] (4xt4, 2x8xa100-80, 1xMINE.yaml)
       python -m recipes plan RECIPE [--num_processes N] [--per_device_train_batch_size b]
                                     [--gradient_accumulation_steps k] [--mixed_precision no|bf16|fp16]
                                     [--gradient_checkpointing] [--sharded] [--json] [--FIELD VALUE ...]
       python -m recipes scale RECIPE --on DEVICE [--up_to 4096] [--json] [--FIELD VALUE ...]
       python -m recipes audit-script --vary "FLAG=VALUE,..." ... -- PROGRAM.py ARGS (--help says more)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How many processes, how the step is cut, and what else decides the memory of one process."""

    on: str | None = setting(
        "hardware, as [NODESx]COUNTxNAME: chooses N, b, k, precision and how it fits", default=None
    )
    write_config: str | None = setting("launch file to write for it", default=None)
    num_processes: int | None = setting("N [1]; not with --on", POSITIVE, default=None)
    per_device_train_batch_size: int | None = setting("most samples in one forward (b)", POSITIVE, default=None)
    gradient_accumulation_steps: int | None = setting("micro-steps per step (k)", POSITIVE, default=None)
    mixed_precision: str | None = setting(
        "of the launch [bf16, or the best that the hardware has]", one_of("no", "bf16", "fp16"), default=None
    )
    gradient_checkpointing: bool = setting("recompute activations in the backward", default=False)
    sharded: bool = setting(
        "divide weights, gradients and moments between the processes (FSDP2), instead of a copy each (DDP)",
        default=False,
    )
    json: bool = setting("print one JSON object", default=False)


def list_recipes() -> None:
    for name in recipes.catalog_names():
        recipe = recipes.load(name)
        print(f"{name:20} B {recipe.global_batch_size:<6} {recipe.description}")


def plan(name: str, argv: list[str]) -> None:
    cls = type(recipes.load(name))
    flags = parse_flags([PlanSettings, cls], argv, USAGE)
    names = {field.name for field in dataclasses.fields(PlanSettings)}
    settings = build(PlanSettings, {key: value for key, value in flags.items() if key in names}, "flags")
    recipe = recipes.load(name, {key: value for key, value in flags.items() if key not in names})
    cut = {
        "per_device_train_batch_size": settings.per_device_train_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
    }
    options = {
        "mixed_precision": settings.mixed_precision,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "sharded": settings.sharded,
    }
    placement = None
    if settings.on is not None:
        if settings.num_processes is not None:
            raise UsageError(f"--num_processes {settings.num_processes} with --on {settings.on}: leave out one of them")
        placement = place(recipe, parse(settings.on), **cut, **options)
        layout, memory = placement.layout, placement.memory
        options = {option: getattr(placement, option) for option in options}
    else:
        if settings.write_config is not None:
            raise UsageError("--write_config needs hardware to write it for: add --on HARDWARE")
        num_processes, batch = settings.num_processes or 1, recipe.global_batch_size
        layout = solve_layout(num_processes=num_processes, global_batch_size=batch, **cut)
        options["mixed_precision"] = settings.mixed_precision or "bf16"
        memory = planned_memory(recipe, layout, **options)
    config_file = _write_config(placement, settings.write_config) if settings.write_config else None
    scaled = dataclasses.asdict(recipe.scaled())
    model = model_of(recipe)
    tokens_per_step = recipe.global_batch_size * model.length
    if settings.json:
        answer = {"recipe": recipe.name, "fingerprint": recipe.fingerprint, **scaled}
        answer |= dataclasses.asdict(layout) | {"shares": layout.shares}
        answer |= {
            "num_parameters": model.num_parameters,
            "states": 16 * model.num_parameters,
            "flops_per_token": model.flops_per_token,
            "flops_per_sample": model.flops_per_sample,
            "tokens_per_step": tokens_per_step,
        }
        answer |= options | {"memory": dataclasses.asdict(memory) | {"total": memory.total}}
        if placement is not None:
            answer |= {
                "hardware": str(placement.hardware),
                "strategy": placement.strategy,
                "reason": placement.reason,
                "warnings": placement.warnings,
                "memory_needed": placement.needed,
                "memory_of_device": placement.hardware.device.memory_bytes,
                "time": dataclasses.asdict(placement.time) | {"total": placement.time.total},
                "samples_per_second": placement.time.samples_per_second(recipe.global_batch_size),
                "share_of_peak": placement.time.share_of_peak,
                "seconds_to_end": placement.seconds_to_end,
                "command": placement.command(config_file),
            }
        print(json.dumps(answer))
        return
    print(f"{recipe.name}: {recipe.description}\n  source     {recipe.source}\n  expect     {recipe.expect}")
    print(f"  layout     {layout}")
    print("  optimizer  " + ", ".join(f"{key} {value:.6g}" for key, value in scaled.items() if value is not None))
    states = 16 * model.num_parameters
    print(
        f"  model      {model.num_parameters:,} parameters; with gradients and moments {states / 1e9:.3f} GB "
        f"({states / 2**30:.3f} GiB) in float32"
    )
    print(
        f"  compute    {model.flops_per_token / 1e9:.4g} GFLOP per token, {model.flops_per_sample / 1e9:.1f} per sample of "
        f"{model.length}, forward and backward; at most {tokens_per_step:,} tokens per step"
    )
    used = [f"mixed_precision {options['mixed_precision']}"]
    used += [name for name in ("gradient_checkpointing", "sharded") if options[name]]
    print(f"  memory     {memory} ({', '.join(used)})")
    if placement is None:
        return
    needed, there = placement.needed / 1e9, placement.hardware.device.memory_bytes / 1e9
    print(
        f"  fits       {needed:.1f} GB of {there:.1f}: the plan, {BAND:.0%} that it may miss (no GPU was measured), and"
    )
    print(f"             {RESERVED / 1e9:g} GB left alone")
    print(f"  strategy   {placement.strategy}: {placement.reason}")
    for line in _time_lines(placement, model.length):
        print(line)
    for warning in placement.warnings:
        print(f"  note       {warning}")
    print(f"  launch     {placement.command(config_file)}")
    if config_file is None and placement.config_file is None:
        print("             FILE.yaml: add --write_config FILE.yaml to this command")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """Devices of one kind, more and more of them."""

    on: str = setting("device")
    up_to: int = setting("largest number of devices", POSITIVE, default=4096)
    json: bool = setting("print one JSON object", default=False)


def scale(name: str, argv: list[str]) -> None:
    cls = type(recipes.load(name))
    flags = parse_flags([ScaleSettings, cls], argv, USAGE)
    names = {field.name for field in dataclasses.fields(ScaleSettings)}
    settings = build(ScaleSettings, {key: value for key, value in flags.items() if key in names}, "flags")
    recipe = recipes.load(name, {key: value for key, value in flags.items() if key not in names})
    rows = grow(recipe, settings.on, settings.up_to)
    if settings.json:
        answer = {"recipe": recipe.name, "device": settings.on, "remarks": remarks(rows)}
        print(json.dumps(answer | {"rows": [_scale_numbers(row) for row in rows]}))
        return
    batch, shared = recipe.global_batch_size, "   s/step   samples/s  efficiency  waiting"
    print(f"{recipe.name} on {settings.on}, predicted: the global batch of {batch} (strong), and one that grows (weak)")
    print(f"devices       b    k {shared} |    batch {shared}")
    for row in rows:
        strong, weak = f"{'does not fit, or leaves devices idle':>55}", ""
        if row.strong:
            layout = row.strong.layout
            cut = f"{layout.per_device_train_batch_size:7} {layout.gradient_accumulation_steps:4}"
            strong = f"{cut} {_speed(row.strong, row.strong_efficiency)}"
        if row.weak:
            weak = f"{row.weak.recipe.global_batch_size:9} {_speed(row.weak, row.weak_efficiency)}"
        print(f"{row.num_devices:7} {strong} |{weak}".rstrip())
    for remark in remarks(rows):
        print(f"- {remark}")


def _speed(placement: Placement, efficiency: float) -> str:
    time = placement.time
    waiting = time.exposed_communication / time.total
    speed = time.samples_per_second(placement.recipe.global_batch_size)
    return f"{time.total:9.3g} {speed:11,.0f} {efficiency:11.0%} {waiting:8.0%}"


def _scale_numbers(row: Row) -> dict:
    def numbers(placement: Placement | None, efficiency: float | None) -> dict | None:
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
        "strong": numbers(row.strong, row.strong_efficiency),
        "weak": numbers(row.weak, row.weak_efficiency),
    }


def _time_lines(placement: Placement, length: int) -> list[str]:
    """Predicted speed, what takes the time, and how long the recipe takes."""
    time, batch, hardware = placement.time, placement.recipe.global_batch_size, placement.hardware
    parts = {name: getattr(time, name) for name in TIMES if getattr(time, name) > 0.005 * time.total}
    speed = f"{time.samples_per_second(batch):,.4g} samples/s, {time.tokens_per_second(batch, length):,.0f} tokens/s"
    lines = [
        f"  time       {time.total:.3g} s per step: {speed}, {time.share_of_peak:.0%} of the peak; predicted, padding counted",
        "             "
        + ", ".join(f"{name.replace('_', ' ')} {part / time.total:.0%}" for name, part in parts.items()),
    ]
    if placement.seconds_to_end is not None:
        hours, steps = placement.seconds_to_end / 3600, placement.recipe.max_train_steps
        energy = hours * hardware.num_processes * hardware.device.watts / 1000
        lines.append(f"             {steps:,} steps take {hours:,.1f} hours, {energy:,.0f} kWh at the power limit")
    return lines


def _write_config(placement: Placement, name: str) -> str:
    path = Path(name)
    if path.exists():
        raise UsageError(f"--write_config {name}: it exists already, and is left alone: give another name")
    try:
        path.write_text(placement.config, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--write_config {name}: {error.strerror}") from None
    return name


def main() -> int | None:
    match sys.argv[1:]:
        case ["list"]:
            list_recipes()
        case ["audit-script", *argv]:
            from recipes.audit.script import audit_script  # here: it imports torch

            return audit_script(argv)
        case ["plan", name, *argv] if not name.startswith("-"):
            plan(name, argv)
        case ["scale", name, *argv] if not name.startswith("-"):
            scale(name, argv)
        case [] | ["-h"] | ["--help"]:
            print(USAGE)
        case [command, *_]:
            commands = ["list", "plan", "scale", "audit-script"]
            hint = "it needs a recipe" if command in ("plan", "scale") else nearest(command, commands)
            raise UsageError(f"python -m recipes {command}: {hint}\n{USAGE}")
    return None


if __name__ == "__main__":
    sys.exit(exit_code(main))
