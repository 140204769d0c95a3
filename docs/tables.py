"""Makes tables of documents from benchmarks/results/*.json: `make docs`, which docs/reference.py answers."""

import json
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from harness import RESULTS, ratios, table

from stepaudit.causes import HARMLESS

WIDTH = 128
"""Columns of a document."""
MODELS = ("gpt2", "bert_pretraining", "bert_classifier")
WORKLOADS = {
    "bert_ragged_8192": "BERT on documents of all lengths",
    "bert_full_8192": "BERT on full rows",
    "bert_ragged_30522": "BERT, a vocabulary of 15,392, of all lengths",
    "bert_full_30522": "the same, full rows",
    "classifier": "classifier of paragraphs",
    "reviews": "classifier of film reviews, 2 x 128",
    "gpt2": "GPT-2 124M on packed blocks",
    "resnet18": "ResNet-18 on photographs",
}
PEERS = {
    "Trainer": "transformers' Trainer",
    "Trainer, rebalanced": "Trainer, rebalanced",
    "Trainer, grouped": "Trainer, grouped",
    "Accelerate loop": "Accelerate's documented loop",
    "Lightning": "Lightning",
}
CHATS = "sft_512"
MICRO_BATCHES = "4x4x1"
"""Layout of benchmarks/audited.py that is one process: samples x micro-batches x processes."""


def fill(text: str) -> str:
    """Wrap a paragraph as documents are."""
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


LOG = Path(__file__).parent.parent / "tests" / "audited" / "first_sight.json"
"""What the audit said of programs before it was mended by them."""


def read(name: str) -> dict[str, Any]:
    """Read the results of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------------------------------------------
# How exact


def count_first_sight() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """List what the audit said of sound and of faulty programs before it was mended by them."""
    log = [row for row in json.loads(LOG.read_text(encoding="utf-8")) if "note" not in row or not row["is_sound"]]
    return tuple([row for row in log if row["is_sound"] == is_sound] for is_sound in (True, False))


def is_exact_on_one_process(row: dict[str, Any]) -> bool:
    """Tell whether a loop of benchmarks/audited.py takes the reference's steps in micro-batches on one process."""
    run = next((run for run in row["runs"] if run["layout"] == MICRO_BATCHES), {})
    return "findings" in run and not {finding["cause"] for finding in run["findings"]} - HARMLESS


# ---------------------------------------------------------------------------------------------------------------------
# How fast


def median_ratio(rates: dict[str, list[float]], peer: str) -> float:
    """Compute how many times as fast as a peer ours is, round by round."""
    return statistics.median(ratios(rates["ours"], rates[peer]))


def pair(rows: list[dict[str, Any]], peer: str, decimals: int | None = None) -> str:
    """Write the ratio to a peer in float32 and in bf16; the peer may not have run."""
    rates = [next(row["rates"] for row in rows if row["precision"] == precision) for precision in ("no", "bf16")]
    if any(peer not in values for values in rates):
        return "-"
    values = [median_ratio(each, peer) for each in rates]
    decimals = decimals if decimals is not None else 1 if min(values) >= 1.95 else 2
    return " / ".join(f"{value:.{decimals}f}" for value in values)


def rows_of_bench(workload: str) -> list[dict[str, Any]]:
    """Read the rows of a workload of benchmarks/bench.py."""
    return [row for row in read("bench")["rows"] if row["workload"] == workload]


def list_ratios() -> list[float]:
    """List how many times as fast ours is, for every peer, workload and precision."""
    return [
        median_ratio(row["rates"], peer)
        for row in [*read("bench")["rows"], *read("chats")["rows"]]
        for peer in row["rates"]
        if peer not in ("ours", "floor") and not peer.startswith("exact(")  # which is ours, too
    ]


def speed() -> str:
    """Show all ratios of benchmarks/bench.py that docs/speed.md shows."""
    lines = [
        [title, *(pair(rows_of_bench(name), peer, 2 if name in ("gpt2", "resnet18") else 1) for peer in PEERS)]
        for name, title in WORKLOADS.items()
    ]
    floors = [median_ratio(row["rates"], "floor") for row in read("bench")["rows"]]
    return (
        f"{table(['', *PEERS.values()], lines)}\n"
        f"A training step runs at {100 * statistics.median(floors):.0f} % (at the worst {100 * min(floors):.0f} %) of the "
        "speed of its forward, backward and update alone.\n"
    )


