"""What do algorithms that send less cost in loss, and how much less do they send?

    make bench NAME=communication                               # about an hour on 2 cores, resumable
    python benchmarks/communication.py --seeds 1 --steps 60 --work runs/communication-short --output short

A small GPT-2 on Python's documentation (`SHAPE`), batches of 32, trained with each seed in these ways (`WAYS`): the exact step;
gradients in 16 bits between 4 processes (--reduce_dtype); and the algorithms of a recipe's `communication`, with 4 workers.
What these compute is the same on any number of processes (tests/test_communication.py), so they are trained on one.

- loss: held-out loss after the last step. A way costs loss if its mean is above that of the exact step by two standard errors
  of the paired differences or more.
- bytes: what one of 4 processes hands to the process group in a step. A training of 60 steps on 4 processes is traced: every
  operation of torch.distributed and of DistributedDataParallel (`c10d`), with the size and the type of its tensors, in the last
  30 steps, of which each exchanges once or more. Flags, counts and lines of the log are apart: tensors of whole numbers but the
  places that top_k sends, and of at most 16 numbers. What a run says that it sends must be what was traced.

A run that is finished is not done again: WORK/WAY-SEED holds it. Remove the folder to measure anew.
"""

import contextlib
import json
import os
import runpy
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from advise import reaches
from ramp import SHAPE

from samestep.recipe import catalog as recipes
from samestep.recipe.recipe import Recipe

BATCH, WORKERS, TRACED = 32, 4, 60
WAYS = {
    "exact": ("the exact step", None, ""),
    "fp16": ("gradients in fp16", None, "--reduce_dtype fp16"),
    "bf16": ("gradients in bf16", None, "--reduce_dtype bf16"),
    "power_sgd": ("PowerSGD, rank 4", "power_sgd of rank 4 from step 10", ""),
    "top_k": ("top-k, 1 %", f"top_k 0.01 of {WORKERS} workers", ""),
    "local_sgd": ("LocalSGD, every 10 steps", f"local_sgd of {WORKERS} workers every 10 steps", ""),
    "diloco": ("DiLoCo, every 30 steps", f"diloco of {WORKERS} workers every 30 steps", ""),
}
"""Way -> title, the recipe's `communication`, flags of the run."""
SMALL = 16


