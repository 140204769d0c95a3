"""Fine-tuning of a model of images and text on images of mixed sizes: speed and memory beside TRL's SFTTrainer.

    make bench NAME=image_text                                # 15 minutes on 2 cores that nothing else uses
    python benchmarks/image_text.py --only qwen2_5_vl_1024 --precisions no --rounds 2

A Qwen2.5-VL with random weights learns drawn answers to drawn questions about one to three drawn images. Sides of images and
numbers of words are log-normal, so samples are as ragged as real ones. All programs train the same weights on the same files,
with the same global batch, precision, optimizer and threads, every one in a process of its own; each opens the images of its
steps anew. TRL's SFTTrainer pads the rows of a micro-batch in the order of our steps: it is checked that its first steps have
the same numbers of trained tokens as ours, and the same first loss. A step of it is one micro-batch, or k of them; the loss of
k is then the mean of the micro-batches' means (TRL 1.16), so that its value is not compared. It has neither packed nor
padding-free rows of images, and cannot group images by length.

The programs run in turns (SIGSTOP, SIGCONT; see harness.py), so that a machine whose speed changes is the same for all. In
every round each takes the same number of steps.

- Rate of a program in a round: trained ("supervised") tokens per second in which it ran.
- Ratio: ours / the other's in the same round; median, smallest and largest of the rounds.
- Memory: largest resident memory from the first step on, beyond what was resident when the model had been built, and that of
  the whole process. Our script is started twice, as in chats.py.

The floor is forward, backward and update of our own step without anything around it (benchmarks/peers/floor.py), without the
reading of images, too; its memory holds the pixels of 20 steps.

Results of workloads and precisions that are not run are kept from the old file.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import beside
import numpy as np
from beside import Comparison, Workload
from PIL import Image, ImageDraw

sys.path.insert(0, str(beside.PEERS))

import image_trainers

NUM_SAMPLES, SEED = 480, 0
MOST_IMAGES, MEDIAN_SIDE, SIDE_SIGMA, SIDES = 3, 150, 0.5, (56, 448)
NUM_WORDS, MEDIAN_WORDS, SIGMA, MOST_WORDS = 500, 16, 0.8, 120
MOST_TOKENS = 256  # of an image
IN_FOUR = "TRL, k = 4"
# Title -> words of peers/image_trainers.py after the precision.
PROGRAMS = {
    "ours": ("ours",),
    "floor": ("floor",),
    "TRL": ("sft",),
    IN_FOUR: ("sft", "4"),
}
SHAPE: dict[str, Any] = {
    "text_config": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
    },
    "vision_config": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_heads": 4,
        "depth": 4,
        "out_hidden_size": 256,
        "window_size": 112,
        "fullatt_block_indexes": [3],
    },
}
RECIPE = {
    "extends": "causal_lm_finetuning",
    "description": "of a benchmark",
    "train_file": ["WORK/rows.jsonl"],
    "validation_fraction": 0.0,
    "images": True,
    "max_seq_length": 512,
    "global_batch_size": 16,
    "learning_rate": 1e-4,
    "learning_rate_batch_size": 16,
    "lr_scaling_rule": "none",
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "warmup_ratio": None,
    "num_warmup_steps": 0,
    "max_train_steps": 10**6,
}
VOCABULARIES = (1024, 32768)
WORKLOADS = {
    f"qwen2_5_vl_{size}": Workload(RECIPE | {"model_name_or_path": f"WORK/base_{size}"}, tuple(PROGRAMS))
    for size in VOCABULARIES
}


def draw_image(rng: np.random.Generator) -> Image.Image:
    """Draw figures on a coloured ground, of a size of their own."""
    size = tuple(int(np.clip(rng.lognormal(np.log(MEDIAN_SIDE), SIDE_SIGMA), *SIDES)) for _ in range(2))
    image = Image.new("RGB", size, tuple(rng.integers(256, size=3).tolist()))
    pen = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(2, 8))):
        left, right = sorted(rng.integers(size[0], size=2).tolist())
        top, bottom = sorted(rng.integers(size[1], size=2).tolist())
        draw = pen.ellipse if rng.random() < 0.5 else pen.rectangle
        draw((left, top, right, bottom), tuple(rng.integers(256, size=3).tolist()))
    return image


def write_data(work: Path, num_samples: int = NUM_SAMPLES, shape: dict[str, Any] = SHAPE) -> None:
    """Write questions about images, their answers, and the bases."""
    rng = np.random.default_rng(SEED)
    words = rng.permutation([f"{a}{b}{c}" for a in "bcdfghjklmnp" for b in "aeiou" for c in "bcdfghjklmnpqrst"])
    words = words[:NUM_WORDS]
    texts = []

    def draw_text() -> str:
        length = min(MOST_WORDS, max(1, round(rng.lognormal(np.log(MEDIAN_WORDS), SIGMA))))
        texts.append(" ".join(rng.choice(words, length)))
        return texts[-1]

    with (work / "rows.jsonl").open("w", encoding="utf-8") as file:
        for number in range(num_samples):
            names = [f"{number}_{place}.png" for place in range(int(rng.integers(1, MOST_IMAGES + 1)))]
            for name in names:
                draw_image(rng).save(work / name)
            parts = [*({"type": "image", "image": name} for name in names), {"type": "text", "text": draw_text()}]
            turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": draw_text()}]
            file.write(json.dumps({"messages": turns}) + "\n")
    for size in VOCABULARIES:
        image_trainers.save_base(work / f"base_{size}", texts, size, MOST_TOKENS, shape)


def describe(data: dict[str, Any]) -> str:
    """Say what the samples of a row are like."""
    low, middle, high, most = data["quantiles"]
    return (
        f"{data['samples']:,} samples with {data['images']:,} images; tokens of a sample {data['mean_length']:.0f} in the "
        f"mean, {middle} in the median, 5 % below {low}, 5 % above {high}, at most {most}; {data['of_images']:.0%} of the "
        f"tokens are of images, {data['supervised']:.0%} trained; {data['padding']:.0%} padding in a batch of one padded "
        f"table; tokenizer of {data['pieces']:,} entries"
    )


COMPARISON = Comparison(
    name="image_text",
    title="Fine-tuning on images of mixed sizes, beside TRL",
    unit="Trained tokens",
    workloads=WORKLOADS,
    programs=PROGRAMS,
    peers="image_trainers.py",
    prepare=image_trainers.prepare,
    write_data=write_data,
    describe=describe,
    packages=("torch", "transformers", "accelerate", "trl"),
    other_loss=(IN_FOUR,),
)
markdown = partial(beside.markdown, COMPARISON)


if __name__ == "__main__":
    beside.main(COMPARISON, __doc__)
