"""Add adapters of low rank to a model (LoRA, Hu et al. 2021, 2106.09685), by peft; all other weights are frozen."""

import contextlib
import warnings
from typing import Any

from transformers import PreTrainedModel

from samestep._internals.torch_tracing import is_fake, keep_modules
from samestep.errors import UsageError, reason
from samestep.recipe import extras
from samestep.recipe.recipe import Recipe

ALL_LINEAR = "all-linear"


def add_lora(model: PreTrainedModel, recipe: Recipe) -> Any:
    """Add adapters to a causal language model, in place, with random weights of torch's seed, in float32 or wider.

    A weight W [out, in] becomes W + s B A, with B [out, rank] of zeros and A [rank, in] random; s is lora_alpha / rank, or
    lora_alpha / sqrt(rank) with use_rslora (2312.03732). With use_dora each row is given its own trained length (2402.09353).

    Args:
        model: on the device of its weights.
        recipe: has lora_rank, lora_alpha (None: lora_rank), lora_dropout, lora_targets (names of modules, or `all-linear`:
            every linear layer but the head), use_rslora, use_dora, and modules_to_save, names of modules trained whole.

    Returns:
        peft's model, whose only trained parameters are the adapters and modules_to_save.

    Raises:
        UsageError: peft is not installed, or no module has a name of lora_targets.
    """
    extras.require("adapters", f"lora_rank {recipe.lora_rank}")
    import peft  # takes seconds

    targets = list(recipe.lora_targets)
    config = peft.LoraConfig(
        # The head of a reward model is trained whole
        task_type=peft.TaskType.SEQ_CLS if recipe.objective == "reward" else peft.TaskType.CAUSAL_LM,
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha or recipe.lora_rank,
        lora_dropout=recipe.lora_dropout or 0.0,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        use_rslora=recipe.use_rslora,
        use_dora=recipe.use_dora,
        modules_to_save=list(recipe.modules_to_save) if recipe.modules_to_save else None,
        # Weights of transformers' Conv1D, of GPT-2, are [in, out]
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    is_traced = is_fake(next(model.parameters()))
    try:
        with keep_modules() if is_traced else contextlib.nullcontext(), warnings.catch_warnings():
            # peft 0.21.2 asks transformers 5.23 for `is_gradient_checkpointing`, which has another name
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(model, config)
    except ValueError as error:
        raise UsageError(
            f"lora_targets {', '.join(targets)} cannot be adapted: {reason(error)}. Give all-linear, or names of linear "
            f"layers of {type(model).__name__}"
        ) from None
