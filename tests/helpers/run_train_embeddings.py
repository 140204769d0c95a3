"""Trainings of embeddings in which memory runs out on one process; a fork server imports this. See test_train_embeddings."""

import json
import os
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.state import GradientState
from blank import draw_nothing
from common import all_metrics, fresh_accelerator, load_script, tiny_argv
from compare import parameters

from samestep.models.text_embeddings import EmbeddingSums
from samestep.training import capacity

SCRIPT = load_script("train_embeddings")
KINDS = ("look", "forward", "backward", "synchronising")
"""Where it runs out: in the forwards before a step, in those of the step, in a backward, in the last one."""
MAX_SAMPLES, FIRST = 2, 3
"""Most samples of a micro-batch that fit, from so many steps on."""


def write_pairs(file: Path, num: int = 13, num_negatives: int = 0) -> Path:
    """Write pairs of texts of very different lengths; every fourth has no negatives."""
    words = "red green blue stone river cloud table chair apple light night star moon sun wind rain fire snow".split()
    with file.open("w", encoding="utf-8") as lines:
        for row in range(num):
            text = [words[(3 * row + 5 * place) % len(words)] for place in range(2 + 3 * row % 11)]
            values = {"query": " ".join([*text[:2], words[row % 7]]), "positive": " ".join(text)}
            for number in range(num_negatives):
                is_there = (row + number) % 4 < 3
                values[f"negative_{number}"] = (
                    " ".join(reversed(text + words[number : number + 2])) if is_there else None
                )
            lines.write(json.dumps(values) + "\n")
    return file


def limit_memory(kind: str, process: int = 1):
    """Let memory run out on a process, from step `FIRST` on; return what ends that."""
    forward, num_looks = EmbeddingSums.forward, [0]

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def limited(self, **batch):
        is_look = self.training and not torch.is_grad_enabled()
        num_looks[0] += is_look
        is_late = num_looks[0] > FIRST * 2 and PartialState().process_index == process
        is_last = kind == "synchronising"  # the last micro-batch is the smallest
        if is_late and self.training and len(batch["numbers"]) > (1 if is_last else MAX_SAMPLES):
            if kind == ("look" if is_look else "forward"):
                fail()
            if not is_look and kind == ("synchronising" if GradientState().sync_gradients else "backward"):
                sums, rows = forward(self, **batch)
                rows[2].register_hook(fail)
                return sums, rows
        return forward(self, **batch)

    def restore():
        EmbeddingSums.forward = forward

    EmbeddingSums.forward = limited
    return restore


def main(folder: str) -> None:
    """Train without and with each kind of failure."""
    draw_nothing()
    torch.set_num_threads(1)
    PartialState.destroy_process_group = lambda self, group=None: None
    folder = Path(folder)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    rank, found = int(os.environ["RANK"]), {}
    file = write_pairs(folder / f"pairs{rank}.jsonl")
    for number, kind in enumerate((None, *KINDS)):
        fresh_accelerator()
        capacity.FILE = folder / f"{number}.json"
        restore = limit_memory(kind) if kind else None
        more = f"--train_file {file} --validation_fraction 0 --dtype float64"
        more += " --global_batch_size 12 --per_device_train_batch_size 4 --max_train_steps 5"
        SCRIPT.main(tiny_argv("train_embeddings", file, folder / str(kind), more))
        if restore is not None:
            restore()
        found[kind] = (
            parameters(folder / str(kind)),
            [line for line in all_metrics(folder / str(kind)) if "event" in line],
        )
    torch.save(found, folder / f"{rank}.pt")
    os._exit(0)
