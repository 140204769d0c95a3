"""Part 3: --reproducible has the same bits in three cuts: one process, two that share the device, and moved in between."""

import hashlib
import json
from pathlib import Path

import harness

from proof import tasks
from proof.tasks import PRECISIONS, Task

TITLE = "The same bits"
ABOUT = """\
SHA-256 of the curve (without times), of all parameters and of all moments after 50 steps by `--reproducible 4`, 12
samples each, with dropout: on one process; on two that share the device over gloo; on one that ends after half of the
steps, and two that go on.
"""
PROGRAMS = {
    "GPT-2": ("pretrain_gpt2", "--resid_pdrop 0.1 --embd_pdrop 0.1"),
    "BERT": ("pretrain_bert", "--hidden_dropout_prob 0.1"),
    "SFT": ("finetune_causal_lm", ""),
}
NUM_STEPS, NUM_TINY_STEPS = 50, 6


def list_tasks(is_tiny: bool, has_gpu: bool) -> list[Task]:
    names = ["GPT-2, fp32"] if is_tiny else [f"{name}, {kind}" for name in PROGRAMS for kind in ("fp32", "bf16")]
    return [Task("reproducible", (name,)) for name in names]


def compute(item: str, is_tiny: bool) -> dict:
    name, precision = item.split(", ")
    program, flags = PROGRAMS[name]
    num_steps, precision = NUM_TINY_STEPS if is_tiny else NUM_STEPS, PRECISIONS[precision]
    flags += f" --reproducible 4 --global_batch_size 12 --max_train_steps {num_steps}"
    half, resume = f" --stop_after_step {num_steps // 2}", " --resume_from_checkpoint latest"
    hashes = {}
    with tasks.output_folder("one") as folder:
        tasks.train(program, flags, folder, precision)
        hashes["one process"] = _hash(folder)
    with tasks.output_folder("two") as folder:
        tasks.train_on(2, program, flags, folder, precision, is_sharded=False)
        hashes["two processes"] = _hash(folder)
    with tasks.output_folder("moved") as folder:
        tasks.train(program, flags + half, folder, precision)
        tasks.train_on(2, program, flags + resume, folder, precision, is_sharded=False)
        hashes["moved from one to two"] = _hash(folder)
    return {"num_steps": num_steps, "hashes": hashes}


def _hash(folder: Path) -> dict[str, str]:
    """Hash what a run wrote."""
    from samestep.recipe.run_fields import TIMES

    times = ("seconds", *TIMES)
    curve = [{name: value for name, value in row.items() if name not in times} for row in tasks.read_curve(folder)]
    hashes = {"curve": hashlib.sha256(json.dumps([curve]).encode()).hexdigest()}
    for part in ("model", "optimizer"):
        whole = hashlib.sha256()
        for name, tensor in tasks.read_tensors(folder, part).items():
            whole.update(name.encode() + tensor.contiguous().numpy().tobytes())
        hashes[part] = whole.hexdigest()
    return hashes


def is_good(row: dict) -> bool:
    values = list(row.get("hashes", {}).values())
    return len(values) == 3 and all(value == values[0] for value in values)


def markdown(rows: dict[str, dict]) -> str:
    lines = []
    for item, row in rows.items():
        cells = [" ".join(value[:8] for value in hashes.values()) for hashes in row.get("hashes", {}).values()]
        lines.append([item, tasks.verdict(row, is_good(row)), *(cells or [""] * 3)])
    return harness.table("model, precision | the same | one process | two processes | moved from one to two", lines)
