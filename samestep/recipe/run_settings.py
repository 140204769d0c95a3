"""The settings of a run here: hardware, output, logging. Nothing in it changes the optimizer's steps."""

import dataclasses
import glob
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from samestep import interrupt
from samestep.errors import UsageError, exit_code
from samestep.recipe import catalog as recipes
from samestep.recipe import pretrained_shape, rehearsal
from samestep.recipe.exclusions import find_problems
from samestep.recipe.extras import require_for_training
from samestep.recipe.other_names import rename_old_flags
from samestep.recipe.reading import describe_missing
from samestep.recipe.recipe import Recipe
from samestep.recipe.settings import (
    BATCH,
    POSITIVE,
    SECONDS,
    WORKERS,
    Parser,
    build,
    choice,
    find_flag,
    limit,
    program_name,
    setting,
)

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
        "checkpoint, and going on from it. In a temporary folder, or OUTPUT_DIR-rehearsal",
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
        "samples of a micro-batch (b) on any hardware. The run is the same to the bit on any number of processes, with any "
        "restarts, on machines of one kind. On CPUs each process computes in one thread. None: the same but for rounding",
        BATCH,
        default=None,
    )
    per_device_eval_batch_size: int = setting("samples in one forward of an evaluation", BATCH, default=32)

    # Speed, precision (mixed precision is the launch file's)
    speed: str = setting(
        "auto: measure once which kernels and how large micro-batches are the fastest here. safe: the same ones everywhere, "
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
        "type in which several processes send gradients (torch's bf16_compress and fp16_compress hooks). own: of the weights. "
        "bf16 or fp16: half of the traffic, not exact: each process's part is rounded, and so is the sum",
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
    watch_layers: int | None = setting(
        "steps between measurements of each layer (norms of gradient and weights, update over weights), which go to "
        "layers.jsonl; none: they are not measured",
        POSITIVE,
        default=None,
    )
    report_to: str = setting(
        "tracker of the curves; tensorboard writes into OUTPUT_DIR/tensorboard",
        choice("none", "tensorboard", "wandb", "trackio"),
        default="none",
    )
    checkpointing_minutes: float | None = setting(
        "minutes between checkpoints (the 2 newest are kept), unless checkpointing_steps is given. 15: more where saving "
        "would take over 5% of the time; none: one at the end",
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
        "folder, as fsspec names it (s3://BUCKET/FOLDER, gs://..., file:///mnt/...). To it each checkpoint is copied in the "
        "background, and from it resume_from_checkpoint latest brings newer ones. none: no copies",
        ("must begin with a protocol: s3://BUCKET/FOLDER, file:///mnt/FOLDER", lambda value: "://" in value),
        default=None,
    )
    replicate_checkpoints: bool = setting(
        "send each checkpoint to every machine. output_dir is a folder of each machine's own, on its disk or in memory "
        "(/dev/shm), not one that all see",
        default=False,
    )
    resume_from_checkpoint: str | None = setting(
        "a checkpoint folder, or latest: the newest whole one in output_dir, and if there is none, from the start",
        default=None,
    )
    fault_tolerance: str = setting(
        "when a process dies: none: the run ends. restart: its launcher (torchrun's agents) starts it again on the machines "
        "that are there, from the newest checkpoint. It brings resume_from_checkpoint latest, async_checkpointing and "
        "checkpointing_minutes 1, where flags do not say otherwise. step: each launch is a replica, and those that are left "
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
        "seconds that replicas wait for one that is alive in a step, before they do it again without. It must be longer than "
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
        options |= {"is_reproducible": self.reproducible is not None, "fault_tolerance": self.fault_tolerance}
        return options | {"reduce_dtype": self.reduce_dtype, "settings": self}

    @property
    def lighthouse(self) -> str:
        """The address where the replicas of a run with fault_tolerance step meet: http://HOST:PORT; empty: nowhere."""
        return os.environ.get("TORCHFT_LIGHTHOUSE", "")

    def problems(self) -> list[str]:
        """List the rules between settings that these break, a message for each."""
        return find_problems(settings=self)


MAX_SAVING = 0.05
"""Share of the time that saving takes at most, where `checkpointing_minutes` has its default."""
RESTART_SETTINGS = {"resume_from_checkpoint": "latest", "async_checkpointing": True, "checkpointing_minutes": 1.0}
"""Settings that fault_tolerance restart brings, where flags do not say otherwise."""


def choose_interval(minutes: float | None, saving: float) -> float:
    """Choose the seconds between checkpoints: as set, but of the default at least so many that saving stays below `MAX_SAVING`.

    Args:
        minutes: `RunSettings.checkpointing_minutes`.
        saving: seconds for which training waits when a checkpoint is saved.

    >>> [choose_interval(minutes, 100.0) for minutes in (None, 1.0, RunSettings.checkpointing_minutes)]
    [inf, 60.0, 1900.0]
    """
    if minutes is None:
        return math.inf
    least = saving * (1 / MAX_SAVING - 1) if minutes == RunSettings.checkpointing_minutes else 0.0
    return max(60 * minutes, least)


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
    named, tasks = find_flag(argv, "recipe"), [task] if isinstance(task, str) else task
    own = recipes.find_task(named) if named else None
    task = tasks[0] if own is None or own not in tasks else own
    cls = recipes.TASKS[task]
    settings_class = cls.parts.find("settings")
    parser = Parser(program_name(), "--recipe RECIPE [--FLAG VALUE ...]", description=description, epilog=EPILOG)
    parser.add_settings(settings_class)
    shown = recipes.load(named, task=task) if named and {"-h", "--help"} & set(argv) else None
    parser.add_settings(cls, shown, "recipe")
    flags = parser.parse(rename_old_flags(argv))
    if "recipe" not in flags:
        raise UsageError(f"--recipe is missing: give one of {', '.join(recipes.catalog_names())}, or a .yaml file")
    names = {field.name for field in dataclasses.fields(settings_class)}
    run = build(settings_class, {name: value for name, value in flags.items() if name in names}, "flags")
    if run.fault_tolerance == "restart":
        run = dataclasses.replace(run, **{name: value for name, value in RESTART_SETTINGS.items() if name not in flags})
    changes = {name: value for name, value in flags.items() if name not in names}
    recipe = pretrained_shape.load(run.recipe, changes, task=task, find_config=find_config, say=say)
    problems = find_problems(recipe, run)
    if recipe.max_train_steps is not None and recipe.batch_schedule is None and not recipe.counts_warmup_in_epochs:
        recipe.schedule(recipe.max_train_steps, 1.0)  # a warm-up that is too long is said before torch is imported
    if run.reproducible is not None and flags.get("speed") == "auto":  # its default, too
        problems.append("reproducible is given, and speed is auto, which takes what is fastest here: set speed to safe")
    if problems:
        raise UsageError(problems)
    if run.reproducible is not None:
        run = dataclasses.replace(run, speed="safe", per_device_train_batch_size=run.reproducible)
    if trains_here:
        require_for_training(task, cls.extra, run)
    run = dataclasses.replace(run, output_dir=run.output_dir or f"runs/{recipe.name}")
    return recipe.rehearsed() if run.rehearse else recipe, run


def explain_earlier_run(path: str | None) -> str | None:
    """Say by which command a folder comes that is not here, if it is what a recipe of the catalog leaves; None: it is not."""
    folder, _, name = (path or "").partition("/")
    if folder != "runs" or os.path.exists(path or "") or name not in recipes.catalog_names():
        return None
    script = recipes.load(name).parts.script
    return (
        f"model_name_or_path {path} is not here: it is what the recipe {name} leaves. First train that (accelerate launch "
        f"scripts/{script} --recipe {name}), or start from another model, --model_name_or_path FOLDER"
    )


def check_files(recipe: Recipe) -> None:
    """Check that the files of data, and the results of earlier recipes, are there that a recipe names by their paths.

    Patterns and URLs are found later.

    Raises:
        UsageError: one is not.
    """
    values = [getattr(recipe, name, None) for name in ("train_file", "validation_file")]
    patterns = [pattern for value in values for pattern in ([value] if isinstance(value, str) else value or ())]
    paths = [
        os.path.expanduser(pattern) for pattern in patterns if "://" not in pattern and not glob.has_magic(pattern)
    ]
    problems = [describe_missing(path) for path in paths if not os.path.lexists(path)]
    problems += filter(None, [explain_earlier_run(getattr(recipe, "model_name_or_path", None))])
    if problems:
        raise UsageError(problems)


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
    if code := exit_code(lambda: check_files(small)):
        sys.exit(code)
    if run.rehearse and rehearsal.SESSION not in os.environ:
        recipe, _ = parse([*argv, "--rehearse", "false"], task, description)
        folder = run.output_dir if find_flag(argv, "output_dir") else None
        sys.exit(exit_code(lambda: rehearsal.rehearse(argv, recipe, small, folder)))
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print("loading torch and transformers", file=sys.stderr, flush=True)  # which takes seconds
