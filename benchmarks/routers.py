"""What the balance of experts over the whole step costs: pretraining with each router_loss, beside the same without.

    make bench NAME=routers                                   # ten minutes on 2 cores that nothing else uses

scripts/pretrain_gpt2.py trains a small Mixtral on drawn words in rows of one length, in one micro-batch and in four, float32.
The runs of a cut take turns of `TURN` seconds (SIGSTOP, SIGCONT; see harness.py). Seconds are those of a step, from
metrics.jsonl, without the steps that a stop interrupted. That all losses of tokens begin alike is checked.

- Ratio: seconds of the run / those of the run without balance, of the same round; median, smallest and largest of the rounds.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import Program

KINDS = {
    "none": "",
    "global": "--router_loss global --router_loss_weight 0.01",
    "sequence": "--router_loss sequence --router_loss_weight 0.01",
    "z": "--router_z_loss_weight 0.001",
}
NAMES = {"none": "without", "global": "global", "sequence": "sequence", "z": "z-loss alone"}
BATCH, BLOCK, TURN, SAME_LOSS = 16, 64, 10.0, 1e-4
RECIPE = {
    "extends": "gpt_modern_small_cpu",
    "description": "of a benchmark",
    "architecture": "mixtral",
    "vocab_size": 2048,
    "block_size": BLOCK,
    "max_position_embeddings": BLOCK,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
    "intermediate_size": 256,
    "zero_init_projections": False,
    "global_batch_size": BATCH,
    "lr_scaling_rule": "none",
    "num_warmup_steps": 1,
    "validation_fraction": 0.0,
}


def write_texts(file: Path, num_words: int) -> None:
    """Write texts of drawn words, of which frequent ones are frequent."""
    rng = np.random.default_rng(0)
    words = np.array([f"{a}{b}{c}" for a in "bcdfghjklmnp" for b in "aeiou" for c in "bcdfghjklmnpqrstvwxz"])
    numbers = np.minimum(rng.zipf(1.3, num_words), len(words)) - 1
    lines = [" ".join(words[numbers[first : first + 100]]) for first in range(0, num_words, 100)]
    file.write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def run(kinds: list[str], num_micro_batches: int, num_steps: int, work: Path, threads: int) -> dict[str, float]:
    """Run all kinds in turns; the mean seconds of a step of each."""
    folder = harness.write_recipe(
        work / f"of-{num_micro_batches}",
        RECIPE | {"train_file": [str(work / "texts.txt")], "max_train_steps": num_steps},
    )
    programs = {}
    for kind in kinds:
        words = [
            *harness.launch(harness.ROOT / "scripts" / "pretrain_gpt2.py"),
            "--recipe",
            str(folder / "recipe.yaml"),
        ]
        words += ["--per_device_train_batch_size", str(BATCH // num_micro_batches), "--overwrite_output_dir"]
        words += ["--output_dir", str(folder / kind), "--speed", "safe", *KINDS[kind].split()]
        programs[kind] = Program(words, folder, folder / f"{kind}.log", threads)
    try:
        harness.run_in_turns(programs.values(), TURN)
    finally:
        for program in programs.values():
            program.kill()
    first = {kind: harness.read_steps(folder / kind)[0]["loss"] for kind in kinds}
    if max(first.values()) - min(first.values()) > SAME_LOSS * first["none"]:
        sys.exit(f"the first losses differ: {first}")
    return {kind: harness.train_seconds(folder / kind, TURN) / num_steps for kind in kinds}


def main() -> None:
    parser = harness.flags("routers", __doc__, rounds=5, only=[kind for kind in KINDS if kind != "none"], threads=True)
    parser.add_argument("--steps", type=harness.positive, default=30, help="of every run")
    arguments = parser.parse_args()
    about = harness.about("make bench NAME=routers", ("torch", "transformers", "accelerate"), arguments.threads)
    rows: list[dict[str, Any]] = []
    kinds = ["none", *arguments.only]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_texts(work / "texts.txt", 200_000)
        for number in (1, 4):
            rounds = [run(kinds, number, arguments.steps, work, arguments.threads) for _ in range(arguments.rounds)]
            rows += [{"kind": kind, "micro_batches": number, "seconds": [r[kind] for r in rounds]} for kind in kinds]
            print(rows[-len(kinds) :], file=sys.stderr, flush=True)
    results = {"about": about, "rows": rows}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict[str, Any]) -> str:
    base = {row["micro_batches"]: row["seconds"] for row in results["rows"] if row["kind"] == "none"}
    lines = []
    for row in results["rows"]:
        if row["kind"] != "none":
            ratios = harness.ratios(row["seconds"], base[row["micro_batches"]])
            seconds = harness.spread(row["seconds"], ".2f")
            lines.append([NAMES[row["kind"]], str(row["micro_batches"]), seconds, harness.spread(ratios, ".2f")])
    return harness.page(
        "What the balance of experts costs",
        "routers.py",
        results["about"],
        f"A Mixtral of 4 layers and 8 experts, {BATCH} rows of {BLOCK} tokens a step, one process, float32. Medians (smallest "
        "to largest) of rounds.\n\n"
        + harness.table(["router_loss", "micro-batches", "seconds of a step", "of the step without"], lines),
    )


if __name__ == "__main__":
    main()
