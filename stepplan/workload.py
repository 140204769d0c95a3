"""The subject of a plan: a model, its global batch, and the bytes that the optimizer keeps and moves."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from samestep.cut import layout as layouts
from samestep.cut.layout import Layout
from samestep.errors import UsageError
from samestep.recipe.catalog import name_changed
from samestep.recipe.exclusions import find_refusal
from samestep.recipe.extras import require
from samestep.recipe.recipe import Recipe
from samestep.recipe.rules import Refusal
from samestep.recipe.schedule import LearningRates
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from samestep.recipe.tasks.decoder import check_module_names
from samestep.recipe.tasks.images import ImageRecipe
from samestep.recipe.variants import Algorithm
from stepplan.base_models import UnknownShapeError
from stepplan.convnet import ConvNet
from stepplan.decoder import Decoder
from stepplan.memory import (
    MOMENTS,
    Memory,
    Model,
    count_trained,
    count_weight_bytes,
    model_from_recipe,
    planned_memory,
)
from stepplan.peers import Elsewhere
from stepplan.stacks import EncoderDecoder
from stepplan.transformer import Transformer

UPDATE = {"adamw": 28, "sgd": 20, "adamw_8bit": 16, "muon": 40}
"""Bytes that an update moves per trained parameter: AdamW reads p, g, m, v and writes p, m, v; SGD p, g, m and p, m; Muon, of
matrices, g, m twice and writes m and what is orthogonalized, then reads that and p, and writes p twice."""
CLIPPING = 12
"""Bytes that clipping moves per parameter: it reads the gradient twice and writes it."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """The computation that hardware is chosen for.

    Attributes:
        name: name of the recipe, or of the model's configuration.
        model: shape of the model.
        global_batch_size: B; the largest one where the batch grows.
        num_steps: optimizer steps to the end; None where that depends on data that nobody has counted yet.
        steps_per_epoch: optimizer steps of an epoch; None likewise.
        schedule: the learning rate of each step; None likewise.
        sizes: of a batch that grows, (steps, samples of each) one after the other; empty: all steps have B samples.
        script: file in scripts/ that trains it; None: this repository has none.
        script_words: what names it to the script, as words of a command line: the recipe, and every field that was changed.
        hint: sentence about that, where `script` is None.
        moment_bytes: bytes per parameter that the optimizer remembers.
        gradient_bytes: bytes per parameter of gradients between micro-batches.
        optimizer_bytes: bytes per parameter that clipping and update move.
        second_moment: how the optimizer estimates its second moment; None: it does not.
        batch_normalization: whether statistics depend on the micro-batch.
        critical_batch_size: global batch beyond which samples are wasted; None: unknown.
        may_shard: whether its program can shard weights (FSDP2).
        optimizer: its name.
        base_quantization: in what frozen weights are kept, as of the recipe; None: whole.
        download_bytes: bytes of the weights that training starts from; 0: random ones.
        orthogonalized: rows and columns of the matrices that Muon updates.
        communication: the recipe's; None: the exact step.
        elsewhere: how a program that is not this repository's trains it; None: one of ours does.
        reads_shards: whether processes that divide the weights read their own rows only of the files to start from.
    """

    name: str
    model: Model
    global_batch_size: int
    num_steps: int | None = None
    steps_per_epoch: float | None = None
    schedule: LearningRates | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    script: str | None = None
    script_words: tuple[str, ...] = ()
    hint: str = "No script of this repository trains it."
    moment_bytes: float = MOMENTS["adamw"]
    gradient_bytes: int = 4
    optimizer_bytes: int = UPDATE["adamw"] + CLIPPING
    second_moment: str | None = None
    batch_normalization: bool = False
    critical_batch_size: float | None = None
    may_shard: bool = True
    optimizer: str = "adamw"
    base_quantization: str | None = None
    download_bytes: int = 0
    orthogonalized: tuple[tuple[int, int], ...] = ()
    communication: Algorithm | None = None
    reads_shards: bool = False
    elsewhere: Elsewhere | None = None

    def move(self, elsewhere: Elsewhere) -> "Workload":
        """Return the same training by another program, for which there is no command."""
        return dataclasses.replace(
            self,
            model=elsewhere.adapt(self.model),
            elsewhere=elsewhere,
            script=None,
            hint=elsewhere.hint,
            moment_bytes=elsewhere.moment_bytes,
            gradient_bytes=elsewhere.weight_bytes,
        )

    @property
    def num_samples(self) -> int | None:
        """Samples to the end, each epoch's counted again; None where `num_steps` is."""
        sizes = self.sizes or ((self.num_steps, self.global_batch_size),)
        return None if self.num_steps is None else sum(number * size for number, size in sizes)

    @property
    def state_bytes(self) -> int:
        """Bytes of the weights as they are kept, and of gradients and moments of those that are trained."""
        trained = round((self.gradient_bytes + self.moment_bytes) * count_trained(self.model))
        return count_weight_bytes(self.model) + trained

    def find_refusal(self, mixed_precision: str, is_sharded: bool, num_processes: int = 1) -> Refusal | None:
        """Find what the program that trains it has against a launch; None: nothing."""
        if self.elsewhere is not None:
            return None
        recipe = SimpleNamespace(
            accumulation="gradient" if self.gradient_bytes else "optimizer",
            optimizer_name=self.optimizer,
            base_quantization=self.base_quantization,
            communication=self.communication,
        )
        settings = SimpleNamespace(may_shard=self.may_shard)
        launch = {"mixed_precision": mixed_precision, "is_sharded": is_sharded, "num_processes": num_processes}
        return find_refusal(recipe, settings, **launch)

    def memory(self, layout: Layout, **options: Any) -> Memory:
        """Plan the memory that one process needs; `options` as of `memory.planned_memory`."""
        if self.elsewhere is not None:
            return self.elsewhere.plan(self.model, layout, options)
        moment_bytes = self.moment_bytes
        if self.communication is not None:
            moment_bytes += self.communication.count_kept_bytes(layout.num_processes, self.moment_bytes)
        return planned_memory(
            self.model, layout, **options, moment_bytes=moment_bytes, gradient_bytes=self.gradient_bytes
        )


