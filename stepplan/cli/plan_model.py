"""Plans a model of Hugging Face without a recipe: `samestep plan --model_name_or_path`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from samestep.cli.flags import drop_flags
from samestep.errors import UsageError
from samestep.recipe import scaling
from samestep.recipe.reading import format_name
from samestep.recipe.scaling import Hyperparameters
from stepplan.base_models import find_config, may_be_decoder
from stepplan.cli.elsewhere import move
from stepplan.cli.model import (
    FINE_TUNING,
    ModelSettings,
    import_trace,
    is_causal,
    load_fine_tuning,
    make_workload,
    read_model,
)
from stepplan.cli.plan import PlanSettings, answer_plan, answer_recipe, count_steps, write_recipe
from stepplan.configs import IMAGE
from stepplan.methods import STARTING_RECIPE
from stepplan.workload import Workload, format_flags


def plan_model(argv: list[str]) -> None:
    """Answer `plan` of a model without a recipe."""
    settings, training = read_model("plan", argv, PlanSettings)
    if settings.image_sizes is not None:
        raise UsageError("--image_sizes without a recipe: only recipes have images in conversations: leave it out")
    if settings.num_train_tokens is not None:
        if training.seq_len is None:
            raise UsageError("--num_train_tokens needs --seq_len, the tokens of a sample")
        if training.max_train_steps is not None or training.num_train_epochs is not None:
            raise UsageError("--num_train_tokens with max_train_steps or num_train_epochs: leave out one of them")
        num_steps = count_steps(settings.num_train_tokens, training.global_batch_size, training.seq_len)
        training = dataclasses.replace(training, max_train_steps=num_steps)
    config = find_config(training.model_name_or_path)
    if may_be_decoder(config):
        _plan_decoder(settings, training, argv)
        return
    script_words = _write_fine_tuning(settings.write_recipe, training, config) if settings.write_recipe else None

    def make(more: Mapping[str, Any]) -> Workload:
        known = {field.name for field in dataclasses.fields(training)}
        if unknown := more.keys() - known:
            raise UsageError(f"{', '.join(unknown)}: no field of a model without a recipe")
        changed = dataclasses.replace(training, **more)
        options = {"may_trace": settings.trace, "script_words": script_words}
        attention = settings.attn_implementation
        return move(make_workload(changed, config, settings.critical_batch_size, attention, **options), settings)

    kind = (
        f"a model of type {format_name(config.get('model_type'))}, {training.model_name_or_path}, all weights trained"
    )
    subject: dict[str, Any] = {"recipe": training.name, "title": training.name, "description": kind}
    subject |= {"source": "the model's configuration, and what was given with it"}
    if training.learning_rate is not None:
        adam = (0.9, 0.999, 1e-8) if training.optimizer == "adamw" else (None, None, None)
        tuned = Hyperparameters(training.learning_rate, *adam)
        batch = training.learning_rate_batch_size or training.global_batch_size
        scaled = scaling.scale(training.lr_scaling_rule, tuned, batch, training.global_batch_size)
        subject |= dataclasses.asdict(scaled)

    def trace(b: int, **options: Any) -> Any:
        length = training.seq_len or IMAGE
        return import_trace().trace_config(
            training.model_name_or_path, b, length, optimizer=training.optimizer, **options
        )

    answer_plan(make, settings, subject, trace, ["plan", *argv])


def _plan_decoder(settings: PlanSettings, training: ModelSettings, argv: list[str]) -> None:
    """Answer `plan` of a decoder of Hugging Face, which is that of the recipe that fine-tunes it."""
    recipe, changes = load_fine_tuning(training)
    if settings.write_recipe is not None:
        write_recipe(settings.write_recipe, STARTING_RECIPE, FINE_TUNING | changes)
    # Of what was typed, what is no field of the recipe; the number of samples is not one, as it only counts steps
    mine = dict.fromkeys([*(field.name for field in dataclasses.fields(ModelSettings)), "num_train_tokens"])
    del mine["num_train_samples"]
    words = ["plan", STARTING_RECIPE, *format_flags(changes), *drop_flags(argv, mine)]
    subject = {"recipe": training.name, "title": training.name, "source": FINE_TUNING["source"]}
    answer_recipe(STARTING_RECIPE, recipe, changes, settings, training.num_train_samples, words, subject)


def _write_fine_tuning(file: str, training: ModelSettings, config: Mapping[str, Any]) -> list[str]:
    """Write a recipe that fine-tunes a causal language model of the hub; return the words that name it to the script."""
    if not is_causal(config):
        raise UsageError(f"--write_recipe {format_name(file)}: only causal language models have one: leave it out")
    _, changes = load_fine_tuning(training)
    write_recipe(file, STARTING_RECIPE, FINE_TUNING | changes)
    return ["--recipe", file]
