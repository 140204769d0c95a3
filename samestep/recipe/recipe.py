"""Recipes: everything that decides the optimizer's steps, and nothing about the hardware they run on."""

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from samestep.errors import UsageError, nearest
from samestep.recipe import batch_schedule, communication, scaling, schedule
from samestep.recipe.communication import Communication
from samestep.recipe.reading import format_name, format_value, read_yaml, shipped_folder
from samestep.recipe.settings import (
    ACTIVATIONS,
    BATCH,
    FRACTION,
    LAYERS,
    LENGTH,
    LINE,
    NOT_NEGATIVE,
    PIXELS,
    POSITIVE,
    PROBABILITY,
    SEED,
    VOCABULARY,
    WIDTH,
    build,
    choice,
    limit,
    setting,
)

CATALOG = shipped_folder("catalog")

STAGES = (
    "must be up to 64 numbers up to 131,072",
    lambda values: len(values) <= 64 and max(values, default=1) <= 2**17,
)
MAX_NAMES, MAX_PATH = 4, 100  # in a description: files, and characters of a path
WEIGHTS = (
    "must be numbers greater than 0, up to 1,000",
    lambda values: len(values) > 0 and all(0 < value <= 1000 for value in values),
)
BLOCKS = ("must be up to 64 numbers up to 1,000", lambda values: len(values) <= 64 and max(values, default=1) <= 1000)

# Fields of which at most one is set. A flag, or a recipe that extends another, replaces the whole group.
ALTERNATIVES = (
    ("max_train_steps", "num_train_epochs"),
    ("num_warmup_steps", "warmup_epochs", "warmup_ratio"),
    ("train_file", "train_dir", "dataset_name"),
)
SOURCES = ALTERNATIVES[-1]
PARTS_OF_A_DATASET = ("dataset_config_name", "validation_split_name", "mixture_weights")
"""Fields that name a part of `dataset_name`, or weigh it; another source has no such part, or weight."""
HELD_OUT = ("validation_file", "validation_dir")
"""Fields that name held-out data of the same kind as the training data."""
COLUMNS = {
    "turns": ("messages", "conversations", "conversation"),
    "question": ("prompt", "instruction", "question", "query"),
    "context": ("input", "context"),
    "answer": ("completion", "output", "response", "answer"),
    "pair": ("chosen", "rejected"),
    "text": ("text",),
    "system": ("system", "system_prompt", "system_message"),
    "history": ("history",),
    "tools": ("tools",),
    "label": ("label",),
}
"""What a column of conversations holds -> its names."""
UNUSED = "unused"
"""What `columns` calls a column that is not read."""
DRAWN = ("builtin/drawn_chats", "builtin/drawn_pairs")
"""Datasets of conversations that are drawn: for fine-tuning by next tokens, by pairs."""
DRAWN_SIZES = ("num_train_samples", "num_validation_samples")
"""Fields that say how many of them are drawn."""
MUON = ("muon_learning_rate", "muon_momentum", "muon_weight_decay")
"""Fields that only the optimizer muon has."""
DATA = ("train_file", "train_dir", "dataset_name", "dataset_config_name")
MODEL = ("model_name_or_path", "architecture", "lora_rank", "base_quantization", "objective")
"""Fields that a description names."""
TEXTS = ("name", "description", "source", "expect")
"""Fields that speak of all others: they are not true of a recipe whose values were changed."""


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
    """What every recipe decides: the global batch, the optimizer, the schedule, the order of the samples.

    Attributes:
        unit: unit in which the length of its samples is counted.
        parts: what trains it, see `register`.
        extra: extra of the installation that its training needs (`samestep.recipe.extras`); None: none.
    """

    unit: ClassVar[str] = "token"
    parts: ClassVar[Parts]
    extra: ClassVar[str | None] = None

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

    batch_schedule: str | None = setting(
        f"a batch that grows to global_batch_size: {batch_schedule.EXAMPLES} (docs/batch-size.md); null: it stays"
    )
    communication: str | None = setting(
        f"another algorithm, which sends less than a gradient every step: {communication.EXAMPLES} (docs/communication.md); "
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
        "where the gradients of a step add up: gradient, or optimizer (in its moments, 4 bytes per parameter less: exact with "
        "sgd, not with adamw, whose second moment is estimated; clipping is approximate)",
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
        if (self.second_moment is None) == (self.estimates_second_moment):
            rule = "one of unbiased, mean_of_squares, sum_of_squares" if self.estimates_second_moment else "null"
            problems.append(
                f"second_moment is {self.second_moment}, but with accumulation {self.accumulation} and {self.optimizer_name} "
                f"it must be {rule}"
            )
        try:
            self.scaled_hyperparameters()
        except UsageError as error:
            problems += error.problems
        return problems + self._problems_of_batch_schedule() + self._problems_of_communication()

    def _problems_of_communication(self) -> list[str]:
        if self.communication is None:
            return []
        subject = f"communication is {format_value(self.communication)}"
        try:
            found = communication.parse(self.communication)
        except ValueError as error:
            return [f"{subject}, but {error}: correct it, or set it to null"]
        problems = []
        if (found.num_workers or 1) > self.global_batch_size:
            problems.append(
                f"{subject}, but global_batch_size is {self.global_batch_size}, so that workers have no sample: set that to "
                f"{found.num_workers} or more"
            )
        if self.batch_schedule is not None:
            problems.append(
                f"{subject}, but batch_schedule is {format_value(self.batch_schedule)}: set one of them to null"
            )
        if self.accumulation == "optimizer":
            problems.append(
                f"{subject}, but accumulation is optimizer, whose gradients are in the moments before workers exchange them: "
                "set it to gradient"
            )
        if found.is_local and self.optimizer_name == "muon":
            problems.append(
                f"{subject}, but optimizer is muon, whose matrices are shared out over processes, so that all take a step "
                "together: set it to adamw"
            )
        if getattr(self, "normalization", None) == "batch":
            problems.append(
                f"{subject}, but normalization is batch, whose statistics are of all workers: set it to group or frozen"
            )
        return problems

    @property
    def exchange(self) -> Communication | None:
        """The recipe's `communication`, read; None: the exact step."""
        return None if self.communication is None else communication.parse(self.communication)

    def _problems_of_batch_schedule(self) -> list[str]:
        if self.batch_schedule is None:
            return []
        subject, batch = f"batch_schedule is {format_value(self.batch_schedule)}", self.global_batch_size
        try:
            growth = batch_schedule.parse(self.batch_schedule)
        except ValueError as error:
            return [f"{subject}, but {error}: correct it, or set it to null"]
        problems = []
        if growth.kind == "stages" and growth.sizes[-1] != batch:
            problems.append(
                f"{subject}, but global_batch_size is {batch}, which is the largest batch: set it to {growth.sizes[-1]}"
            )
        if growth.kind != "stages" and growth.sizes[0] >= batch:
            problems.append(f"{subject}, but it grows to global_batch_size {batch}: set that to more")
        if growth.kind == "seesaw" and self.lr_scheduler_type == "constant":
            problems.append(
                f"{subject}, which grows as the learning rate falls, but lr_scheduler_type is constant: choose another one"
            )
        if growth.kind == "noise" and self.max_train_steps is not None:
            problems.append(
                f"{subject}, so that nobody knows yet how many steps there will be, but max_train_steps is "
                f"{self.max_train_steps}: give num_train_epochs instead"
            )
        if growth.unit == "tokens" and self.tokens_per_sample is None:
            problems.append(
                f"{subject}, but samples of this recipe have different numbers of tokens: give shares of the training, or "
                "samples"
            )
        if self.lr_scaling_rule != "none":
            hint = (
                ""
                if growth.kind == "seesaw"
                else "; `, rate by sqrt` in batch_schedule makes the learning rate follow the batch"
            )
            problems.append(
                f"{subject}, but lr_scaling_rule is {self.lr_scaling_rule}, which knows one batch: set it to none{hint}"
            )
        if self.lr_num_steps is not None or self.lr_first_step:
            problems.append(
                f"{subject}, so that the learning rate counts samples, but lr_num_steps or lr_first_step counts steps of "
                "another training: set them to null and 0"
            )
        return problems

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

        The places of the data are not among them: the data pipeline fingerprints the data's content.
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["decides"]}
        return dict(json.loads(json.dumps(values)))

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

    @property
    def model_in_words(self) -> str:
        """What a description says of the model behind the task: from which weights, and what of it is trained."""
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
        found = self.exchange
        if found is not None and found.is_local:  # a rehearsal saves a checkpoint after an exchange
            found = dataclasses.replace(found, num_steps=1)
        shape = {
            **(self.small_shape if shape is None else shape),
            "communication": None if found is None else str(found),
        }
        return dataclasses.replace(self, **shape, global_batch_size=batch, batch_schedule=growth)

    def scaled_hyperparameters(self) -> scaling.Hyperparameters:
        """Scale learning rate, betas and eps to this recipe's global batch, by its scaling rule.

        Raises:
            UsageError: the rule does not reach so far.
        """
        tuned = scaling.Hyperparameters(self.learning_rate, self.adam_beta1, self.adam_beta2, self.adam_epsilon)
        return scaling.scale(self.lr_scaling_rule, tuned, self.learning_rate_batch_size, self.global_batch_size)

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
            tenth = schedule.warmup_steps(
                num_warmup_steps=None,
                warmup_epochs=None,
                warmup_ratio=0.1,
                num_steps=num_steps,
                steps_per_epoch=steps_per_epoch,
            )
            steps, ratio = (tenth, 0.1) if tenth <= longest else (0, 0)
            remedy = f"give --num_warmup_steps {steps} or --warmup_ratio {ratio}, or train longer"
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
        values = json.loads(json.dumps(dataclasses.asdict(self)))
        return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPretraining(Recipe):
    """What recipes that pretrain on documents share: where the text is, what is held out, the vocabulary."""

    extra: ClassVar[str | None] = "text"

    # Optimizer
    optimizer: str = setting(
        "adamw, or muon: matrices of layers by Muon (kellerjordan.github.io/posts/muon), embeddings, head, gains and biases by "
        "AdamW",
        choice("adamw", "muon"),
    )
    muon_learning_rate: float | None = setting(
        "peak learning rate of matrices at learning_rate_batch_size, of AdamW's size (updates are multiplied by 0.2 "
        "sqrt(max(rows, columns)), 2502.16982); it follows learning_rate's schedule and scaling; null with adamw",
        POSITIVE,
    )
    muon_momentum: float | None = setting("decay of Muon's momentum per step; null with adamw", FRACTION)
    muon_weight_decay: float | None = setting(
        "decoupled weight decay of matrices under Muon; null with adamw", NOT_NEGATIVE
    )

    # Data
    train_file: tuple[str, ...] | None = setting("training documents: txt, jsonl, csv, parquet; globs", decides=False)
    validation_file: tuple[str, ...] | None = setting("held-out documents; null: validation_fraction", decides=False)
    dataset_name: str | None = setting("builtin/python_docs, or a dataset of the hub", decides=False)
    dataset_config_name: str | None = setting("configuration of the hub dataset", decides=False)
    text_column: str = setting("column that holds a document's text (not for txt)", decides=False)
    txt_documents: str = setting(
        "documents of a txt file: blocks (blank lines separate them), files (it is one) or auto (files where several txt files "
        "are given, else blocks)",
        choice("auto", "blocks", "files"),
        decides=False,
    )
    validation_fraction: float = setting("fraction of the text held out, unless validation_file is set", FRACTION)
    validation_split: str = setting(
        "what is held out: random (documents drawn by the seed) or tail (the end of the text, by characters)",
        choice("random", "tail"),
    )
    tokenizer_name: str | None = setting("tokenizer to load; null: train one on the corpus", decides=False)
    vocab_size: int = setting("vocabulary: of the tokenizer to train, or expected of the one loaded", VOCABULARY)

    def problems(self) -> list[str]:
        problems, is_muon = super().problems(), self.optimizer == "muon"
        for name in MUON:
            if (getattr(self, name) is None) == is_muon:
                rule = "must be a number" if is_muon else "must be null"
                problems.append(f"{name} is {getattr(self, name)}, but with optimizer {self.optimizer} it {rule}")
        if is_muon and self.accumulation == "optimizer":
            problems.append(
                "accumulation is optimizer, but optimizer is muon, which needs the whole gradient of a matrix at once: set "
                "accumulation to gradient, or optimizer to adamw"
            )
        return problems


