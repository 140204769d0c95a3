"""Part 5, second half: fine-tuning beside TRL's trainers and transformers' Trainer, as benchmarks/chats.py measures it."""

import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path

import harness

from proof import tasks
from proof.tasks import Task

TITLE = "Speed beside other trainers"
ABOUT = """\
A Llama of 0.3 billion parameters on ragged conversations, whole programs in turns on the one device, the same weights,
samples, batch and optimizer; trained tokens per second, the median of the rounds, and ours / theirs. Padded rows take
torch's kernel (sdpa); padding-free ones need the package flash_attn.
"""
WORKLOAD = "sft_32768"
LARGER = {
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
}
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 600,
}
NEEDS = {"TRL, padded": "trl", "TRL, packed": "trl", "TRL, padding-free": "flash_attn"}
TITLES = ("ours", "Trainer", "Trainer, grouped", *NEEDS)
ROUNDS = 3


def list_tasks(is_tiny: bool, has_gpu: bool) -> list[Task]:
    return [Task("trainers", (f"Llama, {name}",), seconds=500, is_alone=True) for name in ("bf16",)]


def compute(item: str, is_tiny: bool) -> dict:
    import chats
    import torch

    precision = tasks.PRECISIONS[item.rpartition(", ")[2]]
    titles = [title for title in TITLES if find_spec(NEEDS.get(title, "torch")) is not None]
    titles = titles[:2] if is_tiny else titles
    old = chats.WORKLOADS[WORKLOAD]
    chats.WORKLOADS[WORKLOAD] = old._replace(values=old.values | (TINY if is_tiny else LARGER))
    with tempfile.TemporaryDirectory(prefix="proof-") as folder:
        chats.write_data(Path(folder))
        threads = 1 if is_tiny else torch.get_num_threads()
        row = chats.measure(WORKLOAD, precision, titles, 1 if is_tiny else ROUNDS, Path(folder), threads)
    missing = [f"{title} needs {NEEDS[title]}" for title in TITLES if title not in titles and not is_tiny]
    return {"rates": row["rates"], "missing": missing}


def is_good(row: dict) -> bool:
    """A comparison that was measured; what is slower, the table shows."""
    return "rates" in row


def markdown(rows: dict[str, dict]) -> str:
    lines = []
    for item, row in rows.items():
        if not is_good(row):
            lines.append([item, tasks.verdict(row, False), "", ""])
            continue
        for title, rates in row["rates"].items():
            ratios = harness.spread(harness.ratios(row["rates"]["ours"], rates), ".2f")
            lines.append([item, title, f"{statistics.median(rates):,.0f}", ratios])
        lines += [[item, f"not measured: {text}", "", ""] for text in row["missing"]]
    return harness.table("model | program | tokens/s | ours / theirs", lines)
