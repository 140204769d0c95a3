"""Answers `samestep COMMAND`, or `python -m recipes COMMAND`: list, plan, scale, launch, show-data, compare and others.

All but `show-data` and `audit-script` work without torch.

Exit code 0 fine, 1 a check failed, 2 bad usage.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from samestep.cut import layout as layouts
from samestep.errors import UsageError, exit_code, nearest
from samestep.planner import advice, answer, engines, text
from samestep.planner.base_models import find_config, is_decoder, shape_from_config
from samestep.planner.configs import IMAGE, has_formula, model_from_config
from samestep.planner.costs import DISK, MAX_PER_DAY, Terms, read_start
from samestep.planner.growth import MOST_DEVICES
from samestep.planner.hardware import (
    MAX_DEVICES,
    Hardware,
    find_device,
    load_device,
    parse,
    read_bandwidth,
    set_network,
)
from samestep.planner.memory import model_from_recipe
from samestep.planner.methods import (
    LENGTH_FIELDS,
    SHORTEST,
    STARTING_RECIPE,
    MakeWorkload,
    Remedy,
    find_models,
    find_remedies,
)
from samestep.planner.page import fits_page, page
from samestep.planner.placement import Placement, TooLargeError, place
from samestep.planner.workload import Workload, format_flags, from_model, from_recipe
from samestep.recipe import pretrained_shape, run_settings, scaling
from samestep.recipe import recipe as recipes
from samestep.recipe.extras import require
from samestep.recipe.reading import format_name, format_value, read_yaml
from samestep.recipe.recipe import Recipe, TextPretraining
from samestep.recipe.scaling import RULES, Hyperparameters
from samestep.recipe.settings import (
    BATCH,
    LARGEST,
    LENGTH,
    POSITIVE,
    Parser,
    build,
    choice,
    limit,
    program_name,
    setting,
)

DEFAULT_MAX_DEVICES = 4096
CONVERSATIONS = "causal_lm_finetuning"
"""Task whose data `show-data` shows."""
STEPS = ("max_train_steps", "num_train_epochs")
"""Fields that say how long a recipe trains."""
CRITICAL_BATCH_HELP = (
    "samples beyond which a larger global batch wastes them (the gradient's noise scale), if it is known"
)
NETWORK = "bandwidth between nodes, per node and direction: 25GB/s, 200Gb/s; none: the device's, see its file"
PRICE = (
    "dollars for an hour of one device; with several hardware one, or one each, with commas; or a .yaml file of "
    "`DEVICE: DOLLARS` lines"
)
NEED_HARDWARE = (
    *("write_config", "html", "price_per_hour", "network", "sort", "start", "interruptions_per_day", "disk"),
)
"""Flags that say nothing without --on."""
MAX_HARDWARE = 64
"""Hardware that are compared at once, at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Choose what is printed"""

    json: bool = setting("print one JSON object", default=False)
    critical_batch_size: float | None = setting(CRITICAL_BATCH_HELP, POSITIVE, default=None)


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
    price_per_hour: str | None = setting(PRICE, default=None)
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
    network: str | None = setting(NETWORK, default=None)


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
    num_train_tokens: str | None = setting(
        "length of training in tokens (10e9, 10B), instead of steps or epochs; for models that read tokens",
        default=None,
    )
    trace: bool = setting(
        "trace the memory with torch, too: slower, needs no GPU; any model of transformers", default=False
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Choose what starts it where"""

    on: str = setting(f"ENGINE:HARDWARE; engines: {', '.join(engines.ENGINES)}; hardware as of plan: slurm:2x8xa100-80")
    write: str | None = setting("file to write; none: it is printed", default=None)
    submit: bool = setting("hand the written file to the engine", default=False)
    image: str | None = setting("container image, for kubeflow", default=None)
    network: str | None = setting(NETWORK, default=None)


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
    optimizer: str = setting("adamw, or sgd with momentum", choice("adamw", "sgd"), default="adamw")
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

    @property
    def name(self) -> str:
        """The model's name, for messages."""
        return Path(self.model_name_or_path).name or self.model_name_or_path

    def problems(self) -> list[str]:
        problems = []
        if self.max_train_steps is not None and self.num_train_epochs is not None:
            problems.append("max_train_steps and num_train_epochs are both given: leave one out")
        if self.num_train_epochs is not None and self.num_train_samples is None:
            problems.append("num_train_epochs needs num_train_samples, to count steps")
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitSettings:
    """Choose the hardware, and what is tried on it"""

    what_fits: str = setting("hardware, as [NODESx]COUNTxNAME: lists the models, methods and lengths that fit on it")
    seq_len: int | None = setting("only this many tokens of a sample; none: 512 to 131,072", LENGTH, default=None)
    global_batch_size: int | None = setting(
        "samples per optimizer step; none: 64, or one for each device", BATCH, default=None
    )
    html: str | None = setting("page to write about it", default=None)
    price_per_hour: str | None = setting("dollars for an hour of one device, or a .yaml file of prices", default=None)
    network: str | None = setting(NETWORK, default=None)
    json: bool = setting("print one JSON object", default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleSettings(OutputSettings):
    """Choose the devices, all of one kind"""

    on: str = setting("device: a name (t4, a100-80, h100), or a .yaml file of your own")
    network: str | None = setting(NETWORK, default=None)
    up_to: int = setting("largest number of devices", limit(MAX_DEVICES), default=DEFAULT_MAX_DEVICES)
    plot: str | None = setting("PNG file to draw it in; needs matplotlib", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """Choose how it is printed"""

    json: bool = setting("print one JSON object", default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Choose where the page is"""

    port: int = setting("port of the page on this machine; 0: any that is free", limit(65535, 0), default=8765)
    html: str | None = setting("file to write the page to as it is now, instead of serving it", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdviseSettings:
    """Choose what a larger batch may cost, and what is written"""

    max_extra_tokens: float = setting(
        "share of its tokens that a larger batch may take more to the same loss", limit(1, 0.001), default=0.05
    )
    ramp: bool = setting("the changed recipe is that of a batch that grows with the noise scale", default=False)
    write_recipe: str | None = setting("file to write the changed recipe to; none: no file", default=None)
    json: bool = setting("print one JSON object", default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowDataSettings:
    """Choose what is shown"""

    num_samples: int = setting("samples that are shown, the first ones of each source in turn", limit(1000), default=3)
    html: str | None = setting("page to write instead: samples, lengths, sources", default=None)
    preprocessing_num_workers: int | None = setting("processes that tokenize; none: one", limit(1024), default=None)


EXAMPLES = {
    "list": "list\nlist bert wikipedia",
    "plan": """plan bert_large_2080ti --on 1x2080ti
plan gpt2_xl_8xa100 --on 8x3090 --write_config mine.yaml --html plan.html
plan bert_base --on 1x3090,4xt4,8xa100-80 --price_per_hour 0.25,0.35,1.5 --sort time
plan --what_fits 1x3090 --price_per_hour 0.25
plan bert_base --num_processes 3 --per_device_train_batch_size 43
plan --model_name_or_path Qwen/Qwen3-0.6B --seq_len 2048 --global_batch_size 256 --on 4xl4""",
    "scale": """scale gpt2_124m --on a100-80 --up_to 4096 --plot scaling.png
scale bert_base --on t4 --global_batch_size 1024 --json""",
    "launch": "launch bert_large_phase1 --on slurm:2x8xa100-80 --write phase1.sbatch -- --output_dir /shared/runs/phase1",
    "show-data": "show-data sft_small_cpu --num_samples 2",
    "compare": "compare runs/first runs/second",
    "watch": "watch runs/first",
    "advise": "advise runs/first --write_recipe larger.yaml",
    "audit-script": 'audit-script --processes 1,2 --per_process accum --per_process batch --vary "batch=8,accum=1" '
    '--vary "batch=2,accum=4" -- train.py',
}
SUMMARIES = {
    "list": "list the recipes of the catalog",
    "plan": "plan a recipe, or any model, on hardware: what fits, how the step is cut, how long it takes",
    "scale": "put a recipe, or any model, on more and more devices, and see what each adds",
    "launch": "write what Slurm, SkyPilot, Kubeflow or torchrun starts a recipe with, and hand it over",
    "show-data": "show samples of a language model's recipe, with the tokens that are trained",
    "compare": "find where two runs part: the step, the tensors, by how much, and the settings that differ",
    "watch": "show a run, or two over each other, as a live page in the browser",
    "advise": "advise on a run's global batch, from the noise of its gradient, and change the recipe for it",
    "audit-script": "run a training program under several layouts, and compare the steps that it takes",
}
USAGES = {"plan": "[--on HARDWARE]", "scale": "--on DEVICE", "show-data": "[--num_samples 3]"}
USAGES |= {"launch": "--on ENGINE:HARDWARE"}
DESCRIPTIONS = {
    "list": """Lists the recipes of the catalog: name, global batch (samples per optimizer step), what it trains.
With words, those that have all of them in this line.""",
    "plan": """Plans the training of a recipe, or of a model without one: which micro-batch fits, how the step is cut, memory,
seconds per step, learning rate, the command to paste. Needs no GPU and no torch.""",
    "scale": """Puts a recipe, or a model without one, on 1, 2, 4, ... devices: speed, efficiency, waiting for communication.
Needs no GPU and no torch.""",
    "launch": """Writes a job for Slurm, a task for SkyPilot or a TrainJob for Kubeflow, with the plan's launch file and the
command of the recipe's script inside, or a shell script for machines that come and go (torchrun). What follows `--` are flags
of the script, --output_dir among them. Started again, it goes on from the newest checkpoint.""",
    "show-data": """Shows samples as the model reads them, the trained tokens marked: underlined on a terminal, else in [[ ]].
Then how many tokens are trained, how samples end, and how many rows were left out or cut. --html writes one page about them,
with a chart of lengths and the sources, that needs no network.""",
    "compare": """Compares two output folders to the bit: metrics of every step, digests (--digest_steps) and checkpoints of
both. Says at which step they part, in which tensors, by how much, and in what settings they differ. Exit code 0 identical,
1 they part, 2 bad usage.""",
    "watch": """Serves a page about one or two output folders on 127.0.0.1 until Ctrl+C: curves, speed, time left, events,
digests. It reads what the runs write, and needs no network. From another machine: ssh -L 8765:localhost:8765 HOST.""",
    "advise": """Reads the output folder of a run with --noise_scale_steps: its gradient noise scale over training, what the
global batch could be, what that saves in steps and costs in tokens, and the learning rate, beta2 and weight decay for it. Exit
code 0 fine, 1 not known from what was measured, 2 bad usage.""",
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
    parser = Parser(f"{program_name()} list", "[WORD ...]", description=DESCRIPTIONS["list"], epilog=_epilog("list"))
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    parser.parse(argv[len(words) :])
    lines = []
    for name in recipes.catalog_names():
        recipe = recipes.load(name)
        lines.append(f"{name:26} B {recipe.global_batch_size:<6} {recipe.description}")
    lines = [line for line in lines if all(word.lower() in line.lower() for word in words)]
    if not lines:
        raise UsageError(
            f"no recipe has {format_value(' '.join(words))} in its line: {parser.prog} without words shows all"
        )
    print(*lines, sep="\n")


def plan(name: str, argv: list[str]) -> None:
    recipe, settings, data, changes = _read("plan", name, argv, PlanSettings)
    if settings.num_train_tokens is not None:
        if recipe.unit != "token":
            raise UsageError(f"--num_train_tokens with {format_name(name)}, which reads images: give --max_train_steps")
        if set(changes) & set(STEPS):
            raise UsageError(
                f"--num_train_tokens with {' and '.join(set(changes) & set(STEPS))}: leave out one of them"
            )
        length = model_from_recipe(recipe).length
        changes |= {"max_train_steps": _count_steps(settings.num_train_tokens, recipe.global_batch_size, length)}
        recipe = pretrained_shape.load(name, changes)
    if settings.write_recipe is not None:
        _write_recipe(settings.write_recipe, name, changes)
    _plan_recipe(name, recipe, changes, settings, data.num_train_samples, ["plan", name, *argv])


def _plan_recipe(
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

    def make(more: Mapping[str, Any]) -> Workload:
        """Make the workload with more changes, which a recipe written before does not hold."""
        workload = from_recipe(
            build(type(recipe), recipes.overlay(dataclasses.asdict(recipe), more), f"recipe {name}")
            if more
            else recipe,
            source=settings.write_recipe or name,
            changes=more if settings.write_recipe else {**changes, **more},
            attention=settings.attn_implementation,
            num_train_samples=num_train_samples,
            critical_batch_size=settings.critical_batch_size,
        )
        return dataclasses.replace(workload, name=subject["recipe"])

    subject: dict[str, Any] = {"recipe": recipe.name, "description": recipe.description, "source": recipe.source}
    subject |= {} if changes else {"expect": recipe.expect}
    subject |= {"fingerprint": recipe.fingerprint}
    scaled = recipe.scaled_hyperparameters()
    subject |= dataclasses.asdict(scaled) | dict(more_subject or {})
    if isinstance(recipe, TextPretraining) and recipe.optimizer_name == "muon":
        subject["muon_learning_rate"] = recipe.muon_learning_rate * scaled.learning_rate / recipe.learning_rate

    def trace(b: int, **options: Any) -> Any:
        return _import_trace().trace_recipe(recipe, b, **options)

    _plan(make, settings, subject, trace, words)


TOKENS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _count_steps(num_tokens: str, global_batch_size: int, length: int) -> int:
    """Count the optimizer steps that read so many tokens, in samples of `length`.

    >>> _count_steps("10B", 512, 1024), _count_steps("1e6", 1000, 100), _count_steps("15T", 1000, 1000)
    (19074, 10, 15000000)
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?(?:e[0-9]{1,2})?) ?([kmbt]?)", num_tokens.lower())
    value = float(match[1]) * TOKENS[match[2]] if match else 0.0
    num_steps = math.ceil(value / (global_batch_size * length))
    if not 1 <= num_steps <= LARGEST:
        raise UsageError(
            f"num_train_tokens is {format_name(num_tokens)}, must be a number of tokens greater than 0: for example 10e9, 10B"
        )
    return num_steps


def _import_trace() -> ModuleType:
    from samestep.models import trace  # here: it imports torch

    return trace


def plan_model(argv: list[str]) -> None:
    settings, training = _read_model("plan", argv, PlanSettings)
    if settings.num_train_tokens is not None:
        if training.seq_len is None:
            raise UsageError("--num_train_tokens needs --seq_len, the tokens of a sample")
        if training.max_train_steps is not None or training.num_train_epochs is not None:
            raise UsageError("--num_train_tokens with max_train_steps or num_train_epochs: leave out one of them")
        num_steps = _count_steps(settings.num_train_tokens, training.global_batch_size, training.seq_len)
        training = dataclasses.replace(training, max_train_steps=num_steps)
    config = find_config(training.model_name_or_path)
    if is_decoder(config):
        _plan_decoder(settings, training, argv)
        return
    script_words = _write_fine_tuning(settings.write_recipe, training, config) if settings.write_recipe else None

    def make(more: Mapping[str, Any]) -> Workload:
        known = {field.name for field in dataclasses.fields(training)}
        if unknown := more.keys() - known:
            raise UsageError(f"{', '.join(unknown)}: no field of a model without a recipe")
        changed = dataclasses.replace(training, **more)
        options = {"may_trace": settings.trace, "script_words": script_words}
        return _make_workload(changed, config, settings.critical_batch_size, settings.attn_implementation, **options)

    subject: dict[str, Any] = {"recipe": training.name, "description": training.model_name_or_path}
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

    _plan(make, settings, subject, trace, ["plan", *argv])


def _plan_decoder(settings: PlanSettings, training: ModelSettings, argv: list[str]) -> None:
    """Answer `plan` of a decoder of Hugging Face, which is that of the recipe that fine-tunes it."""
    recipe, changes = _load_fine_tuning(training)
    if settings.write_recipe is not None:
        _write_recipe(settings.write_recipe, STARTING_RECIPE, FINE_TUNING | changes)
    # Of what was typed, what is no field of the recipe
    mine = dict.fromkeys(field.name for field in dataclasses.fields(ModelSettings))
    words = ["plan", STARTING_RECIPE, *format_flags(changes), *_drop_flags(argv, mine)]
    subject = {"recipe": training.name, "description": training.model_name_or_path, "source": FINE_TUNING["source"]}
    _plan_recipe(STARTING_RECIPE, recipe, changes, settings, training.num_train_samples, words, subject)


FINE_TUNING = {
    "source": "fine-tuning on conversations; the learning rate is the usual one of all weights where none was given, not tuned",
    "expect": "not measured",
}
"""Texts of a recipe that fine-tunes a model of the hub."""


def _load_fine_tuning(training: ModelSettings) -> tuple[Recipe, dict[str, Any]]:
    """Load the recipe that fine-tunes a causal language model on conversations; return it, and its changed fields.

    Raises:
        UsageError: no length, or one above the model's number of positions; an optimizer that the program does not have.
    """
    name = training.name
    if training.seq_len is None:
        raise UsageError(f"{name} reads tokens: --seq_len is missing (tokens of a sample)")
    if training.optimizer != "adamw":
        raise UsageError(
            f"optimizer is {training.optimizer}, but scripts/finetune_causal_lm.py trains {name} with AdamW: leave it out"
        )
    config = find_config(training.model_name_or_path)
    num_positions = shape_from_config(config, name).max_length if is_decoder(config) else config.get("n_positions")
    if num_positions is not None and training.seq_len > num_positions:
        raise UsageError(
            f"seq_len is {training.seq_len}, but {name} has {num_positions} positions: use {num_positions} or less"
        )
    changes = {
        "model_name_or_path": training.model_name_or_path,
        "max_seq_length": training.seq_len,
        "global_batch_size": training.global_batch_size,
        "learning_rate": training.learning_rate or 2e-5,
        "learning_rate_batch_size": training.learning_rate_batch_size or training.global_batch_size,
        "lr_scaling_rule": training.lr_scaling_rule,
        "train_file": [CONVERSATION_FILE],
    }
    if training.max_train_steps is None:
        changes |= {"num_train_epochs": training.num_train_epochs or 1.0}
    else:
        changes |= {"max_train_steps": training.max_train_steps}
    return pretrained_shape.load(STARTING_RECIPE, changes), changes


def _make_workload(
    training: ModelSettings,
    config: Mapping[str, Any],
    critical_batch_size: float | None,
    attention: str = "sdpa",
    *,
    may_trace: bool = False,
    script_words: Sequence[str] | None = None,
) -> Workload:
    """Make the workload of a model without a recipe.

    Args:
        training: the model and its training.
        config: the model's.
        critical_batch_size, attention: as of `workload.from_model`.
        may_trace: whether a model without a formula is traced.
        script_words: what names it to scripts/finetune_causal_lm.py; None: no script trains it.
    """
    if may_trace and not has_formula(config):
        model = _import_trace().traced_model(training.model_name_or_path, training.seq_len or IMAGE, attention)
        attention = "sdpa"  # it is in the trace
    else:
        model = model_from_config(config, training.seq_len, name=training.name, load_defaults=_load_defaults)
    per_epoch, num_steps = None, training.max_train_steps
    if training.num_train_samples is not None:
        per_epoch = layouts.steps_per_epoch(training.num_train_samples, training.global_batch_size, "carry")
        if num_steps is None and training.num_train_epochs:
            num_steps = layouts.num_steps(per_epoch, training.num_train_epochs)
    workload = from_model(
        dataclasses.replace(model, chunked_head=True) if script_words else model,
        training.name,
        global_batch_size=training.global_batch_size,
        optimizer=training.optimizer,
        num_steps=num_steps,
        steps_per_epoch=None if per_epoch is None else float(per_epoch),
        attention=attention,
        critical_batch_size=critical_batch_size,
    )
    stored = 2 if config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16") else 4
    workload = dataclasses.replace(workload, download_bytes=stored * model.num_parameters)
    if _is_causal(config):
        hint = "scripts/finetune_causal_lm.py fine-tunes it: --write_recipe FILE.yaml writes a recipe for it."
        workload = dataclasses.replace(workload, hint=hint)
    if script_words:
        workload = dataclasses.replace(
            workload, script=recipes.CausalLmFineTuning.parts.script, script_words=tuple(script_words)
        )
    return workload


CAUSAL_LMS = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes of causal language models."""
CONVERSATION_FILE = "chats.jsonl"
"""Name of the data in a command, for the user to replace."""


def _is_causal(config: Mapping[str, Any]) -> bool:
    return str((config.get("architectures") or ["?"])[0]).endswith(CAUSAL_LMS)


def _write_fine_tuning(file: str, training: ModelSettings, config: Mapping[str, Any]) -> list[str]:
    """Write a recipe that fine-tunes a causal language model of the hub; return the words that name it to the script."""
    if not _is_causal(config):
        raise UsageError(f"--write_recipe {format_name(file)}: only causal language models have one: leave it out")
    _, changes = _load_fine_tuning(training)
    _write_recipe(file, STARTING_RECIPE, FINE_TUNING | changes)
    return ["--recipe", file]


def _write_recipe(file: str, base: str, changes: Mapping[str, Any]) -> None:
    """Write a recipe that extends another one."""
    if not file.endswith((".yaml", ".yml")):
        raise UsageError(f"--write_recipe {format_name(file)}: a recipe's file ends in .yaml")
    if not changes:
        raise UsageError(f"--write_recipe {format_name(file)}: no field of the recipe is changed: leave it out")
    if base.endswith((".yaml", ".yml")):
        base = os.path.relpath(base, Path(file).parent)
    values = {"extends": base} | {name: list(v) if isinstance(v, tuple) else v for name, v in changes.items()}
    _write("write_recipe", file, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def what_fits(argv: list[str]) -> None:
    parser = _make_parser("plan", "--what_fits HARDWARE")
    parser.add_settings(FitSettings)
    settings = build(FitSettings, parser.parse(argv), "flags")
    if "," in settings.what_fits:
        raise UsageError(f"what_fits is {format_name(settings.what_fits)}: name one hardware")
    hardware = parse(settings.what_fits, settings.network)
    (price,) = _read_prices(settings.price_per_hour, [hardware])
    if settings.global_batch_size is not None and settings.global_batch_size < hardware.num_processes:
        raise UsageError(
            f"global_batch_size is {settings.global_batch_size}, must be {hardware.num_processes:,} or more, a sample for each "
            f"device of {hardware}"
        )
    fits, others = find_models(hardware, length=settings.seq_len, global_batch_size=settings.global_batch_size)
    result = answer.describe_fits(hardware, fits, others, price)
    command = ""
    if fits:
        largest = max(fits, key=lambda fit: fit.typical.workload.model.num_parameters)
        workload = largest.typical.workload
        changes: dict[str, Any] = {"model_name_or_path": largest.model, "max_seq_length": workload.model.length}
        changes |= {
            "global_batch_size": workload.global_batch_size,
            "train_file": [CONVERSATION_FILE],
        } | dict(largest.method.changes)
        changes |= {"learning_rate": 2e-4 if "lora_rank" in changes else 2e-5, "num_train_epochs": 1}
        changes |= {"learning_rate_batch_size": workload.global_batch_size}
        words = ["plan", STARTING_RECIPE, *format_flags(changes), "--on", settings.what_fits]
        command = _retype(words, network=settings.network, write_recipe="mine.yaml", write_config="launch.yaml")
    result |= {"command": command or None}
    if settings.html is not None:
        _write("html", settings.html, fits_page(result, text.make_fits_table(result), text.explain_band([result])))
    print(json.dumps(result) if settings.json else "\n".join(text.write_fits(result, command)))


def _load_defaults(model_type: str) -> dict[str, Any]:
    """Load the configuration of transformers for a model of this type, as it is when nothing is given."""
    from transformers import AutoConfig  # here: it takes its time

    return AutoConfig.for_model(model_type).to_dict()


def _plan(
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
    workload = make({})
    if settings.on is not None and "," in settings.on:
        _compare(workload, settings, subject, cut | options)
        return
    if settings.on is None:
        batch, num_processes = workload.global_batch_size, settings.num_processes or 1
        layout = layouts.solve_layout(num_processes=num_processes, global_batch_size=batch, **cut)
        options["mixed_precision"] = settings.mixed_precision or "bf16"
        if refusal := workload.find_refusal(options["mixed_precision"], settings.sharded):
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
        (terms,) = _read_terms(settings, [hardware])
        placement = _place(make, hardware, cut | options, words)
        if settings.write_config is not None:
            _write("write_config", settings.write_config, placement.config(settings.write_config))
        options = {option: getattr(placement, option) for option in options}
        layout = placement.layout
        result = subject | answer.describe_plan(workload, layout, placement.memory, options)
        write_command = None
        if workload.script and settings.write_config is None and placement.config_file is None:
            write_command = _retype(words, html=None, json=None, write_config=placement.written_file)
        result |= answer.describe_placement(
            placement,
            placement.command(settings.write_config),
            write_command=write_command,
            terms=terms,
        )
    if settings.trace:
        trace_options = {name: options[name] for name in ("mixed_precision", "gradient_checkpointing")}
        b = min(layout.per_device_train_batch_size, layout.shares[0])
        peaks = trace(b, **trace_options, attn_implementation=settings.attn_implementation)
        result |= answer.describe_trace(peaks, workload, layout, options)
    if placement is not None and settings.html is not None:
        _write("html", settings.html, page(result | {"scale": _grow(workload, placement)}))
    if settings.json:
        print(json.dumps(result))
    else:
        print("\n".join(text.write_plan(result)))


def _read_terms(settings: PlanSettings, hardware: list[Hardware]) -> list[Terms]:
    """Read what the user says of money, time and disks, for each hardware."""
    disk = DISK if settings.disk is None else read_bandwidth("disk", settings.disk, "2GB/s, 500MB/s")
    return [
        Terms(
            price_per_hour=price,
            start=read_start(settings.start),
            interruptions_per_day=settings.interruptions_per_day,
            disk_gb_per_s=disk,
        )
        for price in _read_prices(settings.price_per_hour, hardware)
    ]


def _read_prices(value: str | None, hardware: list[Hardware]) -> list[float | None]:
    """Read the price of each hardware; None: none is given."""
    if value is None:
        return [None] * len(hardware)
    if value.endswith((".yaml", ".yml")):
        return _read_price_file(value, hardware)
    prices = [_read_price(text, value) for text in value.split(",")]
    if len(prices) not in (1, len(hardware)):
        raise UsageError(f"--price_per_hour has {len(prices)} prices for {len(hardware)} hardware: give 1, or one each")
    return prices if len(prices) == len(hardware) else prices * len(hardware)


def _read_price(text: Any, value: str) -> float:
    try:
        price = float(text)
    except (TypeError, ValueError):
        price = 0.0
    if not 0 < price <= LARGEST or isinstance(text, bool):
        raise UsageError(
            f"price_per_hour is {format_name(value)}, must be greater than 0 (dollars for an hour of one device)"
        )
    return price


def _read_price_file(file: str, hardware: list[Hardware]) -> list[float]:
    """Read a file of prices, in which devices may be spelled as in --on."""
    values = read_yaml(Path(file), f"price_per_hour {format_name(file)}")
    prices = {}
    for name, price in values.items():
        device = name if name in {each.device.name for each in hardware} else find_device(name)
        prices[device] = _read_price(price, f"{name}: {price}")
    if missing := sorted({each.device.name for each in hardware} - prices.keys()):
        raise UsageError(
            f"price_per_hour {format_name(file)} has no price of {', '.join(missing)}: add a line for each"
        )
    return [prices[each.device.name] for each in hardware]


def _compare(workload: Workload, settings: PlanSettings, subject: dict[str, Any], options: dict[str, Any]) -> None:
    """Answer `plan` for several hardware: a row for each, of which some may not fit."""
    for flag in ("write_config", "trace", "num_processes"):
        if getattr(settings, flag):
            raise UsageError(f"--{flag} with several hardware in --on: name one of them")
    names = settings.on.split(",")
    if len(names) > MAX_HARDWARE:
        raise UsageError(f"--on names {len(names)} hardware, must be {MAX_HARDWARE} or fewer")
    hardware = [parse(name, settings.network) for name in names]
    terms = _read_terms(settings, hardware)
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
        chosen = {
            option: getattr(placement, option) for option in ("mixed_precision", "gradient_checkpointing", "sharded")
        }
        described = answer.describe_plan(workload, placement.layout, placement.memory, chosen)
        rows.append(described | answer.describe_placement(placement, placement.command(), terms=own_terms))
    rows = answer.sort_rows(rows, settings.sort)
    result = {"recipe": workload.name, "global_batch_size": workload.global_batch_size, "rows": rows}
    result |= {"num_steps": workload.num_steps}
    if settings.html is not None:
        if not placements:
            raise UsageError(f"--html {format_name(settings.html)}: nothing fits: {rows[0]['problem']}")
        first = rows[0]
        growth = _grow(workload, placements[first["hardware"]])
        _write("html", settings.html, page(subject | first | {"scale": growth, "rows": rows}))
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
    texts = [f"{_retype(words, **flags)} ({effect})"]
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
    speed = f"{text.round_number(1 / remedy.seconds_per_unit)} {unit}/s"
    if remedy.changes:
        return {name: str(value) for name, value in remedy.changes.items()}, f"{speed}, another recipe"
    return {"on": str(placement.hardware)}, f"{speed}, the same steps"


def _retype(words: list[str], **flags: object) -> str:
    """Write the command line of these words with other values of some flags; without those of value None."""
    new = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
    return f"{program_name()} {shlex.join(_drop_flags(words, flags) + new)}"


def _drop_flags(words: list[str], flags: Mapping[str, object]) -> list[str]:
    """Return the words of a command line without some of its flags."""
    kept, is_dropped = [], False
    for word in words:
        if word.startswith("--"):
            is_dropped = word.removeprefix("--").partition("=")[0] in flags
        kept += [] if is_dropped else [word]
    return kept


def scale(name: str, argv: list[str]) -> None:
    recipe, settings, _, _ = _read("scale", name, argv, ScaleSettings)
    _scale(from_recipe(recipe, critical_batch_size=settings.critical_batch_size), settings)


def scale_model(argv: list[str]) -> None:
    settings, training = _read_model("scale", argv, ScaleSettings)
    config = find_config(training.model_name_or_path)
    if is_decoder(config):
        recipe, _ = _load_fine_tuning(training)
        workload = from_recipe(recipe, critical_batch_size=settings.critical_batch_size)
        workload = dataclasses.replace(workload, name=training.name)
    else:
        workload = _make_workload(training, config, settings.critical_batch_size)
    _scale(workload, settings)


def _scale(workload: Workload, settings: ScaleSettings) -> None:
    if settings.plot is not None:
        require("plots", "--plot")
    result = answer.describe_growth(workload, set_network(load_device(settings.on), settings.network), settings.up_to)
    if settings.plot is not None:
        from samestep.training.plots import plot_growth  # here: it imports numpy

        _write("plot", settings.plot, plot_growth(result))
    if settings.json:
        print(json.dumps(result))
    else:
        print("\n".join(text.write_scale(result)))


def launch(name: str, argv: list[str]) -> None:
    """Write what an engine starts a recipe with; print it, or write it to a file, and hand it over where that is asked for."""
    words = list(itertools.takewhile(lambda word: word != "--", argv))
    run_words = argv[len(words) + 1 :]
    recipe, settings, data, changes = _read("launch", name, words, LaunchSettings)
    engine, hardware_name = engines.parse_target(settings.on)
    if settings.submit and settings.write is None:
        raise UsageError("--submit needs --write FILE: the file that is handed over")
    workload = from_recipe(recipe, source=name, changes=changes, num_train_samples=data.num_train_samples)
    try:
        placement = place(workload, parse(hardware_name, settings.network))
    except TooLargeError as error:
        words = [program_name(), "plan", name, *format_flags(changes), "--on", hardware_name]
        raise UsageError(f"{error}: {shlex.join(words)} says what to change") from None
    # Mistakes are found here, not in the queue
    run_settings.parse([*workload.script_words, *run_words], recipe.task, "")
    file = settings.write or f"{recipe.name}{engines.ENGINES[engine].suffix}"
    seconds = placement.seconds_to_end
    hours = "" if seconds is None else f", {seconds / 3600:.3g} hours in all, predicted"
    title = [f"{recipe.name} on {placement.hardware}: {placement.time.total:.3g} s per step{hours}"]
    origin = f"{program_name()} {shlex.join(['launch', name, *(word for word in argv if word != '--submit')])}"
    job = engines.write_job(engine, placement, run_words, title=title, origin=origin, file=file, image=settings.image)
    if settings.write is None:
        print(job, end="")
        return
    _write("write", settings.write, job)
    command = [*engines.ENGINES[engine].submit, settings.write]
    if not settings.submit:
        is_for_each = engine == "torchrun"  # on one machine the store, on each other one an agent
        how = "Its first lines say how to start it" if is_for_each else f"Hand it over: {shlex.join(command)}"
        print(f"{settings.write} is written. {how}")
        return
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        raise UsageError(
            f"submit needs {command[0]}, which is not installed here: run {shlex.join(command)} where it is"
        ) from None
    except subprocess.CalledProcessError as error:
        raise UsageError(
            f"{shlex.join(command)} ended with exit code {error.returncode}: see its message above"
        ) from None


def show_data(name: str, argv: list[str]) -> None:
    recipe, settings, _, _ = _read("show-data", name, argv, ShowDataSettings)
    if recipe.task != CONVERSATIONS:
        others = [other for other in recipes.catalog_names() if recipes.load(other).task == CONVERSATIONS]
        raise UsageError(
            f"show-data {format_name(name)}: its task is {recipe.task}, must be {CONVERSATIONS}: {', '.join(others) or 'none'}"
        )
    from samestep._internals.library_output import quiet_libraries  # here: they import torch
    from samestep.data import conversation_page, conversations

    quiet_libraries()
    train, held_out = conversations.build(recipe, settings.preprocessing_num_workers)
    if settings.html is not None:
        _write("html", settings.html, conversation_page.write(recipe, train, held_out, settings.num_samples))
        print(f"{train}\n{train.mask_report}\nwrote {settings.html}")
        return
    print("\n".join(train.show(settings.num_samples, sys.stdout.isatty())))
    if held_out is not None:
        print(f"held out: {held_out}")


def _read_folders(
    command: str, usage: str, argv: list[str], settings_class: type, counts: tuple[int, ...]
) -> tuple[list[str], Any]:
    """Read the output folders that come first, as many as one of `counts`, and the settings of a command."""
    folders = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    name = f"{program_name()} {command}"
    parser = Parser(name, usage, description=DESCRIPTIONS[command], epilog=_epilog(command))
    parser.add_settings(settings_class)
    settings = build(settings_class, parser.parse(argv[len(folders) :]), "flags")
    if len(folders) not in counts:
        numbers = " or ".join("zero one two".split()[count] for count in counts)
        raise UsageError(f"{name}: {len(folders)} output folders come first, must be {numbers}; see {name} --help")
    return folders, settings


def compare(argv: list[str]) -> int:
    """Compare two runs; return 0 if they are identical, else 1."""
    folders, settings = _read_folders("compare", "RUN_A RUN_B [--json]", argv, CompareSettings, (2,))
    from samestep.training import compare_runs  # here: it imports numpy, which takes half as long as a plan

    result = compare_runs.compare(folders)
    print(json.dumps(result, allow_nan=False) if settings.json else "\n".join(compare_runs.write(result)))
    return 0 if result["is_identical"] else 1


def watch_runs(argv: list[str]) -> None:
    """Serve a page about runs until it is interrupted, or write it."""
    usage = "RUN_DIR [OTHER_RUN_DIR] [--FLAG VALUE ...]"
    folders, settings = _read_folders("watch", usage, argv, WatchSettings, (1, 2))
    from samestep.training import watch  # here: it imports numpy

    runs = watch.make_readers(folders)
    if settings.html is not None:
        for run in runs:
            run.update()
        _write("html", settings.html, watch.make_page(runs))
        return
    with watch.make_server(runs, settings.port) as server:
        print(f"http://localhost:{server.server_port} shows {' and '.join(folders)}; Ctrl+C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def advise(argv: list[str]) -> int:
    """Advise on the batch of a run; return 1 if what was measured does not say, else 0."""
    folders, settings = _read_folders("advise", "RUN_DIR [--FLAG VALUE ...]", argv, AdviseSettings, (1,))
    file = settings.write_recipe
    if file is not None and not file.endswith((".yaml", ".yml")):
        raise UsageError(f"write_recipe is {format_name(file)}, must end in .yaml: recipes are found by that")
    result, changed = advice.advise(folders[0], settings.max_extra_tokens, grows=settings.ramp)
    if file is not None and changed is not None:
        _write("write_recipe", file, changed.to_yaml())
    is_written = file is not None and changed is not None
    print(
        json.dumps(result, allow_nan=False)
        if settings.json
        else "\n".join(advice.write(result, file if is_written else None))
    )
    return 1 if "unknown" in result else 0


def _make_parser(command: str, *subjects: str) -> Parser:
    """Make the parser of a command, whose first words are one of `subjects`."""
    words = [f"{subject} {USAGES[command]} [--FLAG VALUE ...]" for subject in subjects]
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


def _read(
    command: str, name: str, argv: list[str], settings_class: type
) -> tuple[Recipe, Any, DataSettings, dict[str, Any]]:
    """Read the recipe with its flags, the settings of a command, and the settings of the data that the recipe lacks.

    The last value holds the fields of the recipe that flags change.
    """
    recipe = recipes.load(name)
    recipe_fields = {field.name for field in dataclasses.fields(recipe)}
    classes = [settings_class] + [DataSettings] * ("num_train_samples" not in recipe_fields)
    parser = _make_parser(command, format_name(name))
    for cls in classes:
        parser.add_settings(cls)
    parser.add_settings(type(recipe), recipe, "recipe")
    flags = parser.parse(argv)
    objects = _build(flags, classes)
    changes = {key: value for key, value in flags.items() if key in recipe_fields}
    data = objects[1] if len(objects) > 1 else DataSettings()
    if isinstance(recipe, recipes.CausalLmFineTuning) and recipe.num_train_samples is None:
        # Only drawn data have it as a field: of others it is what nobody has counted yet
        data = DataSettings(num_train_samples=changes.pop("num_train_samples", None))
    return pretrained_shape.load(name, changes), objects[0], data, changes


def _write(flag: str, name: str, content: str | bytes) -> None:
    path, content = Path(name), content if isinstance(content, bytes) else content.encode()
    try:
        if os.path.exists(path) and not (path.is_file() and _says_the_same(path, content)):
            problem = "it exists already, with other content, and is left alone"
            raise UsageError(f"--{flag} {format_name(name)}: {problem}: give another name")
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"--{flag} {format_name(name)}: {error.strerror}") from None


def _says_the_same(path: Path, content: bytes) -> bool:
    """Tell whether a file holds this content; YAML may have other comments."""
    if path.suffix not in (".yaml", ".yml"):
        return path.read_bytes() == content
    try:
        return yaml.safe_load(path.read_bytes()) == yaml.safe_load(content)
    except (yaml.YAMLError, ValueError):  # another kind of file
        return False


def main() -> int | None:
    """Answer the command line.

    Returns:
        The exit code of a comparison or an audit; None: 0.

    Raises:
        UsageError: bad usage.
        SystemExit: after `--help`.
    """
    match sys.argv[1:]:
        case [] | ["-h" | "--help", *_]:
            _make_overview().print_help()
        case ["list", *argv]:
            list_recipes(argv)
        case ["plan", *argv] if any(re.match("--what[_-]fits(=|$)", word) for word in argv):
            what_fits([word.replace("--what-fits", "--what_fits", 1) for word in argv])
        case ["plan", name, *argv] if not name.startswith("-"):
            plan(name, argv)
        case ["plan", *argv]:
            plan_model(argv)
        case ["scale", name, *argv] if not name.startswith("-"):
            scale(name, argv)
        case ["scale", *argv]:
            scale_model(argv)
        case ["launch", name, *argv] if not name.startswith("-"):
            launch(name, argv)
        case ["launch", *argv]:
            parser = _make_parser("launch", "RECIPE")
            parser.add_settings(LaunchSettings)
            parser.parse(argv)
            raise UsageError(f"{parser.prog}: it needs a recipe as its first word ({program_name()} list shows them)")
        case ["show-data", name, *argv] if not name.startswith("-"):
            show_data(name, argv)
        case ["show-data", *argv]:
            parser = _make_parser("show-data", "RECIPE")
            parser.add_settings(ShowDataSettings)
            parser.parse(argv)
            raise UsageError(f"{parser.prog}: it needs a recipe as its first word ({program_name()} list shows them)")
        case ["compare", *argv]:
            return compare(argv)
        case ["watch", *argv]:
            watch_runs(argv)
        case ["advise", *argv]:
            return advise(argv)
        case ["audit-script", *argv]:
            from stepaudit.script import audit_script

            return audit_script(argv, prog=f"{program_name()} audit-script")
        case [word, *_]:
            raise UsageError(f"{program_name()} {format_name(word)}: {nearest(word, SUMMARIES)}")
    return None


def console() -> None:
    """Run the console command `samestep`."""
    sys.exit(exit_code(main))
