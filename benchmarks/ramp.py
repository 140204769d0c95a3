"""Does a batch that grows reach the loss of one batch in fewer steps? And is its curve the same wherever it is resumed?

    make bench NAME=ramp                                        # about an hour on 2 cores, resumable
    python benchmarks/ramp.py --only resume --num_points 4 --work runs/ramp-short --output short

- reach: a small GPT-2 on Python's documentation (`SHAPE`), trained with each seed in four ways. With as many samples: constant
  (a batch of 16), seesaw (from 16, to 64 at most, see samestep/recipe/batch_schedule.py) and, as a control, even: one batch
  that takes as few steps as Seesaw, with the learning rate by the square root. With more samples: ramp (`RAMP`), in 0.73 of
  the steps. A way reaches the loss if its mean held-out loss at the end is above that of the constant batch by less than two
  standard errors of the paired differences.
- resume: a tiny GPT-2 with a batch that grows (`GROWTHS`), on one process; then from checkpoints at random steps on, on other
  numbers of processes, in other micro-batches: the largest relative difference of a loss to the end; and with --reproducible,
  in how many the digests of all tensors are the same after every step.

A run that is finished is not done again: WORK/WAY-SEED holds it. Remove the folder to measure anew.
"""

import dataclasses
import json
import random
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import harness
from advise import reaches, train

from samestep.recipe import catalog as recipes
from samestep.recipe.recipe import Recipe

BATCH, LARGEST, SAMPLES = 16, 64, 9_600
SHAPE = {"n_layer": 2, "n_embd": 128, "n_head": 4, "block_size": 64, "n_positions": 64, "vocab_size": 2048}
RAMP, FEWER_STEPS = "16, 24 at 0.2, 32 at 0.5, rate by sqrt", 0.73
WAYS = {"constant": "one batch", "ramp": "stages", "seesaw": "Seesaw", "even": "as few steps as Seesaw's of one batch"}
GROWTHS = ("seesaw from 3", "3, 7 at 0.2, 16 at 0.6, rate by sqrt", "power 0.6 from 2")
TINY = SHAPE | {
    "n_embd": 32,
    "n_head": 2,
    "block_size": 48,
    "n_positions": 48,
    "vocab_size": 400,
    "max_train_steps": 30,
}


