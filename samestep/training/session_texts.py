"""The texts of a session of a run: on what it trains how, and if it ends before the training does, why and how to go on."""

from typing import TYPE_CHECKING, Any

from samestep.data.steps import describe_source

if TYPE_CHECKING:
    from samestep.training.run import Run


LONG_WARMUP = 1 / 3
"""Share of a training from which on its warm-up is said: a recipe's steps of warm-up may be those of a longer training."""


def describe_session(run: "Run", train: Any) -> str:
    """Describe what the session trains, before its first step.

    Args:
        run: prepared.
        train: the training data.
    """
    weights, mixed = getattr(run.recipe, "model_name_or_path", None), run.accelerator.mixed_precision
    precision = run.settings.dtype if mixed == "no" else f"{mixed} (autocast of {run.settings.dtype} weights)"
    num_warmup_steps, warned = run.plan.schedule.num_warmup_steps, ""
    if run.plan.spans is None and num_warmup_steps > LONG_WARMUP * run.num_steps:
        share = f"{num_warmup_steps / run.num_steps:.0%}"
        warned = f"\nthe learning rate rises during {share} of the training: --num_warmup_steps or --warmup_ratio changes that"
    size = run.recipe.global_batch_size
    if not hasattr(train, "num_samples") and 0 < len(train) < size:
        warned += (
            f"\nan epoch has {len(train):,} samples, fewer than the global batch: a step holds some more than once"
        )
    return (
        f"{describe_source(train)}; {f'weights of {weights}' if weights else 'random weights'}; "
        f"{run.reduction.describe_cut(run.recovery.steps.layout)}{run.plan.describe_growth()}; on {run.accelerator.device}, "
        f"computed in {precision}; steps {run.completed_steps} to {run.plan.last_step} of "
        f"{run.num_steps}{run.reduction.describe_bits()}{warned}"
    )


def explain_early_end(run: "Run") -> str:
    """Say why the session ended before the training did, and how to go on."""
    settings, limit, flags = run.settings, run.settings.stop_after_step, "--resume_from_checkpoint latest"
    if settings.overwrite_output_dir:
        flags += ", without --overwrite_output_dir"
    if limit is not None and run.completed_steps >= limit:
        why = f"stop_after_step is {limit}"
        flags += f"{' and' if settings.overwrite_output_dir else ', without'} --stop_after_step"
    elif run.recovery.stop.is_out_of_time:
        why = f"max_train_minutes is {settings.max_train_minutes:g}"
    else:
        why = "it was asked to stop"
    return (
        f"Ended after step {run.completed_steps} of {run.num_steps}, as {why}; saved in {run.output_dir}. To go on: the same "
        f"command with {flags}"
    )