def from_model(
    model: Model,
    name: str,
    *,
    global_batch_size: int,
    optimizer: str = "adamw",
    attention: str = "sdpa",
    **fields: Any,
) -> Workload:
    """Make the workload of a step of any model, without clipping.

    Args:
        model: shape of the model, for example from `configs.model_from_config`.
        name: the model's name, for messages.
        global_batch_size: B.
        optimizer: adamw or sgd, with momentum.
        attention: sdpa or eager, of transformers.
        fields: others of `Workload`.

    Raises:
        UsageError: eager attention for a model without attention.
    """
    return Workload(
        name=name,
        model=_set_attention(model, attention, name),
        global_batch_size=global_batch_size,
        moment_bytes=MOMENTS[optimizer],
        optimizer_bytes=UPDATE[optimizer],
        optimizer=optimizer,
        batch_normalization=isinstance(model, ConvNet) and not model.group_norm,
        **fields,
    )


KERNELS = ("flash_1", "flash_2", "flash_3", "cudnn")
"""Kernels of fused attention, as of `timing.Attention`."""


def set_kernels(workload: Workload, *, compiled: bool, attention_kernel: str | None) -> Workload:
    """Return the workload with layers that are compiled, or with another program's kernel of attention.

    Raises:
        UsageError: the model has no formula that knows of them.
    """
    if not compiled and attention_kernel is None:
        return workload
    if not isinstance(workload.model, Transformer | Decoder | EncoderDecoder):
        flag = "compiled" if compiled else "attention_kernel"
        raise UsageError(f"{flag} is given, but the time of {workload.name} is planned without it: leave it out")
    if attention_kernel is not None and workload.model.eager_attention:
        raise UsageError(f"attention_kernel is {attention_kernel}, but attention is eager: leave one out")
    kernels: dict[str, Any] = {"kernels": "compiled" if compiled else "eager", "attention_kernel": attention_kernel}
    return dataclasses.replace(workload, model=dataclasses.replace(workload.model, **kernels))


def _set_attention(model: Model, attention: str, name: str) -> Model:
    if attention == "sdpa":
        return model
    if not isinstance(model, Transformer | Decoder | EncoderDecoder):
        raise UsageError(f"attn_implementation is {attention}, but {name} has no attention: leave it out")
    return dataclasses.replace(model, eager_attention=True)


