"""Saves a model of embeddings as a folder that sentence-transformers loads, with the same vectors."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from samestep.models import adapters
from samestep.models.pretrained import save_pretrained
from samestep.recipe.tasks.embedding_training import EmbeddingTraining

USAGE = """\
from sentence_transformers import SentenceTransformer
model = SentenceTransformer("OUTPUT_DIR")
model.encode_query("a question") @ model.encode_document(["a text", "another"]).T"""
MODULES = {
    "": "sentence_transformers.models.Transformer",
    "1_Pooling": "sentence_transformers.models.Pooling",
    "2_Normalize": "sentence_transformers.models.Normalize",
}
"""Folder -> module of sentence-transformers, in the order in which they compute."""


def save(sums: Any, folder: Path, recipe: EmbeddingTraining, train: Any, best: Path | None = None) -> str:
    """Save the model, adapters merged into its weights, and the tokenizer.

    Args:
        sums: `EmbeddingSums`.
        folder: gets the files.
        recipe: the run's.
        train: the training data, with the tokenizer.
        best: folder of the best model of `Run.save_best`, which is saved instead; None: this one.

    Returns:
        Lines of Python that load the model, OUTPUT_DIR standing for the folder.
    """
    if best is not None and recipe.lora_rank is not None:
        adapters.load_adapter(sums.model, best)
    elif best is not None:
        sums.model.load_state_dict(load_file(best / "model.safetensors"))
    model = sums.model if recipe.lora_rank is None else sums.model.merge_and_unload()
    for name in ("similarity_scale", "similarity_bias"):
        if hasattr(model, name):
            delattr(model, name)  # of the loss, and of no use behind it
    tokenizer = train.tokenizer
    tokenizer.model_max_length = recipe.max_seq_length
    save_pretrained(model, tokenizer, folder)
    names = list(MODULES)
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": MODULES[path]} for place, path in enumerate(names)
    ]
    pooling: dict[str, Any] = {"word_embedding_dimension": model.config.get_text_config().hidden_size}
    pooling |= {
        f"pooling_mode_{kind}": False for kind in ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    }
    pooling |= {"pooling_mode_weightedmean_tokens": False, "pooling_mode_lasttoken": False, "include_prompt": True}
    key = {"mean": "mean_tokens", "cls": "cls_token", "last_token": "lasttoken"}[recipe.pooling]
    pooling[f"pooling_mode_{key}"] = True
    prompts = {"query": recipe.query_prefix, "document": recipe.document_prefix}
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": recipe.max_seq_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": prompts,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": pooling,
    }
    for name in names[1:]:
        (folder / name).mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return USAGE
