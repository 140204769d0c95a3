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
EXACT = 1e-6
"""Largest relative error of a gradient that `how_exact` calls exact, as benchmarks/loops.py does."""
LOOPS = {
    "exact": "**samestep**",
    "accelerate_documented": "Accelerate, `accumulate`",
    "lightning_documented": "Lightning, `accumulate_grad_batches`",
    "transformers_trainer": "transformers' `Trainer`",
}
MODELS = {"gpt2": "GPT-2", "bert_pretraining": "BERT, two loss terms", "bert_classifier": "BERT classifier"}
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
FRONT_WORKLOADS = ("bert_ragged_8192", "gpt2")
FRONT_PEERS = ("Trainer", "Accelerate loop", "Lightning")
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


def format_error(error: float) -> str:
    """Write a relative error for people.

    >>> [format_error(error) for error in (9e-16, 0.025, 0.095, 3.06)]
    ['9e-16', '2.5 %', '9.5 %', '306 %']
    """
    return f"{error:.0e}" if error <= EXACT else f"{100 * error:.{1 if error < 0.0995 else 0}f} %"


def how_exact() -> str:
    """Show the error of the gradient in the first and in the last step, for loops as they are documented."""
    rows = {(row["loop"], row["model"]): row for row in read("loops")["rows"] if row["layout"]["N"] == 1}

    def cell(loop: str, model: str) -> str:
        errors = rows[loop, model]["errors"]
        shown = [max(errors)] if max(errors) <= EXACT else [errors[0], errors[-1]]
        return " / ".join(map(format_error, shown))

    titles: dict[tuple[str, ...], list[str]] = {}  # what is the same stands in one line
    for loop, title in LOOPS.items():
        titles.setdefault(tuple(cell(loop, model) for model in MODELS), []).append(title)
    lines = [["; ".join(names), *cells] for cells, names in titles.items()]
    audited = read("audited")["rows"]
    num_exact = sum(is_exact_on_one_process(row) for row in audited)
    log = [row for row in json.loads(LOG.read_text(encoding="utf-8")) if "note" not in row or not row["is_sound"]]
    sound, faults = ([row for row in log if row["is_sound"] == is_sound] for is_sound in (True, False))
    named, missed = (sum(row["verdict"] == verdict for row in faults) for verdict in ("right", "missed"))
    accused = sum(row["verdict"] != "right" for row in sound)
    text = (
        "Error of the gradient in the first / the last step of an epoch, which has fewer samples, beside one large batch. Tiny "
        f"models in float64: the sizes are examples. Of {len(audited)} loops of packages {num_exact} are exact in "
        f"micro-batches ([audited.md](docs/audited.md)). At first sight the audit "
        f"named {named} of {len(faults)} faults, missed {missed}, and accused {accused} of {len(sound)} sound programs "
        "([audit.md](docs/audit.md))."
    )
    return f"{table(['loop', *MODELS.values()], lines)}\n{fill(text)}\n"


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


def how_fast() -> str:
    """Show how many times as fast as other programs ours is."""
    lines = [
        [WORKLOADS[name], *(pair(rows_of_bench(name), peer) for peer in FRONT_PEERS), "-"] for name in FRONT_WORKLOADS
    ]
    chats = [row for row in read("chats")["rows"] if row["workload"] == CHATS]
    lines.append(["Llama on conversations", pair(chats, "Trainer"), "-", "-", pair(chats, "TRL, padded")])
    everything = [*read("bench")["rows"], *read("chats")["rows"]]
    all_ratios = [
        median_ratio(row["rates"], peer)
        for row in everything
        for peer in row["rates"]
        if peer not in ("ours", "floor") and not peer.startswith("exact(")  # which is ours, too
    ]
    text = (
        "Times as many tokens (images) per second, float32 / bf16, on 2 CPU cores; **no GPU was measured**. Where others group "
        f"samples by length, or pack rows, less is left to save: the least of all {len(all_ratios)} ratios is "
        f"{min(all_ratios):.2f} ([speed.md](docs/speed.md))."
    )
    return f"{table(['', *(PEERS[peer] for peer in FRONT_PEERS), 'TRL'], lines)}\n{fill(text)}\n"


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


def what_survives() -> str:
    """Show what runs and checkpoints were put through, and what became of them."""
    reliability, sweep = read("reliability"), read("reproducible")["sweep"]
    kills, damages = reliability["kills"], reliability["damages"]

    def total(rows: list[dict[str, Any]], name: str) -> int:
        return sum(row[name] for row in rows)

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
    heads = [
        "what happened to tiny models, on CPU processes",
        "what came of it; without `--reproducible` equal up to rounding ([more](docs/reliability.md))",
    ]
    return table(heads, lines)


def front() -> str:
    """Make the three tables of the README."""
    return "\n".join([how_exact(), how_fast(), what_survives()])