def make_recipe(way: str, steps: int) -> Recipe:
    """Make the recipe of a way, of so many steps."""
    changes = SHAPE | {"lr_scaling_rule": "none", "global_batch_size": BATCH, "communication": WAYS[way][1]}
    return recipes.load("gpt2_small_cpu", changes | {"max_train_steps": steps, "num_warmup_steps": steps // 10})


def train(way: str, seed: int, steps: int, work: Path, threads: int) -> float:
    """Train a way with a seed, unless that was done before; its last held-out loss."""
    recipe, folder = make_recipe(way, steps), work / f"{way}-{seed}"
    file, num_processes = work / f"{way}.yaml", WORKERS if WAYS[way][2] else 1
    work.mkdir(parents=True, exist_ok=True)
    file.write_text(recipe.to_yaml(), encoding="utf-8")
    words = harness.launch_on(harness.ROOT / "scripts" / "pretrain_gpt2.py", num_processes)
    words += ["--recipe", str(file), "--seed", str(seed), "--speed", "safe", *WAYS[way][2].split()]
    made = f"{recipe.fingerprint} {WAYS[way][2]}"
    return float(harness.train_once(words, folder, made, max(1, threads // num_processes))["eval_loss"])


# ---------------------------------------------------------------------------------------------------------------------
# Bytes


def trace(file: Path, script: str, argv: list[str]) -> None:
    """Run a script, and write what process 0 hands to its process groups in the second half of its steps; see `record`."""
    import torch

    from samestep._internals.torch_tracing import TorchDispatchMode, tree_leaves
    from samestep.training.run import Run

    sent: dict[str, int] = {}

    class Recorder(TorchDispatchMode):
        """Adds up the bytes of the tensors that operations of `c10d` send."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "c10d":
                name = function._schema.name.partition("::")[2]
                # Gathering operations have their outputs first
                inputs = args[1] if name in ("allgather_", "_allgather_base_") else args[0]
                for tensor in tree_leaves(inputs):
                    if hasattr(tensor, "nbytes") and not name.startswith(("wait", "barrier", "recv")):
                        is_small = tensor.numel() <= SMALL or str(tensor.dtype) in ("torch.int64", "torch.uint8")
                        kind = "control" if is_small else f"{name} {str(tensor.dtype).removeprefix('torch.')}"
                        sent[kind] = sent.get(kind, 0) + tensor.nbytes
            return function(*args, **kwargs or {})

    def then(future: torch.Future, callback: Any) -> torch.futures.Future:
        """Call back at once: PowerSGD's callbacks reduce, too, and other threads than this one are not recorded."""
        future.wait()
        result = torch.futures.Future()
        result.set_result(callback(future))
        return result

    steps = Run.steps

    def record(run: Run, train: Any) -> Iterator[Any]:
        """Iterate over the steps, and record the second half of them, and what is logged between them."""
        with contextlib.ExitStack() as stack:
            for step in steps(run, train):
                if step.index == TRACED // 2:
                    stack.enter_context(Recorder())
                yield step

    Run.steps, Run.evaluate, torch.Future.then = record, lambda *_: None, then
    sys.argv = [script, *argv]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        if os.environ.get("RANK", "0") == "0":
            file.write_text(json.dumps(sent), encoding="utf-8")


def count_bytes(way: str, work: Path) -> dict[str, float]:
    """Count the bytes that a process sends in a step: kind -> bytes."""
    folder, file = work / f"{way}-traced", work / f"{way}-traced.json"
    shutil.rmtree(folder, ignore_errors=True)
    file.unlink(missing_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    recipe = work / f"{way}-traced.yaml"
    recipe.write_text(make_recipe(way, TRACED).to_yaml(), encoding="utf-8")
    flags = ["--recipe", str(recipe), "--output_dir", str(folder), "--speed", "safe", *WAYS[way][2].split()]
    program = harness.ROOT / "scripts" / "pretrain_gpt2.py"
    harness.run([*harness.launch_on(__file__, WORKERS), "--trace", file, program, *flags], threads=1)
    sent = json.loads(file.read_text(encoding="utf-8"))
    sent = {kind: num_bytes / (TRACED // 2) for kind, num_bytes in sorted(sent.items())}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    for said in (line["bytes_per_step"] for line in lines if "bytes_per_step" in line):
        if round(count_gradients(sent)) != said:
            sys.exit(f"{way}: the run says that it sends {said:,} bytes a step, traced were {sent}")
    return sent


def count_gradients(sent: dict[str, float]) -> float:
    """Add up the bytes of all kinds but flags, counts and lines of the log."""
    return sum(num_bytes for kind, num_bytes in sent.items() if kind != "control")


# ---------------------------------------------------------------------------------------------------------------------
# Results


def main() -> None:
    if sys.argv[1:2] == ["--trace"]:
        trace(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
        return
    parser = harness.flags("communication", __doc__, only=WAYS, threads=True)
    parser.add_argument("--seeds", type=harness.positive, default=5, help="of each way [5]")
    parser.add_argument("--steps", type=harness.positive, default=600, help="of each training [600]")
    parser.add_argument("--work", type=Path, default=harness.ROOT / "runs" / "communication", help="folder of the runs")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"steps": arguments.steps, "bytes": {}, "losses": {way: [] for way in arguments.only}}
    for way in arguments.only:
        results["bytes"][way] = count_bytes(way, arguments.work)
        print(way, results["bytes"][way], file=sys.stderr, flush=True)
    for seed in range(1, 1 + arguments.seeds):
        for way in arguments.only:
            loss = train(way, seed, arguments.steps, arguments.work, arguments.threads)
            results["losses"][way].append(loss)
            print(way, seed, loss, file=sys.stderr, flush=True)
    packages = ("torch", "transformers", "accelerate")
    results["about"] = harness.about("make bench NAME=communication", packages, threads=arguments.threads)
    harness.write(arguments.output, results, parts={"communication": ("communication.md", part(results))})


def describe(results: dict[str, Any]) -> str:
    """Describe what each way costs and sends."""
    rows, exact = [], results["losses"].get("exact")
    sent = {way: count_gradients(kinds) for way, kinds in results["bytes"].items()}
    for way, losses in results["losses"].items():
        title, communication, flags = WAYS[way]
        differences = [loss - other for loss, other in zip(losses, exact or losses, strict=True)]
        cost = "" if way == "exact" or exact is None or len(losses) < 2 else "no" if reaches(losses, exact) else "yes"
        less = f"{sent['exact'] / sent[way]:,.1f}" if "exact" in sent else "-"
        control = results["bytes"][way].get("control", 0)
        rows.append([title, f"`{communication or flags}`" if communication or flags else "", f"{sent[way]:,.0f}", less])
        difference = "-" if exact is None else f"{statistics.fmean(differences):+.4f}"
        rows[-1] += [f"{control:,.0f}", harness.spread(losses, ".4f"), difference, cost]
    columns = (
        "way | recipe or flag | bytes a step | times less | flags and log | held-out loss | difference | costs loss"
    )
    number = len(next(iter(results["losses"].values())))
    return (
        f"A GPT-2 of 2 x 128 on Python's documentation, {results['steps']} steps of {BATCH} samples, {number} seed(s). Bytes: "
        f"what one of {WORKERS} processes sends on average. Losses: median (smallest to largest); difference of the means. All "
        "but the first are other algorithms, or round; the learning rate is the exact step's, and was tuned for none of them."
        f"\n\n{harness.table(columns, rows)}"
    )


def part(results: dict[str, Any]) -> str:
    return harness.part("communication.py", results["about"], describe(results))


if __name__ == "__main__":
    main()
