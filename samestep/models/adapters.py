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
from samestep.errors import UsageError, reason
from samestep.models import quantization
from samestep.models.pretrained import save_pretrained
from samestep.recipe import extras
from samestep.recipe.pretrained_shape import find_base
from samestep.recipe.reading import format_name
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from samestep.recipe.tasks.decoder import ALL_LINEAR, check_module_names

FIELDS = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "lora_targets": "target_modules",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "modules_to_save": "modules_to_save",
}
"""Field of a recipe -> its name in peft's configuration, of those that an adapter must share with the recipe that goes on with
it."""
BASE = "base"
"""Folder of a base that is nowhere else, beside its adapter."""
APART = "adapter"
"""Folder of an adapter, beside the model into which it was merged."""


def add_lora(model: PreTrainedModel, recipe: Any) -> Any:
    """Add adapters to a model of texts, in place, with random weights of torch's seed, in float32 or wider.

    A weight W [out, in] becomes W + s B A, with B [out, rank] of zeros and A [rank, in] random; s is lora_alpha / rank, or
    lora_alpha / sqrt(rank) with use_rslora (2312.03732). With use_dora each row is given its own trained length (2402.09353).

    Args:
        model: on the device of its weights.
        recipe: has lora_rank, lora_alpha (None: lora_rank), lora_dropout, lora_targets (names of modules, or `all-linear`:
            every linear layer but the head), use_rslora, use_dora, and modules_to_save, names of modules trained whole.

    The weights are those of an adapter, where model_name_or_path is one.

    Returns:
        peft's model, whose only trained parameters are the adapters and modules_to_save.

    Raises:
        UsageError: peft is not installed, no module has a name of lora_targets or modules_to_save, or the adapter to start from
            is another one.
    """
    extras.require("adapters", f"lora_rank {recipe.lora_rank}")
    import peft  # takes seconds

    targets = list(recipe.lora_targets)
    excluded = find_unused_modules(model)
    names = [name for name, _ in model.named_modules() if name not in excluded]
    check_module_names(recipe, names, type(model).__name__)
    generating = peft.TaskType.SEQ_2_SEQ_LM if model.config.is_encoder_decoder else peft.TaskType.CAUSAL_LM
    without_head = generating if model.can_generate() else peft.TaskType.FEATURE_EXTRACTION
    config = peft.LoraConfig(
        # The head of a reward model is trained whole
        task_type=peft.TaskType.SEQ_CLS if recipe.objective == "reward" else without_head,
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha or recipe.lora_rank,
        lora_dropout=recipe.lora_dropout or 0.0,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        exclude_modules=excluded or None,
        use_rslora=recipe.use_rslora,
        use_dora=recipe.use_dora,
        modules_to_save=list(recipe.modules_to_save) if recipe.modules_to_save else None,
        # Weights of transformers' Conv1D, of GPT-2, are [in, out]
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    is_traced = is_fake(next(model.parameters()))
    start = None if is_traced else find_start(recipe)[1]
    try:
        with keep_modules() if is_traced else contextlib.nullcontext(), warnings.catch_warnings():
            # peft 0.21.2 asks transformers 5.24 for `is_gradient_checkpointing`, which has another name
            warnings.simplefilter("ignore", FutureWarning)
            # and looks for ranks that it gives to experts itself among the modules, where tables of experts are not
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys", RuntimeWarning)
            adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        raise UsageError(
            f"lora_targets {', '.join(targets)} cannot be adapted: {reason(error)}. Give all-linear, or names of linear "
            f"layers of {type(model).__name__}"
        ) from None
    if start is not None:
        _go_on_with(adapted, start)
    return adapted


def find_unused_modules(model: torch.nn.Module) -> list[str]:
    """Find the linear layers that no adapter may be on: a kernel of Mamba 2 multiplies by their weights, not by the layers."""
    scans = [name for name, module in model.named_modules() if hasattr(module, "A_log") and hasattr(module, "D")]
    return [f"{name}.out_proj" for name in scans]


def find_start(recipe: Any) -> tuple[str | None, Path | None]:
    """Find the weights that a recipe starts from: the base, a folder or a name, and the folder of the adapter on it.

    Raises:
        UsageError: model_name_or_path is an adapter, but the recipe trains all weights.
    """
    path = getattr(recipe, "model_name_or_path", None)
    base = None if path is None else find_base(path)
    if base is None:
        return path, None
    if recipe.lora_rank is None:
        raise UsageError(
            f"model_name_or_path {format_name(path)} is an adapter, but lora_rank is null, so that all weights are trained. "
            "Give lora_rank and lora_alpha of the adapter, to train it further, or what --merge_adapter made of it"
        )
    return base, Path(path).expanduser()


def _go_on_with(model: Any, folder: Path) -> None:
    """Give a model of `add_lora` the adapter in a folder as its first weights.

    Raises:
        UsageError: it cannot be read, or is another one than the recipe's.
    """
    import peft

    own = model.active_peft_config
    origin = f"model_name_or_path {format_name(folder)} is an adapter"
    try:
        saved = peft.LoraConfig.from_pretrained(str(folder))
        tensors = safetensors.torch.load_file(str(folder / "adapter_model.safetensors"))
    except Exception as error:  # of any kind: the files were written by others
        raise UsageError(
            f"{origin}, which cannot be read: {reason(error)}. Give what a run with lora_rank left"
        ) from None
    differences = [
        f"{field} {_show(saved, name)} there, {_show(own, name)} here"
        for field, name in FIELDS.items()
        if _show(saved, name) != _show(own, name)
    ]
    names = name_in_model(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    wrong = [name for name in names if name not in tensors or tensors[name].shape != shapes[names[name]]]
    wrong = [name for name in wrong if ".score." not in name]  # the head of a reward model begins anew
    if differences or wrong:
        problem = (
            "; ".join(differences) or f"its file has no {wrong[0]} of that shape, and {len(wrong) - 1} more differ"
        )
        raise UsageError(f"{origin} of another recipe: {problem}. Give the fields of its recipe, recipe.yaml beside it")
    peft.set_peft_model_state_dict(model, tensors)


def _show(config: Any, name: str) -> Any:
    value = getattr(config, name)
    return (
        sorted({item for item in value if item != "score"}) if isinstance(value, set | list | tuple) else value or None
    )


def name_in_files(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the name in peft's files of each trained parameter of peft's model, by its name there."""
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
    """Save an adapter of `add_lora` and the tokenizer in a folder.

    Where its base is no folder's, nor the hub's (`has_base`), but of random weights, which are nowhere else, the adapter is
    taken off the model, and the base is saved beside it, in `base/`.
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
    base = find_start(recipe)[0]
    return torch.float32 if base is None else AutoConfig.from_pretrained(base).dtype or torch.float32
