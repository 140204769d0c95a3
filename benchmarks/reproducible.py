"""Is a reproducible run the same to the bit, on whatever it runs, and what does that cost?

    make bench-reproducible        # about an hour on 2 cores; nothing else should run while costs are measured
    python benchmarks/reproducible.py --only cost

- Sweep: tiny models of every program with dropout 0.1, or exact batch normalisation, take 30 steps by --reproducible on 1, 2,
  3, 4 and 5 processes, and once per seed in three sessions that end at random steps and go on on random numbers of processes.
  SHA-256 of all parameters, of all moments and of all metrics (but the times) must be those of the run on one process.
- Moved: digests of each step (--digest_steps) of a run that moves from 1 to 3 and then to 2 processes, beside those of a run
  on one process; and of the same two runs without --reproducible. Makes docs/reproducible.png.
- Cost: seconds per step by --reproducible over seconds per step of the same micro-batches without, one process and one thread,
  whole programs in turns; medians of the steps after the first two. Seconds of a digest of the parameters of GPT-2 124M.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import harness
import torch
from common import TINIES, all_metrics, launch_environment, tiny_argv, write_corpus
from compare import hash_run
from forked import Server

from samestep.training.digest import digest_tensor

PICTURE = ROOT / "docs" / "reproducible.png"
NUM_STEPS, NUM_SEEDS, MAX_PROCESSES = 30, 20, 5
BERT_DROPOUT = "--hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1 --attn_implementation eager"
GPT2_DROPOUT = "--resid_pdrop 0.1 --embd_pdrop 0.1 --attn_pdrop 0.1 --attn_implementation eager"
BATCH_NORM = "--normalization batch --exact_batch_norm"
# Program -> flags beside its tiny model's.
WORKLOADS = {
    "pretrain_bert": BERT_DROPOUT,
    "pretrain_gpt2": GPT2_DROPOUT,
    "finetune_classifier": BERT_DROPOUT,
    "finetune_causal_lm": "",
    "train_captcha": "",
    "train_image_classifier": BATCH_NORM,
}
MOVES = ((1, 10), (3, 20), (2, NUM_STEPS))
"""Processes of each session of the run that moves, and its last step."""
FLAGS = f"--reproducible 4 --global_batch_size 24 --max_train_steps {NUM_STEPS} --eval_steps 10"
# Name -> program, flags, size of micro-batches, steps.
COSTS = {
    "BERT 4 x 256, micro-batches of 4, k = 6": (
        "pretrain_bert",
        f"--recipe bert_small_cpu --num_hidden_layers 4 --global_batch_size 24 {BERT_DROPOUT}",
        4,
        16,
    ),
    "GPT-2 124M, micro-batches of 1 x 512, k = 2": (
        "pretrain_gpt2",
        "--recipe gpt2_small_cpu --vocab_size 50257 --n_embd 768 --n_layer 12 --n_head 12 --block_size 512 --n_positions 512 "
        f"--global_batch_size 2 {GPT2_DROPOUT}",
        1,
        4,
    ),
}


# ---------------------------------------------------------------------------------------------------------------------
# Sweep


def train(
    server: Server,
    corpus: Path,
    folder: Path,
    num_processes: int,
    precision: str,
    flags: str,
    programs: Iterable[str] = WORKLOADS,
) -> None:
    """Train, or go on with, tiny models on N processes; FOLDER/PROGRAM has the results."""
    calls = [
        [program, *tiny_argv(program, corpus, folder / program, f"{WORKLOADS[program]} {flags}")]
        for program in programs
    ]
    words = ["--num_processes", str(num_processes), "--mixed_precision", precision]
    environment = launch_environment(ROOT / "accelerate_configs" / "2xcpu.yaml", *words)
    folder.mkdir(parents=True, exist_ok=True)
    server.run([str(folder), json.dumps(calls)], num_processes, timeout=900, environment=environment)


def sweep(work: Path, num_seeds: int, precisions: Iterable[str]) -> list[dict[str, Any]]:
    """Train on every number of processes, and with restarts; a row for each program and precision."""
    corpus, rows = write_corpus(work), []
    with Server("run_layouts", libraries=(), is_cpu=False) as server:
        for precision in precisions:
            found: dict[str, list[dict[str, str]]] = {program: [] for program in WORKLOADS}

            def note(folder: Path, found: dict[str, list[dict[str, str]]] = found) -> None:
                for program in WORKLOADS:
                    found[program].append(hash_run(folder / program))
                shutil.rmtree(folder)

            for num_processes in range(1, MAX_PROCESSES + 1):
                folder = work / f"{precision}-{num_processes}"
                train(server, corpus, folder, num_processes, precision, FLAGS)
                note(folder)
            for seed in range(num_seeds):
                draw = random.Random(f"{precision} {seed}")
                ends = [*sorted(draw.sample(range(1, NUM_STEPS), 2)), NUM_STEPS]
                folder = work / f"{precision}-seed-{seed}"
                for end in ends:
                    stop = f"--stop_after_step {end}" if end < NUM_STEPS else ""
                    flags = f"{FLAGS} {stop} --resume_from_checkpoint latest"
                    train(server, corpus, folder, draw.randint(1, MAX_PROCESSES), precision, flags)
                note(folder)
                print(f"{precision}, seed {seed}", file=sys.stderr, flush=True)
            for program, hashes in found.items():
                rows.append(
                    {
                        "program": program,
                        "precision": precision,
                        "runs": len(hashes),
                        "equal": sum(each == hashes[0] for each in hashes),
                        "sha256": hashes[0],
                    }
                )
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Moved


def move(work: Path) -> dict[str, list[str]]:
    """Train a tiny BERT on one process, and moved from 1 to 3 to 2; return the digest of each step of each run."""
    corpus, digests = write_corpus(work), {}
    sizes = {"--reproducible 4": "--reproducible 4", "without": "--per_device_train_batch_size 4"}
    with Server("run_layouts", libraries=(), is_cpu=False) as server:
        for kind, size in sizes.items():
            for name, moves in {"1 process": [(1, NUM_STEPS)], "moved 1, 3, 2": MOVES}.items():
                folder = work / f"{kind}-{name}".replace(" ", "-")
                for num_processes, end in moves:
                    stop = f"--stop_after_step {end}" if end < NUM_STEPS else ""
                    flags = f"{FLAGS.replace('--reproducible 4', size)} {stop} --digest_steps 1 --resume_from_checkpoint latest"
                    train(server, corpus, folder, num_processes, "no", flags, ["pretrain_bert"])
                lines = all_metrics(folder / "pretrain_bert")
                digests[f"{kind}, {name}"] = [line["digest"] for line in lines if "digest" in line]
    return digests


def draw(digests: dict[str, list[str]], path: Path) -> None:
    """Draw a row of coloured fields per run: one field per step, its colour the digest's."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import hsv_to_rgb

    colours = [
        [hsv_to_rgb((int(digest[:4], 16) / 2**16, 0.45 + int(digest[4:6], 16) / 512, 0.9)) for digest in row]
        for row in digests.values()
    ]
    figure, axes = plt.subplots(figsize=(9, 2.2), layout="constrained")
    axes.imshow(colours, aspect="auto", extent=(0.5, NUM_STEPS + 0.5, len(colours) - 0.5, -0.5))
    axes.set_yticks(range(len(digests)), digests)
    axes.set_xlabel("step; the colour is the digest of all parameters, moments and gradients after it")
    for _, end in MOVES[:-1]:
        axes.axvline(end + 0.5, color="black", linewidth=1)
    axes.axhline(1.5, color="white", linewidth=6)
    figure.savefig(path, dpi=100)


