"""Why a session ended before its training did, and how to go on."""

from pathlib import Path

from samestep.recipe.run_settings import RunSettings
from samestep.training.plan import Plan


def explain_early_end(settings: RunSettings, plan: Plan, completed_steps: int, is_out_of_time: bool) -> str:
    """Say why a session ended early, and how to go on.

    Args:
        settings: the run's.
        plan: of the whole training.
        completed_steps: steps so far.
        is_out_of_time: whether --max_train_minutes have passed.
    """
    limit, flags = settings.stop_after_step, "--resume_from_checkpoint latest"
    if settings.overwrite_output_dir:
        flags += ", without --overwrite_output_dir"
    if limit is not None and completed_steps >= limit:
        why = f"stop_after_step is {limit}"
        flags += f"{' and' if settings.overwrite_output_dir else ', without'} --stop_after_step"
    elif is_out_of_time:
        why = f"max_train_minutes is {settings.max_train_minutes:g}"
    else:
        why = "it was asked to stop"
    return (
        f"Ended after step {completed_steps} of {plan.num_steps}, as {why}; saved in {Path(settings.output_dir)}. "
        f"To go on: the same command with {flags}"
    )
