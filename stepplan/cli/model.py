"""Describes models of Hugging Face that no recipe trains: their flags, their workload, a recipe that fine-tunes them."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from samestep.cli.flags import build_each, make_subject_parser
from samestep.cut import layout as layouts
from samestep.errors import UsageError
from samestep.recipe import pretrained_shape
from samestep.recipe.extras import require
from samestep.recipe.recipe import Recipe
from samestep.recipe.scaling import RULES
from samestep.recipe.settings import BATCH, LENGTH, POSITIVE, choice, program_name, setting
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from stepplan.base_models import find_config, find_num_positions, is_decoder, shape_from_config
from stepplan.configs import IMAGE, find_class, has_formula, model_from_config
from stepplan.methods import STARTING_RECIPE
from stepplan.workload import Workload, from_model

FINE_TUNING = {
    "source": "fine-tuning on conversations; the learning rate is the usual one of all weights where none was given, not tuned",
    "expect": "not measured",
}
"""Texts of a recipe that fine-tunes a model of the hub."""

CAUSAL_LMS = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes of causal language models."""

CONVERSATION_FILE = "chats.jsonl"
"""Name of the data in a command, for the user to replace."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Describe a model of Hugging Face without a recipe, and its training"""

    model_name_or_path: str = setting("folder with a config.json, such a file, or a name on the hub")
    from_scratch: bool | None = setting(
        "true: a decoder is pretrained from random weights, by --depth or --parameters or its configuration. false: weights "
        "of this configuration are fine-tuned. none: they are, where there are some",
        default=None,
    )
    seq_len: int | None = setting("tokens of a sample", LENGTH, default=None)
    target_len: int | None = setting(
        "tokens of a sample's target, of an encoder and a decoder; none: seq_len", LENGTH, default=None
    )
    global_batch_size: int = setting(
        "samples per optimizer step, over all processes and micro-batches", BATCH, default=64
    )
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


def read_model(command: str, argv: list[str], settings_class: type) -> tuple[Any, ModelSettings]:
    """Read the settings of a command, and the settings of a model without a recipe."""
    parser = make_subject_parser(command, "RECIPE", "--model_name_or_path MODEL --global_batch_size B")
    parser.epilog += (
        f"\n\nEvery field of a recipe is a flag: {parser.prog} RECIPE --help shows them, with the recipe's values."
    )
    if command == "plan":
        parser.epilog += (
            f"\n{parser.prog} --what_fits 1x3090 --help and {parser.prog} --from_scratch --help show theirs."
        )
    if not any(word.split("=")[0] in ("--model_name_or_path", "-h", "--help") for word in argv):
        hint = f"it needs a recipe as its first word ({program_name()} list shows them), or --model_name_or_path"
        size = "; for a model of a size that you choose: plan --from_scratch --parameters 400M"
        hint += size if command == "plan" else ""
        raise UsageError(f"{parser.prog}: {hint}")
    classes = [settings_class, ModelSettings]
    for cls in classes:
        parser.add_settings(cls)
    flags = parser.parse(argv)
    return tuple(build_each(flags, classes))


def load_fine_tuning(training: ModelSettings) -> tuple[Recipe, dict[str, Any]]:
    """Load the recipe that fine-tunes a causal language model on conversations; return it, and its changed fields.

    Raises:
        UsageError: no length, or one above the model's number of positions; an optimizer that the program does not have.
    """
    name = training.name
    if training.seq_len is None:
        raise UsageError(f"{name} reads tokens: --seq_len is missing (tokens of a sample, such as 2048)")
    if training.optimizer != "adamw":
        raise UsageError(
            f"optimizer is {training.optimizer}, but scripts/finetune_causal_lm.py trains {name} with AdamW: leave it out"
        )
    config = find_config(training.model_name_or_path)
    if training.from_scratch:
        raise UsageError(
            f"--from_scratch is a flag of plan: plan {name} --from_scratch --write_recipe FILE.yaml writes a recipe to scale"
        )
    if training.from_scratch is None and not may_have_weights(training.model_name_or_path):
        raise UsageError(
            f"{name} holds no weights: --from_scratch plans its pretraining, --from_scratch false fine-tuning with weights "
            "of its shape"
        )
    num_positions = shape_from_config(config, name).max_length if is_decoder(config) else find_num_positions(config)
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


def may_have_weights(name_or_path: str) -> bool:
    """Tell whether a model has weights: a folder that holds some, a name on the hub."""
    path = Path(name_or_path).expanduser()
    return not path.exists() or any(path.glob("*.safetensors")) or any(path.glob("*.bin"))


def make_workload(
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
        critical_batch_size: as of `Workload`.
        attention: as of `workload.from_model`.
        may_trace: whether a model without a formula is traced.
        script_words: what names it to scripts/finetune_causal_lm.py; None: no script trains it.
    """
    if may_trace and not has_formula(config):
        model = import_trace().traced_model(training.model_name_or_path, training.seq_len or IMAGE, attention)
        attention = "sdpa"  # it is in the trace
    else:
        options: dict[str, Any] = {"target_length": training.target_len}
        model = model_from_config(config, training.seq_len, name=training.name, load_defaults=_load_defaults, **options)
    per_epoch, num_steps = None, training.max_train_steps
    if training.num_train_samples is not None:
        per_epoch = layouts.steps_per_epoch(training.num_train_samples, training.global_batch_size, "carry")
        if num_steps is None and training.num_train_epochs:
            num_steps = layouts.num_steps(per_epoch, training.num_train_epochs)
    stored = 2 if config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16") else 4
    fields: dict[str, Any] = {"num_steps": num_steps, "critical_batch_size": critical_batch_size}
    fields |= {"steps_per_epoch": None if per_epoch is None else float(per_epoch)}
    fields |= {"download_bytes": stored * model.num_parameters}
    if is_causal(config):
        fields["hint"] = "scripts/finetune_causal_lm.py fine-tunes it: --write_recipe FILE.yaml writes a recipe for it."
    if script_words:
        model = dataclasses.replace(model, chunked_head=True)
        fields |= {"script": CausalLmFineTuning.parts.script, "script_words": tuple(script_words)}
    batch, optimizer = training.global_batch_size, training.optimizer
    return from_model(model, training.name, global_batch_size=batch, optimizer=optimizer, attention=attention, **fields)


def _load_defaults(model_type: str) -> dict[str, Any]:
    """Load the configuration of transformers for a model of this type, as it is when nothing is given."""
    from transformers import AutoConfig  # here: it takes its time

    return AutoConfig.for_model(model_type).to_dict()


def is_causal(config: Mapping[str, Any]) -> bool:
    return find_class(config).endswith(CAUSAL_LMS)


def import_trace() -> ModuleType:
    require(None, "--trace")
    from stepplan import trace  # here: it imports torch

    return trace
