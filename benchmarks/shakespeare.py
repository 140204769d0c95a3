"""The published result beside ours: nanoGPT's own train.py and scripts/pretrain_gpt2.py, tiny Shakespeare, 2,000 steps.

    make bench-shakespeare NANOGPT=path/to/nanoGPT TRAIN_FILE=path/to/tinyshakespeare.txt

NANOGPT is a checkout of github.com/karpathy/nanoGPT; TRAIN_FILE is input.txt of its data/shakespeare_char. Both programs are
run as their users run them, in turns, in processes of their own, with the same threads and in float32 (nanoGPT has no other
precision on a CPU); ours once more in bf16, which is a choice of the launch file.

- Seconds of training: the sum over the steps of both programs' own logs, evaluations left out.
- Validation loss: of both models over the same 111,539 characters of the last tenth, each predicted once, in blocks of 64.
- Cuts: the first 50 steps again with k = 4, and on two processes: largest relative difference of a step's loss.
"""

import argparse
import json
import os
import pickle
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import accelerate
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoTokenizer, GPT2LMHeadModel

ROOT = Path(__file__).parent.parent
# nanoGPT's README, "I only have a macbook", and the last weights saved whether or not they are the best.
NANOGPT_FLAGS = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0 "
    "--always_save_checkpoint=True --out_dir=out"
).split()
BLOCK, STEPS, CUT_STEPS = 64, 2000, 50


def command(program: list[str], folder: Path, log: Path, threads: int) -> float:
    """Run a program in `folder`; its wall-clock seconds."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    start = time.perf_counter()
    with log.open("w") as file:
        finished = subprocess.run(program, cwd=folder, stdout=file, stderr=subprocess.STDOUT, env=environment)
    if finished.returncode:
        sys.exit(f"{' '.join(program)} failed:\n{log.read_text()[-3000:]}")
    return time.perf_counter() - start


def run_nanogpt(checkout: Path, work: Path, train_file: Path, threads: int) -> dict:
    """nanoGPT's data preparation (its own lines, without the download) and its train.py."""
    folder = work / "nanogpt"
    if not folder.exists():
        shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git"))
        data = folder / "data" / "shakespeare_char"
        shutil.copy(train_file, data / "input.txt")
        prepare = (data / "prepare.py").read_text().replace("import requests\n", "")
        subprocess.run([sys.executable, "-c", prepare.replace("__file__", repr(str(data / "prepare.py")))], check=True)
    log = work / "nanogpt.log"
    wall = command([sys.executable, "train.py", *NANOGPT_FLAGS], folder, log, threads)
    steps = [
        (int(i), float(ms) / 1e3) for i, ms in re.findall(r"iter (\d+): loss \S+, time ([\d.]+)ms", log.read_text())
    ]
    train = [seconds for number, seconds in steps if number % 250 and number < STEPS]  # others hold an evaluation
    return {"train_seconds": statistics.mean(train) * STEPS, "wall_seconds": wall}


def run_ours(work: Path, name: str, train_file: Path, threads: int, flags: str = "", launch: str = "cpu.yaml") -> dict:
    program = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    program += [str(ROOT / "accelerate_configs" / launch.split()[0]), *launch.split()[1:]]
    program += [str(ROOT / "scripts" / "pretrain_gpt2.py"), "--recipe", "gpt2_shakespeare_char_cpu"]
    program += [
        "--train_file",
        str(train_file),
        "--output_dir",
        str(work / name),
        "--overwrite_output_dir",
        *flags.split(),
    ]
    wall = command(program, work, work / f"{name}.log", threads)
    lines = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return {
        "train_seconds": sum(line["seconds"] for line in steps),
        "wall_seconds": wall,
        "eval_loss": lines[-1].get("eval_loss"),
        "losses": [line["loss"] for line in steps],
    }


@torch.no_grad()
def validation_loss(tokens: np.ndarray, logits_of) -> tuple[float, int]:
    """Mean loss over all tokens but the first, each predicted once from those before it in its block."""
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, BLOCK):
        part = torch.from_numpy(tokens[start : start + BLOCK + 1].astype(np.int64))[None]
        logits = logits_of(part[:, :-1])
        total += F.cross_entropy(logits[0].double(), part[0, 1:], reduction="sum").item()
        count += part.shape[1] - 1
    return total / count, count


