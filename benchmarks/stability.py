"""How much of a recipe's result hangs on rounding, beside what hangs on its seed?

    make bench NAME=stability                                     # every recipe of the CPU catalog: hours on 2 cores, resumable
    python benchmarks/stability.py --only resnet_digits_cpu --flags "--learning_rate 0.05" --output digits --work runs/digits
    python benchmarks/stability.py --only finetune_reviews_cpu --reviews reviews.csv     # docs/finetuning.md makes it

Every recipe is trained to its end, as `make` trains it (bf16), and its held-out numbers at the end are compared (on a CPU that
computes no bf16, `--precision no` trains in float32, and float64 takes float32's place):

- roundings: the recipe's own seed, so the same samples, first weights and rates in every step. What differs is only how sums
  are rounded: `--speed safe`; cut into 4 and into uneven micro-batches; the kernels of `--speed auto`; float32 instead of
  bfloat16; first weights whose last bits are flipped, in float32 and bfloat16.
- seeds: five seeds by `--speed safe`, and the same five by `--speed auto`.

Shown: means and standard deviations (n - 1) over roundings and seeds; the first step whose loss differs from the safe run's by
more than 1 %; and the mean of auto - safe over the seeds with its standard error, for pairs of the same seed.

A run that is finished is not done again: runs/stability/RECIPE/RUN holds it. Remove the folder to measure anew.
"""

import json
import math
import os
import re
import runpy
import statistics
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import torch

from samestep.recipe.catalog import load
from samestep.recipe.recipe import Recipe
from samestep.training import launch

PARTED = 0.01  # relative difference of a step's loss at which two curves have parted
NUM_SEEDS, NUM_ROUNDINGS = 5, 7
# Recipe -> script, and what is compared at the end: names in all_results.json.
RECIPES = {
    "bert_small_cpu": ("pretrain_bert", ("eval_mlm_loss", "eval_mlm_accuracy", "eval_nsp_accuracy")),
    "gpt2_small_cpu": ("pretrain_gpt2", ("eval_loss", "eval_accuracy")),
    "finetune_small_cpu": ("finetune_classifier", ("eval_loss", "eval_accuracy")),
    "resnet_digits_cpu": ("train_image_classifier", ("eval_loss", "eval_accuracy")),
    "captcha_cpu": ("train_captcha", ("eval_loss", "eval_character_accuracy", "eval_string_accuracy")),
    "sft_small_cpu": ("finetune_causal_lm", ("eval_loss", "eval_accuracy", "eval_exact_match")),
    "dpo_small_cpu": ("finetune_causal_lm", ("eval_loss", "eval_accuracy", "eval_exact_match")),
    "finetune_reviews_cpu": ("finetune_classifier", ("eval_loss", "eval_accuracy")),
    "gpt2_shakespeare_char_cpu": ("pretrain_gpt2", ("eval_loss", "eval_accuracy")),
    "embeddings_small_cpu": ("train_embeddings", ("eval_recall_at_1", "eval_recall_at_10", "eval_ndcg_at_10")),
    "vlm_small_cpu": ("finetune_causal_lm", ("eval_loss", "eval_accuracy", "eval_exact_match")),
    "seq2seq_small_cpu": ("finetune_seq2seq", ("eval_loss", "eval_accuracy", "eval_exact_match")),
    "speech_small_cpu": (
        "finetune_seq2seq",
        ("eval_loss", "eval_word_error_rate", "eval_exact_match"),
    ),
}
FILES = {"finetune_reviews_cpu": "reviews", "gpt2_shakespeare_char_cpu": "shakespeare"}
"""Recipe -> flag that names its data, which no package holds."""
FLAGS = {
    "vlm_small_cpu": "--num_generations 300 --generation_length 16",
    "seq2seq_small_cpu": "--num_generations 1000",
    "speech_small_cpu": "--num_generations 500 --generation_metrics word_error_rate exact_match",
    "sft_small_cpu": "--num_generations 500 --generation_length 24",
    "dpo_small_cpu": "--num_generations 200 --generation_length 24",
}
"""Recipe -> flags of all its runs: prompts that are answered, which change nothing in the training."""
STARTS = {"dpo_small_cpu": "sft_small_cpu"}
"""Recipe -> the one whose safe run left the model that all its runs start from."""
REMARKS = {
    "bert_small_cpu": "a pair's length alone gives a next-sentence accuracy of 0.66",
    "finetune_small_cpu": "always naming the largest of 11 parts is right for 0.35",
    "sft_small_cpu": "exact match is of answers to 500 unseen prompts",
    "embeddings_small_cpu": "of 517 held-out pairs; by chance recall at 10 is 0.02",
    "vlm_small_cpu": "exact match is of answers to 300 unseen questions about drawn images",
    "speech_small_cpu": "of 500 recordings of unseen sequences of digits",
    "seq2seq_small_cpu": "exact match is of 1,000 unseen dates and numbers",
    "dpo_small_cpu": "exact match is of answers to 200 unseen prompts, of the model of sft_small_cpu at first",
}
SAFE, AUTO = "--speed safe", "--speed auto"


