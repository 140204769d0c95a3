"""Sequence to sequence on ragged texts: speed and memory beside transformers' Seq2SeqTrainer.

    make bench NAME=seq2seq                                # 15 minutes on 2 cores that nothing else uses
    python benchmarks/seq2seq.py --only t5_512 --precisions no --rounds 2

A T5 and a BART with random weights learn to translate drawn texts: each word into another one, some into two or none. The
number of words of a text is log-normal. All programs train the same weights on the same token ids, with the same global batch,
precision, optimizer and threads, without dropout, every one in a process of its own. Seq2SeqTrainer pads the samples of a
micro-batch in the order of our steps: it is checked that its first steps have the same numbers of target tokens as ours, and
the same first loss. `grouped` is its sampler that puts samples of one length together: the same samples, but others in each
step. A step is one micro-batch, or k of them; the loss of k is a mean of means, for which Seq2SeqTrainer takes k divisors
(docs/your-trainer.md), so that its value is not compared.

The programs run in turns (SIGSTOP, SIGCONT; see harness.py), so that a machine whose speed changes is the same for all. In
every round each takes the same number of steps.

- Rate of a program in a round: target tokens per second in which it ran.
- Ratio: ours / the other's in the same round; median, smallest and largest of the rounds.
- Memory: largest resident memory from the first step on, beyond what was resident when the model had been built, and that of
  the whole process. Our script is started twice, as in chats.py.

The floor is forward, backward and update of our own step without anything around it (benchmarks/peers/floor.py).

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

import seq2seq_trainers

NUM_PAIRS, SEED = 800, 0
NUM_WORDS, MEDIAN_WORDS, SIGMA, MOST_WORDS = 1000, 32, 0.8, 240
LEFT_OUT, DOUBLED = 0.1, 0.1  # shares of the words
GROUPED, IN_FOUR = "Seq2SeqTrainer, grouped", "Seq2SeqTrainer, k = 4"
# Title -> words of peers/seq2seq_trainers.py after the precision.
PROGRAMS = {
    "ours": ("ours",),
    "floor": ("floor",),
    "Seq2SeqTrainer": ("trainer", "padded"),
    IN_FOUR: ("trainer", "padded", "4"),
    GROUPED: ("trainer", "grouped"),
}
SHAPE = {
    "extends": "seq2seq_finetuning",
    "description": "of a benchmark",
    "train_file": ["WORK/pairs.jsonl"],
    "validation_fraction": 0.0,
    "max_source_length": 512,
    "max_target_length": 512,
    "vocab_size": 512,
    "architecture": "t5",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "dropout": 0.0,
    "global_batch_size": 16,
    "learning_rate": 1e-4,
    "learning_rate_batch_size": 16,
    "lr_scaling_rule": "none",
    "lr_scheduler_type": "constant",
    "warmup_ratio": None,
    "num_warmup_steps": 0,
    "max_train_steps": 10**6,
}
BART = {"architecture": "bart", "max_position_embeddings": 512}
OTHERS = tuple(title for title in PROGRAMS if title not in OWN)
WORKLOADS = {
    "t5_512": Workload(SHAPE, (*OWN, *OTHERS)),
    "t5_32128": Workload(SHAPE | {"vocab_size": 32128}, (*OWN, *OTHERS)),
    "bart_512": Workload(SHAPE | BART, (*OWN, *OTHERS)),
}


def write_data(work: Path, num_pairs: int = NUM_PAIRS) -> None:
    """Write pairs of a text and its translation."""
    rng = np.random.default_rng(SEED)
    syllables = [f"{a}{b}{c}" for a in "bcdfghjklmnp" for b in "aeiou" for c in "bcdfghjklmnpqrstvwxz"]
    words = rng.permutation(syllables)[:NUM_WORDS]
    others = rng.permutation(words)
    with (work / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(num_pairs):
            length = min(MOST_WORDS, max(1, round(rng.lognormal(np.log(MEDIAN_WORDS), SIGMA))))
            places = rng.integers(NUM_WORDS, size=length)
            fates = rng.random(length)
            times = np.where(fates < LEFT_OUT, 0, np.where(fates < LEFT_OUT + DOUBLED, 2, 1))
            target = np.repeat(others[places], times) if times.any() else others[places]
            file.write(json.dumps({"source": " ".join(words[places]), "target": " ".join(target)}) + "\n")


def describe(data: dict[str, Any]) -> str:
    """Say what the samples of a row are like."""
    parts = [
        f"tokens of a {name} {mean:.0f} in the mean, {middle} in the median, 5 % below {low}, 5 % above {high}, at most {most}"
        for name, mean, (low, middle, high, most) in zip(
            ("source", "target"), data["mean_lengths"], data["quantiles"], strict=True
        )
    ]
    return (
        f"{data['samples']:,} pairs; {'; '.join(parts)}; {data['padding']:.0%} padding in a batch that is padded; tokenizer of "
        f"{data['pieces']:,} entries"
    )


COMPARISON = Comparison(
    name="seq2seq",
    title="Sequence to sequence on ragged texts, beside Seq2SeqTrainer",
    unit="Target tokens",
    workloads=WORKLOADS,
    programs=PROGRAMS,
    peers="seq2seq_trainers.py",
    prepare=seq2seq_trainers.prepare,
    write_data=write_data,
    describe=describe,
    packages=("torch", "transformers", "accelerate"),
    other_order=(GROUPED,),
    other_loss=(IN_FOUR,),
)
markdown = partial(beside.markdown, COMPARISON)


if __name__ == "__main__":
    beside.main(COMPARISON, __doc__)
