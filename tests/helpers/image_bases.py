"""Small models of images and text with random weights, and their processors, made by hand: nothing is downloaded."""

from pathlib import Path
from typing import Any

import torch
import transformers
from chat_bases import make_tokenizer

from samestep._internals.image_processors import leave_out_videos, without_videos

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 2048}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER = VISION | {"image_size": 16, "patch_size": 4}
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}MARK{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template of contents in parts; MARK stands for what it writes for an image."""
ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
IDEFICS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *TILES)
GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
INTERN = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
INTERN |= {"video_token": "<video>"}
FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "smolvlm", "internvl")


def _make_tokenizer(mark: str, tokens: Any, named: dict[str, str] | None = None) -> Any:
    more = {} if named is None else {"extra_special_tokens": named}
    return make_tokenizer(PARTS.replace("MARK", mark), (*ENDS, *tokens), **more)


def _find_ids(tokenizer: Any, **names: str) -> dict[str, int]:
    return {field: tokenizer.convert_tokens_to_ids(token) for field, token in names.items()}


def _make_llava() -> tuple[Any, Any, dict[str, Any]]:
    tokenizer = _make_tokenizer("<image>", ["<image>"])
    square = {"height": 16, "width": 16}
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=square)
    processor = transformers.LlavaProcessor(
        images, tokenizer, 4, "default", tokenizer.chat_template, num_additional_image_tokens=1
    )
    fields = {"vision_config": {"model_type": "clip_vision_model", **TOWER}, "text_config": {"model_type": "llama"}}
    return processor, fields, _find_ids(tokenizer, image_token_id="<image>")


def _make_qwen(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    tokenizer = _make_tokenizer("<|vision_start|><|image_pad|><|vision_end|>", QWEN)
    pixels = {"shortest_edge": 8 * 8, "longest_edge": 32 * 32}
    images = transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=pixels)
    make = {"qwen2_5_vl": transformers.Qwen2_5_VLProcessor, "qwen3_vl": transformers.Qwen3VLProcessor}[kind]
    processor = make(images, tokenizer, chat_template=tokenizer.chat_template)
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "depth": 2, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "out_hidden_size": 32}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
        text = {"rope_parameters": rope}
    else:
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0, "mrope_interleaved": True}
        text = {"rope_parameters": rope, "head_dim": 8}
    names = dict(
        zip(("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id"), QWEN, strict=True)
    )
    return processor, {"vision_config": vision, "text_config": text}, _find_ids(tokenizer, **names)


def _make_gemma() -> tuple[Any, Any, dict[str, Any]]:
    tokenizer = _make_tokenizer("<start_of_image>", GEMMA.values(), GEMMA)
    images = transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = transformers.Gemma3Processor(images, tokenizer, tokenizer.chat_template, image_seq_length=4)
    fields = {"vision_config": {"model_type": "siglip_vision_model", **TOWER}, "mm_tokens_per_image": 4}
    fields["text_config"] = {
        "head_dim": 8,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    names = {"image_token_id": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"}
    return processor, fields, _find_ids(tokenizer, **{field: GEMMA[name] for field, name in names.items()})


def _make_idefics(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    tokenizer = _make_tokenizer("<image>", IDEFICS)
    size = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    if kind == "smolvlm":
        images = transformers.SmolVLMImageProcessorPil(**size)
        processor = transformers.SmolVLMProcessor(images, tokenizer, None, 4, chat_template=tokenizer.chat_template)
    else:
        images = transformers.Idefics3ImageProcessorPil(**size)
        processor = transformers.Idefics3Processor(images, tokenizer, 4, chat_template=tokenizer.chat_template)
    fields = {"vision_config": TOWER, "text_config": {"model_type": "llama"}, "scale_factor": 2}
    return processor, fields, _find_ids(tokenizer, image_token_id="<image>")


def _make_internvl() -> tuple[Any, Any, dict[str, Any]]:
    tokenizer = _make_tokenizer("<IMG_CONTEXT>", INTERN.values(), INTERN)
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=4
    )
    processor = transformers.InternVLProcessor(
        images, tokenizer, image_seq_length=4, chat_template=tokenizer.chat_template
    )
    vision = VISION | {"image_size": [16, 16], "patch_size": [4, 4]}
    fields = {"vision_config": vision, "text_config": {"model_type": "qwen2"}, "downsample_ratio": 0.5}
    return processor, fields, _find_ids(tokenizer, image_token_id="<IMG_CONTEXT>")


MAKERS = {
    "llava": _make_llava,
    "qwen2_5_vl": lambda: _make_qwen("qwen2_5_vl"),
    "qwen3_vl": lambda: _make_qwen("qwen3_vl"),
    "gemma3": _make_gemma,
    "idefics3": lambda: _make_idefics("idefics3"),
    "smolvlm": lambda: _make_idefics("smolvlm"),
    "internvl": _make_internvl,
}


def make_image_base(kind: str) -> tuple[Any, Any]:
    """Make a model of a family and its processor."""
    with without_videos():
        processor, fields, ids = MAKERS[kind]()
        leave_out_videos(processor)
    tokenizer = processor.tokenizer
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    fields = fields | {"text_config": TEXT | ends | {"vocab_size": len(tokenizer)} | fields["text_config"]}
    config = transformers.AutoConfig.for_model(kind, **fields, **ids)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    return model, processor


def save_image_base(folder: Path, kind: str = "llava") -> Path:
    """Save a model of a family, and its processor, in a folder."""
    model, processor = make_image_base(kind)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
