"""Fine-tuning on ragged conversations: speed and memory beside TRL's trainers and transformers' Trainer.

    make bench NAME=chats                                # 15 minutes on 2 cores that nothing else uses
    python benchmarks/chats.py --only sft_512 --precisions no --rounds 2

A Llama with random weights learns drawn conversations (samestep/data/builtin/drawn_chats.py, level hard), joined to lengths
as ragged as those of real ones: the number of questions of a conversation is log-normal. All
programs train the same weights on the same
token ids, with the same trained tokens, global batch, precision, optimizer and threads, every one in a process of its own.
Those with padded rows take the samples of the same steps in the same order: it is checked that their first steps have the same
numbers of trained tokens, and the same first loss, as ours. Rows that are packed or grouped by length hold the same samples,
but others in each step.

The programs run in turns (SIGSTOP, SIGCONT; see harness.py), so that a machine whose speed changes is the same for all. In
every round each takes the same number of steps.

- Rate of a program in a round: trained ("supervised") tokens per second in which it ran.
- Ratio: ours / the other's in the same round; median, smallest and largest of the rounds.
- Memory: largest resident memory from the first step on, beyond what was resident when the model had been built: gradients,
  moments, activations, logits, buffers of kernels. At its first start on a machine our script rehearses samples of the
  greatest length, too; it is started twice here, and what is compared is the second start, which remembers what fits.

The floor is forward, backward and update of our own step without anything around it (benchmarks/peers/floor.py). What the
others are: benchmarks/peers/chat_trainers.py. A padded step is one micro-batch, or k of them.

Results of workloads and precisions that are not run are kept from the old file.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import beside
import numpy as np
from beside import OWN, Comparison, Workload

sys.path.insert(0, str(beside.PEERS))

import chat_trainers

from samestep.data.builtin import drawn_chats

NUM_CHATS, SEED = 800, 0
MEDIAN_QUESTIONS, SIGMA, MOST_QUESTIONS = 4, 0.8, 32
# Title -> words of peers/chat_trainers.py after the precision.
PROGRAMS = {
    "ours": ("ours",),
    "floor": ("floor",),
    "TRL, padded": ("sft", "padded"),
    "TRL, padded, k = 4": ("sft", "padded", "4"),
    "TRL, packed": ("sft", "packed"),
    "TRL, padding-free": ("sft", "padding_free"),
    "Trainer": ("trainer", "padded"),
    "Trainer, grouped": ("trainer", "grouped"),
    "exact(Trainer)": ("exact", "padded"),
    "exact(Trainer), PackedLoss": ("exact", "rows"),
    "TRL DPO": ("dpo", "padded"),
}
SFT = (*OWN, "TRL, padded", "TRL, packed", "Trainer", "Trainer, grouped")
EXACT = ("exact(Trainer)", "exact(Trainer), PackedLoss")

SHAPE = {
    "extends": "sft_small_cpu",
    "train_file": ["WORK/chats.jsonl"],
    "dataset_name": None,
    "dataset_config_name": None,
    "validation_fraction": 0.0,
    "num_train_samples": None,
    "num_validation_samples": None,
    "max_seq_length": 1024,
    "max_position_embeddings": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "initializer_range": 0.02,
    "global_batch_size": 16,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "warmup_ratio": None,
    "num_warmup_steps": 0,
    "max_train_steps": 10**6,
}
LARGE = {"vocab_size": 32768}
DPO = {"train_file": ["WORK/pairs.jsonl"], "objective": "dpo", "train_on": "completions", "weight_decay": 0.0}
WORKLOADS = {
    "sft_512": Workload(SHAPE, (*SFT, "TRL, padded, k = 4", "TRL, padding-free", *EXACT)),
    "sft_32768": Workload(SHAPE | LARGE, (*SFT, *EXACT)),
    "lora_32768": Workload(
        SHAPE | LARGE | {"lora_rank": 16, "lora_alpha": 32}, (*OWN, "TRL, padded", "TRL, packed"), ("bf16",)
    ),
    "dpo_32768": Workload(SHAPE | LARGE | DPO, (*OWN, "TRL DPO"), ("bf16",)),
}


# ---------------------------------------------------------------------------------------------------------------------
# Data


def join_chats(number: int) -> tuple[list[dict[str, str]], drawn_chats.Chat]:
    """Join drawn conversations to one with a log-normal number of questions.

    Returns:
        the turns before the last answer, and the conversation that ends with it.
    """
    rng = np.random.default_rng((SEED, number))
    num_questions = min(MOST_QUESTIONS, max(1, round(rng.lognormal(np.log(MEDIAN_QUESTIONS), SIGMA))))
    turns: list[dict[str, str]] = []
    for place in range(num_questions):
        chat = drawn_chats.draw_chat(SEED, "train", number * MOST_QUESTIONS + place, "hard")
        last = [turn for turn in chat.messages if turn["role"] == "user"][-1]
        if place == 0 and chat.messages[0]["role"] == "system":
            turns.append(chat.messages[0])
        turns.append(last)
        if place < num_questions - 1:
            turns.append({"role": "assistant", "content": chat.answer})
    return turns, chat


def write_data(work: Path, num_chats: int = NUM_CHATS) -> None:
    """Write conversations, and the same ones as pairs of a right and a wrong last answer."""
    with (work / "chats.jsonl").open("w", encoding="utf-8") as chats, (work / "pairs.jsonl").open("w") as pairs:
        for number in range(num_chats):
            turns, chat = join_chats(number)
            right, wrong = ([{"role": "assistant", "content": text}] for text in (chat.answer, chat.wrong))
            chats.write(json.dumps({"messages": turns + right}) + "\n")
            pairs.write(json.dumps({"prompt": turns, "chosen": right, "rejected": wrong}) + "\n")


def describe(data: dict[str, Any]) -> str:
    """Say what the samples of a row are like."""
    low, middle, high, most = data["quantiles"]
    return (
        f"{data['samples']:,} samples; tokens of a sequence {data['mean_length']:.0f} in the mean, {middle} in the median, 5 % "
        f"below {low}, 5 % above {high}, at most {most}; {data['supervised']:.0%} of the tokens trained; {data['padding']:.0%} "
        f"padding in a batch of one padded table; tokenizer of {data['pieces']:,} entries"
    )


COMPARISON = Comparison(
    name="chats",
    title="Fine-tuning on ragged conversations, beside other trainers",
    unit="Trained tokens",
    workloads=WORKLOADS,
    programs=PROGRAMS,
    peers="chat_trainers.py",
    prepare=chat_trainers.prepare,
    write_data=write_data,
    describe=describe,
    packages=("torch", "transformers", "accelerate", "trl", "peft"),
    other_order=("TRL, packed", "Trainer, grouped"),
)
markdown = partial(beside.markdown, COMPARISON)


if __name__ == "__main__":
    beside.main(COMPARISON, __doc__)
