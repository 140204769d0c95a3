"""TRL's SFTTrainer on images and text, as `benchmarks/image_text.py` measures it: FOLDER STAMPS PRECISION PROGRAM [K].

PROGRAM is sft; a step is one micro-batch, or K. `ours` and `floor` are the script of this repository and its bare step, with
the script and its flags instead of K. TRL's collator opens the images of a micro-batch, lets the processor make tokens and
pixels, and pads the rows; TRL has neither packed nor padding-free rows of images. Beside its stamps a program writes
STAMPS.base, the resident memory when its model has been built.
"""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from chat_trainers import ROWS, Memory, run_script, run_trainer, settings
from clock import Clock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from samestep._internals.image_processors import leave_out_videos, load_processor, without_videos
from samestep.cut.order import Order
from samestep.data.row_images import list_images_of_row, list_texts
from samestep.recipe.catalog import load

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}TEXT"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}TEXT{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
).replace(
    "TEXT",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ '<|vision_start|><|image_pad|>"
    "<|vision_end|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}",
)
"""Chat template of the base, with markers around what is trained."""
ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NAMES = {
    "vision_start_token_id": "<|vision_start|>",
    "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>",
    "video_token_id": "<|video_pad|>",
}
"""Field of the config -> token."""
PATCH, MERGE = 14, 2
SIDE = PATCH * MERGE
"""Pixels of a side of what is one token."""


def save_base(folder: Path, texts: list[str], vocab_size: int, most_tokens: int, shape: dict[str, Any]) -> None:
    """Save a Qwen2.5-VL of random weights with its processor, whose images take 4 to `most_tokens` tokens.

    Args:
        folder: to write.
        texts: on which the tokenizer is trained, of 1,024 entries.
        vocab_size: rows of the embedding.
        most_tokens: of an image.
        shape: text_config and vision_config.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [*ENDS, *NAMES.values()]
    options: dict[str, Any] = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1024, **options))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=ENDS[2], pad_token=ENDS[0], chat_template=TEMPLATE
    )
    pixels = {"shortest_edge": 4 * SIDE**2, "longest_edge": most_tokens * SIDE**2}
    with without_videos():
        images = transformers.Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=pixels)
        processor = transformers.Qwen2_5_VLProcessor(images, tokenizer, chat_template=TEMPLATE)
        leave_out_videos(processor).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = shape["text_config"] | ids | {"vocab_size": max(vocab_size, len(tokenizer))}
    vision = shape["vision_config"] | {"patch_size": PATCH, "spatial_merge_size": MERGE}
    special_ids = {field: tokenizer.convert_tokens_to_ids(token) for field, token in NAMES.items()}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special_ids)
    torch.manual_seed(0)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)


def prepare(folder: Path) -> dict[str, Any]:
    """Write the conversations of a recipe, with paths of their images, in the order in which our steps take them.

    Returns:
        what the samples are like; `supervised` are tokens that are trained, `of_images` those of images.
    """
    recipe = load(str(folder / "recipe.yaml"))
    source, _ = recipe.parts.find("data")(recipe)
    batch = recipe.global_batch_size
    order = Order(len(source), batch, recipe.seed, recipe.epoch_end)
    ids = [int(number) for step in range(len(source) // batch) for number in order.samples(step)[1]]
    rows = []
    for number in ids:
        row = json.loads(source.rows[int(source.places[number])]["row"])
        turns = [*row["prompt"], *row["answers"][0]]
        messages = [{"role": turn["role"], "content": "".join(list_texts(turn["content"]))} for turn in turns]
        rows.append({"messages": messages, "images": list_images_of_row(row)})
    features = datasets.Features(
        {
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
        }
    )
    datasets.Dataset.from_list(rows, features=features).save_to_disk(folder / ROWS)
    samples = [source.draw(0, number) for number in ids]
    lengths = np.array([sample.length for sample in samples])
    batches = lengths.reshape(-1, batch)
    supervised = [int(sample.is_trained.sum()) for sample in samples]
    of_images = sum(int(np.isin(sample.tokens, list(source.image_ids)).sum()) for sample in samples)
    return {
        "samples": len(samples),
        "images": sum(len(row["images"]) for row in rows),
        "pieces": len(source.tokenizer),
        "quantiles": np.quantile(lengths, (0.05, 0.5, 0.95, 1)).astype(int).tolist(),
        "mean_length": float(lengths.mean()),
        "padding": float(1 - batches.sum() / (batches.max(1).sum() * batch)),
        "supervised": sum(supervised) / int(lengths.sum()),
        "of_images": of_images / int(lengths.sum()),
        "first_steps": np.array(supervised).reshape(-1, batch)[:4].sum(1).tolist(),
    }


def train(
    folder: Path, clock: Clock, memory: Memory, precision: str, num_micro_batches: str = "1", num_steps: int = 10**6
) -> None:
    """Let SFTTrainer take steps."""
    from trl import SFTConfig, SFTTrainer

    recipe = load(str(folder / "recipe.yaml"))
    model = transformers.AutoModelForImageTextToText.from_pretrained(recipe.model_name_or_path, dtype=torch.float32)
    arguments = settings(recipe, precision, int(num_micro_batches), num_steps)

    run_trainer(
        SFTTrainer,
        clock,
        memory,
        recipe,
        model=model,
        args=SFTConfig(**arguments, max_length=None, assistant_only_loss=True),
        train_dataset=datasets.load_from_disk(folder / ROWS),
        processing_class=load_processor(recipe.model_name_or_path),
    )


def main(folder: str, stamps: str, precision: str, program: str, *words: str) -> None:
    clock, memory = Clock(stamps), Memory(Path(f"{stamps}.base"))
    if program == "sft":
        train(Path(folder), clock, memory, precision, *words)
    else:
        run_script(clock, memory, program, list(words))


if __name__ == "__main__":
    main(*sys.argv[1:])
