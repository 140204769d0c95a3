"""Start-up: seconds from the command to the end of the first optimizer step, and what they are spent on.

    make bench-startup

Every program with its small recipe, launched as users launch it, once before to fill the caches; the programs in turns.

- launcher: until Python runs the script: `accelerate launch`, which imports torch and accelerate, and starts a second Python.
- imports: until the script has imported all that it needs: torch, transformers, datasets, accelerate, its own modules.
- preparing: data, model and optimizer, until the first step asks for samples; what `--speed auto` measured is remembered.
- evaluation: the held-out samples, before the first step.
- first step: what is left until its line is logged, drawing its samples included.
"""

import argparse
import gc
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
    begun = time.time()
    gc.disable()  # as the scripts do while they import
    from samestep.data.steps import Steps
    from samestep.training import evaluation, launch, report

    ends, evaluating = {"launcher": begun}, []
    create, stream, step = launch.create_accelerator, Steps.stream, report.RunLog.step

    def created(*args, **more):
        ends["imports"] = time.time()
        return create(*args, **more)

    def streamed(*args, **more):
        ends.setdefault("preparing", time.time())  # evaluations stream, too
        return stream(*args, **more)

    def timed(evaluate):
        def evaluated(*args, **more):
            start = time.time()
            found = evaluate(*args, **more)
            evaluating.append(time.time() - start)
            return found

        return evaluated

    def stepped(*args, **more):
        step(*args, **more)
        if not file.exists():
            ends["evaluation"] = ends["preparing"] + sum(evaluating)
            ends["first step"] = time.time()
            file.write_text(json.dumps(ends), encoding="utf-8")

    launch.create_accelerator, Steps.stream, report.RunLog.step = created, streamed, stepped
    for name in ("evaluate", "outputs", "judge"):
        setattr(evaluation, name, timed(getattr(evaluation, name)))
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def seconds_of(start: float, ends: dict[str, float]) -> dict[str, float]:
    """Seconds of each stage.

    >>> seconds_of(1.0, {"launcher": 2.0, "imports": 5.0, "preparing": 5.5, "evaluation": 6.5, "first step": 7.0})
    {'launcher': 1.0, 'imports': 3.0, 'preparing': 0.5, 'evaluation': 1.0, 'first step': 0.5}
    """
    times = [start, *(ends[stage] for stage in STAGES)]
    return {stage: after - before for stage, before, after in zip(STAGES, times, times[1:], strict=False)}


def measure(program: str, precision: str, folder: Path) -> dict[str, float]:
    """Seconds of each stage of one run."""
    file = folder / f"{program}.json"
    file.unlink(missing_ok=True)
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    words += [str(ROOT / "accelerate_configs" / "cpu.yaml"), "--mixed_precision", precision]
    words += [__file__, "--watch", str(file)]
    words += [str(ROOT / "scripts" / f"{program}.py"), "--recipe", RECIPES[program], "--stop_after_step", "1"]
    words += ["--output_dir", str(folder / program), "--overwrite_output_dir"]
    # As where users import: compiled modules are kept.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.time()
    run = subprocess.run(words, env=environment, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{run.stderr[-3000:]}")
    return seconds_of(start, json.loads(file.read_text()))


def main() -> None:
    from run import about

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--precision", choices=["no", "bf16"], default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "startup")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}: it must be 1 or more")
    rows = {program: [] for program in arguments.programs}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 + arguments.rounds):
            for program, found in rows.items():
                seconds = measure(program, arguments.precision, Path(folder))
                shown = {stage: round(value, 2) for stage, value in seconds.items()}
                print(program, shown, file=sys.stderr, flush=True)
                if number:
                    found.append(seconds)
    threads = len(os.sched_getaffinity(0))
    results = {"precision": arguments.precision, "rows": rows} | about(threads)
    arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
    arguments.output.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))


def markdown(results: dict) -> str:
    lines = ""
    for program, runs in results["rows"].items():
        stages = [f"{statistics.median(run[stage] for run in runs):.1f}" for stage in STAGES]
        whole = [sum(run.values()) for run in runs]
        shown = f"{statistics.median(whole):.1f} ({min(whole):.1f} to {max(whole):.1f})"
        lines += f"| {program} | {' | '.join(stages)} | {shown} |\n"
    num_runs = len(next(iter(results["rows"].values())))
    return (
        "# Start-up\n\n"
        "Generated by `make bench-startup` (benchmarks/startup.py, which says what the stages are); do not edit.\n\n"
        f"Seconds, in {results['precision']}, all caches filled:\n\n"
        f"| program | {' | '.join(STAGES)} | command to the end of the first step |\n{'|---' * (len(STAGES) + 2)}|\n{lines}\n"
        f"Medians (smallest to largest) of {num_runs} runs, the programs in turns.\n\n"
        f"{results['machine']}\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