def plan_runs(recipe: Recipe, precision: str = "bf16") -> dict[str, tuple[int, str, str, bool]]:
    """List the runs of a recipe: name -> seed, precision, flags, whether the first weights' last bits are flipped."""
    other, wide = ("float32", SAFE) if precision == "bf16" else ("float64", f"{SAFE} --dtype float64")
    seed, batch = recipe.seed, recipe.global_batch_size
    quarter, uneven = batch // 4, batch * 3 // 8
    runs = {
        "safe": (seed, precision, SAFE, False),
        "auto": (seed, precision, AUTO, False),
        "cut in 4": (seed, precision, f"{SAFE} --per_device_train_batch_size {quarter}", False),
        "cut unevenly": (seed, precision, f"{SAFE} --per_device_train_batch_size {uneven}", False),
        "last bits": (seed, precision, SAFE, True),
        other: (seed, "no", wide, False),
        f"{other}, last bits": (seed, "no", wide, True),
    }
    for number in range(seed + 1, seed + NUM_SEEDS):
        runs[f"safe, seed {number}"] = (number, precision, SAFE, False)
        runs[f"auto, seed {number}"] = (number, precision, AUTO, False)
    return runs


def run_flipped(script: str, *words: str) -> None:
    """Train by a script from first weights of which every one differs in its last bit: by 1.2e-7 at most."""
    prepare = launch.prepare

    def prepare_flipped(accelerator, model, optimizer, *more):
        for parameter in model.parameters():
            parameter.data.view(torch.int32).bitwise_xor_(1)
        return prepare(accelerator, model, optimizer, *more)

    launch.prepare, sys.argv = prepare_flipped, [script, *words]
    runpy.run_path(script, run_name="__main__")


def train(name: str, run: str, how: tuple[int, str, str, bool], flags: str, work: Path, threads: int) -> dict[str, Any]:
    """Train to the end, unless that was done before.

    Returns:
        all_results.json, with the losses of the steps.
    """
    seed, precision, more, is_flipped = how
    folder = work / name / run.replace(", ", "-").replace(" ", "-")
    script = harness.ROOT / "scripts" / f"{RECIPES[name][0]}.py"
    words = harness.launch(__file__ if is_flipped else script, precision, "cpu.yaml", "--quiet")
    words += ["--flipped", str(script)] if is_flipped else []
    words += ["--recipe", name, "--seed", str(seed), *more.split(), *FLAGS.get(name, "").split(), *flags.split()]
    if name in STARTS:
        start = work / STARTS[name] / "safe"
        if not (start / "model.safetensors").exists():
            sys.exit(
                f"{name} starts from what {STARTS[name]} left in {start}: measure that first, --only {STARTS[name]}"
            )
        words += ["--model_name_or_path", str(start)]
    kept = ["model.safetensors", "best"] if name in STARTS.values() and run == "safe" else []
    results = harness.train_once(words, folder, " ".join(words[words.index("--recipe") :]), threads, kept)
    print(f"{name}, {run}: done", file=sys.stderr, flush=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    first = next(line for line in lines if "eval_loss" in line)
    return results | {"losses": [line["loss"] for line in lines if "loss" in line], "first": first}


def find_parting(losses: list[float], reference: list[float]) -> int | None:
    """Find the first step, from 1, whose loss differs by more than `PARTED`.

    >>> find_parting([2.0, 1.0, 0.5], [2.0, 1.001, 0.6]), find_parting([1.0], [1.0])
    (3, None)
    """
    pairs = enumerate(zip(losses, reference, strict=True), 1)
    return next((step for step, (loss, other) in pairs if abs(loss - other) > PARTED * abs(other)), None)


def measure(name: str, precision: str, flags: str, work: Path, jobs: int, threads: int) -> dict[str, Any]:
    """Train a recipe in every way, and gather what came of it: a row of the results."""
    recipe = load(name)
    runs = plan_runs(recipe, precision)
    with ThreadPoolExecutor(jobs) as pool:
        started = {run: pool.submit(train, name, run, how, flags, work, threads) for run, how in runs.items()}
        results = {run: result.result() for run, result in started.items()}
    reference = results["safe"]["losses"]
    row = {"recipe": name, "precision": precision, "seed": recipe.seed, "steps": len(reference)}
    row |= {"first": {metric: results["safe"]["first"][metric] for metric in RECIPES[name][1]}, "runs": {}}
    for run, result in results.items():
        row["runs"][run] = {metric: result[metric] for metric in RECIPES[name][1]}
        row["runs"][run] |= {"seed": runs[run][0], "train_seconds": result["train_seconds"]}
        if runs[run][0] == recipe.seed:
            row["runs"][run]["parts_at"] = find_parting(result["losses"], reference)
    return row


def spread(values: list[float]) -> tuple[float, float]:
    """Compute mean and standard deviation."""
    return statistics.mean(values), statistics.stdev(values)


def summarize(row: dict[str, Any], metric: str) -> dict[str, Any]:
    """Compute mean and standard deviation over roundings and seeds, and auto - safe with its standard error."""
    runs, seed = row["runs"], row["seed"]
    roundings = [run[metric] for run in runs.values() if run["seed"] == seed]
    safe = {run["seed"]: run[metric] for name, run in runs.items() if name.startswith("safe")}
    auto = {run["seed"]: run[metric] for name, run in runs.items() if name.startswith("auto")}
    differences = [auto[number] - safe[number] for number in safe]
    return {
        "roundings": spread(roundings),
        "seeds": spread(list(safe.values())),
        "difference": (statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))),
        "parts_at": min((run["parts_at"] for run in runs.values() if run.get("parts_at")), default=None),
    }


