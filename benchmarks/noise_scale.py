"""Gradient noise scale of problems whose covariance is known, measured by training programs: do its intervals cover the truth?

    make bench NAME=noise_scale

- coverage: the loss of a target is the product of the weights with a random vector, so that its gradient is that vector, whose
  mean and covariance are given. A program under `Run` trains it, every step measured, on 1 to 3 processes. Its steps are cut
  into runs of --num_measurements; of each the estimate and its 90 % interval, and whether that covers the truth. Problems:
  even (one target per sample), ragged (1 to 31, the targets of a sample correlated, too), two_terms (1 to 31 targets of the
  first term, one of the second, in another direction), and each of its terms alone. Layouts: see `LAYOUTS`.
- cost: gpt2_small_cpu, bert_small_cpu and a GPT-2 of 12 x 768, steps as they are beside measured ones, in turns in one process:
  seconds of a measured step / of one that is not, and what that makes at every 20th and 50th step.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import harness
import numpy as np
import torch
import yaml
from torch import nn

from samestep.contrib.noise.meter import NoiseMeter
from samestep.cut.layout import solve_layout
from samestep.cut.order import Order, sample_rng
from samestep.data import sentence_pairs, token_blocks
from samestep.data.steps import StepData, Steps
from samestep.models import bert_pretraining, gpt2_pretraining
from samestep.models.summed_losses import SummedLosses
from samestep.recipe import batch_size
from samestep.recipe import catalog as recipes
from samestep.recipe.recipe import Parts, Recipe, register
from samestep.step import losses
from samestep.training.run import Run

WIDTH, BATCH = 64, 24
DEVIATIONS = 1 / np.sqrt(np.arange(1, WIDTH + 1))  # of each number of a target's gradient
MEANS = np.full(WIDTH, 0.05), np.full(WIDTH, -0.05) * (-1.0) ** np.arange(WIDTH)  # of the terms' gradients
SHARED = 0.5  # deviation that a ragged sample's targets have in common, as a factor
WEIGHTS = {"even": (1.0,), "ragged": (1.0,), "two_terms": (1.0, 0.5)}
LAYOUTS = {
    "1 process, 24 at once (cut in two)": ("cpu.yaml", "--per_device_train_batch_size 24"),
    "1 process, 7 at most": ("cpu.yaml", "--per_device_train_batch_size 7"),
    "2 processes, 12 at once": ("2xcpu.yaml", "--per_device_train_batch_size 12"),
    "3 processes, 3 at most": ("3", "--per_device_train_batch_size 3"),
    "2 processes, --reproducible 4": ("2xcpu.yaml", "--reproducible 4 --dtype float32"),
}
RECIPES = {
    "bert_small_cpu": (sentence_pairs, bert_pretraining.PretrainingSums),
    "gpt2_small_cpu": (token_blocks, gpt2_pretraining.PretrainingSums),
}


# ---------------------------------------------------------------------------------------------------------------------
# Problems of known covariance


class Draw(NamedTuple):
    """The summed gradient of a sample's targets, [terms, width], and how many they are, [terms]."""

    gradients: np.ndarray
    counts: np.ndarray
    length: int


class Gradients:
    """The samples of a problem; each has random gradients of its own."""

    fingerprints: ClassVar = {"gradients": "drawn"}

    def __init__(self, kind: str):
        self.kind, self.max_length = kind, 1 if kind == "even" else 31

    def __len__(self) -> int:
        return 10**9

    def __str__(self) -> str:
        return f"{self.kind} targets"

    def draw(self, epoch: int, sample_id: int) -> Draw:
        rng = sample_rng(0, 1, epoch, sample_id)
        count = 1 if self.kind == "even" else int(rng.integers(1, 32))
        counts = np.array([count, 1][: len(WEIGHTS[self.kind])])
        rows = [
            count * mean + math.sqrt(count) * DEVIATIONS * rng.standard_normal(WIDTH)
            for count, mean in zip(counts, MEANS, strict=False)
        ]
        if self.kind == "ragged":
            rows[0] += count * SHARED * DEVIATIONS * rng.standard_normal(WIDTH)
        return Draw(np.stack(rows), counts, count)

    def longest(self) -> Draw:
        return Draw(np.zeros((len(WEIGHTS[self.kind]), WIDTH)), np.ones(len(WEIGHTS[self.kind]), int), self.max_length)

    def collate(self, draws: list[Draw]) -> dict[str, torch.Tensor]:
        terms = len(WEIGHTS[self.kind])
        gradients = sum((draw.gradients for draw in draws), np.zeros((terms, WIDTH)))
        counts = sum((draw.counts for draw in draws), np.zeros(terms, int))
        return {"gradients": torch.from_numpy(gradients), "counts": torch.from_numpy(counts)}