def nanogpt_validation(work: Path) -> tuple[float, int]:
    folder = work / "nanogpt"
    sys.path.insert(0, str(folder))
    from model import GPT, GPTConfig

    saved = torch.load(folder / "out" / "ckpt.pt", map_location="cpu", weights_only=False)
    if saved["iter_num"] != STEPS:
        sys.exit(f"nanoGPT's checkpoint is of step {saved['iter_num']}, not {STEPS}")
    model = GPT(GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    model.eval()
    tokens = np.fromfile(folder / "data" / "shakespeare_char" / "val.bin", np.uint16)
    return validation_loss(tokens, lambda x: model(x, x)[0])


def our_validation(work: Path, name: str) -> tuple[float, int]:
    model, tokenizer = GPT2LMHeadModel.from_pretrained(work / name).eval(), AutoTokenizer.from_pretrained(work / name)
    data = work / "nanogpt" / "data" / "shakespeare_char"
    with (data / "meta.pkl").open("rb") as file:
        characters = pickle.load(file)["itos"]
    text = "".join(characters[token] for token in np.fromfile(data / "val.bin", np.uint16))
    return validation_loss(np.array(tokenizer(text)["input_ids"]), lambda x: model(x).logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--train_file", type=Path, required=True, help="tiny Shakespeare")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "shakespeare")
    arguments = parser.parse_args()
    train_file, threads = arguments.train_file.resolve(), arguments.threads

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        rounds: dict[str, list[dict]] = {"nanoGPT": [], "ours": [], "ours, bf16": []}
        for _ in range(arguments.rounds):
            rounds["nanoGPT"].append(run_nanogpt(arguments.nanogpt.resolve(), work, train_file, threads))
            rounds["ours"].append(run_ours(work, "ours", train_file, threads))
            bf16 = run_ours(work, "bf16", train_file, threads, launch="cpu.yaml --mixed_precision bf16")
            rounds["ours, bf16"].append(bf16)
            print(
                {name: [round(r["train_seconds"], 1) for r in runs] for name, runs in rounds.items()}, file=sys.stderr
            )
        true = rounds["ours"][-1]["losses"][:CUT_STEPS]
        cuts = {}
        for name, flags, launch in (
            ("k = 4, b = 3", "--per_device_train_batch_size 3", "cpu.yaml"),
            ("2 processes, b = 6", "", "2xcpu.yaml"),
        ):
            stop = f"{flags} --stop_after_step {CUT_STEPS}"
            losses = run_ours(work, "cut", train_file, threads if launch == "cpu.yaml" else 1, stop, launch)["losses"]
            cuts[name] = max(abs(a / b - 1) for a, b in zip(losses, true, strict=True))
        validation = {"nanoGPT": nanogpt_validation(work)}
        validation |= {
            name: our_validation(work, folder) for name, folder in (("ours", "ours"), ("ours, bf16", "bf16"))
        }

    rows = []
    for name, runs in rounds.items():
        ratios = [
            run["train_seconds"] / nano["train_seconds"] for run, nano in zip(runs, rounds["nanoGPT"], strict=True)
        ]
        rows.append({"program": name, "validation_loss": validation[name][0], "eval_loss": runs[-1].get("eval_loss")})
        for key in ("train_seconds", "wall_seconds"):
            rows[-1][key] = statistics.median(run[key] for run in runs)
        rows[-1] |= {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    about = {
        "command": "make bench-shakespeare",
        "rounds": arguments.rounds,
        "characters": validation["ours"][1],
        "machine": f"{platform.machine()}, {threads} threads, {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        "versions": {module.__name__: module.__version__ for module in (torch, accelerate, transformers)},
        "nanogpt_commit": _commit(arguments.nanogpt),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"about": about, "rows": rows, "cuts": cuts}
    arguments.output.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    arguments.output.with_suffix(".md").write_text(_markdown(about, rows, cuts))
    print(_markdown(about, rows, cuts))


def _commit(checkout: Path) -> str | None:
    found = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or None


def _markdown(about: dict, rows: list[dict], cuts: dict[str, float]) -> str:
    table = "".join(
        f"| {row['program']} | {row['validation_loss']:.4f} | {row['train_seconds']:.1f} | {row['wall_seconds']:.1f} "
        f"| {row['ratio']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f}) |\n"
        for row in rows
    )
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    differences = "".join(f"- {name}: {value:.1e}\n" for name, value in cuts.items())
    return (
        "# Tiny Shakespeare, character by character, beside nanoGPT\n\n"
        f"Generated by `{about['command']}` (benchmarks/shakespeare.py, which says what is compared); do not edit.\n\n"
        "| program | validation loss | training, s | whole process, s | training time / nanoGPT's |\n|---|---|---|---|---|\n"
        f"{table}\n"
        f"2,000 steps of 12 blocks of 64. Validation loss over {about['characters']:,} characters. Medians of "
        f"{about['rounds']} rounds; a round's ratio is of runs next to each other (smallest to largest).\n\n"
        f"The first {CUT_STEPS} steps of ours, cut in other ways; largest relative difference of a step's loss:\n\n"
        f"{differences}\n"
        f"{about['machine']}, Python {about['python']}, {versions}; nanoGPT {(about['nanogpt_commit'] or '?')[:10]}.\n"
    )


if __name__ == "__main__":
    main()
