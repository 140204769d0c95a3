"""What the exact loop costs: scripts/pretrain_bert.py beside the barest loop over the same micro-batches.

    make bench

Ours: everything the script does in a step, from drawing the samples to writing the log. Barest: forward, backward and a fused
AdamW step on micro-batches that were collated beforehand, without Accelerate, without clipping, without a log. The same
model, data, order and precision, in turns in one process; the ratio of each round, and their median.
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
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import accelerate
import torch
import transformers
from common import fresh_accelerator, load_script, metrics

from recipes import losses, optim, run
from recipes.data import sentence_pairs
from recipes.data.steps import Steps
from recipes.order import Order
from recipes.plan import solve_layout

WARM_UP = 5  # steps at the start of every run that are not counted


def ours(script, argv: list[str], precision: str) -> float:
    """Tokens per second (padding not counted) of the script itself."""
    fresh_accelerator()
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        with contextlib.redirect_stderr(io.StringIO()):
            script.main([*argv, "--output_dir", f"{folder}/run", "--eval_steps", "1000000"])
        lines = metrics(Path(folder) / "run")[WARM_UP:]
    return sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines)


def barest(script, recipe, data: list, precision: str) -> float:
    """Tokens per second of the barest loop over `data`, a list of StepData."""
    torch.manual_seed(recipe.seed)
    bert = script.build_model(recipe)
    bert.set_attn_implementation("eager")  # what the script takes on a CPU
    model = script.PretrainingSums(bert).train()
    optimizer = optim.adamw(model, recipe.scaled(), recipe.weight_decay)
    weights = torch.tensor(list(recipe.loss_weights.values()))
    for step in data:
        if step.step == WARM_UP:
            start = time.perf_counter()
        for cell in step.cells:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                sums, _ = model(**cell)
            losses.weighted_loss(sums, step.counts, weights).backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    return sum(step.num_tokens for step in data[WARM_UP:]) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--precisions", nargs="+", default=["no", "bf16"])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "overhead")
    arguments = parser.parse_args()

    script = load_script("pretrain_bert")
    cases = {"k = 1": (16, 16), "k = 4": (64, 16)}
    rows = []
    for precision in arguments.precisions:
        for name, (batch, cap) in cases.items():
            argv = f"--recipe bert_small_cpu --max_train_steps {arguments.steps} --global_batch_size {batch}".split()
            argv += ["--per_device_train_batch_size", str(cap), "--lr_scaling_rule", "none"]
            recipe, _ = run.parse(argv, "bert_pretraining", "")
            source, _ = sentence_pairs.build(recipe)
            layout = solve_layout(num_processes=1, global_batch_size=batch, per_device_train_batch_size=cap)
            steps = Steps(source, Order(len(source), batch, recipe.seed), layout, process_index=0)
            data = [steps[number] for number in range(arguments.steps)]
            pairs = []
            for number in range(arguments.rounds):
                turns = [partial(ours, script, argv, precision), partial(barest, script, recipe, data, precision)]
                speed = {turn: turns[turn]() for turn in ((0, 1) if number % 2 == 0 else (1, 0))}
                pairs.append((speed[0], speed[1]))
                print(f"{precision} {name}: ours {speed[0]:,.0f}, barest {speed[1]:,.0f}, {speed[0] / speed[1]:.3f}")
            ratios = sorted(a / b for a, b in pairs)
            rows.append(
                {
                    "mixed_precision": precision,
                    "case": f"B {batch}, b {cap}, {name}",
                    "ours_tokens_per_second": statistics.median(a for a, _ in pairs),
                    "barest_tokens_per_second": statistics.median(b for _, b in pairs),
                    "ratio": statistics.median(ratios),
                    "ratio_min": ratios[0],
                    "ratio_max": ratios[-1],
                }
            )
    about = {
        "command": "make bench",
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        "versions": {module.__name__: module.__version__ for module in (torch, accelerate, transformers)},
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")
    arguments.output.with_suffix(".md").write_text(_markdown(about, rows))
    print(_markdown(about, rows))


def _markdown(about: dict, rows: list[dict]) -> str:
    head = (
        "# Overhead of the exact loop\n\nGenerated by `make bench` (benchmarks/overhead.py, which says what is compared); do "
        "not edit.\n\n| precision | case | ours, tokens/s | barest, tokens/s | ratio | min to max |\n"
        "|---|---|---|---|---|---|\n"
    )
    table = "".join(
        f"| {row['mixed_precision']} | {row['case']} | {row['ours_tokens_per_second']:,.0f} "
        f"| {row['barest_tokens_per_second']:,.0f} | **{row['ratio']:.3f}** "
        f"| {row['ratio_min']:.3f} to {row['ratio_max']:.3f} |\n"
        for row in rows
    )
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{head}{table}\nbert_small_cpu; medians of {about['rounds']} rounds of {about['steps']} steps, the two in turns. "
        f"{about['machine']}, Python {about['python']}, {versions}.\n"
    )


if __name__ == "__main__":
    main()