def main() -> None:
    if sys.argv[1:2] == ["--flipped"]:
        run_flipped(*sys.argv[2:])
        return
    parser = harness.flags("stability", __doc__, only=RECIPES)
    parser.add_argument("--flags", default="", help="changes of the recipes, as on a script's command line")
    parser.add_argument("--work", type=Path, default=harness.ROOT / "runs" / "stability", help="folder of the runs")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "no"), help="of the runs [bf16]")
    for name, flag in FILES.items():
        parser.add_argument(f"--{flag}", type=Path, help=f"data of {name}")
    parser.add_argument(
        "--jobs", type=harness.positive, default=2, help="runs at the same time, which share the cores [2]"
    )
    arguments = parser.parse_args()
    threads = max(1, len(os.sched_getaffinity(0)) // arguments.jobs)
    about = harness.about("make bench NAME=stability", ("torch", "transformers", "accelerate"), threads)
    files = {name: getattr(arguments, flag) for name, flag in FILES.items()}
    names = [name for name in arguments.only if name not in FILES or files[name]]
    for number, name in enumerate(names, 1):
        flags = arguments.flags + (f" --train_file {files[name].resolve()}" if name in FILES else "")
        rows = harness.read_other_rows(arguments.output, "rows", "recipe", [name])
        row = measure(name, arguments.precision, flags, arguments.work, arguments.jobs, threads)
        rows.append(row | {"about": about})
        rows.sort(key=lambda row: list(RECIPES).index(row["recipe"]))
        results = {"about": about, "rows": rows}
        if any("about" not in other for other in rows):
            results["about"] = harness.read(arguments.output)["about"]
        if arguments.output == harness.RESULTS / "stability":
            write_expectation(name, row, about)
        parts = {"stability": ("first-runs.md", part(results))}
        harness.write(arguments.output, results, markdown(results), number == len(names), parts)


def readable(metric: str) -> str:
    """Turn a metric's name into words.

    >>> readable("eval_mlm_accuracy")
    'mlm accuracy'
    """
    return metric.removeprefix("eval_").replace("_", " ")


def describe(row: dict[str, Any], metric: str) -> str:
    """Say what a held-out number is at the end: mean of the seeds ± their standard deviation."""
    mean, deviation = summarize(row, metric)["seeds"]
    return f"{mean:.3f} ± {deviation:.3f}"


def describe_roundings(row: dict[str, Any], metric: str) -> str:
    """Say what a held-out number is at the end with the recipe's own seed: mean of the roundings ± their standard deviation."""
    mean, deviation = summarize(row, metric)["roundings"]
    return f"{mean:.3f} ± {deviation:.4f}"


def expectation(row: dict[str, Any], about: dict[str, Any]) -> str:
    """Make the text of a recipe's field `expect`."""
    about = row.get("about", about)
    numbers = [
        f"{readable(metric)} {row['first'][metric]:.3f} -> {describe(row, metric)} ({describe_roundings(row, metric)})"
        for metric in RECIPES[row["recipe"]][1]
    ]
    remark = f"; {REMARKS[row['recipe']]}" if row["recipe"] in REMARKS else ""
    is_documentation = "python_docs" in str(getattr(load(row["recipe"]), "dataset_name", None))
    python = (
        f" (Python {about['python']}; its documentation differs a little between versions)" if is_documentation else ""
    )
    precision = "float32" if row.get("precision") == "no" else "bf16"
    return (
        f"measured on CPU cores in {precision}{python}, held out, mean of {NUM_SEEDS} seeds ± standard deviation, beside it of "
        f"{NUM_ROUNDINGS} roundings of seed {row['seed']}: "
        f"{', '.join(numbers)}{remark} (benchmarks/results/stability.md)"
    )


def write_expectation(name: str, row: dict[str, Any], about: dict[str, Any]) -> None:
    """Write the field `expect` of a recipe in the catalog."""
    file = harness.ROOT / "recipes" / "catalog" / f"{name}.yaml"
    lines = textwrap.fill(f'expect: "{expectation(row, about)}"', 120, subsequent_indent="  ", break_on_hyphens=False)
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(r"^expect: .*?(?=^\S)", lambda _: f"{lines}\n", text, flags=re.M | re.S), encoding="utf-8")


