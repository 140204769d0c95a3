"""Training embeddings with negatives of the whole batch: speed and memory beside sentence-transformers' cached loss.

    make bench NAME=embeddings                                # half an hour on 2 cores that nothing else uses
    python benchmarks/embeddings.py --only ragged --rounds 3

An encoder with random weights learns pairs of drawn words, all texts of equal length, or of log-normal lengths. Both programs
train the same weights on the same tokens in the same order, with the same loss, batch and optimizer, float32 and no dropout;
that their first losses are the same is checked. Both embed the texts of a batch twice, `SIZE` pairs or texts at a time:
CachedMultipleNegativesRankingLoss in SentenceTransformerTrainer, and scripts/train_embeddings.py.

The programs run in turns (SIGSTOP, SIGCONT; see harness.py).

Results of workloads and batches that are not run are kept from the old file.

- Ratio: our pairs per second / the other's in the same round; median, smallest and largest of the rounds.
- Memory: largest resident memory of the process, and beyond what was resident when the model had been built; of a small and of
  a large batch.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import beside
import harness
import numpy as np
from beside import PEERS
from harness import Program

sys.path.insert(0, str(PEERS))

import embedding_trainers

SIZE, NUM_STEPS = 32, 2  # samples embedded at a time; steps of a round
BATCHES = (256, 4096)
NUM_WORDS, SEED, SIGMA, MEDIAN_WORDS = 2000, 0, 0.8, 24
OURS, OTHER = "ours", "sentence-transformers, cached"
PACKAGES = ("torch", "transformers", "accelerate", "sentence-transformers")
SAME_LOSS = 1e-4
RECIPE = {
    "extends": "embedding_training",
    "description": "of a benchmark",
    "global_batch_size": 256,
    "max_train_steps": 10**6,
    "learning_rate": 1e-4,
    "learning_rate_batch_size": 256,
    "lr_scaling_rule": "none",
    "lr_scheduler_type": "constant",
    "warmup_ratio": None,
    "num_warmup_steps": 0,
    "validation_fraction": 0.0,
    "mask_duplicates": False,
    "architecture": "bert",
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 256,
    "initializer_range": 0.02,
    "dropout": 0.0,
}
LENGTHS = {"equal": 48, "ragged": 256}
"""Workload -> tokens of a text at most; all equal texts are longer before they are cut."""


def write_pairs(file: Path, is_ragged: bool, num_pairs: int) -> None:
    """Write pairs of drawn words."""
    rng = np.random.default_rng(SEED)
    words = np.array([f"{a}{b}{c}" for a in "bcdfghjklmnp" for b in "aeiou" for c in "bcdfghjklmnpqrstvwxz"])[
        :NUM_WORDS
    ]

    def draw() -> str:
        length = round(rng.lognormal(np.log(MEDIAN_WORDS), SIGMA)) if is_ragged else 2 * LENGTHS["equal"]
        return " ".join(rng.choice(words, max(1, length)))

    rows = [json.dumps({"query": draw(), "positive": draw()}) for _ in range(num_pairs)]
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")


def start(title: str, folder: Path, threads: int) -> Program:
    """Start a program; its stamps are in TITLE.stamps of the folder."""
    file = PEERS / "embedding_trainers.py"
    words = [str(folder), str(folder / f"{title}.stamps")]
    if title == OURS:
        recipe = folder / "recipe.yaml"
        words += ["ours", str(harness.ROOT / "scripts" / "train_embeddings.py"), "--recipe", str(recipe)]
        words += ["--per_device_train_batch_size", str(SIZE), "--output_dir", str(folder / "ours")]
        words = [*harness.launch(file), *words, "--overwrite_output_dir"]
    else:
        words = [sys.executable, str(file), *words, str(SIZE)]
    return Program(words, folder.parent, folder / f"{title}.log", threads)


def measure(name: str, batch: int, num_rounds: int, work: Path, threads: int) -> dict[str, Any]:
    """Measure a row of the results."""
    values = RECIPE | {"global_batch_size": batch, "max_seq_length": LENGTHS[name]}
    folder = work / f"{name}-{batch}"
    pairs = work / f"{name}.jsonl"
    folder = harness.write_recipe(folder, values | {"train_file": [str(pairs)]})
    data = embedding_trainers.prepare(folder)
    raced = beside.race([OURS, OTHER], folder, lambda title: start(title, folder, threads), num_rounds, (1, NUM_STEPS))
    losses = [stamps[0].loss for stamps in raced.stamps.values()]
    if not abs(losses[0] - losses[1]) <= SAME_LOSS * losses[0]:
        sys.exit(f"the first losses of {name} differ: {losses}")
    row = {"name": f"{name}, {batch}", "workload": name, "batch": batch, "data": data, "losses": losses}
    return row | {"rates": raced.rates, "peaks": raced.peaks, "memory": raced.memory}


def main() -> None:
    parser = harness.flags("embeddings", __doc__, rounds=5, only=LENGTHS, threads=True)
    parser.add_argument("--batches", type=harness.positive, nargs="+", default=list(BATCHES))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that stopped programs do not stay behind
    about = harness.about("make bench NAME=embeddings", PACKAGES, arguments.threads)
    names = [f"{workload}, {batch}" for workload in arguments.only for batch in arguments.batches]
    rows = harness.read_other_rows(arguments.output, "rows", "name", names)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        os.environ["HF_HOME"] = str(work / "home")
        for workload in arguments.only:
            write_pairs(work / f"{workload}.jsonl", workload == "ragged", 4 * max(arguments.batches))
            for batch in arguments.batches:
                num_rounds = arguments.rounds if batch == min(arguments.batches) else 1
                rows.append(measure(workload, batch, num_rounds, work, arguments.threads))
                print(rows[-1], file=sys.stderr, flush=True)
    rows.sort(key=lambda row: (row["workload"], row["batch"]))
    results = {"about": about, "rows": rows}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict[str, Any]) -> str:
    lines = []
    for row in results["rows"]:
        data = row["data"]
        small = min((o for o in results["rows"] if o["workload"] == row["workload"]), key=lambda other: other["batch"])
        cells = [
            f"{row[kind][title]:.2f} ({row[kind][title] / small[kind][title]:.2f})"
            for kind in ("memory", "peaks")
            for title in (OURS, OTHER)
        ]
        ratio = harness.spread(harness.ratios(row["rates"][OURS], row["rates"][OTHER]), ".2f")
        lengths = f"{data['mean_length']:.0f}, at most {data['most']}"
        lines.append(
            [row["workload"], f"{row['batch']:,}", lengths, harness.spread(row["rates"][OURS], ",.0f"), ratio, *cells]
        )
    heads = ["workload", "batch", "tokens of a text", "ours, pairs/s", "ours / cached"]
    heads += [f"{kind}, {title}" for kind in ("GB", "GB, whole") for title in ("ours", "cached")]
    return harness.page(
        "Embeddings with negatives of the whole batch, beside sentence-transformers' cached loss",
        "embeddings.py",
        results["about"],
        "Pairs per second, ours / theirs: medians (smallest to largest) of rounds; above 1 ours is faster. GB: largest memory "
        "beyond that of the built model, and of the whole process (in brackets: times that of the small batch).\n\n"
        f"{harness.table(heads, lines)}",
    )


if __name__ == "__main__":
    main()
