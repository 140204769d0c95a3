"""Says of every setting of transformers' `TrainingArguments` whether `ExactTrainer` keeps its step the same for every cut.

What draws by micro-batch, scales by it or depends on the number of processes is refused. A setting that is in no table here, of
a transformers that is newer, is refused unless it has its default.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from transformers import TrainingArguments

NO_EFFECT = {
    "the recipe: the same for every cut": (
        "output_dir num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim_args "
        "weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules seed data_seed ignore_data_skip "
        "resume_from_checkpoint"
    ),
    "precision: rounding, and with fp16 steps that overflow are skipped": "bf16 fp16 tf32 full_determinism",
    "computes the same otherwise": (
        "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs "
        "torch_compile torch_compile_backend torch_compile_mode liger_kernel_config use_cache torch_empty_cache_steps use_cpu "
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout"
    ),
    "reads the same samples otherwise": (
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names length_column_name"
    ),
    "logging": (
        "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
        "include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id "
        "trackio_bucket_id trackio_static_space_id debug skip_memory_metrics"
    ),
    "evaluation, which trains nothing": (
        "eval_strategy eval_steps eval_delay prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval load_best_model_at_end "
        "metric_for_best_model greater_is_better"
    ),
    "saving": (
        "save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub "
        "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
        "restore_callback_states_from_checkpoint"
    ),
    "read by scripts, not by Trainer": "do_train do_eval do_predict local_rank",
}
"""Settings by the reason why they change no step."""

HANDLED = {
    "per_device_train_batch_size": "the cut",
    "gradient_accumulation_steps": "the cut",
    "average_tokens_across_devices": "targets are counted over all processes, whatever it says",
    "max_grad_norm": "clips the whole step's gradient",
    "label_smoothing_factor": "by target, in the loss of known heads; with a loss of one's own it is refused",
    "per_device_eval_batch_size": "eval_loss is the mean over all targets",
    "fsdp": "as many forwards on every process; targets= is asked for",
    "fsdp_config": "as fsdp",
    "deepspeed": "refused by own_loop.find_problems",
    "parallelism_config": "refused by own_loop.find_problems",
}
"""Settings that would change a step, and what is done about it."""


def _find_problem_of_loaders(config: Any) -> str | None:
    """Find what `AcceleratorConfig` must not say. Gradients that are synchronised in each micro-batch add up to the same."""
    if config.dispatch_batches:
        return "dispatch_batches repeats samples where the last batch is not full: leave it out"
    if config.split_batches:
        return (
            "split_batches lets a step have b * k samples, on any number of processes: divide b by it, and leave it out"
        )
    if not config.use_seedable_sampler:
        return "without use_seedable_sampler the order depends on the number of processes: leave it out"
    return None


def _forbid(message: str, is_forbidden: Callable[[Any], bool] = bool) -> Callable[[Any], str | None]:
    return lambda value: message if is_forbidden(value) else None


REFUSED: dict[str, Callable[[Any], str | None]] = {
    "neftune_noise_alpha": _forbid(
        "its noise is drawn by micro-batch, and scaled by the length to which that is padded: leave it out"
    ),
    "auto_find_batch_size": _forbid(
        "where memory runs out, a step would have fewer samples: leave it out, and take a smaller per_device_train_batch_size "
        "with more gradient_accumulation_steps"
    ),
    "dataloader_drop_last": _forbid(
        "how many samples it leaves out depends on the micro-batch: leave it out, the last step is exact with fewer samples"
    ),
    "use_liger_kernel": _forbid(
        "its loss replaces the model's, and gives no logits to sum over. Leave it out, or apply liger's kernels to the model "
        "yourself, without its cross entropy"
    ),
    "train_sampling_strategy": _forbid(
        "its groups depend on how many samples a process computes, and so do the samples that it repeats: random or sequential",
        lambda value: value not in ("random", "sequential"),
    ),
    "optim": _forbid(
        "it steps in every backward, so in every micro-batch: take an optimizer that steps once",
        lambda value: "lomo" in value or value.endswith("layerwise"),
    ),
    "accelerator_config": _find_problem_of_loaders,
}
"""Reasons that forbid a value of a setting, with the remedy; None: nothing."""


def _get_default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


KNOWN = frozenset([*HANDLED, *REFUSED, *" ".join(NO_EFFECT.values()).split()])
"""Names of all settings that were looked at."""


def find_setting_problems(arguments: TrainingArguments, known: Collection[str] = KNOWN) -> list[str]:
    """Find the settings that would make a step depend on its cut: a line for each.

    Args:
        arguments: of a trainer.
        known: settings of which others are refused unless they have their default.
    """
    problems = []
    for field in dataclasses.fields(TrainingArguments):
        value = getattr(arguments, field.name)
        shown = getattr(value, "value", value)  # of an enumeration
        if field.name in REFUSED and (reason := REFUSED[field.name](shown)):
            problems.append(f"{field.name} is {str(shown)[:60]}, but {reason}")
        elif field.name not in known and value != _get_default(field):
            problems.append(
                f"{field.name} is {str(shown)[:60]}, a setting that ExactTrainer does not know: leave it out, or take a "
                "transformers that was tried (requirements.txt)"
            )
    return problems
