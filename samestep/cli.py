"""Answers `samestep list | plan | scale | audit-script`, or `python -m recipes`; all but the last without torch.

Exit code 0 fine, 1 a check failed, 2 bad usage.
"""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from samestep.cut import layout as layouts
from samestep.errors import UsageError, exit_code, nearest
from samestep.planner import answer, text
from samestep.planner.configs import IMAGE, has_formula, model_from_config, read_config
from samestep.planner.hardware import MAX_DEVICES, load_device, parse
from samestep.planner.memory import MOMENTS
from samestep.planner.page import page
from samestep.planner.placement import place
from samestep.planner.workload import Workload, from_model, from_recipe
from samestep.recipe import recipe as recipes
from samestep.recipe import scaling
from samestep.recipe.extras import require
from samestep.recipe.reading import format_name
from samestep.recipe.recipe import Recipe
from samestep.recipe.scaling import RULES, Hyperparameters
from samestep.recipe.settings import BATCH, LENGTH, POSITIVE, Parser, build, choice, limit, program_name, setting
from samestep.training.plots import plot_growth

DEFAULT_MAX_DEVICES = 4096
CRITICAL_BATCH_HELP = (
    "samples beyond which a larger global batch wastes them (the gradient's noise scale), if it is known"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Choose what is printed"""

    json: bool = setting("print one JSON object", default=False)
    critical_batch_size: float | None = setting(CRITICAL_BATCH_HELP, POSITIVE, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareSettings(OutputSettings):
    """Choose the hardware, and what is written for it"""

    on: str | None = setting(
        "hardware, as [NODESx]COUNTxNAME: 4xt4, 2x8xa100-80, 1xMINE.yaml; chooses N, b, k, the precision and how it fits",
        default=None,
    )
    write_config: str | None = setting("launch file of Accelerate to write for it", default=None)
    html: str | None = setting("page to write about it, with charts", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings(HardwareSettings):
    """Choose the processes, the cut of the step, and what else decides the memory of one process"""

    num_processes: int | None = setting("processes (N); none: 1; not with --on", limit(MAX_DEVICES), default=None)
    per_device_train_batch_size: int | None = setting(
        "most samples in one forward (b); none: the most that fit on the hardware, or all", BATCH, default=None
    )
    gradient_accumulation_steps: int | None = setting(
        "micro-batches per step (k); none: what b leaves", POSITIVE, default=None
    )
    mixed_precision: str | None = setting(
        "precision of the launch; none: the best that the hardware has, or bf16",
        choice("no", "bf16", "fp16"),
        default=None,
    )
    gradient_checkpointing: bool = setting("recompute activations in the backward", default=False)
    attn_implementation: str = setting(
        "attention of transformers: sdpa, or eager, which stores every pair of tokens",
        choice("sdpa", "eager"),
        default="sdpa",
    )
    sharded: bool = setting(
        "divide weights, gradients and moments between the processes (FSDP2), instead of a copy each (DDP)",
        default=False,
    )
    trace: bool = setting(
        "trace the memory with torch, too: slower, needs no GPU; any model of transformers", default=False
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Say what a recipe may not know of its data"""

    num_train_samples: int | None = setting("samples of the training data", POSITIVE, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Describe a model of Hugging Face without a recipe, and its training"""

    model_name_or_path: str = setting("folder with a config.json, such a file, or a name on the hub")
    seq_len: int | None = setting("tokens of a sample", LENGTH, default=None)
    global_batch_size: int = setting("samples per optimizer step, over all processes and micro-batches", BATCH)
    optimizer: str = setting("adamw, or sgd with momentum", choice(*MOMENTS), default="adamw")
    learning_rate: float | None = setting("peak learning rate at learning_rate_batch_size", POSITIVE, default=None)
    learning_rate_batch_size: int | None = setting(
        "global batch that it was tuned at; none: this one", POSITIVE, default=None
    )
    lr_scaling_rule: str = setting("how the learning rate changes for another batch", choice(*RULES), default="none")
    max_train_steps: int | None = setting("length of training in optimizer steps", POSITIVE, default=None)
    num_train_epochs: float | None = setting(
        "length of training in epochs of num_train_samples", POSITIVE, default=None
    )
    num_train_samples: int | None = setting("samples of the training data", POSITIVE, default=None)

    def problems(self) -> list[str]:
        problems = []
        if self.max_train_steps is not None and self.num_train_epochs is not None:
            problems.append("max_train_steps and num_train_epochs are both given: leave one out")
        if self.num_train_epochs is not None and self.num_train_samples is None:
            problems.append("num_train_epochs needs num_train_samples, to count steps")
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleSettings(OutputSettings):
    """Choose the devices, all of one kind"""

    on: str = setting("device: a name (t4, a100-80, h100), or a .yaml file of your own")
    up_to: int = setting("largest number of devices", limit(MAX_DEVICES), default=DEFAULT_MAX_DEVICES)
    plot: str | None = setting("PNG file to draw it in; needs matplotlib", default=None)


EXAMPLES = {
    "list": "list",
    "plan": """plan bert_large_2080ti --on 1x2080ti
plan gpt2_xl_8xa100 --on 8x3090 --write_config mine.yaml --html plan.html
plan bert_base --num_processes 3 --per_device_train_batch_size 43
plan --model_name_or_path Qwen/Qwen3-0.6B --seq_len 2048 --global_batch_size 256 --on 4xl4""",
    "scale": """scale gpt2_124m --on a100-80 --up_to 4096 --plot scaling.png
scale bert_base --on t4 --global_batch_size 1024 --json""",
    "audit-script": 'audit-script --processes 1,2 --per_process accum --per_process batch --vary "batch=8,accum=1" '
    '--vary "batch=2,accum=4" -- train.py',
}
SUMMARIES = {
    "list": "list the recipes of the catalog",
    "plan": "plan a recipe, or any model, on hardware: what fits, how the step is cut, how long it takes",
    "scale": "put a recipe, or any model, on more and more devices, and see what each adds",
    "audit-script": "run a training program under several layouts, and compare the steps that it takes",
}
HARDWARE = {"plan": "[--on HARDWARE]", "scale": "--on DEVICE"}
DESCRIPTIONS = {
    "list": "Lists the recipes of the catalog: name, global batch (samples per optimizer step), what it trains.",
    "plan": """Plans the training of a recipe, or of a model without one: which micro-batch fits, how the step is cut, memory,
seconds per step, learning rate, the command to paste. Needs no GPU and no torch.""",
    "scale": """Puts a recipe, or a model without one, on 1, 2, 4, ... devices: speed, efficiency, waiting for communication.
Needs no GPU and no torch.""",
}


def _epilog(*commands: str) -> str:
    lines = [line for command in commands for line in EXAMPLES[command].splitlines()]
    return "\n".join(["examples:", *(f"  {program_name()} {line}" for line in lines)])


def _make_overview() -> Parser:
    description = (
        "Plans the training of recipes, and audits training programs: one recipe, the same step on any hardware."
    )
    parser = Parser(program_name(), "COMMAND ...", description=description, epilog=_epilog(*EXAMPLES))
    commands = parser.add_subparsers(title="commands (COMMAND --help says more)", metavar="COMMAND")
    for name, summary in SUMMARIES.items():
        commands.add_parser(name, help=summary)
    return parser


def list_recipes(argv: list[str]) -> None:
    parser = Parser(f"{program_name()} list", description=DESCRIPTIONS["list"], epilog=_epilog("list"))
    parser.parse(argv)
    for name in recipes.catalog_names():
        recipe = recipes.load(name)
        print(f"{name:26} B {recipe.global_batch_size:<6} {recipe.description}")


def plan(name: str, argv: list[str]) -> None:
    recipe, settings, data = _read("plan", name, argv, PlanSettings)
    workload = from_recipe(
        recipe,
        attention=settings.attn_implementation,
        num_train_samples=data.num_train_samples,
        critical_batch_size=settings.critical_batch_size,
    )
    subject = {"recipe": recipe.name, "description": recipe.description, "source": recipe.source}
    subject |= {"expect": recipe.expect, "fingerprint": recipe.fingerprint}
    subject |= dataclasses.asdict(recipe.scaled_hyperparameters())

    def trace(b: int, **options: Any) -> Any:
        return _import_trace().trace_recipe(recipe, b, **options)

    _plan(workload, settings, subject, trace)


def _import_trace() -> ModuleType:
    from samestep.models import trace  # here: it imports torch

    return trace


def plan_model(argv: list[str]) -> None:
    settings, training = _read_model("plan", argv, PlanSettings)
    workload = _make_workload(
        training, settings.critical_batch_size, settings.attn_implementation, may_trace=settings.trace
    )
    subject: dict[str, Any] = {"recipe": workload.name, "description": training.model_name_or_path}
    subject |= {"source": "the model's configuration, and what was given with it"}
    if training.learning_rate is not None:
        adam = (0.9, 0.999, 1e-8) if training.optimizer == "adamw" else (None, None, None)
        tuned = Hyperparameters(training.learning_rate, *adam)
        batch = training.learning_rate_batch_size or training.global_batch_size
        scaled = scaling.scale(training.lr_scaling_rule, tuned, batch, training.global_batch_size)
        subject |= dataclasses.asdict(scaled)

    def trace(b: int, **options: Any) -> Any:
        length = training.seq_len or IMAGE
        return _import_trace().trace_config(
            training.model_name_or_path, b, length, optimizer=training.optimizer, **options
        )

    _plan(workload, settings, subject, trace)


def _make_workload(
    training: ModelSettings, critical_batch_size: float | None, attention: str = "sdpa", *, may_trace: bool = False
) -> Workload:
    """Make the workload of a model without a recipe; with `may_trace` a model without a formula is traced."""
    path = training.model_name_or_path
    config, name = _load_config(path), Path(path).name or path
    if may_trace and not has_formula(config):
        model = _import_trace().traced_model(path, training.seq_len or IMAGE, attention)
        attention = "sdpa"  # it is in the trace
    else:
        model = model_from_config(config, training.seq_len, name=name, load_defaults=_load_defaults)
    per_epoch, num_steps = None, training.max_train_steps
    if training.num_train_samples is not None:
        per_epoch = layouts.steps_per_epoch(training.num_train_samples, training.global_batch_size, "carry")
        num_steps = num_steps or (training.num_train_epochs and layouts.num_steps(per_epoch, training.num_train_epochs))
    return from_model(
        model,
        name,
        global_batch_size=training.global_batch_size,
        optimizer=training.optimizer,
        num_steps=num_steps,
        steps_per_epoch=None if per_epoch is None else float(per_epoch),
        attention=attention,
        critical_batch_size=critical_batch_size,
    )


def _load_defaults(model_type: str) -> dict[str, Any]:
    """Load the configuration of transformers for a model of this type, as it is when nothing is given."""
    from transformers import AutoConfig  # here: it takes its time

    return AutoConfig.for_model(model_type).to_dict()


def _load_config(name: str) -> dict[str, Any]:
    """Load the configuration of a model here, or on the hub."""
    if os.path.exists(name) or name.endswith(".json") or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        return read_config(name)
    from huggingface_hub import hf_hub_download  # here: it takes its time
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return read_config(hf_hub_download(name, "config.json"))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UsageError(
            f"model_name_or_path {format_name(name)} is no file here, and the hub does not give its config.json: "
            f"{str(error).strip().splitlines()[0]}"
        ) from None


def _plan(workload: Workload, settings: PlanSettings, subject: dict[str, Any], trace: Callable[..., Any]) -> None:
    """Answer `plan`.

    Args:
        workload: the computation.
        settings: the flags.
        subject: first fields of the answer: recipe or model, and hyperparameters.
        trace: traces a micro-batch of so many samples.
    """
    cut = {
        "per_device_train_batch_size": settings.per_device_train_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
    }
    options = {
        "mixed_precision": settings.mixed_precision,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "sharded": settings.sharded,
    }
    if settings.on is None:
        for flag in ("write_config", "html"):
            if getattr(settings, flag) is not None:
                raise UsageError(f"--{flag} needs hardware to write it for: add --on HARDWARE")
        batch, num_processes = workload.global_batch_size, settings.num_processes or 1
        layout = layouts.solve_layout(num_processes=num_processes, global_batch_size=batch, **cut)
        options["mixed_precision"] = settings.mixed_precision or "bf16"
        memory = workload.memory(layout, **options)
        result = subject | answer.describe_plan(workload, layout, memory, options)
        placement = None
    else:
        if settings.num_processes is not None:
            raise UsageError(f"--num_processes {settings.num_processes} with --on {settings.on}: leave out one of them")
        placement = place(workload, parse(settings.on), **cut, **options)
        if settings.write_config is not None:
            _write("write_config", settings.write_config, placement.config)
        options = {option: getattr(placement, option) for option in options}
        layout = placement.layout
        result = subject | answer.describe_plan(workload, layout, placement.memory, options)
        result |= answer.describe_placement(placement, placement.command(settings.write_config))
    if settings.trace:
        trace_options = {name: options[name] for name in ("mixed_precision", "gradient_checkpointing")}
        b = min(layout.per_device_train_batch_size, layout.shares[0])
        peaks = trace(b, **trace_options, attn_implementation=settings.attn_implementation)
        result |= answer.describe_trace(peaks, workload, layout, options)
    if placement is not None and settings.html is not None:
        max_devices = max(DEFAULT_MAX_DEVICES, placement.hardware.num_processes)
        growth = answer.describe_growth(workload, placement.hardware.device, max_devices)
        _write("html", settings.html, page(result | {"scale": growth}))
    if settings.json:
        print(json.dumps(result))
    else:
        print("\n".join(text.write_plan(result)))


def scale(name: str, argv: list[str]) -> None:
    recipe, settings, _ = _read("scale", name, argv, ScaleSettings)
    _scale(from_recipe(recipe, critical_batch_size=settings.critical_batch_size), settings)


def scale_model(argv: list[str]) -> None:
    settings, training = _read_model("scale", argv, ScaleSettings)
    _scale(_make_workload(training, settings.critical_batch_size), settings)


def _scale(workload: Workload, settings: ScaleSettings) -> None:
    if settings.plot is not None:
        require("plots", "--plot")
    result = answer.describe_growth(workload, load_device(settings.on), settings.up_to)
    if settings.plot is not None:
        _write("plot", settings.plot, plot_growth(result))
    if settings.json:
        print(json.dumps(result))
    else:
        print("\n".join(text.write_scale(result)))


def _make_parser(command: str, *subjects: str) -> Parser:
    """Make the parser of a command, whose first words are one of `subjects`."""
    words = [f"{subject} {HARDWARE[command]} [--FLAG VALUE ...]" for subject in subjects]
    usage = f"\n       {program_name()} {command} ".join(words)
    return Parser(f"{program_name()} {command}", usage, description=DESCRIPTIONS[command], epilog=_epilog(command))


def _read_model(command: str, argv: list[str], settings_class: type) -> tuple[Any, ModelSettings]:
    """Read the settings of a command, and the settings of a model without a recipe."""
    parser = _make_parser(command, "RECIPE", "--model_name_or_path MODEL --global_batch_size B")
    parser.epilog += (
        f"\n\nEvery field of a recipe is a flag: {parser.prog} RECIPE --help shows them, with the recipe's values."
    )
    if not any(word.split("=")[0] in ("--model_name_or_path", "-h", "--help") for word in argv):
        hint = f"it needs a recipe as its first word ({program_name()} list shows them), or --model_name_or_path"
        raise UsageError(f"{parser.prog}: {hint}")
    classes = [settings_class, ModelSettings]
    for cls in classes:
        parser.add_settings(cls)
    flags = parser.parse(argv)
    return tuple(_build(flags, classes))


def _build(flags: dict[str, Any], classes: list[type]) -> list[Any]:
    """Make a settings object of each class, from the flags of its fields."""
    names = [{field.name for field in dataclasses.fields(cls)} for cls in classes]
    return [
        build(cls, {key: flags[key] for key in flags.keys() & fields}, "flags")
        for cls, fields in zip(classes, names, strict=True)
    ]


def _read(command: str, name: str, argv: list[str], settings_class: type) -> tuple[Recipe, Any, DataSettings]:
    """Read the recipe with its flags, the settings of a command, and the settings of the data that the recipe lacks."""
    recipe = recipes.load(name)
    recipe_fields = {field.name for field in dataclasses.fields(recipe)}
    classes = [settings_class] + [DataSettings] * ("num_train_samples" not in recipe_fields)
    parser = _make_parser(command, format_name(name))
    for cls in classes:
        parser.add_settings(cls)
    parser.add_settings(type(recipe), recipe, "recipe")
    flags = parser.parse(argv)
    objects = _build(flags, classes)
    recipe = recipes.load(name, {key: value for key, value in flags.items() if key in recipe_fields})
    return recipe, *objects, *([DataSettings()] * (2 - len(objects)))


def _write(flag: str, name: str, content: str | bytes) -> None:
    path = Path(name)
    if os.path.exists(path):
        raise UsageError(f"--{flag} {format_name(name)}: it exists already, and is left alone: give another name")
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise UsageError(f"--{flag} {format_name(name)}: {error.strerror}") from None


def main() -> int | None:
    """Answer the command line.

    Returns:
        The exit code of an audit; None: 0.

    Raises:
        UsageError: bad usage.
        SystemExit: after `--help`.
    """
    match sys.argv[1:]:
        case [] | ["-h" | "--help", *_]:
            _make_overview().print_help()
        case ["list", *argv]:
            list_recipes(argv)
        case ["plan", name, *argv] if not name.startswith("-"):
            plan(name, argv)
        case ["plan", *argv]:
            plan_model(argv)
        case ["scale", name, *argv] if not name.startswith("-"):
            scale(name, argv)
        case ["scale", *argv]:
            scale_model(argv)
        case ["audit-script", *argv]:
            from stepaudit.script import audit_script  # here: it imports torch

            return audit_script(argv, prog=f"{program_name()} audit-script")
        case [word, *_]:
            raise UsageError(f"{program_name()} {format_name(word)}: {nearest(word, SUMMARIES)}")
    return None


def console() -> None:
    """Run the console command `samestep`."""
    sys.exit(exit_code(main))
