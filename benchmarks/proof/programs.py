"""Part 1: each of the six scripts takes two steps on the device, in every precision, by the kernels that it chooses itself."""

import math
import re
from contextlib import redirect_stdout
from io import StringIO

import harness

from proof import tasks
from proof.tasks import PRECISIONS, Task

TITLE = "The six scripts"
ABOUT = """\
Two steps of a tiny model, by the kernels that `--speed auto` chooses: the losses are finite, the model is saved.
Refused: the script says in one line why it does not train so.
"""
PROGRAMS = (
    *("pretrain_bert", "pretrain_gpt2", "finetune_classifier", "finetune_causal_lm", "train_image_classifier"),
    "train_captcha",
)


def list_tasks(is_tiny: bool, has_gpu: bool) -> list[Task]:
    return [Task("programs", tuple(f"{program} {name}" for program in PROGRAMS)) for name in PRECISIONS]


def compute(item: str, is_tiny: bool) -> dict:
    program, name = item.split()
    said = StringIO()
    with tasks.output_folder("run") as folder, redirect_stdout(said):
        tasks.train(program, "--max_train_steps 2", folder, PRECISIONS[name], speed="auto")
        losses = [row["loss"] for row in tasks.read_curve(folder)]
        if len(losses) != 2 or not all(map(math.isfinite, losses)) or not (folder / "model.safetensors").exists():
            raise RuntimeError(f"losses {losses}; in its folder are {sorted(path.name for path in folder.iterdir())}")
    text = said.getvalue()
    return {
        "losses": losses,
        "kernels": next(iter(re.findall(r"kernels: (.+) \(--speed", text)), ""),
        "not": re.findall(r"kernels: not (.+)", text),
    }


def is_good(row: dict) -> bool:
    """A script that trains, or that refuses what the device has not, as fp16 on a CPU."""
    return "losses" in row or "on a CPU" in row.get("refused", "")


def markdown(rows: dict[str, dict]) -> str:
    lines = [[item, tasks.verdict(row, is_good(row)), _describe(row)] for item, row in rows.items()]
    return harness.table("script, precision | trains | kernels", lines)


def _describe(row: dict) -> str:
    refused = "; ".join(f"not {text}".replace("|", "/") for text in row.get("not", ()))
    return row.get("kernels", "") + (f" ({refused})" if refused else "")
