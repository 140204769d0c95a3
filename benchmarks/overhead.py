"""What the exact loop costs: scripts/pretrain_bert.py beside the barest loop over the same micro-batches.

    make bench

Two comparisons, both with the same model, data, order, precision and threads:

- loop: both over collated micro-batches, both taking the recipe's step (forward, backward, clipping, fused AdamW). What is
  left is Accelerate, the counts, the scale, the noise seed and the log.
- everything: ours with drawing, partitioning and collating the samples, against a loop that does not even clip.

All take turns step by step in one process (the script's log calls the barest loops between two steps, off the clock), so
that a change of the machine's speed meets all of them.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import accelerate
import torch
import transformers
from common import fresh_accelerator, load_script

from recipes import losses, optim, report, run
from recipes.data import sentence_pairs
from recipes.data.steps import Steps
from recipes.order import Order
from recipes.plan import solve_layout

WARM_UP = 5  # steps at the start of every run that are not counted


class Barest:
    """The barest loop over the steps of `data`, one step at a time."""

    def __init__(self, script, recipe, data: list, precision: str, clips: bool):
        torch.manual_seed(recipe.seed)
        bert = script.build_model(recipe)
        bert.set_attn_implementation("eager")  # what the script takes on a CPU
        self.model = script.PretrainingSums(bert).train()
        self.optimizer = optim.adamw(self.model, recipe.scaled(), recipe.weight_decay)
        self.weights = torch.tensor(list(recipe.loss_weights.values()))
        self.data, self.bf16 = data, precision == "bf16"
        self.max_grad_norm = recipe.max_grad_norm if clips else None
        self.parameters = list(self.model.parameters())

    def step(self, number: int) -> float:
        """Take a step; its seconds."""
        start = time.perf_counter()
        for cell in self.data[number].cells:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                sums, _ = self.model(**cell)
            losses.weighted_loss(sums, self.data[number].counts, self.weights).backward()
        if self.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def alternate(script, argv: list[str], loops: list[Barest], precision: str) -> list[tuple[float, ...]]:
    """Seconds of every step: of the script, of its data part alone, and of each barest loop."""
    rows, fetched, resumed = [], [0.0], [0.0]
    log_step, get = report.RunLog.step, Steps.__getitem__

    def timed_get(steps, number):
        start = time.perf_counter()
        data = get(steps, number)
        fetched[0] = time.perf_counter() - start
        return data

    def step(log, data, *arguments):
        log_step(log, data, *arguments)
        rows.append((time.perf_counter() - resumed[0], fetched[0], *(loop.step(data.step) for loop in loops)))
        resumed[0] = time.perf_counter()

    fresh_accelerator()
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(mock.patch.object(report.RunLog, "step", step))
        stack.enter_context(mock.patch.object(Steps, "__getitem__", timed_get))
        script.main([*argv, "--output_dir", f"{folder}/run"])
    return rows[WARM_UP:]


def measure(script, precision: str, batch: int, cap: int, num_rounds: int, num_steps: int) -> dict:
    argv = f"--recipe bert_small_cpu --max_train_steps {num_steps} --global_batch_size {batch}".split()
    argv += ["--per_device_train_batch_size", str(cap), "--lr_scaling_rule", "none"]
    recipe, _ = run.parse(argv, "bert_pretraining", "")
    source, _ = sentence_pairs.build(recipe)
    layout = solve_layout(num_processes=1, global_batch_size=batch, per_device_train_batch_size=cap)
    steps = Steps(source, Order(len(source), batch, recipe.seed), layout, process_index=0)
    data = [steps[number] for number in range(num_steps)]
    tokens = statistics.mean(step.num_tokens for step in data[WARM_UP:])
    rounds = []
    for _ in range(num_rounds):
        loops = [Barest(script, recipe, data, precision, clips) for clips in (True, False)]
        rows = alternate(script, argv, loops, precision)
        rounds.append(
            {
                "tokens_per_second": tokens / statistics.mean(row[0] for row in rows),
                "loop_ratio": statistics.median(clipping / (ours - fetch) for ours, fetch, clipping, _ in rows),
                "everything_ratio": statistics.median(barest / ours for ours, _, _, barest in rows),
            }
        )
        print(precision, batch, rounds[-1], file=sys.stderr)
    result = {"mixed_precision": precision, "case": f"B {batch}, b {cap}, k {layout.gradient_accumulation_steps}"}
    for name in rounds[0]:
        values = [numbers[name] for numbers in rounds]
        result |= {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=45, help="for one micro-step per step, fewer for several")
    parser.add_argument("--precisions", nargs="+", default=["no", "bf16"])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "overhead")
    arguments = parser.parse_args()

    script = load_script("pretrain_bert")
    rows = [
        measure(script, precision, 16 * k, 16, arguments.rounds, WARM_UP + (arguments.steps - WARM_UP) // k)
        for precision in arguments.precisions
        for k in (1, 4)
    ]
    about = {
        "command": "make bench",
        "rounds": arguments.rounds,
        "micro_steps": arguments.steps - WARM_UP,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        "versions": {module.__name__: module.__version__ for module in (torch, accelerate, transformers)},
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")
    arguments.output.with_suffix(".md").write_text(_markdown(about, rows))
    print(_markdown(about, rows))


def _markdown(about: dict, rows: list[dict]) -> str:
    def cell(row: dict, name: str, form: str) -> str:
        return f"{row[name]:{form}} ({row[f'{name}_min']:{form}} to {row[f'{name}_max']:{form}})"

    table = "".join(
        f"| {row['mixed_precision']} | {row['case']} | {cell(row, 'tokens_per_second', ',.0f')} "
        f"| {cell(row, 'loop_ratio', '.3f')} | {cell(row, 'everything_ratio', '.3f')} |\n"
        for row in rows
    )
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        "# Overhead of the exact loop\n\n"
        "Generated by `make bench` (benchmarks/overhead.py, which says what is compared); do not edit.\n"
        "Ratios are barest / ours in time, that is ours / barest in tokens per second.\n\n"
        "| precision | case | ours, tokens/s | loop | everything |\n|---|---|---|---|---|\n"
        f"{table}\n"
        f"bert_small_cpu. Medians (smallest to largest) of {about['rounds']} rounds; a round's ratio is the median over "
        f"its steps ({about['micro_steps']} micro-steps). {about['machine']}, Python {about['python']}, {versions}.\n"
    )


if __name__ == "__main__":
    main()