# ---------------------------------------------------------------------------------------------------------------------
# Cost


def measure_cost(name: str, work: Path, rounds: int) -> dict[str, Any]:
    """Measure seconds per step with and without --reproducible, whole programs in turns."""
    program, flags, size, num_steps = COSTS[name]

    def run(more: str) -> float:
        folder = work / "cost"
        words = harness.launch(ROOT / "scripts" / f"{program}.py", "no", "cpu.yaml", "--quiet")
        words += f"{flags} --max_train_steps {num_steps} --num_warmup_steps 1 --warmup_ratio none".split()
        words += f"--validation_fraction 0 --speed safe {more} --output_dir {folder} --overwrite_output_dir".split()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        ended = subprocess.run(words, env=environment, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(f"{' '.join(words)} failed:\n{ended.stderr[-3000:]}")
        return statistics.median(line["seconds"] for line in all_metrics(folder)[2:])

    calls = {
        "usual": lambda: run(f"--per_device_train_batch_size {size}"),
        "reproducible": lambda: run(f"--reproducible {size}"),
    }
    return {"name": name} | harness.in_turns(calls, rounds)


# ---------------------------------------------------------------------------------------------------------------------


def measure_digest(rounds: int) -> list[float]:
    """Measure the seconds of the digests of 124,439,808 float32 numbers, in 148 tensors."""
    width, num_layers = 768, 12
    layer = [(width,)] * 4 + [(width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    shapes = [(50257, width), (1024, width), *layer * num_layers, (width,), (width,)]
    tensors = [torch.randn(shape) for shape in shapes]
    assert sum(tensor.numel() for tensor in tensors) == 124_439_808
    return [harness.seconds(lambda: [digest_tensor(tensor) for tensor in tensors]) for _ in range(rounds)]


def markdown(results: dict[str, Any]) -> str:
    """Make results/reproducible.md."""
    body = ""
    if rows := results["sweep"]:
        lines = [
            [row["program"], row["precision"], row["runs"], row["equal"], row["sha256"]["model"][:16]] for row in rows
        ]
        body += (
            f"{NUM_STEPS} steps on 1 to {MAX_PROCESSES} processes, and with two restarts at random steps on random numbers of "
            "processes: runs whose parameters, moments and metrics have the SHA-256 of the run on one process.\n\n"
        )
        body += harness.table("program | precision | runs | equal | parameters' SHA-256", lines)
    if moved := results["moved"]:
        one, other, usual_one, usual_other = moved.values()
        partings = [_find_parting(*pair) for pair in ((one, other), (usual_one, usual_other))]
        body += (
            f"\nDigests of {NUM_STEPS} steps of a run that moved from 1 to 3 processes after step {MOVES[0][1]}, and to 2 "
            f"after step {MOVES[1][1]}, beside those of a run on one process: with --reproducible {partings[0]}, without it "
            f"{partings[1]}.\n"
        )
    if rows := results["cost"]:
        lines = []
        for row in rows:
            ratios = harness.ratios(row["reproducible"], row["usual"])
            seconds = [f"{statistics.median(row[kind]):.3f}" for kind in ("usual", "reproducible")]
            lines.append([row["name"], *seconds, harness.spread(ratios, ".3f")])
        body += "\nSeconds per step, one thread, medians of rounds, and their ratio round by round.\n\n"
        body += harness.table("model | without | --reproducible | ratio", lines)
    if digests := results.get("digest"):
        body += (
            f"\nDigest of 124M float32 parameters: {harness.spread([1000 * value for value in digests], '.0f')} ms.\n"
        )
    return harness.page("Reproducible runs", "reproducible.py", results["about"], body)


def _find_parting(digests: list[str], others: list[str]) -> str:
    """Say from which step on two lists of digests differ."""
    steps = [step for step, pair in enumerate(zip(digests, others, strict=True), 1) if pair[0] != pair[1]]
    return f"they differ from step {steps[0]} on" if steps else "all are the same"


def main() -> None:
    parser = harness.flags("reproducible", __doc__, rounds=5, only=("sweep", "moved", "cost"), precisions=True)
    parser.add_argument("--seeds", type=harness.positive, default=NUM_SEEDS, help=f"of restarts [{NUM_SEEDS}]")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "reproducible", help="folder of the runs")
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    file = args.output.with_suffix(".json")
    results = json.loads(file.read_text()) if file.exists() else {"sweep": [], "moved": {}, "cost": []}
    results["about"] = harness.about("make bench-reproducible", ("torch", "accelerate", "transformers"), 1)
    if "sweep" in args.only:
        rows = harness.read_other_rows(args.output, "sweep", "precision", args.precisions)
        results["sweep"] = rows + sweep(args.work, args.seeds, args.precisions)
    if "moved" in args.only:
        results["moved"] = move(args.work)
        draw(results["moved"], PICTURE)
    if "cost" in args.only:
        results["cost"] = [measure_cost(name, args.work, args.rounds) for name in COSTS]
        results["digest"] = measure_digest(args.rounds)
    harness.write(args.output, results, markdown(results))


if __name__ == "__main__":
    assert TINIES.keys() == WORKLOADS.keys()
    main()
