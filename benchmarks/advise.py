"""Is the batch that `python -m recipes advise` says right? Recipes of the catalog, what it makes of them, and twice its batch.

    make bench NAME=advise                                                   # half an hour on 2 cores, resumable
    python benchmarks/advise.py --only gpt2_small_cpu --seeds 1 --flags "--max_train_steps 60 --num_warmup_steps 6" \
      --work runs/advise-short --output short

Recipes are those of the catalog in a smaller shape (`RECIPES`), with batch, rate and schedule as they are; --whole takes their
own shape, in hours. Of each:

1. It is trained with its noise measured (--noise_scale_steps), one run for each seed.
2. `advise` reads the first seed's run, and writes the recipe for the batch that it says, which takes at most 5 % more tokens.
   It is trained with each seed, and so is a recipe for twice that batch, made by the same rules for as many tokens.

Compared are the held-out losses at the end, of the same seeds. A batch reaches the recipe's loss if its mean is above the
recipe's by less than two standard errors of the paired differences. The advised batch should, and twice that should not.

3. The recipe and the advised one are trained again, in turns of two seconds, so that a machine whose speed changes is the same
   for both: the seconds of training over those that `advise` predicts from the seconds of the recipe, --races times.

A run that is finished is not done again: WORK/RECIPE/RUN holds it. Remove the folder to measure anew.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import harness

from samestep.contrib.advice import advice
from samestep.recipe import catalog as recipes

RECIPES = {
    "gpt2_small_cpu": (10, "--n_layer 2 --n_embd 128 --block_size 64 --n_positions 64 --vocab_size 2048"),
    "bert_small_cpu": (
        12,
        "--num_hidden_layers 2 --hidden_size 128 --intermediate_size 512 --max_seq_length 64 --vocab_size 2048",
    ),
    "finetune_small_cpu": (5, "--num_hidden_layers 2 --hidden_size 128 --intermediate_size 512 --max_seq_length 64"),
}
"""Recipe -> every how many steps its noise is measured, and flags that make it small."""
MORE_TOKENS = 0.05
TURN = 2.0  # seconds
KINDS = ("recipe", "advised", "twice")


def command(file: str, seed: int, folder: Path, flags: list[str]) -> list[str]:
    """Give the words that train a recipe into a folder."""
    script = harness.ROOT / "scripts" / recipes.load(file).parts.script
    words = [*harness.launch(script, "no", "cpu.yaml", "--quiet"), "--recipe", file, "--seed", str(seed)]
    return [*words, "--output_dir", str(folder), "--speed", "safe", *flags]


def train(file: str, seed: int, folder: Path, flags: list[str], threads: int) -> dict[str, Any]:
    """Train a recipe to the end, unless that was done before; its results."""
    recipe, words = recipes.load(file), command(file, seed, folder, flags)
    return harness.train_once(words, folder, " ".join([recipe.fingerprint, *flags, str(seed)]), threads)


def race(
    files: dict[str, str], number: int, folder: Path, flags: dict[str, list[str]], threads: int
) -> dict[str, float]:
    """Train the recipe and the advised one in turns, unless that was done before; seconds of training."""
    file = folder / f"race-{number}.json"
    if not file.exists():
        seed, programs = recipes.load(files["recipe"]).seed, {}
        for kind in ("recipe", "advised"):
            words = [*command(files[kind], seed, folder / f"race-{kind}", flags[kind]), "--overwrite_output_dir"]
            programs[kind] = harness.Program(words, harness.ROOT, folder / f"race-{kind}.log", threads)
        harness.run_in_turns(programs.values(), TURN)
        file.write_text(json.dumps({kind: harness.train_seconds(folder / f"race-{kind}", TURN) for kind in programs}))
    seconds = json.loads(file.read_text())
    print(files["recipe"], "race", number, seconds, file=sys.stderr, flush=True)
    return seconds


def measure(
    name: str, num_seeds: int, num_races: int, flags: list[str], work: Path, threads: int
) -> dict[str, Any] | None:
    """Train a recipe, the advised one and that for twice its batch with each seed; a row of the results.

    None: `advise` does not know, or keeps the batch.
    """
    first_seed, folder = recipes.load(name).seed, work / name
    every = ["--noise_scale_steps", str(RECIPES[name][0])]
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
    own_flags = {"recipe": flags, "advised": []}
    races = [race(files, number, folder, own_flags, threads) for number in range(num_races)]
    (row,) = (row for row in answer["batches"] if row["batch_size"] == answer["advised_batch_size"])
    (own,) = (row for row in answer["batches"] if row["batch_size"] == answer["global_batch_size"])
    return {
        "recipe": name,
        "batch": answer["global_batch_size"],
        "advised": answer["advised_batch_size"],
        "noise_scale": answer["noise_scale"],
        "predicted_tokens": row["tokens"],
        "predicted_seconds": [seconds["recipe"] * row["hours"] / own["hours"] for seconds in races],
        "seconds": [seconds["advised"] for seconds in races],
        "losses": {kind: [result["eval_loss"] for result in results[kind]] for kind in KINDS},
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
    parser.add_argument("--races", type=harness.positive, default=3, help="of each recipe [3]")
    parser.add_argument("--flags", default="", help="of the recipe's own runs, to shorten them")
    parser.add_argument("--whole", action="store_true", help="recipes in their own shape")
    parser.add_argument("--work", type=Path, default=harness.ROOT / "runs" / "advise", help="folder of the runs")
    arguments = parser.parse_args()
    rows = harness.read_other_rows(arguments.output, "rows", "recipe", arguments.only)
    about = harness.about("make bench NAME=advise", ("torch", "transformers", "accelerate"), threads=arguments.threads)
    about |= {"flags": arguments.flags, "whole": arguments.whole}
    for name in arguments.only:
        flags = [*("" if arguments.whole else RECIPES[name][1]).split(), *arguments.flags.split()]
        if row := measure(name, arguments.seeds, arguments.races, flags, arguments.work, arguments.threads):
            rows.append(row)
        results = {"about": about, "rows": rows}
        harness.write(arguments.output, results, markdown(results), is_last=name == arguments.only[-1])


def markdown(results: dict) -> str:
    rows = []
    for row in results["rows"]:
        losses, samples = row["losses"], row["samples"]
        times = harness.ratios(row["seconds"], row["predicted_seconds"])
        for kind in KINDS:
            batch = {"recipe": row["batch"], "advised": row["advised"], "twice": 2 * row["advised"]}[kind]
            tokens = samples[kind][0] / samples["recipe"][0]
            verdict = "" if kind == "recipe" else "yes" if reaches(losses[kind], losses["recipe"]) else "no"
            mean = statistics.fmean(a - b for a, b in zip(losses[kind], losses["recipe"], strict=True))
            rows.append(
                [row["recipe"], kind, batch, f"{tokens:.3f}", harness.spread(losses[kind], ".4f"), f"{mean:+.4f}"]
            )
            rows[-1] += [verdict, harness.spread(times, ".2f") if kind == "advised" else ""]
    scales = []
    for row in results["rows"]:
        ends = (row["noise_scale"][name] for name in ("value", "low", "high"))
        value, low, high = (math.inf if end is None else end for end in ends)
        scales.append(f"{row['recipe']}: {value:.0f} ({low:.0f} to {high:.0f})")
    flags = f" Shortened: {results['about']['flags']}." if results["about"]["flags"] else ""
    columns = "recipe | trained | batch | tokens | held-out loss | mean difference | reaches it | seconds / predicted"
    return harness.page(
        "The advised batch",
        "advise.py",
        results["about"],
        f"Recipes of the catalog{'' if results['about']['whole'] else ' in a smaller shape'}. Tokens are over those of the "
        f"recipe; losses, and seconds over those predicted: median (smallest to largest).{flags}\n\n"
        f"{harness.table(columns, rows)}\nNoise scale in samples (90 % interval): {'; '.join(scales)}.\n",
    )


if __name__ == "__main__":
    main()
