"""Plans a recipe: `samestep plan`, on one hardware or several."""

import dataclasses
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from samestep.cli.flags import read_recipe, retype, write_file
from samestep.cut import layout as layouts
from samestep.errors import UsageError
from samestep.printing import round_number
from samestep.recipe import catalog as recipes
from samestep.recipe import pretrained_shape
from samestep.recipe.exclusions import find_refusal
from samestep.recipe.reading import format_name
from samestep.recipe.recipe import VARIANTS, Recipe
from samestep.recipe.settings import build, choice, find_flag, limit, program_name, setting
from samestep.recipe.tasks.text_pretraining import TextPretraining
from stepplan import answer, text
from stepplan.cli.cut import CutSettings
from stepplan.cli.elsewhere import ElsewhereSettings, move
from stepplan.cli.model import import_trace
from stepplan.cli.scale import DEFAULT_MAX_DEVICES
from stepplan.cli.terms import read_terms
from stepplan.costs import Terms, describe_costs
from stepplan.growth import MOST_DEVICES
from stepplan.hardware import MAX_DEVICES, Hardware, parse
from stepplan.image_text import read_sizes
from stepplan.methods import LENGTH_FIELDS, SHORTEST, MakeWorkload, Remedy, find_remedies
from stepplan.page import page
from stepplan.placement import Placement, TooLargeError, place
from stepplan.rows import count_rows
from stepplan.workload import KERNELS, Workload, find_model, format_flags, from_command, set_kernels

STEPS = ("max_train_steps", "num_train_epochs")
"""Fields that say how long a recipe trains."""

NEED_HARDWARE = "write_config html price_per_hour network sort start interruptions_per_day disk host_memory".split()
"""Flags that say nothing without --on."""

MAX_HARDWARE = 64
"""Hardware that are compared at once, at most."""

MOST_TOKENS = 1e15
TOKENS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings(CutSettings, ElsewhereSettings):
    """Choose the processes, and what else decides memory and time"""

    num_processes: int | None = setting("processes (N); none: 1; not with --on", limit(MAX_DEVICES), default=None)
    attn_implementation: str = setting(
        "attention of transformers: sdpa, or eager, which stores every pair of tokens",
        choice("sdpa", "eager"),
        default="sdpa",
    )
    compiled: bool = setting("plan the time with compiled layers; the command has --torch_compile", default=False)
    attention_kernel: str | None = setting(
        "kernel of fused attention in another program, for its time: flash_1 (2022 to mid-2023), flash_2, flash_3 or cudnn; "
        "none: that of torch 2.13",
        choice(*KERNELS),
        default=None,
    )
    num_train_tokens: str | None = setting(
        "length of training in tokens (10e9, 10B), instead of steps or epochs; for models that read tokens",
        default=None,
    )
    image_sizes: tuple[str, ...] | None = setting(
        "height and width of each image of a sample, as 480x640, for recipes with images; none: as the recipe has it, or one "
        "of these",
        default=None,
    )
    trace: bool = setting(
        "trace the memory with torch, too: slower, needs no GPU; any model of transformers", default=False
    )


def plan(argv: list[str]) -> None:
    """Answer `plan` of a recipe, the first word."""
    recipe, settings, data, changes = read_recipe("plan", argv, PlanSettings)
    name = argv[0]
    if settings.num_train_tokens is not None:
        if recipe.unit != "token":
            raise UsageError(f"--num_train_tokens with {format_name(name)}, which reads images: give --max_train_steps")
        if lengths := [field for field in STEPS if field in changes]:
            raise UsageError(f"--num_train_tokens with {' and '.join(lengths)}: leave out one of them")
        length = find_model(recipe).length
        changes |= {"max_train_steps": count_steps(settings.num_train_tokens, recipe.global_batch_size, length)}
        recipe = pretrained_shape.load(name, changes)
    if settings.write_recipe is not None:
        write_recipe(settings.write_recipe, name, changes)
    rows = count_rows(recipe) if data.num_train_samples is None else None
    num_samples = rows.num_samples if rows else data.num_train_samples
    answer_recipe(
        name, recipe, changes, settings, num_samples, ["plan", *argv], {"train_rows": rows and rows._asdict()}
    )


