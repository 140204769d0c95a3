"""Recipes: everything that decides the optimizer's steps, and nothing about the hardware they run on."""

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from samestep.errors import UsageError
from samestep.recipe import scaling, schedule
from samestep.recipe.exclusions import find_problems
from samestep.recipe.rules import Rule
from samestep.recipe.settings import (
    BATCH,
    FRACTION,
    LINE,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    SEED,
    choice,
    setting,
)
from samestep.recipe.variants import Algorithm, Growth, Variant

MAX_NAMES, MAX_PATH = 4, 100  # in a description: files, and characters of a path
# Fields of which at most one is set. A flag, or a recipe that extends another, replaces the whole group.
ALTERNATIVES = (
    ("max_train_steps", "num_train_epochs"),
    ("num_warmup_steps", "warmup_epochs", "warmup_ratio"),
    ("train_file", "train_dir", "dataset_name"),
)


VARIANTS: dict[str, type[Variant]] = {kind.FIELD: kind for kind in (Growth, Algorithm)}
"""Fields that are mappings; files of earlier versions, and flags, have sentences."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts that train the recipes of a task.

    A part is the object itself, or "module:name" of an object that `find` imports: planning needs no torch.

    Attributes:
        settings: class of a run's settings.
        data: makes the training samples and the held-out ones, called with the recipe and the number of workers.
        model: class that returns summed losses (`samestep.models.summed_losses`).
        shape: makes a recipe's model as the planner takes it; None: such recipes are not planned.
        script: file in scripts/ that trains it; None: this repository has none.
        pipeline_tag: what the hub calls the task; None: it has no such task.
    """

    settings: Any = "samestep.recipe.run_settings:RunSettings"
    data: Any
    model: Any
    shape: Any = None
    script: str | None = None
    pipeline_tag: str | None = None

    def find(self, name: str) -> Any:
        """Return a part, imported if need be."""
        part = getattr(self, name)
        if not isinstance(part, str):
            return part
        module, _, attribute = part.partition(":")
        return getattr(importlib.import_module(module), attribute)


REHEARSED_TOKENS, REHEARSED_SAMPLES = 2**15, 16
"""Tokens of a rehearsal's step at most, but it has these samples at least."""


