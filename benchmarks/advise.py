"""Is the batch that `python -m recipes advise` says right? Recipes of the catalog, what it makes of them, and twice its batch.

    make bench-advise                                                   # hours on 2 cores, resumable
    python benchmarks/advise.py --only gpt2_small_cpu --seeds 1 --flags "--max_train_steps 60 --num_warmup_steps 6" \
      --work runs/advise-short --output short

Of each recipe:

1. It is trained with its noise measured (--noise_scale_steps), one run for each seed.
2. `advise` reads the first seed's run, and writes the recipe for the batch that it says, which takes at most 5 % more tokens.
   It is trained with each seed, and so is a recipe for twice that batch, made by the same rules for as many tokens.

Compared are the held-out losses at the end, of the same seeds. A batch reaches the recipe's loss if its mean is above the
recipe's by less than two standard errors of the paired differences. The advised batch should, and twice that should not. Also
the seconds of training beside those that `advise` predicts from the first run. All runs of a seed are trained in turn, one
after the other, so that a machine whose speed drifts is about the same for all.

A run that is finished is not done again: WORK/RECIPE/RUN holds it. Remove the folder to measure anew.
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness

from samestep.planner import advice
from samestep.recipe import recipe as recipes

RECIPES = {"gpt2_small_cpu": 10, "bert_small_cpu": 5, "finetune_small_cpu": 5}
"""Recipe -> every how many steps its noise is measured."""
MORE_TOKENS = 0.05
KINDS = ("recipe", "advised", "twice")


def train(file: str, seed: int, folder: Path, flags: list[str], threads: int) -> dict[str, Any]:
    """Train a recipe to the end, unless that was done before; its results."""
    recipe = recipes.load(file)
    script = harness.ROOT / "scripts" / f"{recipe.parts.script}"
    words = harness.launch(script, "no", "cpu.yaml", "--quiet")
    words += ["--recipe", file, "--seed", str(seed), "--output_dir", str(folder), "--speed", "safe", *flags]
    stamp, command = folder.with_suffix(".command"), " ".join([recipe.fingerprint, *flags, str(seed)])
    if not (stamp.exists() and stamp.read_text() == command and (folder / "all_results.json").exists()):
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(harness.ROOT)}
        ended = subprocess.run(words, env=environment, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(f"{' '.join(words)} failed:\n{ended.stderr[-3000:]}")
        stamp.write_text(command)
        for path in [*folder.glob("checkpoint-*"), *folder.glob("*.safetensors")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return json.loads((folder / "all_results.json").read_text())


def measure(name: str, num_seeds: int, flags: list[str], work: Path, threads: int) -> dict[str, Any] | None:
    """Train a recipe, the advised one and that for twice its batch with each seed; a row of the results.

    None: `advise` does not know, or keeps the batch.
    """
    first_seed, folder = recipes.load(name).seed, work / name
    every = ["--noise_scale_steps", str(RECIPES[name])]
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    files = {"recipe": name, "advised": str(folder / "advised.yaml"), "twice": str(folder / "twice.yaml")}
    answer: dict[str, Any] = {}
    for seed in range(first_seed, first_seed + num_seeds):
        for kind in KINDS:
            more = [*flags, *every] if kind == "recipe" else []
            results[kind].append(train(files[kind], seed, folder / f"{kind}-{seed}", more, threads))
            print(name, seed, kind, results[kind][-1], file=sys.stderr, flush=True)
            if kind == "recipe" and seed == first_seed:
                answer, changed = advice.advise(str(folder / f"recipe-{seed}"), MORE_TOKENS)
                print("\n".join(advice.write(answer, None)), file=sys.stderr, flush=True)
                if changed is None:
                    return None
                old = recipes.load(str(folder / f"recipe-{seed}" / "recipe.yaml"))
                batch = 2 * changed.global_batch_size
                twice, _ = advice.change(old, batch, 1 + MORE_TOKENS, str(folder / f"recipe-{seed}"))
                for kind_of_file, recipe in (("advised", changed), ("twice", twice)):
                    Path(files[kind_of_file]).write_text(recipe.to_yaml())
    (row,) = (row for row in answer["batches"] if row["batch_size"] == answer["advised_batch_size"])
    (own,) = (row for row in answer["batches"] if row["batch_size"] == answer["global_batch_size"])
    return {
        "recipe": name,
        "batch": answer["global_batch_size"],
        "advised": answer["advised_batch_size"],
        "noise_scale": answer["noise_scale"],
        "predicted_tokens": row["tokens"],
        "predicted_time": row["hours"] / own["hours"],
        "predicted_seconds": 3600 * row["hours"],
        "losses": {kind: [result["eval_loss"] for result in results[kind]] for kind in KINDS},
        "seconds": {kind: [result["train_seconds"] for result in results[kind]] for kind in KINDS},
        "samples": {kind: [result["samples_seen"] for result in results[kind]] for kind in KINDS},
    }


def reaches(losses: list[float], reference: list[float]) -> bool:
    """Tell whether losses are no higher than those of the same seeds, but for two standard errors of the mean difference.

    >>> reaches([1.02, 1.0], [1.0, 1.01]), reaches([1.2, 1.21], [1.0, 1.0]), reaches([1.0], [1.1])
    (True, False, True)
    """
    differences = [loss - other for loss, other in zip(losses, reference, strict=True)]
    spread = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return statistics.fmean(differences) <= 2 * spread


def main() -> None:
    parser = harness.flags("advise", __doc__, only=RECIPES, threads=True)
    parser.add_argument("--seeds", type=harness.positive, default=5, help="of each recipe [5]")
    parser.add_argument("--flags", default="", help="of the recipe's own runs, to shorten them")
    parser.add_argument("--work", type=Path, default=harness.ROOT / "runs" / "advise", help="folder of the runs")
    arguments = parser.parse_args()
    rows = harness.read_other_rows(arguments.output, "rows", "recipe", arguments.only)
    about = harness.about("make bench-advise", ("torch", "transformers", "accelerate"), threads=arguments.threads)
    about["flags"] = arguments.flags
    for name in arguments.only:
        if row := measure(name, arguments.seeds, arguments.flags.split(), arguments.work, arguments.threads):
            rows.append(row)
        results = {"about": about, "rows": rows}
        harness.write(arguments.output, results, markdown(results), is_last=name == arguments.only[-1])


def markdown(results: dict) -> str:
    rows = []
    for row in results["rows"]:
        losses, seconds, samples = row["losses"], row["seconds"], row["samples"]
        for kind in KINDS:
            batch = {"recipe": row["batch"], "advised": row["advised"], "twice": 2 * row["advised"]}[kind]
            tokens = samples[kind][0] / samples["recipe"][0]
            verdict = "" if kind == "recipe" else "yes" if reaches(losses[kind], losses["recipe"]) else "no"
            times = statistics.median(harness.ratios(seconds[kind], seconds["recipe"]))
            predicted = f"{row['predicted_time']:.2f}" if kind == "advised" else ""
            rows.append([row["recipe"], kind, batch, f"{tokens:.3f}", harness.spread(losses[kind], ".4f"), verdict])
            rows[-1] += [f"{times:.2f}", predicted]
    scales = [
        "{recipe}: {value:.0f} ({low:.0f} to {high:.0f})".format(**row["noise_scale"], recipe=row["recipe"])
        for row in results["rows"]
    ]
    flags = f" Shortened: {results['about']['flags']}." if results["about"]["flags"] else ""
    columns = "recipe | trained | batch | tokens | held-out loss | reaches it | time | predicted"
    return harness.page(
        "The advised batch",
        "advise.py",
        results["about"],
        f"Tokens and time are over those of the recipe; losses: median (smallest to largest).{flags}\n\n"
        f"{harness.table(columns, rows)}\nNoise scale in samples (90 % interval): {'; '.join(scales)}.\n",
    )


if __name__ == "__main__":
    main()