def answer_recipe(
    name: str,
    recipe: Recipe,
    changes: Mapping[str, Any],
    settings: PlanSettings,
    num_train_samples: int | None,
    words: list[str],
    more_subject: Mapping[str, Any] | None = None,
) -> None:
    """Answer `plan` of a recipe.

    Args:
        name: what it was loaded from, before `changes`.
        recipe: with the changes.
        changes: field -> value.
        settings: the flags.
        num_train_samples: of the training data, where the recipe does not say it.
        words: the words of the command line.
        more_subject: fields of the answer's head, in place of the recipe's.
    """

    # The script's own rules: those that ask for the flag and for a field of the recipe
    compiled = SimpleNamespace(torch_compile=settings.compiled)
    if settings.program is None and (refusal := find_refusal(recipe, compiled)):
        raise UsageError(f"compiled is given: {refusal}")

    def make(more: Mapping[str, Any]) -> Workload:
        """Make the workload with more changes, which a recipe written before does not hold."""
        workload = from_command(
            build(type(recipe), recipes.overlay(vars(recipe), more), f"recipe {name}") if more else recipe,
            source=settings.write_recipe or name,
            changes=more if settings.write_recipe else {**changes, **more},
            attention=settings.attn_implementation,
            num_train_samples=num_train_samples,
            critical_batch_size=settings.critical_batch_size,
            images=None if settings.image_sizes is None else read_sizes(settings.image_sizes),
        )
        return move(dataclasses.replace(workload, name=subject["title"]), settings)

    subject: dict[str, Any] = {"recipe": recipe.name, "title": recipes.name_changed(recipe, changes)}
    subject |= {"description": recipe.description, "source": recipe.source}
    subject |= {} if changes else {"expect": recipe.expect}
    subject |= {"fingerprint": recipe.fingerprint, "train_rows": None}
    scaled = recipe.scaled_hyperparameters()
    subject |= dataclasses.asdict(scaled) | dict(more_subject or {})
    if isinstance(recipe, TextPretraining) and recipe.optimizer_name == "muon":
        subject["muon_learning_rate"] = recipe.muon_learning_rate * scaled.learning_rate / recipe.learning_rate

    def trace(b: int, **options: Any) -> Any:
        return import_trace().trace_recipe(recipe, b, **options)

    answer_plan(make, settings, subject, trace, words)


def _set_kernels(make: Callable[[Mapping[str, Any]], Workload], settings: PlanSettings) -> Callable[..., Workload]:
    kernels: dict[str, Any] = {"compiled": settings.compiled, "attention_kernel": settings.attention_kernel}
    return lambda more: set_kernels(make(more), **kernels)