class LinearSums(SummedLosses):
    """Weights whose gradient is what a sample says."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients.to(self.weights.dtype) @ self.weights, None


@dataclass(frozen=True, kw_only=True)
class OneTerm(Recipe):
    loss_weights: ClassVar = {"first": WEIGHTS["even"][0]}


@dataclass(frozen=True, kw_only=True)
class TwoTerms(Recipe):
    loss_weights: ClassVar = dict(zip(("first", "second"), WEIGHTS["two_terms"], strict=True))


def true_ratio(
    kind: str, samples: list[int], targets: list[list[int]], sizes: list[float], term: int | None = None
) -> float:
    """Compute the mean noise of a sample over the signal, of steps with so many samples and targets.

    Args:
        kind: of the problem.
        samples: of each step.
        targets: of each step, of each term.
        sizes: of each step, the sum of the squares of its samples' targets of the first term.
        term: number of the loss term whose own ratio is meant; None: of all.
    """
    variance, noises = np.square(DEVIATIONS).sum(), []
    weights = [weight * (term in (None, number)) for number, weight in enumerate(WEIGHTS[kind])]
    for number, counts, squares in zip(samples, targets, sizes, strict=True):
        noise = sum(weight**2 * variance / count for weight, count in zip(weights, counts, strict=True))
        if kind == "ragged":
            noise += SHARED**2 * variance * squares / counts[0] ** 2
        noises.append(number * noise)
    mean = sum(weight * mean for weight, mean in zip(weights, MEANS, strict=False))
    return statistics.fmean(noises) / np.square(mean).sum()


def train(kind: str, argv: list[str]) -> None:
    """Train a problem: the loop of a script."""
    task = f"known_noise_{kind}"
    register(task, TwoTerms if kind == "two_terms" else OneTerm, Parts(data=None, model=LinearSums))
    run = Run(argv, task, description=__doc__)
    train, _ = run.load_data(lambda recipe, num_workers: (Gradients(kind), None))
    model, optimizer = run.prepare(LinearSums, train)
    for step in run.steps(train):
        with step:
            for batch in step.micro_batches:
                with run.accelerator.accumulate(model):
                    sums, _ = model(**batch)
                    loss = (run.loss_weights * sums / step.num_targets).sum()
                    run.accelerator.backward(loss * step.loss_scale)
                    step.add_to_log(sums)
                    if run.accelerator.sync_gradients:
                        step.clip_grad_norm_(None)
                    optimizer.step()
                    optimizer.zero_grad()
    run.finish(lambda: None)
    run.close()


def write_recipe(kind: str, num_steps: int, file: Path) -> None:
    """Write the recipe of a problem; its numbers do not matter, as its gradients do not depend on the weights."""
    recipe = yaml.safe_load((ROOT / "tests" / "toy_task" / "curve.yaml").read_text())
    recipe |= {"task": f"known_noise_{kind}", "global_batch_size": BATCH, "max_train_steps": num_steps}
    recipe |= {"learning_rate_batch_size": BATCH, "num_warmup_steps": 0}
    file.write_text(yaml.safe_dump(recipe))


def judge(kind: str, folder: Path, num_measurements: int, term: int | None = None) -> list[dict[str, float]]:
    """Cut the steps of a training into runs, and judge the interval of each: of all terms, or of one alone."""
    lines = [json.loads(line) for line in (folder / "noise.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    name = None if term is None else list(TwoTerms.loss_weights)[term]
    measurements = batch_size.read_measurements([line for line in steps if "loss" in line], name)
    order, source, rows = Order(10**9, BATCH, 1), Gradients(kind), []
    for first in range(0, len(lines) - num_measurements + 1, num_measurements):
        part = slice(first, first + num_measurements)
        estimate, sizes = batch_size.estimate(measurements[part]), []
        for line in lines[part]:
            pairs = zip(*(array.tolist() for array in order.samples(line["step"] - 1)), strict=True)
            sizes.append(sum(source.draw(*pair).counts[0] ** 2 for pair in pairs) if kind == "ragged" else 0.0)
        targets = [list(line["targets"].values()) for line in lines[part]]
        truth = true_ratio(kind, [line["samples"] for line in lines[part]], targets, sizes, term)
        row = {"truth": truth, "value": estimate.value, "low": estimate.low, "high": estimate.high}
        rows.append({name: float(value) for name, value in row.items()})
    return rows


def measure_coverage(kind: str, layout: str, num_runs: int, num_measurements: int) -> list[dict[str, Any]]:
    """Train a problem on a layout, and count how often the interval covers the truth: a row, and one for each of two terms."""
    config, flags = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "problem.yaml", Path(folder) / "run"
        write_recipe(kind, num_runs * num_measurements, file)
        more = ["--num_processes", config] if config.isdigit() else []
        words = harness.launch(__file__, "no", "2xcpu.yaml" if more else config, *more)
        words += ["--train", kind, "--recipe", str(file), "--output_dir", str(output), "--speed", "safe"]
        words += ["--noise_scale_steps", "1", "--logging_steps", "100", *flags.split()]
        words += [] if "--dtype" in flags else ["--dtype", "float64"]
        harness.run(words, threads=1)
        terms = dict(enumerate(TwoTerms.loss_weights)) if kind == "two_terms" else {}
        names = {None: kind} | {term: f"{kind}, {name} alone" for term, name in terms.items()}
        judged = {term: judge(kind, output, num_measurements, term) for term in names}
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    results = []
    for term, rows in judged.items():
        prefix = "" if term is None else f"{terms[term]}_"
        signal, noise = (
            statistics.fmean(line[prefix + name] for line in lines) for name in ("grad_signal", "grad_noise")
        )
        covered = sum(row["low"] <= row["truth"] <= row["high"] for row in rows)
        truth = statistics.fmean(row["truth"] for row in rows)
        result = {"problem": names[term], "layout": layout, "runs": len(rows), "covered": covered, "truth": truth}
        result |= {"all_steps": BATCH * noise / signal, "unbounded": sum(math.isinf(row["high"]) for row in rows)}
        result["factor"] = statistics.median(row["high"] / row["low"] if row["low"] else math.inf for row in rows)
        print(result, file=sys.stderr)
        results.append(result)
    return results


# ---------------------------------------------------------------------------------------------------------------------
# Cost


class Loop:
    """A plain loop over steps, some of which are measured."""

    def __init__(self, name: str, shape: dict[str, Any], b: int):
        module, model_class = RECIPES[name]
        self.recipe = recipes.load(name, shape)
        source, _ = module.build(self.recipe)
        torch.manual_seed(0)
        self.model = model_class.from_recipe(self.recipe, source).train()
        layout = solve_layout(
            num_processes=1, global_batch_size=self.recipe.global_batch_size, per_device_train_batch_size=b
        )
        order = Order(len(source), self.recipe.global_batch_size, 0)
        options = {"process_index": 0}
        self.steps = Steps(source, order, layout, **options)
        self.measured_steps = Steps(source, order, layout, random_steps=1, **options)
        self.meter = NoiseMeter(dict(self.model.named_parameters()))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)
        self.weights = torch.tensor(list(self.recipe.loss_weights.values()))

    def step(self, data: StepData) -> float:
        """Take a step; its seconds."""
        start = harness.clock()
        if data.is_cut_at_random:
            self.meter.begin(data.micro_batch_counts, data.counts)
        for micro_batch in data.micro_batches:
            losses.weighted_loss(self.model(**micro_batch)[0], data.counts, self.weights).backward()
        if data.is_cut_at_random:
            self.meter.finish(1.0)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return harness.clock() - start


SHAPES = {
    "bert_small_cpu, 16 at once": ("bert_small_cpu", {}, 16),
    "bert_small_cpu, 4 x 4": ("bert_small_cpu", {}, 4),
    "gpt2_small_cpu, at once": ("gpt2_small_cpu", {}, 2**20),
    "GPT-2 124M, 16 x 4": ("gpt2_small_cpu", {"n_embd": 768, "n_layer": 12, "n_head": 12, "global_batch_size": 64}, 4),
}


def measure_cost(name: str, num_steps: int) -> dict[str, Any]:
    """Take the same steps as they are and measured, in turns."""
    loop = Loop(*SHAPES[name])
    loop.step(loop.steps[0])
    ratios = []
    for number in range(1, num_steps + 1):
        plain, measured = copy.copy(loop.steps[number]), loop.measured_steps[number]
        first, second = (plain, measured) if number % 2 else (measured, plain)
        seconds = {data.is_cut_at_random: loop.step(data) for data in (first, second)}
        ratios.append(seconds[True] / seconds[False])
    result = {"case": name, "steps": num_steps, "ratios": ratios}
    print(name, statistics.median(ratios), file=sys.stderr)
    return result


# ---------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = harness.flags("noise_scale", __doc__, only=("coverage", "cost"))
    parser.add_argument("--num_runs", type=harness.positive, default=400, help="of each problem and layout [400]")
    parser.add_argument("--num_measurements", type=harness.positive, default=10, help="steps of a run [10]")
    parser.add_argument(
        "--num_steps", type=harness.positive, default=10, help="pairs of steps whose time is taken [10]"
    )
    parser.add_argument("--problems", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--layouts", nargs="+", type=int, default=list(range(len(LAYOUTS))), help="numbers of them")
    parser.add_argument("--train", choices=WEIGHTS, help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if arguments.train:
        train(arguments.train, rest)
        return
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    file = arguments.output.with_suffix(".json")
    results = json.loads(file.read_text()) if file.exists() else {"coverage": [], "cost": []}
    results |= {"about": harness.about("make bench NAME=noise_scale", ("torch", "accelerate"), threads=1)}
    results["about"] |= {"measurements": arguments.num_measurements}
    if "coverage" in arguments.only:
        # Rows of other problems and layouts stay
        layouts = [list(LAYOUTS)[number] for number in arguments.layouts]
        for kind in arguments.problems:
            for layout in layouts:
                rows = measure_coverage(kind, layout, arguments.num_runs, arguments.num_measurements)
                old = [row for row in results["coverage"] if row["layout"] == layout]
                old = [row for row in old if row["problem"].partition(",")[0] == kind]
                results["coverage"] = [row for row in results["coverage"] if row not in old] + rows
                results["coverage"].sort(key=lambda row: (row["problem"], list(LAYOUTS).index(row["layout"])))
                harness.write(arguments.output, results, markdown(results), is_last=False)
    if "cost" in arguments.only:
        results["cost"] = [measure_cost(name, arguments.num_steps) for name in SHAPES]
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict) -> str:
    coverage = [
        [
            row["problem"],
            row["layout"],
            row["runs"],
            f"{100 * row['covered'] / row['runs']:.1f}",
            f"{row['truth']:.1f}",
            f"{row['all_steps']:.1f}",
            f"{row['factor']:.2g}",
            f"{100 * row['unbounded'] / row['runs']:.1f}",
        ]
        for row in results["coverage"]
    ]
    cost = []
    for row in results["cost"]:
        more = statistics.median(row["ratios"]) - 1
        cost.append([row["case"], harness.spread(row["ratios"], ".2f"), *(f"{100 * more / n:.2f}" for n in (20, 50))])
    columns = "problem | layout | runs | covered, % | truth | of all steps | highest / lowest | no upper end, %"
    return harness.page(
        "Gradient noise scale",
        "noise_scale.py",
        results["about"],
        f"## Coverage\n\nRuns of {results['about']['measurements']} measured steps, {BATCH} samples each: in how many the "
        "90 % interval covers the truth; the truth, and the estimate from all runs' steps, in samples; width of the interval "
        f"(median); runs whose interval has no upper end.\n\n{harness.table(columns, coverage)}\n"
        "## Cost\n\nSeconds of a measured step / of the same step as it is: median (smallest to largest), and what a "
        f"measurement every 20 and every 50 steps adds, in %.\n\n"
        f"{harness.table('steps | measured / not | every 20 | every 50', cost)}",
    )


if __name__ == "__main__":
    main()
