"""Fine-tuning a classifier: its accuracy however it is cut.

    make bench NAME=finetuning FLAGS='--train_file reviews.csv'

TRAIN_FILE is the sentences of Pang and Lee's film reviews (docs/finetuning.md says how to make it). By recipe
finetune_reviews_cpu, float32, from random weights, as it is, in micro-batches of 8, and on two processes: accuracy on the
held-out tenth at the end, and the largest relative difference of a step's loss from the first run's. Speed: run.py (--reviews).
"""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import harness
import numpy as np

from samestep.data import labelled_texts
from samestep.recipe.catalog import load

RECIPE = "finetune_reviews_cpu"
CUTS = {
    "one batch of 32, 1 process": ("cpu.yaml", ""),
    "4 x 8, 1 process": ("cpu.yaml", "--per_device_train_batch_size 8"),
    "16 on each of 2 processes": ("2xcpu.yaml", ""),
}


def launch(train_file: Path, output_dir: Path, config: str, flags: str) -> list[str]:
    words = harness.launch(harness.ROOT / "scripts" / "finetune_classifier.py", "no", config, "--quiet")
    words += ["--recipe", RECIPE, "--train_file", str(train_file)]
    return [*words, "--output_dir", str(output_dir), *flags.split()]


def accuracies(train_file: Path) -> list[dict]:
    """Make a row for every cut."""
    rows, reference = [], None
    with tempfile.TemporaryDirectory() as folder:
        for number, (title, (config, flags)) in enumerate(CUTS.items()):
            output_dir = Path(folder) / str(number)
            words = launch(train_file, output_dir, config, flags)
            seconds = harness.seconds(partial(subprocess.run, words, check=True, stdout=subprocess.DEVNULL))
            losses = np.array([line["loss"] for line in harness.read_steps(output_dir)])
            reference = losses if reference is None else reference
            results = json.loads((output_dir / "all_results.json").read_text())
            row = {"cut": title, "steps": len(losses), "accuracy": results["eval_accuracy"], "f1": results["eval_f1"]}
            row |= {"difference": float(np.abs(losses / reference - 1).max())}
            row |= {"train_seconds": results["train_seconds"], "seconds": seconds}
            print(row, file=sys.stderr)
            rows.append(row)
    return rows


def main() -> None:
    parser = harness.flags("finetuning", __doc__)
    parser.add_argument("--train_file", type=Path, required=True)
    arguments = parser.parse_args()
    train_file = arguments.train_file.resolve()
    texts, _ = labelled_texts.build(load(RECIPE, {"train_file": [str(train_file)]}))
    about = harness.about(
        "make bench NAME=finetuning FLAGS='--train_file reviews.csv'",
        ("torch", "accelerate", "transformers", "evaluate"),
        texts=str(texts),
        majority=max(map(texts.labels.tolist().count, (0, 1))) / len(texts),
    )
    results = {"about": about, "accuracy": accuracies(train_file)}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict) -> str:
    about = results["about"]
    rows = [
        [
            *(row["cut"], row["steps"], f"{row['accuracy']:.4f}", f"{row['f1']:.4f}", f"{row['difference']:.1e}"),
            *(f"{row['train_seconds']:.0f}", f"{row['seconds']:.0f}"),
        ]
        for row in results["accuracy"]
    ]
    columns = "cut | steps | accuracy, held out | F1 | largest difference of a loss | training, s | whole process, s"
    return harness.page(
        "Fine-tuning a classifier",
        "finetuning.py",
        about,
        f"Film reviews, {RECIPE}, float32: {about['texts']}, {about['majority']:.3f} of them of the larger class.\n\n"
        f"{harness.table(columns, rows)}",
    )


if __name__ == "__main__":
    main()
