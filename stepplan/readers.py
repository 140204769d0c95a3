"""Shapes of the models that a recipe trains to read more than one text: sources with targets, recordings, images.

Lengths are those that a recipe states. Sizes of images, which it does not state, are asked for, or assumed: `IMAGES`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.recipe.reading import format_value, read_json
from samestep.recipe.tasks.causal_lm_finetuning import DRAWN, CausalLmFineTuning, find_drawn
from samestep.recipe.tasks.freezing import ROLES
from samestep.recipe.tasks.seq2seq_finetuning import Seq2SeqFineTuning
from stepplan import base_models, image_text, seq2seq, stacks
from stepplan.configs import is_seq2seq, model_from_config
from stepplan.decoder import Tuning
from stepplan.image_text import ImageText
from stepplan.stacks import EncoderDecoder

IMAGES = ((480, 640),)
"""Height and width of each image of a sample, where nothing is known: one photograph of COCO."""
MOST_DRAWN = 3
"""Images of a sample of drawn ones, at most."""
DROPOUTS: dict[str, dict[str, float]] = {
    **{kind: {"dropout_rate": 0.1} for kind in ("t5", "mt5", "umt5")},
    **{kind: {"dropout": 0.1} for kind in ("bart", "mbart", "pegasus", "marian")},
    "m2m_100": {"dropout": 0.1, "attention_dropout": 0.1},
    "whisper": {},
}
"""`model_type` -> dropout that is not 0 in a configuration of transformers where nothing is said."""
GIVEN_DROPOUTS = ("dropout_rate", "dropout", "attention_dropout", "activation_dropout")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
PROCESSOR_FIELDS = ("min_pixels", "max_pixels", "min_patches", "max_patches")


# ---------------------------------------------------------------------------------------------------------------------
# Sources and targets


def seq2seq_finetuning(recipe: Seq2SeqFineTuning) -> EncoderDecoder:
    """Return the shape of a recipe's model with an encoder and a decoder, every sample at full length.

    With dropout attention is eager, as `models.seq2seq` computes it.

    Raises:
        UsageError: the configuration cannot be found, or has no formula; a length is above the model's positions.
    """
    config = config_from_recipe(recipe)
    name = recipe.model_name_or_path or f"architecture {recipe.architecture}"
    lengths = recipe.max_source_length, recipe.max_target_length
    if not is_seq2seq(config):
        raise base_models.UnknownShapeError(
            f"{name} has model_type {format_value(config.get('model_type'))}, for which there is no formula: known are "
            f"{', '.join(seq2seq.KINDS)}. Train a few steps of it, --max_train_steps 5, to see what they take"
        )
    try:
        found = model_from_config(config, lengths[0], name=name, target_length=lengths[1])
    except UsageError as error:  # which has other names for the lengths
        text = str(error).replace("seq_len is", "max_source_length is").replace("target_len is", "max_target_length is")
        raise UsageError(text) from None
    assert isinstance(found, EncoderDecoder)
    stacks_of = {part: dataclasses.replace(getattr(found, part), is_padded=True) for part in ("encoder", "decoder")}
    has_dropout = any(_find_dropouts(config).values())
    model = dataclasses.replace(found, **stacks_of, chunked_head=True, eager_attention=has_dropout)
    method = Tuning(rank=recipe.lora_rank, targets=tuple(recipe.lora_targets))
    if recipe.lora_rank is not None and recipe.lora_rank > model.hidden_size:
        raise UsageError(
            f"lora_rank is {recipe.lora_rank:,}, above the width {model.hidden_size:,} of {name}: lower it"
        )
    frozen = set(recipe.freeze or ())
    if unknown := frozen - {"encoder"}:
        raise UsageError(
            f"freeze names {', '.join(sorted(unknown))}, but of its parts only encoder is planned: leave it out"
        )
    options: dict[str, bool] = {
        "trains_encoder": "encoder" not in frozen,
        "shares_embedding": recipe.modality == "text",
    }
    return stacks.adapt(model, method, **options)


def config_from_recipe(recipe: Seq2SeqFineTuning) -> dict[str, Any]:
    """Return the configuration of a recipe's model: that of its weights, or of its own fields, with the recipe's dropout.

    A field has the names of all kinds of configurations, of which a formula reads its own.
    """
    if recipe.model_name_or_path is not None:
        config = base_models.find_config(base_models.find_weights(recipe))
    else:
        kind, layers, width = recipe.architecture, recipe.num_hidden_layers, recipe.hidden_size
        heads, inner = recipe.num_attention_heads, recipe.intermediate_size
        decoder_layers, positions = recipe.num_decoder_layers or layers, recipe.max_position_embeddings
        config = {
            "model_type": kind,
            "vocab_size": recipe.vocab_size or base_models.UNKNOWN_VOCABULARY,
            "d_model": width,
        }
        config |= {"num_layers": layers, "num_decoder_layers": decoder_layers, "num_heads": heads, "d_ff": inner}
        config |= {"d_kv": (width or 0) // (heads or 1), "encoder_layers": layers, "decoder_layers": decoder_layers}
        config |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads)
        config |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), inner)
        if kind == "whisper":
            config |= {"num_mel_bins": 80, "max_source_positions": recipe.max_source_length}
            config |= {"max_target_positions": positions or 448}
        elif kind not in ("t5", "mt5", "umt5"):
            config |= {"max_position_embeddings": positions or 1024}
        if recipe.tie_word_embeddings is not None:
            config |= {"tie_word_embeddings": recipe.tie_word_embeddings}
    return config | _find_dropouts(config, recipe.dropout)


def _find_dropouts(config: Mapping[str, Any], probability: float | None = None) -> dict[str, float]:
    """Find the dropout of a configuration, by name; a probability replaces all."""
    if probability is not None:
        return dict.fromkeys(GIVEN_DROPOUTS, probability)
    usual = dict.fromkeys(GIVEN_DROPOUTS, 0.0) | DROPOUTS.get(str(config.get("model_type")), {})
    return {name: value if config.get(name) is None else config[name] for name, value in usual.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Images


def image_text_finetuning(recipe: CausalLmFineTuning, images: Sequence[tuple[int, int]] | None = None) -> ImageText:
    """Return the shape of a recipe's model of images and text: a sample of full length, its images' tokens among them.

    Args:
        recipe: with images.
        images: height and width of each image of a sample; None: the recipe's image_size, or `IMAGES`.

    Raises:
        UsageError: the configuration cannot be found, or has no formula; images of more tokens than max_seq_length.
    """
    name = recipe.model_name_or_path or f"architecture {recipe.architecture}"
    config = _llava_from_recipe(recipe) if recipe.model_name_or_path is None else None
    if config is None:
        config = base_models.find_config(base_models.find_weights(recipe))
    processor = _read_processor(recipe, config)
    if images is None:
        is_drawn = bool(find_drawn(recipe.dataset_name)) and DRAWN[2] in str(recipe.dataset_name)
        own = () if recipe.image_size is None else ((recipe.image_size,) * 2,)
        images = (own or IMAGES) * (MOST_DRAWN if is_drawn else 1)
    tokens = sum(image_text.count_patches(config, *size, processor).tokens for size in images)
    if tokens >= recipe.max_seq_length:
        raise UsageError(
            f"the images of a sample ({image_text.describe_images(images)}) have {tokens:,} tokens, but max_seq_length is "
            f"{recipe.max_seq_length:,}: raise it, or give fewer or smaller ones, --image_sizes"
        )
    shape = base_models.shape_from_config(config, name)
    base_models.check_shape(recipe, shape)
    stored_bytes = 2 if "bfloat16" in _list_dtypes(config) or "float16" in _list_dtypes(config) else 4
    named = recipe.freeze or ()
    frozen = {role for role, names in ROLES.items() if {role, *names} & set(named)}
    if unknown := [part for part in named if not any(part in (role, *names) for role, names in ROLES.items())]:
        raise UsageError(
            f"freeze names {', '.join(unknown)}, but frozen parts are planned whole: give {', '.join(ROLES)}, or leave it out"
        )
    if "visual" in named:  # which holds what projects
        frozen.add("projector")
    method = Tuning(
        rank=recipe.lora_rank,
        targets=tuple(recipe.lora_targets),
        uses_dora=recipe.use_dora,
        trains_outside=bool({"embed_tokens", "lm_head"} & set(recipe.modules_to_save or ())),
        matrix_bytes=4 if recipe.lora_rank is None or recipe.use_dora else stored_bytes,
        is_quantized=recipe.base_quantization is not None,
    )
    is_whole = recipe.lora_rank is None or bool(set(ROLES["projector"]) & set(recipe.modules_to_save or ()))
    return image_text.model_from_config(
        config,
        images,
        recipe.max_seq_length - tokens,
        name=name,
        method=method,
        trains_tower="vision_tower" not in frozen,
        trains_bridge=is_whole and "projector" not in frozen,
        adapts_bridge="projector" not in frozen,
        trains_text="language_model" not in frozen,
        processor=processor,
    )


def _llava_from_recipe(recipe: CausalLmFineTuning) -> dict[str, Any]:
    """Return the configuration of the LLaVA of a recipe's shape, as `models.image_text` makes it."""
    text = base_models.config_from_recipe(recipe) | {"model_type": "llama"}
    tower = {name: text[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    tower |= {"num_hidden_layers": recipe.num_image_layers, "model_type": "siglip_vision_model"}
    tower |= {"image_size": recipe.image_size, "patch_size": recipe.image_patch_size}
    config: dict[str, Any] = {"model_type": "llava", "vision_config": tower, "text_config": text}
    config |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return config | {"tie_word_embeddings": bool(recipe.tie_word_embeddings)}


def _list_dtypes(config: Mapping[str, Any]) -> list[Any]:
    parts = [config, config.get("text_config") or {}]
    return [part.get(name) for part in parts for name in ("dtype", "torch_dtype")]


def _read_processor(recipe: CausalLmFineTuning, config: Mapping[str, Any]) -> dict[str, int]:
    """Read what a model's processor decides of the sizes of images, from its folder or the table; {}: the kind's usual."""
    if isinstance(config.get("processor"), dict):
        return dict(config["processor"])
    folder = Path(base_models.find_weights(recipe)).expanduser()
    for file in (folder / name for name in PROCESSOR_FILES):
        if not file.is_file():
            continue
        values = read_json(file, f"model_name_or_path {recipe.model_name_or_path}: {file.name}")
        values = values.get("image_processor", values)
        size = values.get("size")
        edges = size if isinstance(size, dict) else {}
        found: dict[str, Any] = {"longest_edge": edges.get("longest_edge")}
        if str(config.get("model_type")).startswith("qwen"):  # whose edges are pixels of the whole
            found = {"min_pixels": edges.get("shortest_edge"), "max_pixels": edges.get("longest_edge")}
        found |= {name: values[name] for name in PROCESSOR_FIELDS if values.get(name) is not None}
        return {name: value for name, value in found.items() if type(value) is int and value > 0}
    return {}