def _limit_rehearsed_batch(global_batch_size: int, length: int) -> int:
    """Limit the samples of a rehearsal's step, of sequences of `length` tokens.

    >>> _limit_rehearsed_batch(512, 1024), _limit_rehearsed_batch(512, 64), _limit_rehearsed_batch(4, 2**20)
    (32, 512, 4)
    """
    return min(global_batch_size, max(REHEARSED_SAMPLES, REHEARSED_TOKENS // length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The decisions of every recipe: the global batch, the optimizer, the schedule, the order of the samples.

    Attributes:
        unit: unit in which the length of its samples is counted.
        parts: what trains it, see `register`.
        extra: extra of the installation that its training needs (`samestep.recipe.extras`); None: none.
        rules: between fields that only these recipes have, beside those of the classes that it inherits from.
    """

    unit: ClassVar[str] = "token"
    parts: ClassVar[Parts]
    extra: ClassVar[str | None] = None
    rules: ClassVar[Sequence[Rule]] = ()

    # What it is
    name: str = setting("name in the catalog", LINE, decides=False, flag=False)
    task: str = setting("which script trains it", flag=False)
    description: str = setting("what it trains, in a sentence", decides=False, flag=False)
    source: str = setting("where its numbers come from", decides=False, flag=False)
    expect: str = setting("the result to expect, and whether it was measured", decides=False, flag=False)
    seed: int = setting("seed of everything random: weights, order, masks, dropout", SEED)

    # The global batch and its order
    global_batch_size: int = setting("samples per optimizer step, over all processes and micro-batches", BATCH)
    epoch_end: str = setting(
        "the end of an epoch: carry (a global batch may span two epochs), keep (a smaller last step), drop (leave the rest)",
        choice("carry", "keep", "drop"),
    )
    max_train_steps: int | None = setting("length of training in optimizer steps", POSITIVE)
    num_train_epochs: float | None = setting("length of training in epochs", POSITIVE)

    batch_schedule: Growth | None = setting(
        f"a batch that grows to global_batch_size: {Growth.EXAMPLES} (docs/growing-batch.md); null: it stays"
    )
    communication: Algorithm | None = setting(
        f"another algorithm, which sends less than a gradient every step: {Algorithm.EXAMPLES} (docs/communication.md); "
        "null: the exact step"
    )

    # AdamW
    learning_rate: float = setting("peak learning rate at learning_rate_batch_size", POSITIVE)
    learning_rate_batch_size: int = setting("global batch that learning_rate, betas and eps were tuned at", BATCH)
    lr_scaling_rule: str = setting("how they change for another global batch", choice(*scaling.RULES))
    adam_beta1: float = setting("decay of the first moment per step", FRACTION)
    adam_beta2: float = setting("decay of the second moment per step", FRACTION)
    adam_epsilon: float = setting("added to the root of the second moment", POSITIVE)
    weight_decay: float = setting("decoupled weight decay; never on biases and normalisation weights", NOT_NEGATIVE)
    max_grad_norm: float | None = setting("clip the whole step's gradient to this L2 norm; null: no clipping", POSITIVE)
    accumulation: str = setting(
        "where the gradients of a step add up: gradient, or optimizer (in its moments, 4 bytes per parameter less). Exact with "
        "sgd, not with adamw, whose second moment is estimated. Clipping is approximate",
        choice("gradient", "optimizer"),
    )
    second_moment: str | None = setting(
        "of adamw with accumulation optimizer, null otherwise: unbiased, mean_of_squares or sum_of_squares",
        choice("unbiased", "mean_of_squares", "sum_of_squares"),
    )

    # Learning rate over the steps
    lr_scheduler_type: str = setting("shape of the decay", choice(*schedule.SHAPES))
    num_warmup_steps: int | None = setting("linear warm-up in optimizer steps", NOT_NEGATIVE)
    warmup_epochs: float | None = setting("linear warm-up in epochs", NOT_NEGATIVE)
    warmup_ratio: float | None = setting("linear warm-up as a fraction of the schedule", PROBABILITY)
    lr_num_steps: int | None = setting("length of the schedule in steps; null: the length of training", POSITIVE)
    lr_first_step: int = setting(
        "step of the schedule at which this run starts (it continues another run)", NOT_NEGATIVE
    )
    min_lr_ratio: float = setting("last learning rate / peak", PROBABILITY)
    lr_power: float = setting("exponent of the polynomial schedule", POSITIVE)
    lr_decay_ratio: float = setting("fraction of the schedule that warmup_stable_... spends decaying", PROBABILITY)

    def problems(self) -> list[str]:
        """List the rules between fields that this recipe breaks, a message for each."""
        problems = []
        for group in ALTERNATIVES:
            names = [name for name in group if hasattr(self, name)]
            present = [name for name in names if getattr(self, name) is not None]
            if names and len(present) != 1:
                state = " and ".join(present) + " are set" if present else "none is set"
                problems.append(f"of {', '.join(names)} exactly one must be set, but {state}: set the others to null")
        try:
            self.scaled_hyperparameters()
        except UsageError as error:
            problems += error.problems
        return problems + find_problems(self)

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of each sample, where all have as many; else None."""
        return None

    @property
    def fingerprint(self) -> str:
        """16 hex digits (SHA-256) of all fields that decide the steps; recipes with equal fingerprints take equal steps."""
        return hashlib.sha256(json.dumps(self.decisive_fields(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of each loss term."""
        raise NotImplementedError

    def decisive_fields(self) -> dict[str, Any]:
        """Return the fields that decide the steps, as plain JSON values.

        The places of the data are not among them: the data pipeline fingerprints the data's content. `batch_schedule` and
        `communication` are their sentences, as fingerprints of earlier versions have them.
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["decides"]}
        return dict(json.loads(json.dumps(values, default=lambda variant: variant.sentence)))

    @property
    def data_name(self) -> str | None:
        """Names of the training data: files, a folder, a dataset and its configuration; None: the task makes its data."""
        paths = getattr(self, "train_file", None) or filter(None, [getattr(self, "train_dir", None)])
        names = [Path(path).name if Path(path).is_absolute() or len(path) > MAX_PATH else path for path in paths]
        if len(names) > MAX_NAMES:
            names[MAX_NAMES - 1 :] = [f"{len(names) - MAX_NAMES + 1} more files"]
        datasets = getattr(self, "dataset_name", None) or ()
        datasets = ", ".join([datasets] if isinstance(datasets, str) else datasets)
        parts = [datasets, getattr(self, "dataset_config_name", None)]
        return ", ".join(names) or " ".join(filter(None, parts)) or None

    def find_fields_of_data(self, typed: Mapping[str, Any]) -> dict[str, Any]:
        """Find fields that data which somebody names decide, and a recipe of the catalog has for its own: field -> value.

        Args:
            typed: field -> value, what was typed beside the recipe; none of these is found.
        """
        return {}

    @property
    def model_in_words(self) -> str:
        """Words of a description on the model behind the task: its first weights, and the part that is trained."""
        name = getattr(self, "model_name_or_path", None)
        return "" if name is None else f", from {Path(name).name if Path(name).is_absolute() else name},"

    @property
    def optimizer_name(self) -> str:
        """Name of the optimizer: adamw, adamw_8bit, muon or sgd."""
        return getattr(self, "optimizer", "adamw")

    @property
    def estimates_second_moment(self) -> bool:
        """Whether gradients accumulate in the optimizer's moments and the second moment is an estimate."""
        return self.accumulation == "optimizer" and self.optimizer_name == "adamw"

    @property
    def is_planned(self) -> bool:
        """Whether the planner has a formula for models of this kind."""
        return self.parts.shape is not None

    @property
    def small_shape(self) -> dict[str, Any]:
        """Values for a model that any machine holds, which rehearsals train; whatever decides the data and the step stays."""
        return {}

    def rehearsed(self, shape: Mapping[str, Any] | None = None) -> "Recipe":
        """Return this recipe with the model of a rehearsal, of random weights.

        Of long sequences a step has fewer samples: logits of a large vocabulary would take minutes.

        Args:
            shape: values that make the model small; None: `small_shape`.
        """
        length = getattr(self, "block_size", getattr(self, "max_seq_length", 1))
        batch = _limit_rehearsed_batch(self.global_batch_size, length)
        growth = self.batch_schedule if batch == self.global_batch_size else None
        algorithm = self.communication and self.communication.rehearsed()
        shape = {**(self.small_shape if shape is None else shape), "communication": algorithm}
        return dataclasses.replace(self, **shape, global_batch_size=batch, batch_schedule=growth)

    def scaled_hyperparameters(self) -> scaling.Hyperparameters:
        """Scale learning rate, betas and eps to this recipe's global batch, by its scaling rule.

        Raises:
            UsageError: the rule does not reach so far.
        """
        tuned = scaling.Hyperparameters(self.learning_rate, self.adam_beta1, self.adam_beta2, self.adam_epsilon)
        return scaling.scale(self.lr_scaling_rule, tuned, self.learning_rate_batch_size, self.global_batch_size)

    @property
    def counts_warmup_in_epochs(self) -> bool:
        """Whether the steps of the warm-up are known only with the number of samples."""
        return self.warmup_epochs is not None or self.scaled_hyperparameters().warmup_epochs is not None

    def schedule(self, num_steps: int, steps_per_epoch: float) -> schedule.Schedule:
        """Make the learning rate as a function of the step, for a training of `num_steps` steps.

        Raises:
            UsageError: the warm-up and the decay are together longer than the training.
        """
        numbers, num_steps = self.scaled_hyperparameters(), self.lr_num_steps or num_steps
        warmup = {name: getattr(self, name) for name in ("num_warmup_steps", "warmup_epochs", "warmup_ratio")}
        if numbers.warmup_epochs is not None:
            warmup = dict.fromkeys(warmup) | {"warmup_epochs": numbers.warmup_epochs}
        num_warmup_steps = schedule.warmup_steps(**warmup, num_steps=num_steps, steps_per_epoch=steps_per_epoch)
        base = schedule.Schedule(
            lr_scheduler_type=self.lr_scheduler_type,
            peak=numbers.learning_rate,
            num_steps=num_steps,
            num_warmup_steps=0,
            min_ratio=self.min_lr_ratio,
            power=self.lr_power,
            decay_ratio=self.lr_decay_ratio,
            first_step=self.lr_first_step,
        )
        is_decayed = self.lr_scheduler_type in schedule.STABLE
        longest = base.find_last_warmup()
        if num_warmup_steps > longest:
            tenth = schedule.warmup_steps(warmup_ratio=0.1, num_steps=num_steps, steps_per_epoch=steps_per_epoch)
            steps, ratio = (tenth, 0.1) if tenth <= longest else (0, 0)
            remedy = f"give --num_warmup_steps {steps} or --warmup_ratio {ratio}, or train longer"
            remedy += "; a few steps of the whole are tried by --stop_after_step"
            if numbers.warmup_epochs is not None:
                rule = f"--lr_scaling_rule {self.lr_scaling_rule} asks for it"
                remedy = f"{rule}: give --lr_scaling_rule none --num_warmup_steps {steps}, or train longer"
            raise UsageError(
                f"the warm-up takes {num_warmup_steps} steps, but the training has {num_steps}"
                f"{f', {longest} of them before the decay' if is_decayed else ''}: {remedy}"
            )
        return dataclasses.replace(base, num_warmup_steps=num_warmup_steps)

    def to_yaml(self) -> str:
        """Write the recipe as YAML, every field of it: `load` reads it back to an equal recipe."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values = json.loads(json.dumps(values, default=lambda variant: variant.mapping))
        return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100))


def explain_accumulation(second_moment: str | None) -> str:
    """Say what accumulation in the optimizer means for a step; `second_moment` as in a recipe."""
    exact = "the cut is exact"
    if second_moment is not None:
        exact = f"the cut is not exact, because AdamW's second moment is estimated ({second_moment})"
    return (
        f"gradients are folded into the optimizer's moments, which saves 4 bytes per parameter: {exact}. The gradient's norm "
        "is an estimate, and clipping keeps the direction of the unclipped step"
    )


TASKS: dict[str, type[Recipe]] = {}
"""Task -> class of its recipes, filled by `register`: the only list of tasks."""


def register(task: str, recipe_class: type[Recipe], parts: Parts) -> None:
    """Add a task to scripts, planner, tracer and command line.

    Args:
        task: its name in recipes.
        recipe_class: class of its recipes.
        parts: what trains it.
    """
    recipe_class.parts = parts
    TASKS[task] = recipe_class
