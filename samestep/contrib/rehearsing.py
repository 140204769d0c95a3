"""The model of a rehearsal in place of the one that a recipe fine-tunes: a small one of its kind."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from samestep.errors import UsageError
from samestep.models import pretrained
from samestep.recipe import rehearsal, run_settings
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from samestep.training import ways


def rehearse_own_kind(
    accelerator: Accelerator,
    recipe: Any,
    output_dir: Path,
    arguments: tuple[Sequence[str], str | Sequence[str], str],
    say: Callable[[str], None],
) -> Any:
    """Let a rehearsal train a small model of the kind that the recipe fine-tunes, of which the first session makes one.

    Where none can be made, it trains a small Llama, and says so. Called by all processes.

    Args:
        accelerator: the run's.
        recipe: of the rehearsal.
        output_dir: the run's.
        arguments: flags, tasks and description, as `Run` takes them.
        say: prints on process 0.

    Returns:
        The recipe that the rehearsal trains.
    """
    argv, task, description = arguments
    find_config, no_rehearsal = pretrained.find_config, [*argv, "--rehearse", "false"]
    whole, _ = run_settings.parse(no_rehearsal, task, description, find_config=find_config)
    if not isinstance(whole, CausalLmFineTuning) or whole.model_name_or_path is None:
        return recipe
    folder = output_dir / rehearsal.START
    answer: list[str | None] = [None]
    if accelerator.is_main_process:
        try:
            if os.environ.get(rehearsal.SESSION, "0") == "0":
                shutil.rmtree(folder, ignore_errors=True)
                torch.manual_seed(whole.seed)
                ways.make_small_model(whole, folder)
            answer = [None if folder.exists() else ""]  # the first session has said why
        except UsageError as error:
            answer = [f"{error}: this rehearsal trains a small Llama instead"]
    (problem,) = broadcast_object_list(answer)
    if problem is not None:
        if problem:
            say(problem)
        return recipe
    tokenizer = whole.tokenizer_name or whole.model_name_or_path
    return whole.rehearsed({"model_name_or_path": str(folder), "tokenizer_name": tokenizer})
