"""Shapes of models of Hugging Face that no recipe describes, from a configuration, without transformers."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.recipe.reading import check_model_folder, format_name, format_value, read_json
from samestep.recipe.settings import ACTIVATIONS
from stepplan import convnet, seq2seq, transformer
from stepplan.stacks import EncoderDecoder
from stepplan.transformer import Transformer

Model = Transformer | convnet.ConvNet | EncoderDecoder


def read_config(path: str) -> dict[str, Any]:
    """Read the configuration in a folder with a config.json, or in a .json file.

    Raises:
        UsageError: the file is missing, unreadable, or not a configuration of transformers.
    """
    file = Path(path)
    origin = f"model_name_or_path {format_name(path)}"
    if (file / "adapter_config.json").exists() and not (file / "config.json").exists():
        raise UsageError(
            f"{origin} is an adapter, not a model. Give its base, lora_rank and lora_alpha of its recipe to train it further, "
            "or the adapter merged into its base (--merge_adapter when it was trained)"
        )
    check_model_folder(file, origin)
    file = file / "config.json" if os.path.isdir(file) else file
    config = read_json(file, f"{origin} (a folder with a config.json, or such a file)")
    if "model_type" not in config:
        raise UsageError(f"{origin} is not a configuration of transformers: it has no model_type")
    return config


CLASSES = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "deberta": "DebertaForMaskedLM",
    "deberta-v2": "DebertaV2ForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "resnet": "ResNetForImageClassification",
    "vit": "ViTForImageClassification",
}
"""`model_type` -> the class of a configuration that names none."""
IMAGE = 224
"""Pixels per side of an image."""


def has_formula(config: Mapping[str, Any]) -> bool:
    """Tell whether `model_from_config` has a formula for the configuration's class."""
    if is_seq2seq(config):
        return True
    kind, width = find_class(config), config.get("hidden_size")
    # A DeBERTa may have a convolution, and an embedding of another width
    is_plain = not config.get("conv_kernel_size") and config.get("embedding_size") in (None, width)
    return kind in _SHAPES and (is_plain or not kind.startswith("Deberta")) and not config.get("talking_head")


def is_seq2seq(config: Mapping[str, Any]) -> bool:
    """Tell whether a configuration is of an encoder and a decoder with a head over the vocabulary."""
    kind = find_class(config)
    is_generator = kind == "?" or kind.endswith(("ForConditionalGeneration", "MTModel"))
    return config.get("model_type") in seq2seq.KINDS and is_generator


