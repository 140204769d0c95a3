"""What the loaders deliver, beside what the models take, and how much memory they need.

    make bench NAME=loader

Speed: in one process, without a DataLoader's workers, the time in which `Steps` draws, partitions and collates steps, and the
time in which the program's model computes forward and backward of the same steps, in the precision that is faster: bf16 where
the CPU computes in it. Both alternate, a few steps at a time, so that a machine whose speed changes is the same for both.
Tokens are those of the samples, padding not counted.

Memory: what a loader adds to the private memory of a process, for datasets of 10^5 and 10^7 rows
(tests/helpers/run_loader_memory.py).
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "helpers")]
from images import write_photographs
from run_loader_memory import COLUMNS, write
from torch import nn

from samestep._internals.libc import stop_malloc_returning_memory
from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data.steps import StepData, Steps
from samestep.recipe.catalog import load
from samestep.recipe.recipe import Recipe
from samestep.step import losses

# Title -> recipe, what differs from it, and steps of a round.
CASES = {
    "bert_small_cpu": ("bert_small_cpu", {}, 10),
    "bert_small_cpu, 64 pairs of all lengths": (
        "bert_small_cpu",
        {"global_batch_size": 64, "short_seq_probability": 1.0},
        4,
    ),
    "gpt2_small_cpu": ("gpt2_small_cpu", {}, 10),
    "gpt2_small_cpu, blocks of 256": ("gpt2_small_cpu", {"block_size": 256, "n_positions": 256}, 4),
    "finetune_small_cpu": ("finetune_small_cpu", {}, 10),
    "resnet_digits_cpu": ("resnet_digits_cpu", {}, 10),
    "captcha_cpu": ("captcha_cpu", {"num_train_samples": 2048, "num_validation_samples": 64}, 1),
    "ResNet-18 on JPEG photographs": ("photographs", {}, 1),
}
ROWS = (10**5, 10**7)


def network(recipe: Recipe, source, precision: str) -> nn.Module:
    """Make the program's own model, which takes a micro-batch's tensors, as `--speed safe` computes it on a CPU."""
    settings = recipe.parts.find("settings")(recipe=recipe.name)
    model = recipe.parts.find("model").from_recipe(recipe, source)
    candidates = model.kernel_candidates(torch.device("cpu"), precision, settings)
    next(iter(candidates.values()))()
    return model.train()


def compute(model: nn.Module, data: StepData, weights: torch.Tensor, precision: str) -> None:
    """Compute forward and backward of a step."""
    for micro_batch in data.micro_batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            sums, _ = model(**micro_batch)
        losses.weighted_loss(sums, data.counts, weights).backward()
    model.zero_grad()


def speed(title: str, recipe: Recipe, num_steps: int, rounds: int, precision: str) -> dict:
    """Measure what is delivered and taken per second, medians of rounds."""
    source, _ = recipe.parts.find("data")(recipe)
    batch = recipe.global_batch_size
    order = Order(len(source), batch, recipe.seed, recipe.epoch_end)
    layout = solve_layout(num_processes=1, global_batch_size=batch, per_device_train_batch_size=batch)
    steps = Steps(source, order, layout, process_index=0)
    model, weights = network(recipe, source, precision), torch.tensor(list(recipe.loss_weights.values()))
    delivered, trained = [], []
    for round_ in range(rounds + 1):
        start = harness.clock()
        data = [steps[round_ * num_steps + step] for step in range(num_steps)]
        loaded = harness.clock()
        for step in data:
            compute(model, step, weights, precision)
        size = sum(step.num_tokens for step in data)
        delivered.append(size / (loaded - start))
        trained.append(size / (harness.clock() - loaded))
    ratios = [fast / slow for fast, slow in zip(delivered, trained, strict=True)][1:]
    return {
        "title": title,
        "unit": recipe.unit,
        "delivered": statistics.median(delivered[1:]),
        "taken": statistics.median(trained[1:]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def memory(num_rows: tuple[int, ...]) -> list[dict]:
    """Measure bytes that a loader of each kind adds, by rows of its dataset."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in COLUMNS:
            words = [str(word) for rows in num_rows for word in (kind, write(kind, Path(folder) / f"{rows}", rows))]
            command = [sys.executable, ROOT / "tests" / "helpers" / "run_loader_memory.py", *words]
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
            results += [
                {"kind": kind, "rows": rows} | json.loads(line) for rows, line in zip(num_rows, lines, strict=True)
            ]
    return results


def main() -> None:
    parser = harness.flags("loader", __doc__, rounds=7, only=CASES)
    parser.add_argument("--precision", choices=harness.PRECISIONS, default=harness.PRECISION)
    parser.add_argument("--rows", type=harness.positive, nargs="+", default=ROWS)
    arguments = parser.parse_args()
    stop_malloc_returning_memory()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for title in arguments.only:
            name, changes, num_steps = CASES[title]
            recipe = load(str(write_photographs(Path(folder))) if name == "photographs" else name, changes)
            rows.append(speed(title, recipe, num_steps, arguments.rounds, arguments.precision))
            print(rows[-1], file=sys.stderr)
    more = {"rounds": arguments.rounds, "precision": "bf16" if arguments.precision == "bf16" else "float32"}
    about = harness.about("make bench NAME=loader", ("torch", "transformers"), **more)
    results = {"about": about, "speed": rows, "memory": memory(tuple(arguments.rows))}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict) -> str:
    about = results["about"]
    speeds = [
        [
            *(row["title"], f"{row['unit']}s", f"{row['delivered']:,.0f}", f"{row['taken']:,.0f}"),
            f"{row['ratio']:.1f} ({min(row['ratios']):.1f} to {max(row['ratios']):.1f})",
        ]
        for row in results["speed"]
    ]
    sizes = [
        [
            *(row["kind"].replace("_", " "), f"{row['rows']:,}"),
            *(f"{row[name] / 1e6:.1f}" for name in ("file", "samples", "steps")),
        ]
        for row in results["memory"]
    ]
    columns = "workload | unit | one process loads, per second | the model takes, per second | loads / takes"
    return harness.page(
        "What the loaders deliver",
        "loader.py",
        about,
        f"{harness.table(columns, speeds)}\n"
        f"Medians (smallest to largest) of {about['rounds']} rounds, forward and backward in {about['precision']}.\n\n"
        "Private memory, in MB, that opening the file (by `datasets`), making the samples and 100 steps add; the rows are "
        f"mapped:\n\n{harness.table('samples | rows | file | samples | steps', sizes)}\n"
        "`datasets` writes chunks of 1,000 rows, and keeps about 1.5 kB for each column of a chunk; the samples keep as much, "
        "for columns of lists, and classifiers a label and a length of each row, 16 bytes.\n",
    )


if __name__ == "__main__":
    main()