def _check_multiple(recipe: Any, field: str, divisor: str) -> list[str]:
    """Return the problem that a field is no multiple of another one, if so."""
    value, number = getattr(recipe, field), getattr(recipe, divisor)
    return [f"{field} {value} is not a multiple of {divisor} {number}: change one of them"] if value % number else []


def _check_order(recipe: Any, field: str, limit: str) -> list[str]:
    """Return the problem that a field exceeds another one, if so."""
    value, most = getattr(recipe, field), getattr(recipe, limit)
    return [f"{field} {value} exceeds {limit} {most}: lower the first or raise the second"] if value > most else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertRecipe(Recipe):
    """What recipes that train a BERT share: how text becomes samples, and the model's shape."""

    # Data
    tokenizer_name: str | None = setting("tokenizer to load; null: train one on the corpus", decides=False)
    vocab_size: int = setting("vocabulary: of the tokenizer to train, or expected of the one loaded", VOCABULARY)
    do_lower_case: bool = setting("lower-case and strip accents")
    max_seq_length: int = setting("tokens per sample, [CLS] and both [SEP] included", limit(2**24, 8))

    # Model
    model_name_or_path: str | None = setting("weights to start from; null: random", decides=False)
    hidden_size: int = setting("width", WIDTH)
    num_hidden_layers: int = setting("layers", LAYERS)
    num_attention_heads: int = setting("heads; divides hidden_size", WIDTH)
    intermediate_size: int = setting("width of the feed-forward layer", WIDTH)
    hidden_act: str = setting("activation of the feed-forward layer", choice(*ACTIVATIONS))
    max_position_embeddings: int = setting("positions; at least max_seq_length", LENGTH)
    hidden_dropout_prob: float = setting("dropout, drawn by sample", FRACTION)
    attention_probs_dropout_prob: float = setting(
        "attention dropout, drawn by sample where attention is eager", FRACTION
    )
    initializer_range: float = setting("standard deviation of the initial weights", POSITIVE)
    layer_norm_eps: float = setting("eps of the layer normalisation", POSITIVE)

    def problems(self) -> list[str]:
        return [
            *super().problems(),
            *_check_multiple(self, "hidden_size", "num_attention_heads"),
            *_check_order(self, "max_seq_length", "max_position_embeddings"),
        ]

    @property
    def small_shape(self) -> dict[str, Any]:
        shape: dict[str, Any] = {"num_hidden_layers": min(2, self.num_hidden_layers), "model_name_or_path": None}
        shape |= {"tokenizer_name": self.tokenizer_name or self.model_name_or_path}
        if self.hidden_size > 64:
            shape |= {
                "hidden_size": 64,
                "num_attention_heads": 2,
                "intermediate_size": min(256, self.intermediate_size),
            }
        return shape

    @property
    def architecture(self) -> dict[str, Any]:
        """The model's shape, as `transformers.BertConfig` takes it."""
        names = [field.name for field in dataclasses.fields(BertRecipe)]
        return {name: getattr(self, name) for name in ["vocab_size", *names[names.index("hidden_size") :]]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertPretraining(BertRecipe, TextPretraining):
    """BERT pretraining: masked language modelling and next-sentence prediction on pairs of segments."""

    # Data
    short_seq_probability: float = setting("share of the pairs cut to a random shorter length", PROBABILITY)
    next_sentence_probability: float = setting("share of the pairs whose second segment truly follows", PROBABILITY)
    mlm_probability: float = setting(
        "share of a sample's tokens to predict (80 % [MASK], 10 % random, 10 % kept)", PROBABILITY
    )

    # Loss
    mlm_loss_weight: float = setting(
        "weight of the masked-token loss (mean over the step's masked tokens)", NOT_NEGATIVE
    )
    nsp_loss_weight: float = setting("weight of the next-sentence loss (mean over the step's pairs)", NOT_NEGATIVE)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of each loss term."""
        return {"mlm": self.mlm_loss_weight, "nsp": self.nsp_loss_weight}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBertPretraining(TextPretraining):
    """ModernBERT pretraining: masked language modelling on runs of sentences, without next-sentence prediction."""

    # Data
    do_lower_case: bool = setting("lower-case and strip accents")
    max_seq_length: int = setting("tokens per sample, [CLS] and [SEP] included", limit(2**24, 8))
    short_seq_probability: float = setting("share of the samples cut to a random shorter length", PROBABILITY)
    mlm_probability: float = setting(
        "share of a sample's tokens to predict (80 % [MASK], 10 % random, 10 % kept)", PROBABILITY
    )

    # Model
    hidden_size: int = setting("width", WIDTH)
    num_hidden_layers: int = setting("layers", LAYERS)
    num_attention_heads: int = setting("heads; divides hidden_size", WIDTH)
    intermediate_size: int = setting("width of the gated feed-forward layer (GeGLU)", WIDTH)
    max_position_embeddings: int = setting("positions; at least max_seq_length", LENGTH)
    global_attn_every_n_layers: int = setting(
        "every n-th layer, from the first, attends to the whole sample, the others to local_attention tokens", LAYERS
    )
    local_attention: int = setting("tokens that a layer with a window sees, half of them on each side", limit(2**24, 2))
    global_rope_theta: float = setting("base of the rotary positions of layers that see all", POSITIVE)
    local_rope_theta: float = setting("base of the rotary positions of layers with a window", POSITIVE)
    initializer_range: float = setting("standard deviation of the initial weights", POSITIVE)
    norm_eps: float = setting("eps of the layer normalisation", POSITIVE)

    def problems(self) -> list[str]:
        problems, heads = super().problems(), self.num_attention_heads
        if self.hidden_size % (2 * heads):
            problems.append(
                f"hidden_size {self.hidden_size} is not an even multiple of num_attention_heads {heads}: change one of them"
            )
        return problems + _check_order(self, "max_seq_length", "max_position_embeddings")

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of the only loss term."""
        return {"mlm": 1.0}

    @property
    def small_shape(self) -> dict[str, Any]:
        shape: dict[str, Any] = {"num_hidden_layers": min(2, self.num_hidden_layers)}
        if self.hidden_size > 64:
            shape |= {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
        return shape

    @property
    def architecture(self) -> dict[str, Any]:
        """The model's shape, as `transformers.ModernBertConfig` takes it."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in ["vocab_size", *names[names.index("hidden_size") :]]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextClassification(BertRecipe):
    """Fine-tuning BERT: a label, or a number, of a text or a pair of texts."""

    extra: ClassVar[str | None] = "text"

    # Data
    train_file: tuple[str, ...] | None = setting("labelled texts: csv, tsv, jsonl, parquet; globs", decides=False)
    validation_file: tuple[str, ...] | None = setting("held-out texts; null: validation_fraction", decides=False)
    dataset_name: str | None = setting("builtin/python_docs_parts, or a dataset of the hub", decides=False)
    dataset_config_name: str | None = setting("configuration of the hub dataset (of GLUE: the task)", decides=False)
    validation_split_name: str | None = setting(
        "split of the hub dataset that is held out; null: validation_fraction", decides=False
    )
    text_column: str | None = setting("column of the text; null: found by its name", decides=False)
    text_pair_column: str | None = setting(
        "column of the second text of a pair; null: found by its name, when text_column is null too", decides=False
    )
    label_column: str | None = setting("column of the label; null: found by its name", decides=False)
    validation_fraction: float = setting("fraction of the texts held out, unless others are named", FRACTION)
    num_labels: int | None = setting("classes; null: those of the training texts; 1: the label is a number", VOCABULARY)

    # What is trained, and how it is judged
    layerwise_lr_decay: float = setting(
        "learning rate of a layer / of the layer above it; 1: all the same",
        ("must lie in (0, 1]", lambda v: 0 < v <= 1),
    )
    freeze_embeddings: bool = setting("leave the embeddings as they are")
    metrics: tuple[str, ...] = setting("metrics of the held-out texts: ours, or of the hub", decides=False)

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.freeze_embeddings and self.model_name_or_path is None:
            problems.append("freeze_embeddings is true, but model_name_or_path is not set: they would stay random")
        if self.text_pair_column is not None and self.text_column is None:
            problems.append("text_pair_column is set, but text_column is not: name both, or neither")
        if not self.metrics:
            problems.append("metrics is empty: name at least one, for example accuracy")
        return problems

    @property
    def small_shape(self) -> dict[str, Any]:
        return super().small_shape | {"freeze_embeddings": False}

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of the only loss term: cross-entropy, or the squared error of a number."""
        return {"label": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalPretraining(TextPretraining):
    """What recipes that pretrain by next tokens share: how documents become samples."""

    # Data
    tokenizer: str = setting(
        "tokenizer to train when tokenizer_name is null: byte_level_bpe or characters",
        choice("byte_level_bpe", "characters"),
    )
    block_size: int = setting("tokens per sample, all of them predicted but the first of a document", LENGTH)
    packing: bool = setting("true: documents one after the other, cut into blocks; false: a document, cut, per sample")
    document_mask: bool = setting("attention and positions stay inside a document of a block")

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.document_mask and not self.packing:
            problems.append(
                "document_mask is true, but without packing a sample never holds two documents: set it to false"
            )
        return problems

    @property
    def tokens_per_sample(self) -> int | None:
        return self.block_size if self.packing else None

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of the only loss term."""
        return {"lm": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2Pretraining(CausalPretraining):
    """GPT-2 pretraining: causal language modelling."""

    # Model
    model_name_or_path: str | None = setting("weights to start from; null: random", decides=False)
    n_positions: int = setting("positions; at least block_size", LENGTH)
    n_embd: int = setting("width", WIDTH)
    n_layer: int = setting("layers", LAYERS)
    n_head: int = setting("heads; divides n_embd", WIDTH)
    activation_function: str = setting(
        "activation of the feed-forward layer; gelu_pytorch_tanh is GPT-2's gelu_new in one kernel",
        choice("gelu_pytorch_tanh", "gelu_new", "gelu", "relu", "silu"),
    )
    resid_pdrop: float = setting("dropout after each layer, drawn by sample", FRACTION)
    embd_pdrop: float = setting("dropout of the embeddings, drawn by sample", FRACTION)
    attn_pdrop: float = setting("attention dropout, drawn by sample where attention is eager", FRACTION)
    initializer_range: float = setting("standard deviation of the initial weights", POSITIVE)
    layer_norm_epsilon: float = setting("eps of the layer normalisation", POSITIVE)

    def problems(self) -> list[str]:
        return [
            *super().problems(),
            *_check_multiple(self, "n_embd", "n_head"),
            *_check_order(self, "block_size", "n_positions"),
        ]

    @property
    def small_shape(self) -> dict[str, Any]:
        shape: dict[str, Any] = {"n_layer": min(2, self.n_layer), "model_name_or_path": None}
        shape |= {"tokenizer_name": self.tokenizer_name or self.model_name_or_path}
        return shape | ({"n_embd": 64, "n_head": 2} if self.n_embd > 64 else {})

    @property
    def architecture(self) -> dict[str, Any]:
        """The model's shape, as `transformers.GPT2Config` takes it."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in ["vocab_size", *names[names.index("n_positions") :]]}


def _find_problems_of_decoder(recipe: Any, length: str) -> list[str]:
    """Find what is wrong with the shape of a decoder; `length` names the field of the longest sample."""
    is_grouped = recipe.num_key_value_heads is not None
    return [
        *_check_multiple(recipe, "hidden_size", "num_attention_heads"),
        *(_check_multiple(recipe, "num_attention_heads", "num_key_value_heads") if is_grouped else []),
        *_check_order(recipe, length, "max_position_embeddings"),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLmPretraining(CausalPretraining):
    """Pretraining of a causal language model of any architecture of transformers, from random weights."""

    # Model
    architecture: str = setting("model_type of transformers: qwen3, llama, ...")
    hidden_size: int = setting("width", WIDTH)
    num_hidden_layers: int = setting("layers", LAYERS)
    num_attention_heads: int = setting("heads; divides hidden_size", WIDTH)
    num_key_value_heads: int | None = setting("heads of keys and values; null: num_attention_heads", WIDTH)
    intermediate_size: int = setting("width of the feed-forward layer", limit(2**20))
    max_position_embeddings: int = setting("positions; at least block_size", LENGTH)
    tie_word_embeddings: bool = setting("whether the head is the embedding's matrix")
    initializer_range: float = setting("standard deviation of the initial weights", POSITIVE)
    zero_init_projections: bool = setting(
        "begin with zeros in the last matrix of attention and of the feed-forward layer, so that every layer passes on what it "
        "gets"
    )

    def problems(self) -> list[str]:
        return super().problems() + _find_problems_of_decoder(self, "block_size")

    @property
    def small_shape(self) -> dict[str, Any]:
        shape: dict[str, Any] = {"num_hidden_layers": min(2, self.num_hidden_layers)}
        if self.hidden_size > 64:
            shape |= {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
            shape |= {"num_key_value_heads": None if self.num_key_value_heads is None else 2}
        return shape

    @property
    def shape(self) -> dict[str, Any]:
        """The model's shape, as transformers' configuration of `architecture` takes it."""
        return {name: getattr(self, name) for name in CausalLmFineTuning.SHAPE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLmFineTuning(Recipe):
    """Fine-tuning a causal language model: all of it or adapters (LoRA), on conversations or on preferences."""

    extra: ClassVar[str | None] = "text"

    # Optimizer
    optimizer: str = setting(
        "adamw, or adamw_8bit: its moments are rounded to 8 bits in blocks of 256, so it is another optimizer than AdamW; 2 "
        "bytes per trained parameter instead of 8",
        choice("adamw", "adamw_8bit"),
    )

    # Data
    train_file: tuple[str, ...] | None = setting("conversations or pairs: jsonl, csv, parquet; globs", decides=False)
    validation_file: tuple[str, ...] | None = setting("held-out ones; null: validation_fraction", decides=False)
    dataset_name: tuple[str, ...] | None = setting(
        f"{', '.join(DRAWN)}, builtin/doctests, datasets of the hub (NAME, NAME:CONFIG, NAME:CONFIG:SPLIT), or data files",
        decides=False,
    )
    dataset_config_name: str | None = setting(
        "configuration of the hub dataset, or level of drawn data: easy, medium or hard; null with several datasets",
        decides=False,
    )
    columns: tuple[str, ...] | None = setting(
        "NAME=COLUMN for columns that are called otherwise, such as messages=chat,prompt=ask; unused=COLUMN leaves one out; "
        "null: all have known names",
        decides=False,
    )
    mixture_weights: tuple[float, ...] | None = setting(
        "passes over each source in an epoch, a source being an entry of dataset_name or train_file: 2 uses each sample twice, "
        "0.5 half of them, the next epoch the others; null: each sample once",
        WEIGHTS,
    )
    validation_fraction: float = setting(
        "fraction of the samples held out, drawn by the seed; not used with validation_file or builtin data", FRACTION
    )
    num_train_samples: int | None = setting("samples to draw; null with other data", POSITIVE, decides=False)
    num_validation_samples: int | None = setting(
        "held-out samples to draw beside them; null with other data", POSITIVE, decides=False
    )
    chat_template: str | None = setting(
        "file of a chat template (Jinja), chatml, or tulu (roles as text, for base models); null: the tokenizer's, and chatml "
        "for a tokenizer that is trained",
        decides=False,
    )
    train_on: str = setting(
        "tokens that are predicted: assistant (all turns of the assistant; beside a prompt the completion), completions (the "
        "last answer alone), or all (of the sample)",
        choice("completions", "assistant", "all"),
    )
    max_seq_length: int = setting("tokens of a sequence", limit(2**24, 2))
    truncation: str = setting("of longer sequences: cut (their ends) or drop (leave them out)", choice("cut", "drop"))

    # Objective
    objective: str = setting(
        "sft (next tokens), or of pairs: dpo (2305.18290), orpo (2403.07691), simpo (2405.14734), reward (Bradley-Terry)",
        choice("sft", "dpo", "orpo", "simpo", "reward"),
    )
    loss_weighting: str = setting("of sft: token (each counts the same) or sample", choice("token", "sample"))
    preference_beta: float = setting("beta of dpo and simpo", POSITIVE)
    preference_margin: float = setting("gamma of simpo: log-odds by which the chosen answer should lead", NOT_NEGATIVE)
    preference_weight: float = setting(
        "lambda of orpo: weight of the odds ratio beside the loss of tokens", NOT_NEGATIVE
    )
    sft_loss_weight: float = setting("weight of the loss of chosen tokens beside dpo; 0: none", NOT_NEGATIVE)

    # Model
    tokenizer_name: str | None = setting(
        "tokenizer to load; null: that of model_name_or_path, or one trained on the samples", decides=False
    )
    vocab_size: int | None = setting(
        "vocabulary: of the tokenizer to train, or rows of the embedding; null: those of the model or of tokenizer_name",
        VOCABULARY,
    )
    model_name_or_path: str | None = setting(
        "weights to start from, which decide the shape; null: random, of the shape below", decides=False
    )
    architecture: str | None = setting("model_type of transformers: llama, qwen3, gpt2, ...; null with weights")
    hidden_size: int | None = setting("width; null with weights, as all that follow", WIDTH)
    num_hidden_layers: int | None = setting("layers", LAYERS)
    num_attention_heads: int | None = setting("heads; divides hidden_size", WIDTH)
    num_key_value_heads: int | None = setting("heads of keys and values; null: num_attention_heads", WIDTH)
    intermediate_size: int | None = setting("width of the feed-forward layer", limit(2**20))
    max_position_embeddings: int | None = setting("positions; at least max_seq_length", LENGTH)
    tie_word_embeddings: bool | None = setting("whether the head is the embedding's matrix")
    initializer_range: float | None = setting("standard deviation of the initial weights", POSITIVE)
    base_quantization: str | None = setting(
        "nf4: the linear layers below adapters in 4 bits, with double quantisation (QLoRA, 2305.14314), so another base; null: "
        "as they are",
        choice("nf4"),
    )

    # Adapters
    lora_rank: int | None = setting(
        "rank of the adapters that are trained (LoRA, 2106.09685); null: all weights", WIDTH
    )
    lora_alpha: float | None = setting("adapters are scaled by lora_alpha / lora_rank; null without adapters", POSITIVE)
    lora_dropout: float = setting("dropout before adapters, drawn by sample", FRACTION)
    lora_targets: tuple[str, ...] = setting("all-linear, or names of the layers that get adapters")
    use_rslora: bool = setting("scale adapters by lora_alpha / sqrt(lora_rank) (2312.03732)")
    use_dora: bool = setting("train the norms of the weights beside the adapters (DoRA, 2402.09353)")
    modules_to_save: tuple[str, ...] | None = setting("names of modules that are trained whole beside adapters")

    SHAPE: ClassVar[tuple[str, ...]] = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "max_position_embeddings",
        "tie_word_embeddings",
        "initializer_range",
    )
    """Fields of `shape`."""

    def problems(self) -> list[str]:
        return (
            super().problems()
            + self._problems_of_optimizer()
            + self._problems_of_data()
            + self._problems_of_shape()
            + self._problems_of_adapters()
        )

    def _problems_of_optimizer(self) -> list[str]:
        if self.optimizer == "adamw_8bit" and self.accumulation == "optimizer":
            return [
                "accumulation is optimizer, but optimizer is adamw_8bit, whose moments would be rounded in every micro-batch: "
                "set accumulation to gradient, or optimizer to adamw"
            ]
        return []

    def _problems_of_data(self) -> list[str]:
        problems, drawn, names = [], find_drawn(self.dataset_name), self.dataset_name or ()
        for name in DRAWN_SIZES:
            if (getattr(self, name) is None) == bool(drawn):
                rule = "a number of samples" if drawn else "null"
                data = ", ".join(drawn or names) or "files"
                problems.append(f"{name} is {getattr(self, name)}, but with {data} it must be {rule}: set it to {rule}")
        kind = DRAWN[self.objective != "sft"]
        for name in drawn:
            if name.partition(":")[0] != kind:
                problems.append(
                    f"objective is {self.objective}, but dataset_name is {name}, which has no such samples: set dataset_name "
                    f"to {kind}, or another objective"
                )
        if len(names) > 1 and self.dataset_config_name is not None:
            problems.append(
                f"dataset_config_name is {self.dataset_config_name}, but dataset_name names {len(names)} datasets: write "
                "NAME:CONFIG, and set dataset_config_name to null"
            )
        problems += self._problems_of_columns()
        entries = names or self.train_file or ()
        is_mixed = self.dataset_name is not None or self.mixture_weights is not None
        if is_mixed and len(set(entries)) < len(entries):
            twice = next(name for number, name in enumerate(entries) if name in entries[:number])
            problems.append(f"{twice} is named twice: name it once, and set mixture_weights")
        if self.mixture_weights is not None and len(self.mixture_weights) != len(entries):
            problems.append(
                f"mixture_weights has {len(self.mixture_weights)} numbers for {len(entries)} sources "
                f"({', '.join(entries[:MAX_NAMES])}{', ...' if len(entries) > MAX_NAMES else ''}): give one each"
            )
        if self.loss_weighting == "sample" and self.objective != "sft":
            problems.append(
                f"loss_weighting is sample, but objective is {self.objective}, whose pairs count the same anyway: set it to "
                "token"
            )
        if self.sft_loss_weight and self.objective != "dpo":
            problems.append(
                f"sft_loss_weight is {self.sft_loss_weight}, but objective is {self.objective}: set it to 0, or objective to "
                "dpo"
            )
        if self.train_on == "all" and self.objective != "sft":
            problems.append(
                f"train_on is all, but objective is {self.objective}, which compares answers: set it to completions or "
                "assistant"
            )
        return problems

    def _problems_of_columns(self) -> list[str]:
        problems, targets = [], [name for names in COLUMNS.values() for name in names]
        pairs = [word.partition("=") for words in self.columns or () for word in words.split(",")]
        for target, equals, name in pairs:
            if not (target and equals and name):
                problems.append(f"columns has {format_value(target + equals + name)}: write NAME=COLUMN")
            elif target not in (*targets, UNUSED):
                problems.append(
                    f"columns maps {name} to {target[:60]}, which is not read: {nearest(target[:60], targets)}"
                )
        for place, kind in ((0, "to two columns"), (2, "to two names")):
            names = [pair[place] for pair in pairs if pair[place] != UNUSED]
            twice = [name for number, name in enumerate(names) if name in names[:number]]
            problems += [f"columns maps {name} {kind}: leave one out" for name in dict.fromkeys(twice)]
        return problems

    @property
    def column_names(self) -> dict[str, str]:
        """Name of a column in the data -> what `columns` calls it."""
        pairs = [word.partition("=") for words in self.columns or () for word in words.split(",")]
        return {name: target for target, _, name in pairs}

    def _problems_of_shape(self) -> list[str]:
        names = ("architecture", *self.SHAPE)
        if self.model_name_or_path is not None:
            return [
                f"{name} is {getattr(self, name)}, but model_name_or_path is set, whose weights decide it: set {name} to null"
                for name in (*names, "vocab_size")
                if getattr(self, name) is not None
            ]
        problems = [
            f"{name} is null, but model_name_or_path is not set: set one of them"
            for name in names
            if getattr(self, name) is None and name != "num_key_value_heads"
        ]
        if self.vocab_size is None and self.tokenizer_name is None:
            problems.append(
                "vocab_size is null, but neither tokenizer_name nor model_name_or_path is set: set one of them"
            )
        if problems:
            return problems
        return _find_problems_of_decoder(self, "max_seq_length")

    def _problems_of_adapters(self) -> list[str]:
        if self.lora_rank is not None:
            problems = []
            if self.lora_alpha is None:
                problems.append(
                    f"lora_alpha is null, but lora_rank is {self.lora_rank}: set it, for example to {2 * self.lora_rank}"
                )
            if not self.lora_targets or ("all-linear" in self.lora_targets and len(self.lora_targets) > 1):
                problems.append(f"lora_targets is {list(self.lora_targets)}: give all-linear alone, or names of layers")
            if self.use_dora and self.base_quantization is not None:
                problems.append(
                    f"use_dora is true, but base_quantization is {self.base_quantization}, whose weights have no norms: "
                    "set use_dora to false, or base_quantization to null"
                )
            return problems
        values = {
            "base_quantization": None,
            "lora_alpha": None,
            "lora_dropout": 0.0,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
        }
        return [
            f"{name} is {getattr(self, name)}, but lora_rank is null, so that all weights are trained: set {name} to "
            f"{format_value(value)}, or lora_rank to a number"
            for name, value in values.items()
            if getattr(self, name) != value
        ]

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of each loss term: means over tokens (lm, sft), over pairs (preference, odds)."""
        terms = {"sft": {"lm": 1.0}, "orpo": {"sft": 1.0, "odds": self.preference_weight}}
        weights = terms.get(self.objective, {"preference": 1.0})
        return weights | ({"sft": self.sft_loss_weight} if self.sft_loss_weight else {})

    @property
    def model_in_words(self) -> str:
        method = "" if self.lora_rank is None else " by LoRA" if self.base_quantization is None else " by QLoRA"
        return super().model_in_words + method + ("" if self.objective == "sft" else f" ({self.objective})")

    @property
    def shape(self) -> dict[str, Any]:
        """The shape of a model with random weights, as transformers' configuration of `architecture` takes it."""
        return {name: getattr(self, name) for name in self.SHAPE}

    @property
    def small_shape(self) -> dict[str, Any]:
        small: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        small |= {"intermediate_size": 128}
        if self.model_name_or_path is None:
            assert self.hidden_size is not None  # as no checkpoint gives it
            assert self.num_hidden_layers is not None
            small = small if self.hidden_size > 64 else {}
            if self.num_key_value_heads is None:
                small.pop("num_key_value_heads", None)
            return small | {"num_hidden_layers": min(2, self.num_hidden_layers)}
        small |= {"model_name_or_path": None, "tokenizer_name": self.tokenizer_name or self.model_name_or_path}
        small |= {"architecture": "llama", "num_hidden_layers": 2, "max_position_embeddings": self.max_seq_length}
        return small | {"tie_word_embeddings": True, "initializer_range": 0.02}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageRecipe(Recipe):
    """What recipes that learn from images share: SGD beside AdamW, the size of an image, the normalisation."""

    unit: ClassVar[str] = "image"
    extra: ClassVar[str | None] = "images"

    # Optimizer
    optimizer: str = setting("sgd (with momentum) or adamw", choice("sgd", "adamw"))
    sgd_momentum: float | None = setting("decay of SGD's momentum per step; null with adamw", FRACTION)
    # Wider than those of `Recipe`, which mypy refuses
    adam_beta1: float | None = setting(  # type: ignore[assignment]
        "decay of the first moment per step; null with sgd", FRACTION
    )
    adam_beta2: float | None = setting(  # type: ignore[assignment]
        "decay of the second moment per step; null with sgd", FRACTION
    )
    adam_epsilon: float | None = setting(  # type: ignore[assignment]
        "added to the root of the second moment; null with sgd", POSITIVE
    )

    # Data
    num_train_samples: int = setting("images of the training data", POSITIVE)
    image_height: int = setting("pixels", PIXELS)
    image_width: int = setting("pixels", PIXELS)
    num_channels: int = setting("colours of a pixel", PIXELS)

    # Model
    normalization: str = setting(
        "group; batch: its statistics depend on how the step is cut, so the cut is not exact; frozen: batch with the "
        "statistics of model_name_or_path",
        choice("batch", "group", "frozen"),
    )
    exact_batch_norm: bool = setting(
        "batch normalisation by statistics of the whole step, however it is cut: exact, and 9 times slower and more"
    )

    def problems(self) -> list[str]:
        problems = super().problems()
        moments = {"sgd": ("sgd_momentum",), "adamw": ("adam_beta1", "adam_beta2", "adam_epsilon")}
        for optimizer, names in moments.items():
            for name in names:
                if (getattr(self, name) is None) == (optimizer == self.optimizer):
                    rule = "must be a number" if optimizer == self.optimizer else "must be null"
                    problems.append(f"{name} is {getattr(self, name)}, but with optimizer {self.optimizer} it {rule}")
        if self.exact_batch_norm and self.normalization != "batch":
            problems.append(
                f"exact_batch_norm is true, but normalization is {self.normalization}, which is exact: set it to false"
            )
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageClassification(ImageRecipe):
    """Image classification by a ResNet."""

    # Data
    train_dir: str | None = setting("training images: CLASS/NAME.jpg, png, bmp or webp", decides=False)
    validation_dir: str | None = setting("held-out images, as train_dir; null: validation_fraction", decides=False)
    dataset_name: str | None = setting("builtin/digits, or a dataset of the hub", decides=False)
    dataset_config_name: str | None = setting("configuration of the hub dataset", decides=False)
    validation_fraction: float = setting(
        "fraction of the images held out, drawn by the seed; not used with validation_dir or a validation split of the hub",
        FRACTION,
    )
    image_mean: tuple[float, ...] = setting("subtracted from each channel, whose values lie in [0, 1]")
    image_std: tuple[float, ...] = setting("each channel is divided by it, after that")
    augmentation: str = setting(
        "of training images, drawn anew in every epoch: none, shift (by up to 1/8, zeros move in) or imagenet (random crop "
        "and flip; of held-out images 7/8 of the short side)",
        choice("none", "shift", "imagenet"),
    )

    # Loss
    label_smoothing: float = setting("share of the target that all classes divide between them", FRACTION)

    # Model
    model_name_or_path: str | None = setting(
        "weights to start from, but for a head of another num_labels; null: random", decides=False
    )
    num_labels: int = setting("classes", VOCABULARY)
    layer_type: str = setting(
        "basic (two 3x3 convolutions) or bottleneck (1x1, 3x3, 1x1)", choice("basic", "bottleneck")
    )
    embedding_size: int = setting("channels of the first convolution", WIDTH)
    hidden_sizes: tuple[int, ...] = setting("channels that each stage ends with", STAGES)
    depths: tuple[int, ...] = setting("blocks of each stage", BLOCKS)

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.validation_dir is not None and self.train_dir is None:
            problems.append(f"validation_dir is {self.validation_dir}, but train_dir is not set: set both or neither")
        if self.num_channels not in (1, 3):
            problems.append(f"num_channels is {self.num_channels}, must be 1 (grey) or 3 (red, green, blue)")
        for name in ("image_mean", "image_std"):
            values = list(getattr(self, name))
            if len(values) != self.num_channels:
                problems.append(f"{name} {values} must hold one number for each of num_channels {self.num_channels}")
        if min(self.image_std, default=1) <= 0:
            problems.append(f"image_std {list(self.image_std)} must be positive numbers")
        if len(self.hidden_sizes) != len(self.depths) or min(*self.hidden_sizes, *self.depths, 1) < 1:
            problems.append(
                f"hidden_sizes {list(self.hidden_sizes)} and depths {list(self.depths)} must be positive, one each per stage"
            )
        if self.layer_type == "bottleneck" and any(size % 4 for size in self.hidden_sizes):
            problems.append(f"hidden_sizes {list(self.hidden_sizes)} must be multiples of 4 with layer_type bottleneck")
        if self.normalization == "frozen" and self.model_name_or_path is None:
            problems.append("normalization is frozen, but model_name_or_path, whose statistics it takes, is not set")
        return problems

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of the only loss term."""
        return {"class": 1.0}

    @property
    def small_shape(self) -> dict[str, Any]:
        shape = {"embedding_size": min(16, self.embedding_size), "depths": (1,) * len(self.depths)}
        shape |= {"hidden_sizes": tuple(min(32, size) for size in self.hidden_sizes), "model_name_or_path": None}
        return shape | ({"normalization": "group"} if self.normalization == "frozen" else {})

    @property
    def architecture(self) -> dict[str, Any]:
        """The model's shape, as `transformers.ResNetConfig` takes it; `normalization` comes on top."""
        names = ("num_channels", "num_labels", "layer_type", "embedding_size")
        lists = {"hidden_sizes": list(self.hidden_sizes), "depths": list(self.depths)}
        return {name: getattr(self, name) for name in names} | lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptchaRecognition(ImageRecipe):
    """Reading the characters of a captcha: convolutions, each halving height and width, and one head per character."""

    num_validation_samples: int = setting("held-out images, drawn beside the training data", POSITIVE, decides=False)
    alphabet: str = setting("the characters that may occur")
    num_characters: int = setting("characters of an image", limit(1000))
    conv_channels: tuple[int, ...] = setting("channels of each convolution", STAGES)
    hidden_size: int = setting("width of the layer between the convolutions and the heads", WIDTH)

    def problems(self) -> list[str]:
        problems = super().problems()
        if not self.conv_channels or min(self.conv_channels) < 1:
            problems.append(f"conv_channels {list(self.conv_channels)} must be positive numbers, at least one")
        elif min(self.image_height, self.image_width) < 2 ** len(self.conv_channels):
            problems.append(
                f"image_height {self.image_height} and image_width {self.image_width} cannot be halved by each of "
                f"{len(self.conv_channels)} conv_channels: give fewer, or larger images"
            )
        if len(set(self.alphabet)) != len(self.alphabet) or not self.alphabet:
            problems.append(f"alphabet {self.alphabet!r} must hold each character once, and at least one")
        if self.num_channels != 3:
            problems.append(
                f"num_channels is {self.num_channels}, but captchas are drawn in red, green and blue: set it to 3"
            )
        if self.normalization == "frozen":
            problems.append(
                "normalization is frozen, but no trained statistics exist for captchas: set it to group or batch"
            )
        return problems

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of each loss term: a whole string's loss is the sum of its characters', and only logged."""
        return {"character": 1.0, "string": 0.0}

    @property
    def small_shape(self) -> dict[str, Any]:
        channels = tuple(min(8, channels) for channels in self.conv_channels)
        return {"conv_channels": channels, "hidden_size": min(32, self.hidden_size)}

    @property
    def architecture(self) -> dict[str, Any]:
        """The model's shape, as `networks.CaptchaReader` takes it."""
        names = (
            "image_height",
            "image_width",
            "num_channels",
            "alphabet",
            "num_characters",
            "hidden_size",
            "normalization",
        )
        return {name: getattr(self, name) for name in names} | {"conv_channels": list(self.conv_channels)}


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


register(
    "bert_pretraining",
    BertPretraining,
    Parts(
        settings="samestep.recipe.run_settings:LanguageModelSettings",
        data="samestep.data.sentence_pairs:build",
        model="samestep.models.bert_pretraining:PretrainingSums",
        shape="stepplan.memory:bert_pretraining",
        script="pretrain_bert.py",
        pipeline_tag="fill-mask",
    ),
)
register(
    "modernbert_pretraining",
    ModernBertPretraining,
    Parts(
        settings="samestep.recipe.run_settings:LanguageModelSettings",
        data="samestep.data.sentence_pairs:build",
        model="samestep.models.modernbert_pretraining:PretrainingSums",
        shape="stepplan.memory:modernbert_pretraining",
        script="pretrain_bert.py",
        pipeline_tag="fill-mask",
    ),
)
register(
    "gpt2_pretraining",
    Gpt2Pretraining,
    Parts(
        settings="samestep.recipe.run_settings:CausalLmSettings",
        data="samestep.data.token_blocks:build",
        model="samestep.models.gpt2_pretraining:PretrainingSums",
        shape="stepplan.memory:gpt2_pretraining",
        script="pretrain_gpt2.py",
        pipeline_tag="text-generation",
    ),
)
register(
    "causal_lm_pretraining",
    CausalLmPretraining,
    Parts(
        settings="samestep.recipe.run_settings:CausalLmSettings",
        data="samestep.data.token_blocks:build",
        model="samestep.models.causal_lm_pretraining:PretrainingSums",
        shape="stepplan.memory:causal_lm_pretraining",
        script="pretrain_gpt2.py",
        pipeline_tag="text-generation",
    ),
)
register(
    "text_classification",
    TextClassification,
    Parts(
        settings="samestep.recipe.run_settings:FineTuningSettings",
        data="samestep.data.labelled_texts:build",
        model="samestep.models.text_classification:ClassificationSums",
        shape="stepplan.memory:text_classification",
        script="finetune_classifier.py",
        pipeline_tag="text-classification",
    ),
)
register(
    "causal_lm_finetuning",
    CausalLmFineTuning,
    Parts(
        settings="samestep.recipe.run_settings:CausalLmFineTuningSettings",
        data="samestep.data.conversations:build",
        model="samestep.models.causal_lm:CausalLmSums",
        shape="stepplan.memory:causal_lm_finetuning",
        script="finetune_causal_lm.py",
        pipeline_tag="text-generation",
    ),
)
register(
    "image_classification",
    ImageClassification,
    Parts(
        settings="samestep.recipe.run_settings:DataSettings",
        data="samestep.data.images:build",
        model="samestep.models.image_classification:ClassificationSums",
        shape="stepplan.memory:image_classification",
        script="train_image_classifier.py",
        pipeline_tag="image-classification",
    ),
)
register(
    "captcha_recognition",
    CaptchaRecognition,
    Parts(
        settings="samestep.recipe.run_settings:RunSettings",
        data="samestep.data.captchas:build",
        model="samestep.models.captcha_recognition:ReadingSums",
        shape="stepplan.memory:captcha_recognition",
        script="train_captcha.py",
    ),
)


def catalog_names() -> list[str]:
    """List the names of the recipes that ship with the package."""
    return sorted(path.stem for path in CATALOG.glob("*.yaml"))


def find_drawn(names: Any) -> list[str]:
    """Find those names of datasets, one or several, whose samples are drawn.

    >>> find_drawn("builtin/drawn_chats"), find_drawn(["a/b", "builtin/drawn_chats:hard"]), find_drawn(None)
    (['builtin/drawn_chats'], ['builtin/drawn_chats:hard'], [])
    """
    entries = [names] if isinstance(names, str) else names or []
    return [name for name in entries if isinstance(name, str) and name.partition(":")[0] in DRAWN]


def overlay(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `changes` over `values`; a value for one of several alternatives clears the others.

    Other training data clears the fields that name parts of the old data: the configuration and the held-out split of another
    dataset; for data of another kind, files instead of a dataset, also the held-out data, and how documents are told apart.
    Weights to start from clear the shape of a causal language model, which they decide.

    >>> overlay({"max_train_steps": 10, "num_train_epochs": None}, {"num_train_epochs": 2})
    {'max_train_steps': None, 'num_train_epochs': 2}
    >>> overlay({"dataset_name": "wiki", "dataset_config_name": "en", "train_file": None}, {"train_file": ["a.txt"]})
    {'dataset_name': None, 'dataset_config_name': None, 'train_file': ['a.txt']}
    """
    merged = dict(values)
    for name in SOURCES:
        if changes.get(name) is not None and changes[name] != values.get(name):
            is_other_kind = values.get(name) is None and any(values.get(source) is not None for source in SOURCES)
            cleared = PARTS_OF_A_DATASET + (HELD_OUT if is_other_kind else ())
            cleared += DRAWN_SIZES if find_drawn(values.get("dataset_name")) and not find_drawn(changes[name]) else ()
            merged.update({field: None for field in cleared if field in merged})
            if is_other_kind and "txt_documents" in merged:
                merged["txt_documents"] = "auto"
    if changes.get("model_name_or_path") is not None and "architecture" in merged:
        merged |= dict.fromkeys((*CausalLmFineTuning.SHAPE, "architecture", "vocab_size"))
    for group in ALTERNATIVES:
        if any(changes.get(name) is not None for name in group):
            merged.update({name: None for name in group if name in merged})
    return merged | dict(changes)


def _change(values: Mapping[str, Any], changes: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Lay `changes` over the values of a recipe, and say in its `source` and `expect` that they are no longer the recipe's.

    A description of other data, or of another model, is left empty, for `load` to write.
    """
    merged = overlay(values, changes)
    names = [name for name in changes if name not in TEXTS and not _is_same(merged[name], values.get(name))]
    if names:
        texts = {"source": f"{origin}, but for {', '.join(names)}", "expect": "not measured with these values"}
        if any(name in DATA or name in MODEL for name in names):
            texts["description"] = ""
        merged |= {name: text for name, text in texts.items() if name not in changes}
    return merged


def _is_same(a: Any, b: Any) -> bool:
    """Tell whether two values of a field, from a file or a flag, are the same.

    >>> _is_same(("a",), ["a"]), _is_same("1e-3", 0.001), _is_same(None, "a")
    (True, True, False)
    """
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    try:
        return float(a) == float(b)
    except (TypeError, ValueError, OverflowError):
        return bool(a == b)


def load(name_or_file: str, changes: Mapping[str, Any] | None = None, *, task: str | None = None) -> Recipe:
    """Load a recipe from the catalog or from a YAML file, strictly.

    Args:
        name_or_file: a catalog name ("bert_base") or a path to a .yaml file. A file may begin with `extends: NAME_OR_FILE`
            and then hold only what differs.
        changes: field -> value, laid over the file's (flags).
        task: refuse a recipe of another task.

    Raises:
        UsageError: unknown recipe, unreadable file, or any broken rule, all problems in one error.
    """
    values = _read(name_or_file, ancestors=())
    kind = values.get("task")
    if not isinstance(kind, str) or kind not in TASKS:
        raise UsageError(
            f"recipe {format_name(name_or_file)}: task is {format_value(kind)}, must be one of {', '.join(TASKS)}"
        )
    if task is not None and kind != task:
        raise UsageError(
            f"recipe {format_name(name_or_file)} is for the task {kind}, this script trains {task}: {_list_choices(task)}"
        )
    values = _change(values, changes or {}, str(values.get("name", name_or_file)))
    recipe: Recipe = build(TASKS[kind], values, f"recipe {format_name(name_or_file)}")
    if not recipe.description:
        subject = (type(recipe).__doc__ or kind).partition(":")[0].rstrip(".")
        place = f" on {recipe.data_name}" if recipe.data_name else ""
        recipe = dataclasses.replace(recipe, description=f"{subject}{recipe.model_in_words}{place}.")
    return recipe


def find_task(name_or_file: str) -> str | None:
    """Find the task of a recipe; None: there is no such recipe, or it names none."""
    try:
        task = _read(name_or_file, ancestors=()).get("task")
    except UsageError:
        return None
    return task if isinstance(task, str) else None


def _list_choices(task: str) -> str:
    return "recipes for it: " + ", ".join(n for n in catalog_names() if _read(n, ancestors=())["task"] == task)


def _read(name_or_file: str, ancestors: Iterable[str]) -> dict[str, Any]:
    """Read a recipe's values, laid over its base's; `ancestors` are the recipes that extend it."""
    is_path = name_or_file.endswith((".yaml", ".yml"))
    if not is_path and name_or_file not in catalog_names():
        hint = nearest(name_or_file, catalog_names())
        raise UsageError(
            f"unknown recipe {format_value(name_or_file)}: {hint}{'' if hint.endswith('?') else '.'} Another model of its kind "
            "trains with --model_name_or_path MODEL added; a recipe of your own is a .yaml file"
        )
    path = Path(name_or_file) if is_path else CATALOG / f"{name_or_file}.yaml"
    if name_or_file in ancestors:
        raise UsageError(
            f"recipe {format_name(name_or_file)} extends itself through {' -> '.join(ancestors)}: remove one `extends`"
        )
    values = {"name": path.stem} | read_yaml(path, f"recipe {format_name(path)}")
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise UsageError(
            f"recipe {format_name(path)}: extends is {format_value(base)}, must be a recipe's name or file"
        )
    if str(base).endswith((".yaml", ".yml")):
        base = path.parent / base
    base_values = _read(str(base), (*ancestors, name_or_file))
    is_shipped = path.parent == CATALOG  # such a recipe speaks for itself
    return overlay(base_values, values) if is_shipped else _change(base_values, values, str(base))
