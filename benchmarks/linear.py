"""How the time of a step grows with its micro-batches: k = 1, 2, 4, ... 64 micro-batches of the same size, one process.

    make bench NAME=linear

BERT of 4 layers x 256 on rows of 128 tokens, 8 in a micro-batch: scripts/pretrain_bert.py as users launch it, once for every k,
all in turns of a second, so that a machine whose speed changes is the same for all. In every round each takes 64 micro-batches,
and a line is fitted through the seconds of a step, weighted by 1 / seconds, so that deviations are relative. What is shown is
the median of the rounds' deviations. Memory is the largest resident memory of the process.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))

import clock
import harness
import numpy as np
import yaml
from bench import ENDLESS, FULL_BERT, write_data
from harness import Program, peak_memory, running_time, spread

NUM_MICRO_STEPS, MICRO_BATCH = (1, 2, 4, 8, 16, 32, 64), 8
WARM_UP, TURN = 3, 1.0  # steps, seconds


def deviations(num_micro_steps: list[int], seconds: list[float]) -> tuple[float, float, list[float]]:
    """Fit the line a + b k that is nearest in relative terms: a, b, and seconds / (a + b k) - 1 of each.

    >>> a, b, off = deviations([1, 2, 4], [3.0, 5.0, 9.0])
    >>> round(a, 6), round(b, 6), [round(abs(value), 6) for value in off]
    (1.0, 2.0, [0.0, 0.0, 0.0])
    """
    k, y = np.array(num_micro_steps, float), np.array(seconds)
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / y, k / y], 1), np.ones(len(y)))
    return float(a), float(b), (y / (a + b * k) - 1).tolist()


def recipe(k: int) -> dict[str, Any]:
    """Make the changes of a recipe, see `run.Workload`. The rate is the same for all: BERT's rule ends at a batch of 159."""
    return FULL_BERT | {"vocab_size": 8192, "global_batch_size": MICRO_BATCH * k, "lr_scaling_rule": "none"} | ENDLESS


def start(k: int, precision: str, work: Path, threads: int) -> tuple[Program, Path]:
    folder = work / f"k{k}"
    folder.mkdir()
    text = yaml.safe_dump(recipe(k)).replace("WORK", str(work))
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    words = harness.launch(ROOT / "benchmarks" / "peers" / "ours.py", precision)
    words += [str(folder / "stamps"), str(ROOT / "scripts" / "pretrain_bert.py")]
    words += ["--recipe", str(folder / "recipe.yaml"), "--speed", "safe"]
    words += ["--per_device_train_batch_size", str(MICRO_BATCH), "--output_dir", str(folder / "run")]
    return Program(words, work, folder / "log", threads), folder / "stamps"


def take_round(programs: dict[int, tuple[Program, Path]]) -> dict[int, float]:
    """Measure the seconds of a step of each k, stops left out, over as many steps as the greatest k has micro-batches."""
    first = {k: len(clock.read(stamps)[1]) for k, (_, stamps) in programs.items()}
    last = {k: first[k] + max(programs) // k for k in programs}
    running = list(programs)
    while running:
        for k in running:
            programs[k][0].turn(TURN)
        running = [k for k in running if len(clock.read(programs[k][1])[1]) < last[k]]
    seconds = {}
    for k, (program, stamps) in programs.items():
        begin, end = (running_time(program.turns, clock.read(stamps)[1][step - 1].time) for step in (first[k], last[k]))
        seconds[k] = (end - begin) / (last[k] - first[k])
    return seconds


def measure(precision: str, num_rounds: int, work: Path, threads: int) -> dict:
    """Measure the seconds of a step of each k in every round, and memory."""
    programs: dict[int, tuple[Program, Path]] = {}
    try:
        for k in NUM_MICRO_STEPS:
            programs[k] = start(k, precision, work, threads)
            program, stamps = programs[k]
            program.run_until(lambda stamps=stamps: len(clock.read(stamps)[1]) > WARM_UP)
        rounds = [take_round(programs) for _ in range(num_rounds)]
        seconds = {k: [numbers[k] for numbers in rounds] for k in NUM_MICRO_STEPS}
        memory = {k: peak_memory(clock.read(stamps)[0]) for k, (_, stamps) in programs.items()}
    finally:
        for program, _ in programs.values():
            program.kill()
    fits = [deviations(list(NUM_MICRO_STEPS), list(values)) for values in zip(*seconds.values(), strict=True)]
    a, b = (statistics.median(fit[place] for fit in fits) for place in (0, 1))
    errors = {k: [fit[2][place] for fit in fits] for place, k in enumerate(NUM_MICRO_STEPS)}
    return {"precision": precision, "seconds": seconds, "memory": memory, "a": a, "b": b, "off": errors}


def main() -> None:
    arguments = harness.flags("linear", __doc__, rounds=5, precisions=True, threads=True).parse_args()
    rows = []
    for precision in arguments.precisions:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            write_data(work, argparse.Namespace(reviews=None, shakespeare=None, nanogpt=None))
            rows.append(measure(precision, arguments.rounds, work, arguments.threads))
    about = harness.about("make bench NAME=linear", ("torch", "transformers", "accelerate"), arguments.threads)
    results = {"about": about, "rows": rows}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict) -> str:
    rows = []
    for row in results["rows"]:
        for (k, seconds), errors, memory in zip(
            row["seconds"].items(), row["off"].values(), row["memory"].values(), strict=True
        ):
            rows.append([row["precision"], k, spread(seconds, ".3f"), spread(errors, "+.1%"), f"{memory:.2f}"])
    fits = ", ".join(f"{row['precision']} {row['a']:.4f} + {row['b']:.4f} k" for row in results["rows"])
    num_rounds = len(next(iter(results["rows"][0]["seconds"].values())))
    return harness.page(
        "Time of a step over its micro-batches",
        "linear.py",
        results["about"],
        f"{harness.table('precision | k | seconds of a step | beside the line | memory, GB', rows)}\n"
        f"The lines: {fits} seconds. Medians (smallest to largest) of {num_rounds} rounds, all k in turns.\n",
    )


if __name__ == "__main__":
    main()
