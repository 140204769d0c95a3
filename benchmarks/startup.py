"""Start-up: seconds from the command to the end of the first optimizer step, and what they are spent on.

    make bench NAME=startup

Every program with its small recipe, launched as users launch it, once before to fill the caches; the programs in turns.

- launcher: until Python runs the script: `accelerate launch`, which imports torch and accelerate, and starts a second Python.
- imports: until the script has imported all that it needs: torch, transformers, datasets, accelerate, its own modules.
- preparing: data, model and optimizer, until the first step asks for samples; what `--speed auto` measured is remembered.
- evaluation: the held-out samples, before the first step.
- first step: what is left until its line is logged, drawing its samples included.
"""

import gc
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import harness

ROOT = Path(__file__).parent.parent
RECIPES = {
    "pretrain_bert": "bert_small_cpu",
    "pretrain_gpt2": "gpt2_small_cpu",
    "finetune_classifier": "finetune_small_cpu",
    "train_image_classifier": "resnet_digits_cpu",
    "train_captcha": "captcha_cpu",
}
STAGES = ("launcher", "imports", "preparing", "evaluation", "first step")


def watch(file: Path, argv: list[str]) -> None:
    """Run a script, and write when its stages ended. Called before anything is imported that the script would import."""
    begun = harness.clock()
    gc.disable()  # as the scripts do while they import
    from samestep.data.steps import Steps
    from samestep.training import evaluation, launch, report

    ends, evaluating = {"launcher": begun}, []
    create, stream, step = launch.create_accelerator, Steps.stream, report.RunLog.step

    def created(*args, **more):
        ends["imports"] = harness.clock()
        return create(*args, **more)

    def streamed(*args, **more):
        ends.setdefault("preparing", harness.clock())  # evaluations stream, too
        return stream(*args, **more)

    def timed(evaluate):
        def evaluated(*args, **more):
            start = harness.clock()
            result = evaluate(*args, **more)
            evaluating.append(harness.clock() - start)
            return result

        return evaluated

    def stepped(*args, **more):
        step(*args, **more)
        if not file.exists():
            ends["evaluation"] = ends["preparing"] + sum(evaluating)
            ends["first step"] = harness.clock()
            file.write_text(json.dumps(ends), encoding="utf-8")

    launch.create_accelerator, Steps.stream, report.RunLog.step = created, streamed, stepped
    for name in ("evaluate", "evaluate_logits", "judge"):
        setattr(evaluation, name, timed(getattr(evaluation, name)))
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def stage_seconds(start: float, ends: dict[str, float]) -> dict[str, float]:
    """Compute the seconds of each stage.

    >>> stage_seconds(1.0, {"launcher": 2.0, "imports": 5.0, "preparing": 5.5, "evaluation": 6.5, "first step": 7.0})
    {'launcher': 1.0, 'imports': 3.0, 'preparing': 0.5, 'evaluation': 1.0, 'first step': 0.5}
    """
    times = [start, *(ends[stage] for stage in STAGES)]
    return {stage: end - begin for stage, begin, end in zip(STAGES, times, times[1:], strict=False)}


def measure(program: str, precision: str, folder: Path) -> dict[str, float]:
    """Measure the seconds of each stage of one run."""
    file = folder / f"{program}.json"
    file.unlink(missing_ok=True)
    words = harness.launch(__file__, precision)
    words += ["--watch", str(file), str(ROOT / "scripts" / f"{program}.py"), "--recipe", RECIPES[program]]
    words += ["--stop_after_step", "1", "--output_dir", str(folder / program), "--overwrite_output_dir"]
    # As where users import: compiled modules are kept.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = harness.clock()
    run = subprocess.run(words, env=environment, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{run.stderr[-3000:]}")
    return stage_seconds(start, json.loads(file.read_text()))


def main() -> None:
    parser = harness.flags("startup", __doc__, rounds=5, only=RECIPES)
    parser.add_argument("--precision", choices=harness.PRECISIONS, default=harness.PRECISION)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:

        def run(program: str) -> dict[str, float]:
            seconds = measure(program, arguments.precision, Path(folder))
            rounded = {stage: round(value, 2) for stage, value in seconds.items()}
            print(program, rounded, file=sys.stderr, flush=True)
            return seconds

        calls = {program: partial(run, program) for program in arguments.only}
        rows = harness.in_turns(calls, arguments.rounds, warm_up=1)
    about = harness.about(
        "make bench NAME=startup", ("torch", "transformers", "accelerate"), len(os.sched_getaffinity(0))
    )
    results = {"about": about, "precision": arguments.precision, "rows": rows}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict) -> str:
    rows = []
    for program, runs in results["rows"].items():
        stages = [f"{statistics.median(run[stage] for run in runs):.1f}" for stage in STAGES]
        rows.append([program, *stages, harness.spread([sum(run.values()) for run in runs], ".1f")])
    num_runs = len(next(iter(results["rows"].values())))
    return harness.page(
        "Start-up",
        "startup.py",
        results["about"],
        f"Seconds, in {results['precision']}, all caches filled:\n\n"
        f"{harness.table(['program', *STAGES, 'command to the end of the first step'], rows)}\n"
        f"Medians (smallest to largest) of {num_runs} runs, the programs in turns.\n",
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
