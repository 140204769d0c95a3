"""Saves a causal language model after training: all weights, an adapter, or an adapter merged into its base."""

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from samestep.models import adapters, quantization
from samestep.models.pretrained import save_pretrained
from samestep.recipe.task_settings import CausalLmFineTuningSettings
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning

RESULTS = ("config.json", "generation_config.json", "model*.safetensors*", "adapter_*", adapters.APART, adapters.BASE)
"""Files and folders of a saved model or adapter."""
MERGED_SEQUENCES, MERGED_TOKENS = 8, 128
"""Sequences, and tokens of each, with which a merge is measured."""
USAGE = """\
from transformers import pipeline
chat = pipeline("text-generation", model="OUTPUT_DIR")
chat([{"role": "user", "content": "a question"}], do_sample=False)"""
ADAPTER_CHAT = """\
from transformers import GenerationConfig, pipeline
ends = GenerationConfig.from_pretrained("OUTPUT_DIR")  # the base's own may lack the token that ends a turn
chat = pipeline("text-generation", model="OUTPUT_DIR", generation_config=ends)
chat([{"role": "user", "content": "a question"}], do_sample=False)"""
IMAGE_USAGE = """\
from transformers import pipeline
chat = pipeline("image-text-to-text", model="OUTPUT_DIR")
parts = [{"type": "image", "path": "an image"}, {"type": "text", "text": "a question"}]
chat(text=[{"role": "user", "content": parts}], generate_kwargs={"do_sample": False})"""
REWARD_USAGE = """\
from transformers import pipeline
judge = pipeline("text-classification", model="OUTPUT_DIR", function_to_apply="none")
judge("a conversation, rendered by the chat template")"""
ADAPTER_USAGE = """\
from peft import PeftModel
from transformers import CLASS, AutoTokenizer
base = CLASS.from_pretrained(BASE)
model = PeftModel.from_pretrained(base, "OUTPUT_DIR")
tokenizer = AutoTokenizer.from_pretrained("OUTPUT_DIR")"""


QUESTION, BEGINNING = '[{"role": "user", "content": "a question"}]', '"the beginning of a text"'
"""The input of a model of turns, and that of a model of texts."""


@torch.no_grad()
def merge_adapter(sums: Any, held_out: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32) -> float:
    """Merge the adapters into the weights, in place: W + s B A, computed in the dtype of W and rounded to `dtype`.

    What a merge loses is measured by the logits of held-out sequences: |merged - adapted| / |adapted - base|, all computed
    in the dtype of W. Small adapters vanish where weights have few bits: rounded to bfloat16 they may lose most of what
    they do. A base in 4 bits gets the weights back that it computes with, in float32, before adapters are merged into them.

    Args:
        sums: `CausalLmSums`.
        held_out: token ids of some sequences, int64 [tokens] each.
        dtype: in which the weights are to be saved.

    Returns:
        The share that is lost; not finite where the adapter does nothing.
    """

    def compute(model: PreTrainedModel) -> torch.Tensor:
        logits = [model(input_ids=tokens[None], use_cache=False).logits.flatten().cpu() for tokens in held_out]
        return torch.cat(logits)

    sums.eval()
    with sums.own_attention() as adapted:
        target = compute(adapted)
        with sums.model.disable_adapter():
            effect = (target - compute(adapted)).norm()
    quantization.dequantize_base(sums.model)
    own_dtype = target.dtype
    sums.model = sums.model.merge_and_unload().to(dtype).to(own_dtype)
    with sums.own_attention() as merged:
        return ((compute(merged) - target).norm() / effect).item()


def save(
    sums: Any,
    folder: Path,
    recipe: CausalLmFineTuning,
    settings: CausalLmFineTuningSettings,
    train: Any,
    held_out: Any = None,
    best: Path | None = None,
) -> tuple[str, dict[str, float], str | None]:
    """Save what was trained, for `from_pretrained`, and the tokenizer: all weights, the adapter, or the adapter merged.

    Args:
        sums: `CausalLmSums`.
        folder: gets the files.
        recipe, settings: the run's.
        train, held_out: sources of the samples; a merge is measured with some of the held-out ones, if there are any, without
            their images.
        best: folder of the best model of `Run.save_best`, which is saved instead; None: this one.

    Returns:
        Lines of Python that load the model, OUTPUT_DIR standing for the folder; merge_loss, if a merge was measured; why it
        was not written (the adapter is then), or None.
    """
    usage, facts, problem = _save(sums, folder, recipe, settings, train, held_out, best)
    if train.tokenizer.chat_template is None:  # it has learned from texts, not from turns
        usage = usage.replace(QUESTION, BEGINNING).replace("a conversation, rendered by the chat template", "a text")
    return usage, facts, problem