def part(results: dict) -> str:
    """Make the table of docs/first-runs.md, of what the recipes reach."""
    rows = [
        [
            row["recipe"],
            readable(metric),
            f"{row['first'][metric]:.3f}",
            describe(row, metric),
            describe_roundings(row, metric),
        ]
        for row in results["rows"]
        for metric in RECIPES[row["recipe"]][1]
    ]
    heads = f"recipe | held out | first | last, {NUM_SEEDS} seeds | the recipe's seed, {NUM_ROUNDINGS} roundings"
    about, origins = find_origins(results)
    return harness.part("stability.py", about, harness.table(heads, rows) + origins)


def find_origins(results: dict) -> tuple[dict[str, Any], str]:
    """Say how all rows came about, or in a text what rows came about how, where they are of several machines or days."""
    origins: dict[str, list[str]] = {}
    for row in results["rows"]:
        origins.setdefault(harness.provenance(row.get("about", results["about"])), []).append(row["recipe"])
    if len(origins) == 1:
        return results["about"], ""
    lines = "".join(f"\n{', '.join(recipes)}: {origin}.\n" for origin, recipes in origins.items())
    return {"command": results["about"]["command"]}, lines


HEADS = ("recipe", "held out", "mean, roundings", "SD", "mean, seeds", "SD", "SD / SD", "auto - safe", "parts at step")


def markdown(results: dict) -> str:
    summaries, runs = [], []
    for row in results["rows"]:
        metrics = RECIPES[row["recipe"]][1]
        for metric in metrics:
            summary = summarize(row, metric)
            (mean, by_rounding), (mean_of_seeds, by_seed) = summary["roundings"], summary["seeds"]
            difference, error = summary["difference"]
            summaries.append(
                [
                    row["recipe"],
                    readable(metric),
                    f"{mean:.4f}",
                    f"{by_rounding:.4f}",
                    f"{mean_of_seeds:.4f}",
                    f"{by_seed:.4f}",
                    f"{by_rounding / by_seed:.2f}" if by_seed else "-",
                    f"{difference:+.4f} ± {error:.4f}",
                    summary["parts_at"] or f"none of {row['steps']}",
                ]
            )
        for name, run in row["runs"].items():
            values = ", ".join(f"{readable(metric)} {run[metric]:.4f}" for metric in metrics)
            runs.append([row["recipe"], name, values, run.get("parts_at") or "-"])
    about, origins = find_origins(results)
    return harness.page(
        "Results of recipes over roundings and seeds",
        "stability.py",
        about,
        f"SD: standard deviation. auto - safe: mean and standard error over {NUM_SEEDS} seeds.\n\n"
        f"{harness.table(HEADS, summaries)}\nEvery run:\n\n"
        f"{harness.table('recipe | run | held out | parts at step', runs)}{origins}",
    )


if __name__ == "__main__":
    main()