def read_tokens(text: str) -> float:
    """Read a number of tokens.

    >>> read_tokens("10B"), read_tokens("1e6")
    (10000000000.0, 1000000.0)
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?(?:e[0-9]{1,2})?) ?([kmbt]?)", text.lower())
    value = float(match[1]) * TOKENS[match[2]] if match else 0.0
    if not 0 < value <= MOST_TOKENS:
        raise UsageError(
            f"num_train_tokens is {format_name(text)}, must be a number of tokens greater than 0: for example 10e9, 10B"
        )
    return value


def count_steps(num_tokens: str, global_batch_size: int, length: int) -> int:
    """Count the optimizer steps that read so many tokens, in samples of `length`.

    >>> count_steps("10B", 512, 1024), count_steps("1e6", 1000, 100), count_steps("15T", 1000, 1000)
    (19074, 10, 15000000)
    """
    return math.ceil(read_tokens(num_tokens) / (global_batch_size * length))


def write_recipe(file: str, base: str, changes: Mapping[str, Any]) -> None:
    """Write a recipe that extends another one."""
    if not file.endswith((".yaml", ".yml")):
        raise UsageError(f"--write_recipe {format_name(file)}: a recipe's file ends in .yaml")
    if not changes:
        raise UsageError(f"--write_recipe {format_name(file)}: no field of the recipe is changed: leave it out")
    if base.endswith((".yaml", ".yml")):
        base = os.path.relpath(base, Path(file).parent)
    values = {"extends": base} | {name: list(v) if isinstance(v, tuple) else v for name, v in changes.items()}
    values |= {name: kind.read(values[name]).mapping for name, kind in VARIANTS.items() if values.get(name)}
    write_file("write_recipe", file, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def answer_plan(
    make: MakeWorkload, settings: PlanSettings, subject: dict[str, Any], trace: Callable[..., Any], words: list[str]
) -> None:
    """Answer `plan`.

    Args:
        make: makes the workload, with changed fields.
        settings: the flags.
        subject: first fields of the answer: recipe or model, and hyperparameters.
        trace: traces a micro-batch of so many samples.
        words: the words of the command line.
    """
    cut = {
        "per_device_train_batch_size": settings.per_device_train_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
    }
    options: dict[str, Any] = {
        "mixed_precision": settings.mixed_precision,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "sharded": settings.sharded,
    }
    if settings.on is None:
        for flag in NEED_HARDWARE:
            if getattr(settings, flag) is not None:
                raise UsageError(f"--{flag} needs hardware: add --on HARDWARE")
    make = _set_kernels(make, settings)
    workload = make({})
    if settings.on is not None and "," in settings.on:
        _compare(workload, settings, subject, cut | options)
        return
    if settings.on is None:
        batch, num_processes = workload.global_batch_size, settings.num_processes or 1
        layout = layouts.solve_layout(num_processes=num_processes, global_batch_size=batch, **cut)
        options["mixed_precision"] = settings.mixed_precision or "bf16"
        if refusal := workload.find_refusal(options["mixed_precision"], settings.sharded, num_processes):
            raise UsageError(str(refusal))
        memory = workload.memory(layout, **options)
        result = subject | answer.describe_plan(workload, layout, memory, options)
        placement = None
    else:
        if settings.num_processes is not None:
            raise UsageError(f"--num_processes {settings.num_processes} with --on {settings.on}: leave out one of them")
        hardware = parse(settings.on, settings.network)
        if settings.sort is not None:
            raise UsageError(f"--sort {settings.sort} with one hardware: name several in --on, with commas")
        (terms,) = read_terms(settings, [hardware])
        placement = _place(make, hardware, cut | options, words)
        if settings.write_config is not None:
            write_file("write_config", settings.write_config, placement.config(settings.write_config))
        options, layout = placement.options, placement.layout
        result = subject | answer.describe_plan(workload, layout, placement.memory, options)
        write_command = None
        if workload.script and settings.write_config is None and placement.config_file is None:
            write_command = retype(words, html=None, json=None, write_config=placement.written_file)
        of_run = _write_interval(placement, terms)
        command = placement.command(settings.write_config)
        result |= answer.describe_placement(
            placement,
            command and shlex.join([*shlex.split(command), *of_run]),
            write_command=write_command,
            job_command=_write_job_command(placement, words, settings, of_run),
            terms=terms,
        )
        rows = subject.get("train_rows")
        if rows and rows["mean_tokens"]:
            share = 1 - rows["num_long"] / rows["num_rows"]
            result["of_mean_rows"] = _describe_mean_rows(make, placement, rows["mean_tokens"], share, terms)
    if settings.trace:
        result |= _describe_trace(trace, settings, workload, layout, options)
    if placement is not None and settings.html is not None:
        write_file("html", settings.html, page(result | {"scale": _grow(workload, placement)}))
    if settings.json:
        print(json.dumps(result))
    else:
        print("\n".join(text.write_plan(result)))


def _describe_trace(
    trace: Callable[..., Any],
    settings: PlanSettings,
    workload: Workload,
    layout: layouts.Layout,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Trace the largest micro-batch, and describe what it says beside the formulas."""
    trace_options = {name: options[name] for name in ("mixed_precision", "gradient_checkpointing")}
    b = min(layout.per_device_train_batch_size, layout.shares[0])
    if sys.stderr.isatty():  # a model that goes from token to token has as many operators as tokens
        print("tracing with torch; a recurrence takes minutes: shorter samples take less", file=sys.stderr, flush=True)
    peaks = trace(b, **trace_options, attn_implementation=settings.attn_implementation)
    return answer.describe_trace(peaks, workload, layout, options)


def _describe_mean_rows(
    make: MakeWorkload, placement: Placement, num_tokens: int, share: float, terms: Terms
) -> dict[str, Any] | None:
    """Describe seconds and dollars if each row has the mean number of tokens, in the same cut; None: they cannot be planned.

    Args:
        make: makes the workload, with changed fields.
        placement: of rows of the most tokens.
        num_tokens: the mean.
        share: of the rows that are not left out; a length in epochs is that much shorter.
        terms: price, start, interruptions.
    """
    try:
        short = make({"max_seq_length": num_tokens})
    except UsageError:  # it has no such field, or so few tokens are no sample
        return None
    costs = describe_costs(placement.compute(short), terms)
    seconds, cost = (None if costs[name] is None else costs[name] * share for name in ("seconds_to_end", "cost"))
    return {"tokens": num_tokens, "seconds_to_end": seconds, "cost": cost}


def _write_interval(placement: Placement, terms: Terms) -> list[str]:
    """Write the flag of the interval between checkpoints that loses the least, where a rate of interruptions is given."""
    if not terms.interruptions_per_day or placement.seconds_to_end is None:
        return []
    return ["--checkpointing_minutes", f"{describe_costs(placement, terms)['checkpointing_seconds'] / 60:.3g}"]


