"""Is a reproducible run the same to the bit, on whatever it runs, and what does that cost?

    make bench NAME=reproducible        # about an hour on 2 cores; nothing else should run while costs are measured
    python benchmarks/reproducible.py --only cost
    python benchmarks/reproducible.py --only grid    # minutes; timings of others do not matter

- Sweep: tiny models of every program with dropout 0.1, or exact batch normalisation, take 30 steps by --reproducible on 1, 2,
  3, 4 and 5 processes, and once per seed in three sessions that end at random steps and go on on random numbers of processes.
  SHA-256 of all parameters, of all moments and of all metrics (but the times) must be those of the run on one process.
- Moved: digests of each step (--digest_steps) of a run that moves from 1 to 3 and then to 2 processes, beside those of a run
  on one process; and of the same two runs without --reproducible. Makes docs/reproducible.png.
- Grid: tiny models with dropout 0.1 take 10 steps of AdamW without --reproducible, cut in every way: micro-batches of 1 to B
  samples or of so many tokens, on 1 to 4 processes. Losses, gradients and parameters must be those of whole batches on one
  process, to 1e-12 in float64 and 1e-5 in float32. Key biases are left out of the parameters' rule: attention does not depend
  on them, so that their gradient is rounding alone, which AdamW divides by its own size. They stand in a column of their own.
- Cost: seconds per step by --reproducible over seconds per step of the same micro-batches without, one process and one thread,
  whole programs in turns; medians of the steps after the first two. Seconds of a digest of the parameters of GPT-2 124M.
"""

import json
import random
import shutil
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import harness
import torch
from common import TINIES, all_metrics, launch_environment, metrics, tiny_argv, write_corpus
from compare import hash_run
from forked import Server

from samestep.training.checkpoint import checkpoints, read
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
GRID_BATCH, GRID_PROCESSES, GRID_STEPS = 6, 4, 10
GRID_TOKENS = (100,)
"""Largest numbers of tokens of a micro-batch, of samples of up to 48."""
GRID = {name: flags for name, flags in WORKLOADS.items() if "dropout" in flags or "pdrop" in flags}
BOUNDS = {"float32": 1e-5, "float64": 1e-12}
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
    start(server, folder, num_processes, precision, calls)


def start(server: Server, folder: Path, num_processes: int, precision: str, calls: list[list[str]]) -> None:
    """Train one after the other on N processes, in which imports are not waited for; FOLDER has what they print."""
    words = ["--num_processes", str(num_processes), "--mixed_precision", precision]
    environment = launch_environment(ROOT / "accelerate_configs" / "2xcpu.yaml", *words)
    folder.mkdir(parents=True, exist_ok=True)
    server.run([str(folder), json.dumps(calls)], num_processes, timeout=3600, environment=environment)


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
# Grid