def _save(
    sums: Any,
    folder: Path,
    recipe: CausalLmFineTuning,
    settings: CausalLmFineTuningSettings,
    train: Any,
    held_out: Any,
    best: Path | None,
) -> tuple[str, dict[str, float], str | None]:
    usage = REWARD_USAGE if recipe.objective == "reward" else IMAGE_USAGE if recipe.images else USAGE
    _delete_earlier(folder, recipe.model_name_or_path)
    if recipe.lora_rank is None:
        if best is not None:
            shutil.copytree(best, folder, dirs_exist_ok=True)
        else:
            save_pretrained(sums.model, train.processor, folder)
        return usage, {}, None
    if best is not None:
        adapters.load_adapter(sums.model, best)
    has_base = recipe.model_name_or_path is not None
    if not settings.merge_adapter:
        adapters.save_adapter(sums.model, train.processor, folder, has_base)
        return _find_adapter_usage(recipe), {}, None
    dtype = adapters.find_base_dtype(recipe) if settings.merge_dtype == "base" else torch.float32
    name, limit = str(dtype).removeprefix("torch."), settings.max_merge_loss
    spare, apart = None, folder / adapters.APART
    if has_base:
        adapters.save_adapter(sums.model, train.processor, apart, has_base)
    else:
        spare = copy.deepcopy(sums.model)
    lost = merge_adapter(sums, _choose_sequences(held_out or train, sums.causal_lm.device), dtype)
    logits = "training logits" if held_out is None else "held-out logits"
    text = f"merged weights in {name} lose {lost:.2%} of what the adapter does to {logits}"
    facts = {"merge_loss": lost}
    if lost <= limit:
        print(text)
        if spare is not None:
            adapters.save_adapter(spare, train.processor, apart, has_base)
        save_pretrained(sums.model.to(dtype), train.processor, folder)
        return usage, facts, None
    if spare is not None:
        adapters.save_adapter(spare, train.processor, folder, has_base)
    else:
        shutil.copytree(apart, folder, dirs_exist_ok=True)
        shutil.rmtree(apart)
    remedy = f"set merge_dtype to float32 or max_merge_loss to more than {lost:.2g}"
    if dtype == torch.float32:
        remedy = "leave merge_adapter out"
    problem = (
        f"merge_adapter is true, but {text}, more than max_merge_loss {limit:g}, so the adapter is apart in {folder}. "
        f"To merge it, {remedy}, and resume from the latest checkpoint"
    )
    return _find_adapter_usage(recipe), facts, problem


def _delete_earlier(folder: Path, base: str | None) -> None:
    """Delete the model or the adapter that an earlier run left in a folder: beside the other one, both would be loaded."""
    if base is not None and Path(base).resolve().is_relative_to(folder.resolve()):
        return  # what was trained on is not ours to delete
    for path in (path for pattern in RESULTS for path in folder.glob(pattern)):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _find_adapter_usage(recipe: CausalLmFineTuning) -> str:
    """Write the lines of Python that load an adapter: a pipeline, unless its base needs more to be said."""
    is_reward, base, name = recipe.objective == "reward", '"OUTPUT_DIR/base"', adapters.find_start(recipe)[0]
    if name is not None and recipe.base_quantization is None and not (recipe.use_dora or recipe.images):
        return REWARD_USAGE if is_reward else ADAPTER_CHAT
    head, more, config = "AutoModelForCausalLM", "", ""
    if name is not None:
        base = f'"{name}"'
    if name is not None and recipe.base_quantization is not None:
        base, more = f"{base}, quantization_config=config", ", BitsAndBytesConfig"
        config = 'config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)\n'
    if is_reward:
        head, base = "AutoModelForSequenceClassification", f"{base}, num_labels=1"
    if recipe.images:
        head = "AutoModelForImageTextToText"
    lines = ADAPTER_USAGE.replace("CLASS", head).replace("BASE", base)
    if name is not None and not is_reward:
        more += ", GenerationConfig"
        lines += '\nmodel.generation_config = GenerationConfig.from_pretrained("OUTPUT_DIR")'
    lines = lines.replace("AutoTokenizer\n", f"AutoTokenizer{more}\n{config}", 1)
    return (
        lines.replace("AutoTokenizer", "AutoProcessor").replace("tokenizer =", "processor =")
        if recipe.images
        else lines
    )


def _choose_sequences(source: Any, device: torch.device) -> list[torch.Tensor]:
    """Choose the beginnings of a source's first sequences, int64 [tokens] each."""
    batches = [source.collate([source.draw(0, place)]) for place in range(min(MERGED_SEQUENCES, len(source)))]
    return [batch["input_ids"][0, : min(MERGED_TOKENS, int(batch["ends"][1]))].to(device) for batch in batches]
