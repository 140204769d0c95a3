"""Add adapters of low rank to a model (LoRA, Hu et al. 2021, 2106.09685), by peft, and save them; other weights are frozen."""

import contextlib
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import AutoConfig, PreTrainedModel

from samestep._internals.torch_tracing import is_fake, keep_modules
from samestep.errors import UsageError, nearest, reason
from samestep.models import quantization
from samestep.models.pretrained import save_pretrained
from samestep.recipe import extras
from samestep.recipe.recipe import CausalLmFineTuning

ALL_LINEAR = "all-linear"
BASE = "base"
"""Folder of a base that is nowhere else, beside its adapter."""
APART = "adapter"
"""Folder of an adapter, beside the model into which it was merged."""


def add_lora(model: PreTrainedModel, recipe: CausalLmFineTuning) -> Any:
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
        UsageError: peft is not installed, or no module has a name of lora_targets or modules_to_save.
    """
    extras.require("adapters", f"lora_rank {recipe.lora_rank}")
    import peft  # takes seconds

    targets = list(recipe.lora_targets)
    _check_names(model, recipe)
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
            # and looks for ranks that it gives to experts itself among the modules, where tables of experts are not
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys", RuntimeWarning)
            return peft.get_peft_model(model, config)
    except ValueError as error:
        raise UsageError(
            f"lora_targets {', '.join(targets)} cannot be adapted: {reason(error)}. Give all-linear, or names of linear "
            f"layers of {type(model).__name__}"
        ) from None


def _check_names(model: PreTrainedModel, recipe: CausalLmFineTuning) -> None:
    """Raise UsageError for a name that no module has: peft trains nothing for it where another name is found."""
    names = [name for name, _ in model.named_modules()]
    for field in ("lora_targets", "modules_to_save"):
        for wanted in getattr(recipe, field) or ():
            if wanted != ALL_LINEAR and not any(f".{name}".endswith(f".{wanted}") for name in names):
                valid = {
                    name.rpartition(".")[2] for name, module in model.named_modules() if not any(module.children())
                }
                raise UsageError(
                    f"{field} names {wanted}, but {type(model).__name__} has no such module: {nearest(wanted, valid)}"
                )


def name_in_files(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the name in peft's files of each trained tensor of peft's model, by its name there.

    Args:
        model: peft's.
        names: of its trained parameters.
    """
    import peft

    # peft selects and renames the entries of a state, and never looks into them
    renamed = peft.get_peft_model_state_dict(model, {name: name for name in names}, save_embedding_layers=False)
    return {name: in_file for in_file, name in renamed.items()}


def name_in_model(model: Any) -> dict[str, str]:
    """Return the name in peft's model of each tensor in its files, by its name there; none without adapters."""
    if model is None:
        return {}
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {in_file: name for name, in_file in name_in_files(model, names).items()}


def load_adapter(model: Any, folder: Path) -> None:
    """Give a model of `add_lora` the adapter that was saved in a folder."""
    import peft

    peft.set_peft_model_state_dict(model, safetensors.torch.load_file(str(folder / "adapter_model.safetensors")))


def save_adapter(model: Any, tokenizer: Any, folder: Path, has_base: bool) -> None:
    """Save an adapter. A base of random weights is nowhere else, so it is saved beside it, in `base/`.

    Args:
        model: of `add_lora`; without a base of its own, the adapter is taken off.
        tokenizer: of transformers.
        folder: gets the adapter and the tokenizer.
        has_base: whether the base is a folder's, or the hub's.
    """
    save_pretrained(model, tokenizer, folder)
    if not has_base:
        config = model.peft_config[model.active_adapter]
        config.base_model_name_or_path, config.inference_mode = str(folder / BASE), True
        config.save_pretrained(folder)
        quantization.dequantize_base(model)
        save_pretrained(model.unload(), tokenizer, folder / BASE)


def find_base_dtype(recipe: CausalLmFineTuning) -> torch.dtype:
    """Find the type in which a recipe's base is saved, as its config says; float32 for random weights."""
    if recipe.model_name_or_path is None:
        return torch.float32
    return AutoConfig.from_pretrained(recipe.model_name_or_path).dtype or torch.float32