def make_recipes() -> dict[str, Recipe]:
    """Make the recipes of the ways; all but the stages have as many samples, and of warm-up, too."""
    from samestep.contrib.growing.step_plan import plan_steps

    steps = SAMPLES // BATCH
    own = SHAPE | {"lr_scaling_rule": "none", "max_train_steps": steps, "num_warmup_steps": steps // 10}
    constant = recipes.load("gpt2_small_cpu", own)
    # The number of steps that uses all samples: one more would be too many
    growing, low, high = own | {"batch_schedule": f"seesaw from {BATCH}", "global_batch_size": LARGEST}, 1, steps
    while high - low > 1:
        middle = (low + high) // 2
        plan = plan_steps(recipes.load("gpt2_small_cpu", growing | {"max_train_steps": middle}), None)
        low, high = (middle, high) if plan.num_samples <= SAMPLES else (low, middle)
    even = round(SAMPLES / low)
    kappa = even / BATCH
    numbers = {"global_batch_size": even, "learning_rate": float(f"{constant.learning_rate * kappa**0.5:.4g}")}
    numbers |= {"max_train_steps": round(SAMPLES / even), "num_warmup_steps": round(steps / 10 / kappa)}
    stages = {"batch_schedule": RAMP, "global_batch_size": 32, "learning_rate_batch_size": BATCH}
    stages |= {"max_train_steps": round(FEWER_STEPS * steps), "num_warmup_steps": round(FEWER_STEPS * steps / 10)}
    return {
        "constant": constant,
        "ramp": recipes.load("gpt2_small_cpu", own | stages),
        "seesaw": recipes.load("gpt2_small_cpu", growing | {"max_train_steps": low}),
        "even": recipes.load("gpt2_small_cpu", own | numbers),
    }


def measure_reach(num_seeds: int, work: Path, threads: int) -> dict[str, Any]:
    """Train each way with each seed; losses and steps."""
    made = make_recipes()
    result: dict[str, Any] = {"batches": {}, "steps": {}, "samples": {}, "losses": {way: [] for way in WAYS}}
    work.mkdir(parents=True, exist_ok=True)
    for way, recipe in made.items():
        (work / f"{way}.yaml").write_text(dataclasses.replace(recipe, name=way).to_yaml())
        result["batches"][way] = str(recipe.batch_schedule or "") or recipe.global_batch_size
    for seed in range(1, 1 + num_seeds):
        for way in WAYS:
            done = train(str(work / f"{way}.yaml"), seed, work / f"{way}-{seed}", [], threads)
            result["losses"][way].append(done["eval_loss"])
            result["steps"][way], result["samples"][way] = done["steps"], done["samples_seen"]
            print(way, seed, done["eval_loss"], done["steps"], file=sys.stderr, flush=True)
    return result


def run(file: Path, output: Path, num_processes: int, flags: str) -> list[dict[str, Any]]:
    """Train a tiny recipe; the lines of its steps."""
    words = harness.launch_on(harness.ROOT / "scripts" / "pretrain_gpt2.py", num_processes)
    words += ["--recipe", str(file), "--output_dir", str(output), "--speed", "safe", *flags.split()]
    harness.run(words, threads=1)
    return harness.read_steps(output)


def measure_resume(num_points: int, work: Path) -> list[dict[str, Any]]:
    """Resume each growth at random steps, on 1 to 3 processes, with and without --reproducible; a row for each growth."""
    rows, rng = [], random.Random(0)
    shutil.rmtree(work / "resume", ignore_errors=True)
    (work / "resume").mkdir(parents=True)
    for number, growth in enumerate(GROWTHS):
        file = work / "resume" / f"{number}.yaml"
        changes = {"batch_schedule": growth, "global_batch_size": 16, "lr_scaling_rule": "none", "num_warmup_steps": 3}
        file.write_text(recipes.load("gpt2_small_cpu", TINY | changes).to_yaml())
        whole = {}
        for kind, flags in (("usual", ""), ("exact", "--reproducible 2 --digest_steps 1")):
            output = work / "resume" / f"{number}-{kind}"
            whole[kind] = run(file, output, 1, f"{flags} --checkpointing_steps 1")
        row: dict[str, Any] = {"growth": growth, "points": [], "differences": [], "equal": 0, "digests": 0}
        for _ in range(num_points // len(GROWTHS) + (number < num_points % len(GROWTHS))):
            step, n, b = rng.randrange(1, 30), rng.choice([1, 2, 3]), rng.choice([1, 2, 5, 16])
            row["points"].append([step, n, b])
            for kind, flags in (
                ("usual", f"--per_device_train_batch_size {b}"),
                ("exact", "--reproducible 2 --digest_steps 1"),
            ):
                start = work / "resume" / f"{number}-{kind}" / f"checkpoint-{step}"
                output = work / "resume" / f"{number}-{kind}-resumed-{len(row['points'])}"
                flags += f" --resume_from_checkpoint {start}"
                lines, others = run(file, output, n, flags), whole[kind][step:]
                assert [line["step"] for line in lines] == [line["step"] for line in others]
                if kind == "usual":
                    pairs = zip(lines, others, strict=True)
                    row["differences"].append(max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs))
                else:
                    row["digests"] += 1
                    row["equal"] += [line["digest"] for line in lines] == [line["digest"] for line in others]
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = harness.flags("ramp", __doc__, only=("reach", "resume"), threads=True)
    parser.add_argument("--seeds", type=harness.positive, default=5, help="of each way [5]")
    parser.add_argument("--num_points", type=harness.positive, default=20, help="at which trainings are resumed [20]")
    parser.add_argument("--work", type=Path, default=harness.ROOT / "runs" / "ramp", help="folder of the runs")
    arguments = parser.parse_args()
    file = arguments.output.with_suffix(".json")
    results = json.loads(file.read_text()) if file.exists() else {"reach": None, "resume": []}
    about = harness.about("make bench NAME=ramp", ("torch", "transformers", "accelerate"), threads=arguments.threads)
    for name in arguments.only:
        if name == "reach":
            results["reach"] = measure_reach(arguments.seeds, arguments.work, arguments.threads)
        else:
            results["resume"] = measure_resume(arguments.num_points, arguments.work)
        results["about"] = about
        harness.write(arguments.output, results, markdown(results), is_last=name == arguments.only[-1])


def markdown(results: dict) -> str:
    parts = []
    if results["reach"] is not None:
        reach, rows = results["reach"], []
        usual = reach["losses"]["constant"]
        for way, losses in reach["losses"].items():
            differences = [loss - other for loss, other in zip(losses, usual, strict=True)]
            verdict = "" if way == "constant" else "yes" if reaches(losses, usual) else "no"
            steps = f"{reach['steps'][way]:,} ({reach['steps'][way] / reach['steps']['constant']:.2f})"
            rows.append([WAYS[way], reach["batches"][way], f"{reach['samples'][way]:,}", steps])
            rows[-1] += [harness.spread(losses, ".4f"), f"{statistics.fmean(differences):+.4f}", verdict]
        columns = "trained | batch | samples | steps (over one batch's) | held-out loss | mean difference | reaches it"
        parts.append(
            f"## The loss in fewer steps\n\nA GPT-2 of 2 x 128 on Python's documentation, {len(usual)} seeds; losses: median "
            f"(smallest to largest).\n\n{harness.table(columns, rows)}"
        )
    if results["resume"]:
        rows = [
            [
                row["growth"],
                len(row["points"]),
                f"{max(row['differences']):.1e}",
                f"{row['equal']} of {row['digests']}",
            ]
            for row in results["resume"]
        ]
        columns = "batch_schedule | resumed | largest difference of a loss | same digests (--reproducible)"
        parts.append(
            "## Resumed\n\nAt random steps, on 1 to 3 processes, in micro-batches of 1 to 16 samples, beside the run on one "
            f"process.\n\n{harness.table(columns, rows)}"
        )
    return harness.page("A batch that grows", "ramp.py", results["about"], "\n".join(parts))


if __name__ == "__main__":
    main()