def _write_job_command(placement: Placement, words: list[str], settings: PlanSettings, of_run: list[str]) -> str | None:
    """Write the command that makes a job for Slurm of a plan on several nodes; None: of one node, or without a script."""
    workload, hardware = placement.workload, placement.hardware
    if hardware.num_nodes == 1 or workload.script is None or workload.script_words[:1] != ("--recipe",):
        return None
    _, recipe, *flags = workload.script_words
    asked = {name: find_flag(words, name) for name in ("num_train_samples", "network")}
    flags += format_flags({name: value for name, value in asked.items() if value and f"--{name}" not in flags})
    flags += format_flags({name: value for name, value in settings.options.items() if value})  # those that were chosen
    of_run = of_run + ["--torch_compile"] * (workload.model.kernels == "compiled")
    of_run += ["--attn_implementation", "eager"] * bool(workload.model.eager_attention)
    job = ["launch", recipe, *flags, "--on", f"slurm:{hardware}", "--write", "job.sbatch", "--"]
    return f"{program_name()} {shlex.join([*job, '--output_dir', '/shared/runs/NAME', *of_run])}"


def _compare(workload: Workload, settings: PlanSettings, subject: dict[str, Any], options: dict[str, Any]) -> None:
    """Answer `plan` for several hardware: a row for each, of which some may not fit."""
    for flag in ("write_config", "trace", "num_processes"):
        if getattr(settings, flag):
            raise UsageError(f"--{flag} with several hardware in --on: name one of them")
    names = settings.on.split(",")
    if len(names) > MAX_HARDWARE:
        raise UsageError(f"--on names {len(names)} hardware, must be {MAX_HARDWARE} or fewer")
    hardware = [parse(name, settings.network) for name in names]
    terms = read_terms(settings, hardware)
    if settings.sort == "cost" and settings.price_per_hour is None:
        raise UsageError("--sort cost needs prices: add --price_per_hour")
    rows: list[dict[str, Any]] = []
    placements: dict[str, Placement] = {}
    for machine, own_terms in zip(hardware, terms, strict=True):
        try:
            placement = placements[str(machine)] = place(workload, machine, **options)
        except UsageError as error:
            rows.append({"hardware": str(machine), "problem": str(error)})
            continue
        described = answer.describe_plan(workload, placement.layout, placement.memory, placement.options)
        rows.append(described | answer.describe_placement(placement, placement.command(), terms=own_terms))
    rows = answer.sort_rows(rows, settings.sort)
    result = {"recipe": subject["recipe"], "title": workload.name, "rows": rows}
    result |= {"global_batch_size": workload.global_batch_size, "num_steps": workload.num_steps}
    if settings.html is not None:
        if not placements:
            raise UsageError(f"--html {format_name(settings.html)}: nothing fits: {rows[0]['problem']}")
        first = rows[0]
        growth = _grow(workload, placements[first["hardware"]])
        write_file("html", settings.html, page(subject | first | {"scale": growth, "rows": rows}))
    print(json.dumps(result) if settings.json else "\n".join(text.write_comparison(result)))


def _grow(workload: Workload, placement: Placement) -> dict[str, Any]:
    hardware = placement.hardware
    return answer.describe_growth(workload, hardware.device, max(DEFAULT_MAX_DEVICES, hardware.num_processes))


def _place(make: MakeWorkload, hardware: Hardware, options: dict[str, Any], words: list[str]) -> Placement:
    """Place a workload; where it does not fit, say what to change, in a command that works as typed."""
    workload = make({})
    try:
        return place(workload, hardware, **options)
    except TooLargeError as error:
        message = str(error)
    length_field = next((name for name in LENGTH_FIELDS if _is_field(make, name)), None)
    remedies = find_remedies(workload, hardware, make, length_field, **options)
    if not remedies:
        raise UsageError(
            f"{message}, and no known device holds it, 1 to {MOST_DEVICES} of them: take shorter or smaller samples, or a "
            "smaller model"
        )
    first, *others = (_describe_remedy(remedy, workload) for remedy in remedies)
    flags, effect = first
    texts = [f"{retype(words, **flags)} ({effect})"]
    texts += [f"{shlex.join(format_flags(flags))} ({effect})" for flags, effect in others]
    raise UsageError(f"{message}; this fits: {', or '.join(texts)}")


def _is_field(make: MakeWorkload, name: str) -> bool:
    """Tell whether a field of this name decides the tokens of a sample."""
    try:
        return make({name: SHORTEST}).model.length == SHORTEST
    except UsageError:
        return False


def _describe_remedy(remedy: Remedy, workload: Workload) -> tuple[dict[str, Any], str]:
    """Return the flags of a remedy, and its speed and whether the steps stay the same, in words."""
    placement = remedy.placement
    unit = "tokens" if workload.model.unit == "token" else "images"
    speed = f"{round_number(1 / remedy.seconds_per_unit)} {unit}/s"
    if remedy.changes:
        return {name: str(value) for name, value in remedy.changes.items()}, f"{speed}, another recipe"
    return {"on": str(placement.hardware)}, f"{speed}, the same steps"