def find_class(config: Mapping[str, Any]) -> str:
    """Find the class that a configuration names, or else the one of its kind that trace.py would take."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0][:60]
    return CLASSES.get(str(config.get("model_type")), "?")


def model_from_config(
    config: Mapping[str, Any],
    length: int | None,
    *,
    name: str,
    load_defaults: Callable[[str], Mapping[str, Any]] | None = None,
    target_length: int | None = None,
) -> Model:
    """Return the shape of a configuration's model, as its own class computes it: the loss of its head, all logits at once.

    Args:
        config: configuration of transformers, for example from `read_config`.
        length: tokens of a sample; None for images; of a sequence-to-sequence model those of its source, which of sounds is
            not read.
        name: the model's name, for messages.
        load_defaults: loads the defaults of a model_type, called if a field is missing: a configuration may leave out what
            equals them. None: every field must be there.
        target_length: tokens of a sequence-to-sequence model's target; None: as many as of its source.

    Raises:
        UsageError: a target for a model without one, a class without a formula, a missing field, a length above the model's
            number of positions.
    """
    _check(config, name)
    config = {field: value for field, value in config.items() if value is not None}
    kind = find_class(config)
    if not has_formula(config) and kind == "?":
        raise UsageError(
            f"{name}: its config.json names no class: add its name, of a decoder such as "
            '"architectures": ["MambaForCausalLM"]. Decoders of transformers without a formula are traced, which needs torch'
        )
    if not has_formula(config):
        raise UsageError(
            f"{name} is a {format_name(kind)} (model_type {format_name(config['model_type'])}), for which there is no "
            f"formula. Known are {', '.join(_SHAPES)}, encoders with decoders ({', '.join(seq2seq.KINDS)}), and decoders such "
            "as Llama, Qwen and Gemma; --trace finds its memory with torch"
        )
    if target_length is not None and not is_seq2seq(config):
        raise UsageError(f"target_len is {target_length}, but {name} has no decoder behind an encoder: leave it out")
    is_text = not kind.endswith("ForImageClassification")
    if is_text and length is None:
        raise UsageError(f"{name} reads tokens: --seq_len is missing (tokens of a sample, such as 2048)")
    if is_seq2seq(config):
        assert length is not None
        return _load_seq2seq(config, length, target_length or length, name, load_defaults)
    num_positions = config.get("max_position_embeddings", config.get("n_positions"))
    if num_positions is not None and config["model_type"] == "roberta":
        num_positions -= config.get("pad_token_id", 1) + 1  # positions are counted from the one after the padding's
    if is_text and num_positions is not None and length > num_positions:
        raise UsageError(f"seq_len is {length}, but {name} has {num_positions} positions: use {num_positions} or less")
    try:
        return _SHAPES[kind](config, length)
    except KeyError as error:
        if load_defaults is None:
            raise UsageError(f"{name}: its configuration has no {error.args[0]}") from None
    return model_from_config({**load_defaults(config["model_type"]), **config}, length, name=name)


def _load_seq2seq(
    config: Mapping[str, Any],
    source_length: int,
    target_length: int,
    name: str,
    load_defaults: Callable[[str], Mapping[str, Any]] | None,
) -> EncoderDecoder:
    """Return the shape of a sequence-to-sequence model; as `model_from_config`."""
    kind = config["model_type"]
    if load_defaults is not None and not kind.endswith("t5"):
        config = {**load_defaults(kind), **config} if "d_model" not in config else config
    lengths = {"seq_len": source_length, "target_len": target_length}
    limits = {"seq_len": config.get("max_position_embeddings"), "target_len": config.get("max_position_embeddings")}
    if kind == "whisper":
        limits = {"target_len": config.get("max_target_positions")}
    elif kind in seq2seq.UNLIMITED:
        limits = {}
    for field, limit in limits.items():
        if limit is not None and lengths[field] > limit:
            raise UsageError(f"{field} is {lengths[field]}, but {name} has {limit} positions: use {limit} or less")
    try:
        return seq2seq.KINDS[kind](config, source_length, target_length)
    except KeyError as error:
        raise UsageError(f"{name}: its configuration has no {error.args[0]}") from None


# Field -> its largest value that is accepted, as in recipes.
SIZES = {
    **dict.fromkeys("vocab_size max_position_embeddings type_vocab_size n_positions num_labels".split(), 2**24),
    **dict.fromkeys("hidden_size num_attention_heads num_key_value_heads head_dim".split(), 2**17),
    **dict.fromkeys("n_embd n_head embedding_size".split(), 2**17),
    **dict.fromkeys("intermediate_size n_inner".split(), 2**20),
    **dict.fromkeys("num_hidden_layers n_layer".split(), 10_000),
    **dict.fromkeys(("num_channels", "image_size", "patch_size", "num_mel_bins"), 2**14),
    **dict.fromkeys(
        "d_model d_kv num_heads encoder_attention_heads decoder_attention_heads relative_attention_num_buckets".split(),
        2**17,
    ),
    **dict.fromkeys("d_ff encoder_ffn_dim decoder_ffn_dim".split(), 2**20),
    **dict.fromkeys("num_layers num_decoder_layers encoder_layers decoder_layers".split(), 10_000),
    **dict.fromkeys("max_source_positions max_target_positions".split(), 2**24),
}
LISTS = {"hidden_sizes": 2**17, "depths": 1000}
MAX_STAGES = 64
KINDS_OF_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "pos_att_type": ((str, list), "c2p, p2c or both"),
    "model_type": ((str,), "text"),
    "feed_forward_proj": ((str,), "an activation, or gated- and one"),
    "id2label": ((dict,), "a mapping of numbers to names"),
}
RATES = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "attn_pdrop"),
    *("dropout_rate", "dropout", "attention_dropout", "activation_dropout"),
)


def _check(config: Mapping[str, Any], name: str) -> None:
    """Raise UsageError for the first field that is no valid size, activation or rate."""

    def refuse(field: str, value: Any, rule: str) -> None:
        raise UsageError(f"{name}: {field} is {format_value(value)} in its configuration, must be {rule}")

    check_sizes(config, name, SIZES, ("type_vocab_size",))
    for field, largest in LISTS.items():
        value = config.get(field, [1])
        is_list = isinstance(value, list) and 0 < len(value) <= MAX_STAGES
        if not is_list or not all(_is_size(size, largest) for size in value):
            refuse(field, value, f"up to {MAX_STAGES} whole numbers from 1 to {largest:,}")
    if len(config.get("hidden_sizes", [1])) != len(config.get("depths", config.get("hidden_sizes", [1]))):
        refuse("depths", config["depths"], f"as many numbers as hidden_sizes {format_value(config['hidden_sizes'])}")
    for field in ("hidden_act", "activation_function"):
        value = config.get(field)
        if value is not None and (not isinstance(value, str) or value not in ACTIVATIONS):
            refuse(field, value, f"one of {', '.join(ACTIVATIONS)}")
    for field in RATES:
        value = config.get(field, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            refuse(field, value, "a number in [0, 1)")
    for field in ("position_buckets", "max_relative_positions"):
        if config.get(field) is not None and not _is_size(config[field], SIZES["n_positions"], -1):
            refuse(field, config[field], "a whole number from -1")
    for field, (kinds, rule) in KINDS_OF_FIELDS.items():
        if not isinstance(config.get(field) or kinds[0](), kinds):
            refuse(field, config[field], rule)
    if config.get("layer_type", "basic") not in ("basic", "bottleneck"):
        refuse("layer_type", config["layer_type"], "basic or bottleneck")


def check_sizes(
    config: Mapping[str, Any], name: str, fields: Mapping[str, int], may_be_zero: Sequence[str] = ()
) -> None:
    """Raise UsageError for the first of `fields`, each with its largest value, that is there and no valid size."""
    for field, largest in fields.items():
        value, smallest = config.get(field), 0 if field in may_be_zero else 1
        if value is not None and not _is_size(value, largest, smallest):
            raise UsageError(
                f"{name}: {field} is {format_value(value)} in its configuration, must be a whole number from {smallest} to "
                f"{largest:,}"
            )


def _is_size(value: Any, largest: int, smallest: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= largest


def _count_labels(config: Mapping[str, Any]) -> int:
    """Count the labels: transformers keeps their names, and leaves the names out where there are two."""
    return len(config.get("id2label") or {}) or config.get("num_labels", 2)


def _masked_language_model(config: Mapping[str, Any], length: int) -> Transformer:
    """Return the shape of BERT without pooler and next-sentence head, with logits at every place."""
    pretraining, h = transformer.bert(config, length, length), config["hidden_size"]
    num_outside = pretraining.num_outside - (h * h + h) - (2 * h + 2)  # pooler, next-sentence head
    flops = pretraining.flops_per_sample - 3 * (2 * h * h + 4 * h)
    return dataclasses.replace(pretraining, num_outside=num_outside, flops_per_sample=flops)


def _bert_classifier(config: Mapping[str, Any], length: int) -> Transformer:
    return transformer.bert({**config, "num_labels": _count_labels(config)}, length, None)


def _resnet(config: Mapping[str, Any], _: int | None) -> convnet.ConvNet:
    return convnet.resnet({**config, "num_labels": _count_labels(config)}, IMAGE, IMAGE)


def _vit(config: Mapping[str, Any], _: int | None) -> Transformer:
    """Return the shape of a ViT, whose patches are the tokens of a BERT with its normalisations before each block."""
    h, labels = config["hidden_size"], _count_labels(config)
    patch, channels = config["patch_size"], config.get("num_channels", 3)
    num_patches = (config["image_size"] // patch) ** 2
    tokens = num_patches + 1  # and one that is classified
    # Its embeddings and pooler are those below
    words = {"vocab_size": 0, "max_position_embeddings": 0, "type_vocab_size": 0, "num_labels": labels}
    shape = transformer.bert({**config, **words}, tokens, None)
    embedding = channels * patch**2 * h
    flops = shape.flops_per_sample + 3 * 2 * embedding * num_patches - 3 * (2 * h * h)
    outside = embedding + h + h + tokens * h + 2 * h + (h + 1) * labels
    return dataclasses.replace(shape, num_outside=outside, flops_per_sample=flops, post_norm=False, keeps_masks=False)


def _modernbert(config: Mapping[str, Any], length: int) -> Transformer:
    return transformer.modernbert(config, length, length)


def _deberta_v2(config: Mapping[str, Any], length: int) -> Transformer:
    """Return the shape of DeBERTa-v2 and v3: a BERT that stores its scores, with products of queries and keys with distances.

    Of each kind of such products a layer saves the scores that are divided, b a T per token, and for each sample the vectors of
    all distances; besides, scaled keys and a mask; and all samples of a micro-batch share indices of distances, of 8 bytes.
    Gradients on their way through these products are left out, which shows where layers are computed again.
    """
    h, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    kinds = sum(kind in (config.get("pos_att_type") or ()) for kind in ("c2p", "p2c"))  # of a list, or of c2p|p2c
    kinds *= bool(config.get("relative_attention"))
    positions = config["max_position_embeddings"] * config.get("position_biased_input", True)
    words = {"max_position_embeddings": positions, "type_vocab_size": config.get("type_vocab_size", 0)}
    shape = _masked_language_model({**config, **words}, length)
    span, buckets = config.get("max_relative_positions", -1), config.get("position_buckets", -1)
    span = buckets if buckets > 0 else span if span > 0 else config["max_position_embeddings"]
    distances = 2 * span * bool(config.get("relative_attention"))
    own = 0 if config.get("share_att_key") else kinds * (h * h + h)
    norm = 2 * h * ("layer_norm" in str(config.get("norm_rel_ebd")))
    more = (b * kinds * (heads * length + distances * h // length) + b * h + length for b in (4, 2))
    float32, half = (saved + count for saved, count in zip(shape.layer.saved_bytes, more, strict=True))
    layer = shape.layer._replace(
        num_parameters=shape.layer.num_parameters + own,
        saved_bytes=(float32, half),
        matrices=(*shape.layer.matrices, *((h, h),) * (own and kinds)),
    )
    return dataclasses.replace(
        shape,
        layer=layer,
        num_outside=shape.num_outside + distances * h + norm,
        flops_per_sample=shape.flops_per_sample + 6 * layers * kinds * length * distances * h,
        eager_attention=True,
        shared_layer_bytes=8 * kinds * length**2,
    )


def _deberta(config: Mapping[str, Any], length: int) -> Transformer:
    """Return the shape of a DeBERTa of 2020: as v2, with one matrix of queries, keys and values, and all distances.

    Keys have no bias, nor has the product of distances with queries; each kind of products has a matrix of its own.
    """
    h, kinds = config["hidden_size"], config.get("pos_att_type") or ()
    is_relative = bool(config.get("relative_attention"))
    # v2 counts a matrix and a bias for each kind, and biases of queries, keys and values
    spare = h + h * ("c2p" in kinds) * is_relative
    shape = _deberta_v2({**config, "share_att_key": False, "position_buckets": -1, "norm_rel_ebd": "none"}, length)
    # Normalisations are operations in float32, and queries and values are kept anew when biases are added: fitted to a trace
    saved = [count + (4 * b + 14) * h for count, b in zip(shape.layer.saved_bytes, (4, 2), strict=True)]
    layer = shape.layer._replace(num_parameters=shape.layer.num_parameters - spare, saved_bytes=(saved[0], saved[1]))
    span, num_kinds = config.get("max_relative_positions", -1), sum(kind in kinds for kind in ("c2p", "p2c"))
    span = span if span > 0 else config["max_position_embeddings"]
    unseen = 2 * max(0, span - length) * num_kinds * is_relative
    flops = shape.flops_per_sample - 6 * shape.num_layers * length * unseen * h
    return dataclasses.replace(shape, layer=layer, flops_per_sample=flops)


_SHAPES: dict[str, Callable[[Mapping[str, Any], Any], Model]] = {
    "BertForPreTraining": lambda config, length: transformer.bert(config, length, length),
    "BertForMaskedLM": _masked_language_model,
    "BertForSequenceClassification": _bert_classifier,
    "RobertaForMaskedLM": _masked_language_model,
    "RobertaForSequenceClassification": _bert_classifier,
    "GPT2LMHeadModel": lambda config, length: transformer.gpt2(config, length, chunked_head=False),
    "ModernBertForMaskedLM": _modernbert,
    "DebertaForMaskedLM": _deberta,
    "DebertaV2ForMaskedLM": _deberta_v2,
    "ResNetForImageClassification": _resnet,
    "ViTForImageClassification": _vit,
}