def from_recipe(
    recipe: Recipe,
    *,
    source: str | None = None,
    changes: Mapping[str, Any] | None = None,
    attention: str = "sdpa",
    num_train_samples: int | None = None,
    critical_batch_size: float | None = None,
    images: Sequence[tuple[int, int]] | None = None,
    may_trace: bool = False,
) -> Workload:
    """Make the workload of a recipe.

    Args:
        recipe: of a task for which `memory.model_from_recipe` has a formula.
        source: name in the catalog, or the .yaml file, that the recipe was loaded from; None: its name.
        changes: field -> value, laid over it when it was loaded.
        attention: sdpa or eager, of transformers.
        num_train_samples: samples of the training data, where the recipe does not say it.
        critical_batch_size: samples, for a warning.
        images: as of `memory.model_from_recipe`.
        may_trace: whether a decoder without a formula is traced, which takes seconds and torch.

    Raises:
        UsageError: a task without a formula, eager attention for a model without attention, an impossible schedule.
    """
    model = find_model(recipe, images, attention=attention, may_trace=may_trace)
    optimizer = recipe.optimizer_name
    num_samples = num_train_samples or getattr(recipe, "num_train_samples", None)
    num_steps, per_epoch = recipe.max_train_steps, None
    if num_samples is not None:
        exact = layouts.steps_per_epoch(num_samples, recipe.global_batch_size, recipe.epoch_end)
        num_steps, per_epoch = num_steps or layouts.num_steps(exact, recipe.num_train_epochs), float(exact)
    has_schedule = num_steps is not None and (per_epoch is not None or not recipe.counts_warmup_in_epochs)
    plan = None if recipe.batch_schedule is None else recipe.batch_schedule.plan_steps(recipe, num_samples)
    schedule: Any
    if recipe.batch_schedule is None:
        schedule = recipe.schedule(num_steps, per_epoch or 1.0) if has_schedule else None
    else:
        num_steps, schedule = (None, None) if plan is None else (plan.num_steps, plan.schedule)
    return Workload(
        name=name_changed(recipe, changes or {}),
        model=model,
        global_batch_size=recipe.global_batch_size,
        num_steps=num_steps,
        steps_per_epoch=per_epoch,
        schedule=schedule,
        sizes=() if plan is None else tuple(plan.sizes),
        script=recipe.parts.script,
        script_words=("--recipe", source or recipe.name, *format_flags(changes or {})),
        moment_bytes=_count_moment_bytes(model) if optimizer == "muon" else MOMENTS[optimizer],
        orthogonalized=tuple(model.layer_matrices) if optimizer == "muon" and not isinstance(model, ConvNet) else (),
        gradient_bytes=4 if recipe.accumulation == "gradient" else 0,
        second_moment=recipe.second_moment,
        optimizer_bytes=UPDATE[optimizer] + (0 if recipe.max_grad_norm is None else CLIPPING),
        batch_normalization=isinstance(recipe, ImageRecipe)
        and recipe.normalization == "batch"
        and not recipe.exact_batch_norm,
        may_shard=recipe.parts.find("settings").may_shard,
        optimizer=optimizer,
        base_quantization=getattr(recipe, "base_quantization", None),
        download_bytes=_count_download(recipe, model),
        critical_batch_size=critical_batch_size,
        communication=recipe.communication,
        reads_shards=getattr(recipe, "reads_shards", False)
        and isinstance(model, Decoder)
        and not model.shape.num_mixtures,
    )


def find_model(
    recipe: Recipe,
    images: Sequence[tuple[int, int]] | None = None,
    *,
    attention: str = "sdpa",
    may_trace: bool = True,
) -> Any:
    """Find the shape of a recipe's model by its formula, or, of a decoder that has none, by a trace of few layers.

    Arguments and errors are those of `from_recipe`.
    """
    try:
        return _set_attention(model_from_recipe(recipe, images), attention, recipe.name)
    except UnknownShapeError:
        if not may_trace or not isinstance(recipe, CausalLmFineTuning) or recipe.images:
            raise
    require(None, "a model without a formula")
    from stepplan.traced import trace_decoder  # here: it imports torch

    return trace_decoder(recipe, attention)


def from_command(recipe: Recipe, **options: Any) -> Workload:
    """Make the workload of a recipe whose command is printed: what its program would refuse is refused.

    Arguments and errors are those of `from_recipe`. A decoder without a formula is traced.
    """
    workload = from_recipe(recipe, **options, may_trace=True)
    if isinstance(recipe, CausalLmFineTuning) and isinstance(workload.model, Decoder):
        names = workload.model.shape.module_names
        check_module_names(recipe, names, recipe.model_name_or_path or recipe.name)
    return workload


def _count_moment_bytes(model: Any) -> float:
    """Count the bytes per parameter that Muon remembers: one moment of layers' matrices, AdamW's two of the rest."""
    hidden = sum(rows * columns for rows, columns in model.layer_matrices)
    return float(MOMENTS["adamw"] - 4 * hidden / model.num_parameters)


def _count_download(recipe: Recipe, model: Model) -> int:
    """Count the bytes of the weights to start from: on the hub 16 bits a number of a language model, 32 of others."""
    if getattr(recipe, "model_name_or_path", None) is None:
        return 0
    if hasattr(model, "num_adapter") and not isinstance(model, EncoderDecoder):
        return 2 * (model.num_parameters - model.num_adapter)
    return 4 * model.num_parameters


def format_flags(values: Mapping[str, Any]) -> list[str]:
    """Write settings as the words of a command line that sets them, for the parser of flags to read back.

    Args:
        values: field -> value; a list is of texts or numbers.

    >>> format_flags({"max_seq_length": 512, "train_file": ["a b.txt", "c.txt"], "min_lr_ratio": -1, "do_lower_case": True})
    ['--max_seq_length', '512', '--train_file', 'a b.txt', 'c.txt', '--min_lr_ratio=-1', '--do_lower_case', 'true']
    >>> format_flags({"max_train_steps": None})
    ['--max_train_steps', 'none']
    """
    words = []
    for name, value in values.items():
        items = list(value) if isinstance(value, list | tuple) else [value]
        texts = [str(item).lower() if item is None or isinstance(item, bool) else str(item) for item in items]
        is_joined = len(texts) == 1 and texts[0].startswith("-")  # a word of its own would be read as a flag
        words += [f"--{name}={texts[0]}"] if is_joined else [f"--{name}", *texts]
    return words