def list_cuts(batch: int, max_processes: int, tokens: Iterable[int]) -> list[tuple[int, str]]:
    """List the ways to cut a step: processes, and flags. The first is the whole batch.

    >>> list_cuts(3, 2, [50])  # doctest: +NORMALIZE_WHITESPACE
    [(1, '--per_device_train_batch_size 3'), (1, '--per_device_train_batch_size 2'), (1, '--per_device_train_batch_size 1'),
     (1, '--per_device_train_batch_size 3 --per_device_train_tokens 50'),
     (2, '--per_device_train_batch_size 2'), (2, '--per_device_train_batch_size 1'),
     (2, '--per_device_train_batch_size 2 --per_device_train_tokens 50')]
    """
    cuts = []
    for num_processes in range(1, max_processes + 1):
        share = -(-batch // num_processes)
        sizes = [f"--per_device_train_batch_size {size}" for size in range(share, 0, -1)]
        sizes += [f"{sizes[0]} --per_device_train_tokens {cap}" for cap in tokens]
        cuts += [(num_processes, size) for size in sizes]
    return cuts


def read_end(folder: Path) -> dict[str, Any]:
    """Read a run's losses and gradient norms, the average of its gradients (AdamW's first moment), and its parameters."""
    lines, checkpoint = metrics(folder), checkpoints(folder)[-1]
    assert len(lines) == GRID_STEPS
    moments, mean = read(checkpoint, "optimizer"), "/exp_avg"
    return {
        "loss": torch.tensor([line["loss"] for line in lines], dtype=torch.float64),
        "norm": torch.tensor([line["grad_norm"] for line in lines], dtype=torch.float64),
        "gradient": {name.removesuffix(mean): moments[name] for name in moments if name.endswith(mean)},
        "parameters": read(checkpoint, "model"),
    }


def split_key_biases(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join parameters, but biases of attention's keys; and those, if there are any."""
    others, keys = [], [torch.zeros(0, dtype=torch.float64)]
    for name in sorted(tensors):
        value = tensors[name].double()
        if name.endswith("c_attn.bias"):  # of queries, keys and values
            query, key, value_bias = value.chunk(3)
            keys.append(key)
            others += [query, value_bias]
        else:
            (keys if name.endswith("key.bias") else others).append(value.flatten())
    return torch.cat(others), torch.cat(keys)


def compare_tensors(ours: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Compute the relative difference of all numbers, and that of the biases of attention's keys, told apart."""
    (others, keys), (true_others, true_keys) = split_key_biases(ours), split_key_biases(whole)
    size = torch.cat([true_others, true_keys]).norm()
    return ((others - true_others).norm() / size).item(), ((keys - true_keys).norm() / size).item()


def compare_ends(ours: dict[str, Any], whole: dict[str, Any]) -> dict[str, float]:
    """Compute relative differences: the largest of a step, or of norms over all numbers."""
    errors = {name: (ours[name] / whole[name] - 1).abs().max().item() for name in ("loss", "norm")}
    errors["gradient"], _ = compare_tensors(ours["gradient"], whole["gradient"])
    errors["parameters"], errors["key biases"] = compare_tensors(ours["parameters"], whole["parameters"])
    return errors


def measure_grid(work: Path) -> list[dict[str, Any]]:
    """Train on whole batches and by every cut; a row for each program and type, with the largest difference of any cut."""
    corpus, cuts = write_corpus(work), list_cuts(GRID_BATCH, GRID_PROCESSES, GRID_TOKENS)
    cases = [(program, dtype) for program in GRID for dtype in BOUNDS]
    common = f"--global_batch_size {GRID_BATCH} --max_train_steps {GRID_STEPS}"
    largest: dict[tuple[str, str], dict[str, float]] = {case: {} for case in cases}
    whole = {}
    with Server("run_layouts", libraries=(), is_cpu=False) as server:
        for num_processes, size in cuts:
            folder, calls = work / "cut", []
            for program, dtype in cases:
                flags = f"{GRID[program]} {common} {size} --dtype {dtype}"
                calls.append([program, *tiny_argv(program, corpus, folder / f"{program}-{dtype}", flags)])
            start(server, folder, num_processes, "no", calls)
            ends = {case: read_end(folder / "-".join(case)) for case in cases}
            whole = whole or ends  # the first cut is the whole batch
            for case, end in ends.items():
                for name, error in compare_ends(end, whole[case]).items():
                    largest[case][name] = max(error, largest[case].get(name, 0.0))
            shutil.rmtree(folder)
            print(f"{num_processes} processes, {size}: {largest}", file=sys.stderr, flush=True)
    return [
        {"program": program, "dtype": dtype, "cuts": len(cuts) - 1} | largest[program, dtype]
        for program, dtype in cases
    ]


def find_breaks(rows: list[dict[str, Any]]) -> list[str]:
    """Find what breaks the grid's rule."""
    names = ("loss", "norm", "gradient", "parameters")
    return [
        f"{row['program']}, {row['dtype']}: {name}"
        for row in rows
        for name in names
        if not row[name] < BOUNDS[row["dtype"]]
    ]


def describe_grid(results: dict[str, Any]) -> str:
    """Make the table of the grid, which docs/noise-and-batch-norm.md shows, too."""
    rows, breaks = results["grid"]["rows"], find_breaks(results["grid"]["rows"])
    lines = [
        [row["program"], row["dtype"], row["cuts"]]
        + [f"{row[name]:.1e}" for name in ("loss", "norm", "gradient", "parameters", "key biases")]
        for row in rows
    ]
    verdict = "holds" if not breaks else f"**is broken** by {'; '.join(breaks)}"
    body = (
        "Largest relative difference of any cut from whole batches on one process, dropout 0.1: of losses and gradient\n"
        f"norms of {GRID_STEPS} steps of AdamW, of the average of gradients (AdamW's first moment) and of parameters after "
        f"them.\n{GRID_BATCH} samples per step, in micro-batches of 1 to {GRID_BATCH} samples, or of {GRID_TOKENS[0]} tokens, "
        f"on 1 to {GRID_PROCESSES} processes.\nThe rule, below 1e-5 in float32 and below 1e-12 in float64, {verdict}.\n\n"
        f"{harness.table('program | type | cuts | loss | norm | gradient | parameters | key biases', lines)}\n"
        "Key biases: their part of the parameters' difference, which is not in the column before. Attention does not\n"
        "depend on them; their gradient is rounding, which AdamW divides by its own size.\n"
    )
    return harness.part("reproducible.py", results["grid"]["about"], body)


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
        harness.run(words, threads=1)
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
    if results.get("grid"):
        body += f"\n## Any cut, without --reproducible\n\n{describe_grid(results)}"
    return harness.page("Reproducible runs", "reproducible.py", results["about"], body)


def _find_parting(digests: list[str], others: list[str]) -> str:
    """Say from which step on two lists of digests differ."""
    steps = [step for step, pair in enumerate(zip(digests, others, strict=True), 1) if pair[0] != pair[1]]
    return f"they differ from step {steps[0]} on" if steps else "all are the same"


def main() -> None:
    parser = harness.flags("reproducible", __doc__, rounds=5, only=("sweep", "moved", "grid", "cost"), precisions=True)
    parser.add_argument("--seeds", type=harness.positive, default=NUM_SEEDS, help=f"of restarts [{NUM_SEEDS}]")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "reproducible", help="folder of the runs")
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    results = {"sweep": [], "moved": {}, "cost": []} | harness.read(args.output)
    about = harness.about("make bench NAME=reproducible", ("torch", "accelerate", "transformers"), 1)
    if args.only != ["grid"]:
        results["about"] = about
    if "sweep" in args.only:
        rows = harness.read_other_rows(args.output, "sweep", "precision", args.precisions)
        results["sweep"] = rows + sweep(args.work, args.seeds, args.precisions)
    if "moved" in args.only:
        results["moved"] = move(args.work)
        draw(results["moved"], PICTURE)
    if "grid" in args.only:
        results["grid"] = {"about": about, "rows": measure_grid(args.work)}
    if "cost" in args.only:
        results["cost"] = [measure_cost(name, args.work, args.rounds) for name in COSTS]
        results["digest"] = measure_digest(args.rounds)
    parts = {"grid": ("noise-and-batch-norm.md", describe_grid(results))} if "grid" in results else {}
    harness.write(args.output, results, markdown(results), parts=parts)


if __name__ == "__main__":
    assert TINIES.keys() == WORKLOADS.keys()
    main()
