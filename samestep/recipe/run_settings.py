"""The settings of a run here: hardware, output, logging. Nothing in it changes the optimizer's steps."""

import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from shutil import which
from typing import Any, ClassVar
from urllib.parse import urlsplit

from samestep import interrupt
from samestep.errors import UsageError, exit_code, will_be_restarted
from samestep.recipe import catalog as recipes
from samestep.recipe import pretrained_shape, rehearsal
from samestep.recipe.extras import require
from samestep.recipe.reading import format_value
from samestep.recipe.recipe import Recipe
from samestep.recipe.settings import (
    BATCH,
    LENGTH,
    POSITIVE,
    PROBABILITY,
    SECONDS,
    WORKERS,
    Parser,
    build,
    choice,
    limit,
    program_name,
    setting,
)

URL = ("must begin with a protocol: s3://BUCKET/FOLDER, file:///mnt/FOLDER", lambda value: "://" in value)
MINUTES = ("must be more than 0, up to 1,000,000", lambda value: 0 < value <= 10**6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of one run of a recipe on one machine.

    Attributes:
        may_shard: whether its program can shard weights (FSDP2).
    """

    may_shard: ClassVar[bool] = False

    recipe: str = setting("name in the catalog (`samestep list` shows it), or a .yaml file")
    output_dir: str | None = setting("folder for all results; none: runs/RECIPE", default=None)
    overwrite_output_dir: bool = setting("delete an earlier run in output_dir", default=False)
    rehearse: bool = setting(
        "rehearse the run with a small model (a few narrow layers): its data, tokenizer, schedule, 3 whole steps, a "
        "checkpoint, and going on from it; in a temporary folder, or OUTPUT_DIR-rehearsal",
        default=False,
    )

    # How the step is cut
    per_device_train_batch_size: int | None = setting(
        "most samples in one forward (b); none: the fastest that fits", BATCH, default=None
    )
    gradient_accumulation_steps: int | None = setting(
        "micro-batches per step (k); none: what b leaves", POSITIVE, default=None
    )
    reproducible: int | None = setting(
        "samples of a micro-batch (b) on any hardware: the run is the same to the bit on any number of processes, with any "
        "restarts, on machines of one kind; on CPUs each process computes in one thread. None: the same but for rounding",
        BATCH,
        default=None,
    )
    per_device_eval_batch_size: int = setting("samples in one forward of an evaluation", BATCH, default=32)

    # Speed, precision (mixed precision is the launch file's)
    speed: str = setting(
        "auto: measure once which kernels and how large micro-batches are the fastest here; safe: the same ones everywhere, "
        "for runs that are repeated bit by bit",
        choice("auto", "safe"),
        default="auto",
    )
    dtype: str = setting("of weights and optimizer states", choice("float32", "float64"), default="float32")
    preprocessing_num_workers: int | None = setting(
        "processes or threads that prepare the data; none: as many as suit them", limit(WORKERS), default=None
    )
    dataloader_num_workers: int | None = setting(
        "processes that prepare coming steps; none: 2 beside a GPU, 0 beside a CPU", limit(WORKERS, 0), default=None
    )

    reduce_dtype: str = setting(
        "type in which several processes send gradients (torch's bf16_compress and fp16_compress hooks): own, of the weights; "
        "bf16 or fp16, half of the traffic, not exact: each process's part is rounded, and so is the sum",
        choice("own", "bf16", "fp16"),
        default="own",
    )

    # Progress, checkpoints
    logging_steps: int = setting("steps between two reads of the loss from the device", POSITIVE, default=10)
    eval_steps: int | None = setting(
        "steps between evaluations; none: at the start and the end", POSITIVE, default=None
    )
    record_samples: bool = setting("write every sample's step, process and micro-batch to samples.jsonl", default=False)
    digest_steps: int | None = setting(
        "steps between digests of parameters, moments and gradient; none: no digests", POSITIVE, default=None
    )
    noise_scale_steps: int | None = setting(
        "steps between measurements of the gradient noise scale, from which `samestep advise` finds the batch; none: it is not "
        "measured",
        POSITIVE,
        default=None,
    )
    report_to: str = setting(
        "tracker of the curves; tensorboard writes into OUTPUT_DIR/tensorboard",
        choice("none", "tensorboard", "wandb", "trackio"),
        default="none",
    )
    checkpointing_minutes: float | None = setting(
        "minutes between checkpoints (the 2 newest are kept), unless checkpointing_steps is given; none: one at the end",
        MINUTES,
        default=15.0,
    )
    checkpointing_steps: int | None = setting(
        "steps between checkpoints, all of which are kept; none: checkpointing_minutes", POSITIVE, default=None
    )
    async_checkpointing: bool = setting("write checkpoints in the background while training goes on", default=False)
    checkpoints_total_limit: int | None = setting(
        "newest checkpoints to keep; none: all of checkpointing_steps, 2 of checkpointing_minutes",
        POSITIVE,
        default=None,
    )
    checkpoint_store: str | None = setting(
        "folder, as fsspec names it (s3://BUCKET/FOLDER, gs://..., file:///mnt/...), to which each checkpoint is copied in the "
        "background, and from which resume_from_checkpoint latest brings newer ones; none: no copies",
        URL,
        default=None,
    )
    replicate_checkpoints: bool = setting(
        "send each checkpoint to every machine: output_dir is a folder of each machine's own, on its disk or in memory "
        "(/dev/shm), not one that all see",
        default=False,
    )
    resume_from_checkpoint: str | None = setting(
        "a checkpoint folder, or latest: the newest whole one in output_dir, and if there is none, from the start",
        default=None,
    )
    fault_tolerance: str = setting(
        "when a process dies: none: the run ends; restart: its launcher (torchrun's agents) starts it again on the machines "
        "that are there, from the newest checkpoint; it brings resume_from_checkpoint latest, async_checkpointing and "
        "checkpointing_minutes 1, where flags do not say otherwise; step: each launch is a replica, and those that are left "
        "do the step again (docs/fault-tolerance.md)",
        choice("none", "restart", "step"),
        default="none",
    )
    stop_after_step: int | None = setting(
        "end this session after this step, the schedule stays; none: at the end of training", POSITIVE, default=None
    )
    max_train_minutes: float | None = setting(
        "minutes after which this session ends, with a checkpoint; none: no limit",
        MINUTES,
        default=None,
    )
    on_nonfinite: str = setting(
        "when a gradient is not finite: end the run as it was before the step, or leave the step out and count it",
        choice("stop", "skip"),
        default="stop",
    )
    ddp_timeout: float = setting(
        "seconds to wait for another process before the run ends", limit(SECONDS), default=1800.0
    )
    min_replicas: int = setting(
        "replicas without which no step is done, of a run with fault_tolerance step: fewer wait for more",
        limit(100_000),
        default=1,
    )
    replica_timeout: float = setting(
        "seconds that replicas wait for one that is alive in a step, before they do it again without; it must be longer than "
        "the step itself and than sending the model to a replica that joins",
        limit(SECONDS),
        default=60.0,
    )
    push_to_hub: bool = setting("upload the results to the hub at the end", default=False)
    license: str | None = setting(
        "licence of the model, for its card: apache-2.0, mit, ...; none: the card has none", default=None
    )
    hub_model_id: str | None = setting("repository on the hub; none: the output folder's name", default=None)

    @property
    def memory_remedy(self) -> str:
        """The remedy when memory does not hold a sample, for messages."""
        return "a smaller model or smaller images"

    @property
    def accelerator_options(self) -> dict[str, Any]:
        """Keyword arguments of `launch.create_accelerator`."""
        tracker = None if self.report_to == "none" else self.report_to
        options = {"log_with": tracker, "project_dir": self.output_dir, "ddp_timeout": self.ddp_timeout}
        options |= {"may_shard": self.may_shard, "is_reproducible": self.reproducible is not None}
        options |= {"digest_steps": self.digest_steps, "noise_scale_steps": self.noise_scale_steps}
        return options | {"fault_tolerance": self.fault_tolerance, "reduce_dtype": self.reduce_dtype}

    @property
    def lighthouse(self) -> str:
        """The address where the replicas of a run with fault_tolerance step meet: http://HOST:PORT; empty: nowhere."""
        return os.environ.get("TORCHFT_LIGHTHOUSE", "")

    def problems(self) -> list[str]:
        problems = self._problems_of_reproducible() if self.reproducible is not None else []
        problems += self._problems_of_replicas()
        if self.overwrite_output_dir and self.resume_from_checkpoint:
            problems.append("overwrite_output_dir and resume_from_checkpoint exclude each other: leave one out")
        if self.overwrite_output_dir and self.fault_tolerance == "restart":
            problems.append(
                "overwrite_output_dir and fault_tolerance restart exclude each other, as each restart would delete the run: "
                "leave one out"
            )
        if self.max_train_minutes is not None and will_be_restarted():
            problems.append(
                f"max_train_minutes is {self.max_train_minutes}, but the launcher's --max_restarts would start the run again: "
                "leave one out"
            )
        return problems

    def _problems_of_replicas(self) -> list[str]:
        """Find what fault_tolerance excludes, and what it lacks."""
        if self.fault_tolerance != "step":
            is_set = {"min_replicas": self.min_replicas != 1, "replica_timeout": self.replica_timeout != 60.0}
            return [
                f"{name} is {getattr(self, name):g}, but fault_tolerance is {self.fault_tolerance}: set it to step"
                for name, value in is_set.items()
                if value
            ]
        reasons = {
            "gradient_accumulation_steps": "k changes with the number of replicas: give per_device_train_batch_size",
            "noise_scale_steps": "the noise of the gradient is measured on one quorum only: leave it out",
            "checkpoint_store": "the replica that writes checkpoints may be another one each time: leave it out",
            "replicate_checkpoints": "replicas share one output_dir: leave it out",
            "load_best_model_at_end": "a replica that is lost may take the best model with it: leave it out",
        }
        if self.reduce_dtype != "own":
            reasons["reduce_dtype"] = "torch's hooks belong to DistributedDataParallel, not to replicas: leave it out"
        problems = [
            f"fault_tolerance is step, and {name} is {format_value(getattr(self, name))}, but {why}"
            for name, why in reasons.items()
            if getattr(self, name, None)
        ]
        if self.report_to != "none":
            problems.append(
                f"fault_tolerance is step, and report_to is {self.report_to}, which wants one writer from begin to end: leave "
                "it out, and look at metrics.jsonl with `samestep watch`"
            )
        address = urlsplit(self.lighthouse)
        if address.scheme != "http" or not address.hostname or not re.search(r":[0-9]+/?$", address.netloc):
            problems.append(
                f"fault_tolerance is step, but TORCHFT_LIGHTHOUSE is {self.lighthouse or 'not set'}: start torchft_lighthouse, "
                "and set it to http://HOST:PORT for every replica"
            )
        return problems

    def _problems_of_reproducible(self) -> list[str]:
        reasons = {
            "per_device_train_batch_size": "it is the size of micro-batches itself",
            "gradient_accumulation_steps": "the number of micro-batches follows from their size",
        }
        problems = [
            f"reproducible is {self.reproducible}, and {name} is {getattr(self, name)}: leave {name} out, {why}"
            for name, why in reasons.items()
            if getattr(self, name) is not None
        ]
        if self.reduce_dtype != "own":
            problems.append(
                f"reproducible is given, but reduce_dtype is {self.reduce_dtype}, which rounds sums: leave one out"
            )
        if self.dtype != "float32":
            problems.append(
                f"reproducible is given, but dtype is {self.dtype}: set dtype to float32, of which sums are exact"
            )
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(RunSettings):
    """Settings of one run that trains on data which others have made."""

    on_bad_row: str = setting(
        "rows, images and the like that cannot be used: refuse them all in one message, or skip them and list them in "
        "OUTPUT_DIR/skipped_rows.jsonl",
        choice("refuse", "skip"),
        default="refuse",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelSettings(DataSettings):
    """Settings of one run that trains a transformer on tokens."""

    may_shard: ClassVar[bool] = True

    per_device_train_tokens: int | None = setting(
        "most tokens in one forward, padding included; none: no such limit", POSITIVE, default=None
    )
    attn_implementation: str | None = setting(
        "attention kernel; none: sdpa on a GPU, on a CPU the one measured to be faster",
        choice("sdpa", "eager"),
        default=None,
    )
    gradient_checkpointing: bool = setting("recompute activations in the backward", default=False)
    fsdp_gather: str = setting(
        "type in which sharded weights (FSDP2) are gathered under mixed precision bf16: bf16, half of the traffic and no "
        "16-bit copy of all weights; fp32, exactly the rounding of whole weights",
        choice("bf16", "fp32"),
        default="bf16",
    )
    torch_compile: bool = setting("compile each layer; needs a C++ compiler, and minutes at the start", default=False)

    @property
    def accelerator_options(self) -> dict[str, Any]:
        return super().accelerator_options | {"fsdp_gather": self.fsdp_gather}

    @property
    def memory_remedy(self) -> str:
        return "--gradient_checkpointing or shorter samples, or share the weights among processes (FSDP2)"

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.torch_compile and self.reproducible is not None:
            problems.append(
                "reproducible is given, and torch_compile is true, whose code depends on the sizes that a process has met: "
                "leave one out"
            )
        if self.torch_compile and not any(map(which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl"))):
            problems.append("torch_compile is true, but there is no C++ compiler: install g++, or leave it out")
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestModelSettings(LanguageModelSettings):
    """Settings of one run that compares its evaluations."""

    may_shard: ClassVar[bool] = False

    metric_for_best_model: str | None = setting(
        "which evaluation is the best one: loss or another metric of evaluations; none: the recipe's first, or loss",
        default=None,
    )
    early_stopping_patience: int | None = setting(
        "end the training after so many evaluations that are no better; none: never", POSITIVE, default=None
    )
    load_best_model_at_end: bool = setting("leave the best evaluation's model, not the last step's", default=False)

    def problems(self) -> list[str]:
        problems = super().problems()
        for name in ("early_stopping_patience", "load_best_model_at_end"):
            if getattr(self, name) and self.eval_steps is None:
                problems.append(f"{name} compares evaluations, but there is one only: set eval_steps")
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuningSettings(BestModelSettings):
    """Settings of one run that fine-tunes a classifier."""

    predict_file: tuple[str, ...] | None = setting(
        "texts to label at the end, columns as in train_file; none: no texts", default=None
    )
    trust_metric_code: bool = setting(
        "run the code of metrics that are not local: of the hub, or a file", default=False
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLmFineTuningSettings(BestModelSettings):
    """Settings of one run that fine-tunes a causal language model."""

    may_shard: ClassVar[bool] = True

    metric_for_best_model: str | None = setting(
        "which evaluation is the best one, by what it has of these; none: loss",
        choice("loss", "perplexity", "accuracy", "margin", "exact_match"),
        default=None,
    )
    num_generations: int = setting(
        "held-out prompts that the model answers at an evaluation, the same ones at each; 0: none",
        limit(10**6, 0),
        default=100,
    )
    generation_length: int = setting("tokens of an answer, at most", LENGTH, default=64)
    merge_adapter: bool = setting(
        "merge the adapter into the base's weights at the end, in float32, and measure on held-out logits what is lost when "
        "they are saved",
        default=False,
    )
    merge_dtype: str = setting(
        "type in which merged weights are saved: base, the one of the base's files, or float32",
        choice("base", "float32"),
        default="base",
    )
    max_merge_loss: float = setting(
        "largest share of what the adapter does to logits that a merge may lose; a merge that loses more is not written",
        PROBABILITY,
        default=0.01,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLmSettings(LanguageModelSettings):
    """Settings of one run that trains a model to continue text."""

    sample_prompt: str | None = setting("text that the trained model continues at the end; none: no text", default=None)
    sample_length: int = setting("tokens of that continuation", LENGTH, default=200)


BITS_DEPEND_ON = ("per_device_train_tokens", "attn_implementation", "noise_scale_steps")
"""Settings that decide the bits of a step under --reproducible, beside precision and device."""
OLD_FLAGS = {"on_bad_sample": ("on_bad_row", {"stop": "refuse"})}
"""Flag that will go in 0.2 -> its name today, and values that are called otherwise today."""
RESTART_SETTINGS = {"resume_from_checkpoint": "latest", "async_checkpointing": True, "checkpointing_minutes": 1.0}
"""Settings that fault_tolerance restart brings, where flags do not say otherwise."""

EPILOG = """A recipe gives every field of its own, and a flag changes it: --recipe RECIPE --help shows the values of a recipe.
`none` unsets a field that may be unset."""


def parse(
    argv: Sequence[str],
    task: str | Sequence[str],
    description: str,
    *,
    find_config: pretrained_shape.FindConfig = pretrained_shape.read_local_config,
    say: Callable[[str], object] = lambda text: None,
    trains_here: bool = True,
) -> tuple[Recipe, Any]:
    """Read the recipe and the run settings from the flags in `argv`.

    Args:
        argv: the flags.
        task: the task that the recipe must have; several: one of them.
        description: of the program, for `--help`.
        find_config, say: as of `pretrained_shape.load`.
        trains_here: whether the packages that training needs must be installed.

    Returns:
        The recipe, flags laid over its file (with --rehearse, of a small model), and the run settings, an object of the task's
        settings class.

    Raises:
        UsageError: unknown flags or recipe, any broken rule, packages of the task that are not installed.
    """
    task = task if isinstance(task, str) else _choose_task(argv, task)
    cls = recipes.TASKS[task]
    settings_class = cls.parts.find("settings")
    parser = Parser(program_name(), "--recipe RECIPE [--FLAG VALUE ...]", description=description, epilog=EPILOG)
    parser.add_settings(settings_class)
    parser.add_settings(cls, _load_help_recipe(argv, task), "recipe")
    flags = parser.parse(rename_old_flags(argv))
    if "recipe" not in flags:
        raise UsageError(f"--recipe is missing: give one of {', '.join(recipes.catalog_names())}, or a .yaml file")
    names = {field.name for field in dataclasses.fields(settings_class)}
    run = build(settings_class, {name: value for name, value in flags.items() if name in names}, "flags")
    if run.fault_tolerance == "restart":
        run = dataclasses.replace(run, **{name: value for name, value in RESTART_SETTINGS.items() if name not in flags})
    changes = {name: value for name, value in flags.items() if name not in names}
    recipe = pretrained_shape.load(run.recipe, changes, task=task, find_config=find_config, say=say)
    if recipe.accumulation == "optimizer" and run.on_nonfinite == "skip":
        raise UsageError(
            "on_nonfinite is skip, but with accumulation optimizer a gradient that is not finite is in the moments when it is "
            "found: set it to stop, or accumulation to gradient"
        )
    if run.noise_scale_steps is not None and (problem := _find_what_has_no_noise_scale(recipe)):
        raise UsageError(f"noise_scale_steps is {run.noise_scale_steps}, but {problem}")
    growth = recipe.batch_schedule
    if run.noise_scale_steps is None and growth is not None and growth.kind == "noise":
        raise UsageError(
            f"batch_schedule is {str(growth)!r}, but noise_scale_steps is not set, so that nothing is measured: set it"
        )
    if problems := _find_conflicts(recipe, run):
        raise UsageError(problems)
    if run.reproducible is not None:
        if problems := _find_what_depends_on_the_cut(recipe, flags):
            raise UsageError(problems)
        run = dataclasses.replace(run, speed="safe", per_device_train_batch_size=run.reproducible)
    if trains_here:
        _require_packages(task, run)
    recipe = recipe.rehearsed() if run.rehearse else recipe
    return recipe, dataclasses.replace(run, output_dir=run.output_dir or f"runs/{recipe.name}")


_announced: set[str] = set()  # old flags that this process has named: flags are parsed several times


def rename_old_flags(argv: Sequence[str]) -> list[str]:
    """Write flags of `OLD_FLAGS` by their names of today, with a line on stderr for each.

    >>> rename_old_flags(["--on_bad_row", "skip"])
    ['--on_bad_row', 'skip']
    """
    words, values = [], {}
    for word in argv:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in OLD_FLAGS:
            new, values = OLD_FLAGS[name]
            if name not in _announced and os.environ.get("RANK", "0") == "0":
                _announced.add(name)
                print(f"--{name} is --{new} now, and will go in 0.2: write --{new}", file=sys.stderr)
            word = f"--{new}{equals}{values.get(value, value)}"
            values = {} if equals else values
        elif values:
            word, values = values.get(word, word), {}
        words.append(word)
    return words


def _require_packages(task: str, run: Any) -> None:
    """Check that what a training of a task imports is installed."""
    require(None, f"the task {task}")
    if run.fault_tolerance == "step":
        require("replicas", "fault_tolerance step")
    if (extra := recipes.TASKS[task].extra) is not None:
        require(extra, f"the task {task}")
    if run.report_to != "none" and find_spec(run.report_to) is None:
        raise UsageError(f"report_to is {run.report_to}, which is not installed: pip install {run.report_to}")


def _find_what_has_no_noise_scale(recipe: Recipe) -> str:
    """Say why the noise of this recipe's gradient cannot be measured; empty if it can."""
    if recipe.global_batch_size == 1:
        return "a global batch of one sample says nothing of its noise: leave it out, or set global_batch_size to 2 or more"
    if recipe.accumulation == "optimizer":
        return (
            "accumulation is optimizer, which takes the gradients away: leave it out, or set accumulation to gradient"
        )
    if getattr(recipe, "normalization", None) == "batch":
        return (
            "normalization is batch, so that the gradients of a step's samples depend on each other: leave it out, or set "
            "normalization to group or frozen"
        )
    return ""


def _find_conflicts(recipe: Any, run: Any) -> list[str]:
    """Find what a recipe and the settings of its run exclude of each other: a line for each."""
    problems = _find_what_replicas_cannot_do(recipe) if run.fault_tolerance == "step" else []
    problems += _find_what_workers_cannot_do(recipe, run)
    if run.reduce_dtype != "own" and recipe.accumulation == "optimizer":
        problems.append(
            f"reduce_dtype is {run.reduce_dtype}, but accumulation is optimizer, which sends moments, not gradients: leave it "
            "out, or set accumulation to gradient"
        )
    if recipe.optimizer_name == "adamw_8bit" and run.dtype != "float32":
        problems.append(
            f"dtype is {run.dtype}, but optimizer is adamw_8bit, which computes in float32: set one of them to its default"
        )
    if getattr(run, "merge_adapter", False) and recipe.lora_rank is None:
        problems.append(
            "merge_adapter is true, but lora_rank is null, so that there is no adapter: leave it out, or set lora_rank"
        )
    is_apart = getattr(recipe, "lora_rank", None) is not None and not run.merge_adapter
    if run.push_to_hub and is_apart and recipe.model_name_or_path is None:
        problems.append(
            "push_to_hub is true, but the adapter's base has random weights, which are not on the hub: add --merge_adapter, or "
            "set model_name_or_path"
        )
    return problems


def _find_what_replicas_cannot_do(recipe: Any) -> list[str]:
    """Find the fields of a recipe that `fault_tolerance step` excludes: a line for each."""
    problems = []
    if recipe.accumulation == "optimizer":
        problems.append(
            "fault_tolerance is step, but accumulation is optimizer, which cannot take a gradient out of its moments again "
            "when a replica is lost: set accumulation to gradient"
        )
    if getattr(recipe, "normalization", None) == "batch":
        problems.append(
            "fault_tolerance is step, but normalization is batch, whose statistics change in the forward, before the step is "
            "committed: set normalization to group or frozen"
        )
    return problems


def _find_what_workers_cannot_do(recipe: Any, run: Any) -> list[str]:
    """Find the settings that a recipe's `communication` excludes: a line for each."""
    found = recipe.communication
    if found is None:
        return []
    subject = f"communication is {format_value(str(found))}"
    reasons = {
        "reproducible": "whose sums are not exact ones: leave it out",
        "noise_scale_steps": "with which no process has the whole step's gradient: leave it out",
        "digest_steps": "with which tensors differ between workers: leave it out" if found.is_local else "",
        "fault_tolerance": "whose workers a lost replica takes away: set it to restart"
        if run.fault_tolerance == "step"
        else "",
        "reduce_dtype": "which sends something else than gradients: leave it out" if run.reduce_dtype != "own" else "",
        "on_nonfinite": (
            "whose error feedback such a gradient would spoil: set it to stop"
            if run.on_nonfinite == "skip" and not found.is_local
            else ""
        ),
    }
    problems = [
        f"{name} is {getattr(run, name)}, but {subject}, {why}"
        for name, why in reasons.items()
        if why and getattr(run, name) is not None
    ]
    for name in ("stop_after_step", "checkpointing_steps", "eval_steps") if found.is_local and not run.rehearse else ():
        value = getattr(run, name)
        if value is not None and value % found.num_steps:
            nearest = max(1, round(value / found.num_steps)) * found.num_steps
            problems.append(
                f"{name} is {value}, but {subject}, and only after an exchange is there one model: set it to a multiple of "
                f"{found.num_steps}, such as {nearest}"
            )
    return problems


def _find_what_depends_on_the_cut(recipe: Any, flags: dict[str, Any]) -> list[str]:
    """Find the fields that --reproducible excludes, beside those of `RunSettings.problems`: a line for each."""
    problems = []
    if flags.get("speed") == "auto":
        problems.append("reproducible is given, and speed is auto, which takes what is fastest here: set speed to safe")
    if recipe.accumulation == "optimizer":
        problems.append(
            "reproducible is given, but accumulation is optimizer, whose moments depend on the order of the gradients: set it "
            "to gradient"
        )
    if getattr(recipe, "normalization", None) == "batch" and not recipe.exact_batch_norm:
        problems.append(
            "reproducible is given, but normalization is batch, which takes the statistics of the micro-batches that processes "
            "compute at one time: set exact_batch_norm to true"
        )
    return problems


def answer_early(argv: Sequence[str], task: str | Sequence[str], description: str) -> None:
    """Answer `--help`, mistakes in the flags and `--rehearse`, and end the program then; else return.

    Called before a program imports torch, which takes 40 times as long. Arguments are those of `parse`.

    Raises:
        SystemExit: the flags were answered.
    """
    interrupt.end_with_launcher()
    parsed: list[Any] = []
    code = exit_code(lambda: parsed.append(parse(argv, task, description)))
    if not parsed:
        sys.exit(code)
    small, run = parsed[0]
    if run.rehearse and rehearsal.SESSION not in os.environ:
        recipe, _ = parse([*argv, "--rehearse", "false"], task, description)
        is_named = any(word.split("=")[0] == "--output_dir" for word in argv)
        sys.exit(exit_code(lambda: rehearsal.rehearse(argv, recipe, small, run.output_dir if is_named else None)))


def _load_help_recipe(argv: Sequence[str], task: str) -> Recipe | None:
    """Load the recipe whose values `--help` shows; None: no recipe in the flags, or no help asked for."""
    name = _find_recipe(argv)
    if name is None or not {"-h", "--help"} & set(argv):
        return None
    return recipes.load(name, task=task)


def _choose_task(argv: Sequence[str], tasks: Sequence[str]) -> str:
    """Choose the task of the recipe that the flags name; the first one if it is of none of these tasks."""
    name = _find_recipe(argv)
    task = None if name is None else recipes.find_task(name)
    return tasks[0] if task is None or task not in tasks else task


def _find_recipe(argv: Sequence[str]) -> str | None:
    """Find the recipe that the flags name, before they are parsed; None: they name none."""
    names = [following for word, following in itertools.pairwise([*argv, ""]) if word == "--recipe"]
    names += [word.removeprefix("--recipe=") for word in argv if word.startswith("--recipe=")]
    return names[-1] if names else None