# ---------------------------------------------------------------------------------------------------------------------
# What survives


def total(rows: list[dict[str, Any]], name: str) -> int:
    """Add up a number of rows."""
    return sum(row[name] for row in rows)


def what_survives() -> str:
    """Show what runs and checkpoints were put through, and what became of them."""
    reliability, sweep = read("reliability"), read("reproducible")["sweep"]
    kills, damages = reliability["kills"], reliability["damages"]

    found = total(damages, "fell_back") + total(damages, "refused")
    lines = [
        [
            f"{total(kills, 'kills')} kills at random moments, {total(kills, 'while_saving')} of them while a checkpoint was "
            "written",
            f"{total(kills, 'checkpoints_compared')} checkpoints compared with an undisturbed run: "
            f"{total(kills, 'failed_checks')} differ",
        ],
        [
            f"{total(damages, 'times')} damaged checkpoints: cut, a bit flipped, a file missing or of another one",
            f"{found} noticed, {total(damages, 'undetected')} loaded; {total(damages, 'fell_back')} fell back to an older "
            f"whole one, {total(damages, 'refused')} had none",
        ],
        [
            f"{total(sweep, 'runs')} runs on 1 to 5 processes, most of them stopped and moved twice (`--reproducible`)",
            f"{total(sweep, 'equal')} have the same bits: parameters, moments, curve",
        ],
    ]
    return table(["what happened to tiny models, on CPU processes", "what came of it"], lines)


def front() -> str:
    """Make the table of the README: eight numbers, each with the page that has more of them."""
    loops = [row for row in read("loops")["rows"] if row["layout"]["N"] == 1 and row["model"] in MODELS]
    ours, usual = (
        max(error for row in loops if row["loop"] == loop for error in row["errors"])
        for loop in ("exact", "accelerate_documented")
    )
    heads = [row for row in read("state")["heads"] if row.get("verdict") is not None]
    too_large = sum(row["verdict"] == "k times too large" for row in heads)
    audited = read("audited")["rows"]
    sound, faults = count_first_sight()
    sweep, kills = read("reproducible")["sweep"], read("reliability")["kills"]
    gpt2 = median_ratio(next(row["rates"] for row in rows_of_bench("gpt2") if row["precision"] == "no"), "Trainer")
    chats = next(row["rates"] for row in read("chats")["rows"] if row["workload"] == CHATS and row["precision"] == "no")
    chats = median_ratio(chats, "TRL, padded")
    planned = read("language_models")["unfitted"]["all"]
    rows = [
        (
            f"[gradient](docs/exactness.md) in micro-batches, float64, {len(MODELS)} tasks",
            f"off by {ours:.0e}; Accelerate's documented loop: up to {100 * usual:.0f} %",
        ),
        (
            f"{total(sweep, 'runs')} [moved runs](docs/reliability.md), 1 to 5 processes, `--reproducible`",
            f"{total(sweep, 'equal')} have the same bits at the end",
        ),
        (
            f"{total(kills, 'kills')} [kills](docs/reliability.md) at random moments",
            f"{total(kills, 'failed_checks')} of {total(kills, 'checkpoints_compared')} checkpoints differ",
        ),
        (
            f"{len(heads)} [model classes](docs/state-of-the-step.md) in Trainer",
            f"{too_large} get a gradient k times too large",
        ),
        (
            f"{len(audited)} [training loops](docs/audited.md) of packages",
            f"{sum(is_exact_on_one_process(row) for row in audited)} are exact in micro-batches",
        ),
        (
            f"[audit](docs/audit-limits.md) of {len(faults)} faulty, {len(sound)} sound unseen programs",
            f"{sum(row['verdict'] == 'right' for row in faults)} faults named, "
            f"{sum(row['verdict'] != 'right' for row in sound)} sound programs accused",
        ),
        (
            "[speed](docs/speed.md), ours / theirs, float32 on 2 CPU cores",
            f"GPT-2 / Trainer {gpt2:.1f}, chats / TRL, padded, {chats:.1f}, the least of all {min(list_ratios()):.2f}",
        ),
        (
            f"{planned['rows']} published speeds, not fitted, by [the planner](docs/planner.md)",
            f"missed by {planned['median']:.1%} in the median",
        ),
    ]
    return table(["what was tried", "what came of it"], list(map(list, rows)))
