"""The published result beside ours: nanoGPT's own train.py and scripts/pretrain_gpt2.py, tiny Shakespeare, 2,000 steps.

    make bench NAME=shakespeare FLAGS='--nanogpt path/to/nanoGPT --train_file path/to/tinyshakespeare.txt'

NANOGPT is a checkout of github.com/karpathy/nanoGPT; TRAIN_FILE is input.txt of its data/shakespeare_char. Both programs are
run as their users run them, in turns, in processes of their own, with the same threads and in float32 (nanoGPT has no other
precision on a CPU); ours once more in bf16, which is a choice of the launch file. A program runs for two seconds, is stopped
(SIGSTOP), and the next runs for two seconds, so that a machine whose speed changes is the same for all.

- Training: 2,000 times the mean step of a program's own log (nanoGPT logs milliseconds per iteration), without the steps
  that a stop or, in nanoGPT, an evaluation interrupted.
- Whole process: the seconds in which it ran, from start to exit, evaluations (nanoGPT 9 of 2 x 20 batches, ours 2 of the
  whole validation part), imports and saving included.
- Validation loss: of both models over the same 111,539 characters of the last tenth, each predicted once, in blocks of 64.
- Cuts: the first 50 steps again with k = 4, and on two processes: largest relative difference of a step's loss.
"""

import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
import numpy as np
import torch
import torch.nn.functional as F
from harness import Program, ratios, spread
from transformers import AutoModelForCausalLM, AutoTokenizer

# nanoGPT's README, "I only have a macbook", and the last weights saved whether or not they are the best.
NANOGPT_FLAGS = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0 "
    "--always_save_checkpoint=True --out_dir=out"
).split()
BLOCK, STEPS, CUT_STEPS, TURN = 64, 2000, 50, 2.0


def prepare_nanogpt(checkout: Path, work: Path, train_file: Path) -> None:
    """Copy nanoGPT, and make the data with its own prepare.py (without the download)."""
    folder = work / "nanogpt"
    shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git"))
    data = folder / "data" / "shakespeare_char"
    shutil.copy(train_file, data / "input.txt")
    prepare = (data / "prepare.py").read_text().replace("import requests\n", "")
    prepare = prepare.replace("__file__", repr(str(data / "prepare.py")))
    subprocess.run([sys.executable, "-c", prepare], check=True, stdout=subprocess.DEVNULL)


def nanogpt(work: Path, threads: int) -> Program:
    return Program([sys.executable, "train.py", *NANOGPT_FLAGS], work / "nanogpt", work / "nanogpt.log", threads)


def ours(work: Path, name: str, train_file: Path, threads: int, flags: str = "", *launch_flags: str) -> Program:
    words = harness.launch(harness.ROOT / "scripts" / "pretrain_gpt2.py", *launch_flags)
    words += ["--recipe", "gpt2_shakespeare_char_cpu", "--train_file", str(train_file)]
    words += ["--output_dir", str(work / name), "--overwrite_output_dir", *flags.split()]
    return Program(words, work, work / f"{name}.log", threads)


def train_seconds(work: Path, name: str, turn: float = TURN) -> float:
    if name == "nanoGPT":
        matches = re.findall(r"iter (\d+): loss \S+, time ([\d.]+)ms", (work / "nanogpt.log").read_text())
        seconds = [float(ms) / 1e3 for number, ms in matches if int(number) % 250]  # the others hold an evaluation
    else:
        seconds = [line["seconds"] for line in harness.read_steps(work / name)]
    return STEPS * harness.mean_step_seconds(seconds, turn)


@torch.no_grad()
def validation_loss(tokens: np.ndarray, compute_logits) -> tuple[float, int]:
    """Compute the mean loss over all tokens but the first, each predicted once from the earlier tokens of its block."""
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, BLOCK):
        part = torch.from_numpy(tokens[start : start + BLOCK + 1].astype(np.int64))[None]
        logits = compute_logits(part[:, :-1])
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
    model = AutoModelForCausalLM.from_pretrained(work / name).eval()
    tokenizer = AutoTokenizer.from_pretrained(work / name)
    data = work / "nanogpt" / "data" / "shakespeare_char"
    with (data / "meta.pkl").open("rb") as file:
        characters = pickle.load(file)["itos"]
    text = "".join(characters[token] for token in np.fromfile(data / "val.bin", np.uint16))
    return validation_loss(np.array(tokenizer(text)["input_ids"]), lambda x: model(x).logits)


def main() -> None:
    parser = harness.flags("shakespeare", __doc__, rounds=3, threads=True)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--train_file", type=Path, required=True, help="tiny Shakespeare")
    arguments = parser.parse_args()
    train_file, threads = arguments.train_file.resolve(), arguments.threads

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare_nanogpt(arguments.nanogpt.resolve(), work, train_file)
        rounds: list[dict[str, tuple[float, float]]] = []
        for _ in range(arguments.rounds):
            programs = {
                "nanoGPT": nanogpt(work, threads),
                "ours": ours(work, "ours", train_file, threads),
                "ours, bf16": ours(work, "ours, bf16", train_file, threads, "", "bf16"),
            }
            harness.run_in_turns(programs.values(), TURN)
            rounds.append({n: (train_seconds(work, n), p.seconds) for n, p in programs.items()})
            print(rounds[-1], file=sys.stderr)
        true = [line["loss"] for line in harness.read_steps(work / "ours")[:CUT_STEPS]]
        cuts = {}
        for name, flags, config in (
            ("k = 4, b = 3", "--per_device_train_batch_size 3", "cpu.yaml"),
            ("2 processes, b = 6", "", "2xcpu.yaml"),
        ):
            stop = f"{flags} --stop_after_step {CUT_STEPS}"
            ours(work, "cut", train_file, threads if config == "cpu.yaml" else 1, stop, "no", config).turn(None)
            losses = [line["loss"] for line in harness.read_steps(work / "cut")]
            cuts[name] = max(abs(a / b - 1) for a, b in zip(losses, true, strict=True))
        validation = {"nanoGPT": nanogpt_validation(work)}
        validation |= {name: our_validation(work, name) for name in ("ours", "ours, bf16")}

    rows = []
    for name in rounds[0]:
        row = {"program": name, "validation_loss": validation[name][0]}
        for place, stage in enumerate(("train", "process")):
            seconds, theirs = ([times[title][place] for times in rounds] for title in (name, "nanoGPT"))
            values = ratios(seconds, theirs)
            row[f"{stage}_seconds"] = statistics.median(seconds)
            row |= {
                f"{stage}_ratio": statistics.median(values),
                f"{stage}_min": min(values),
                f"{stage}_max": max(values),
            }
        rows.append(row)
    about = harness.about(
        "make bench NAME=shakespeare",
        ("torch", "accelerate", "transformers"),
        threads,
        rounds=arguments.rounds,
        characters=validation["ours"][1],
        nanogpt_commit=_commit(arguments.nanogpt),
    )
    results = {"about": about, "rows": rows, "cuts": cuts}
    harness.write(arguments.output, results, markdown(results))


def _commit(checkout: Path) -> str | None:
    result = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or None


def markdown(results: dict) -> str:
    about, rows = results["about"], []
    for row in results["rows"]:
        rows.append([row["program"], f"{row['validation_loss']:.4f}"])
        for stage in ("train", "process"):
            numbers = (row[f"{stage}_{name}"] for name in ("ratio", "min", "max"))
            rows[-1] += [f"{row[f'{stage}_seconds']:.1f}", spread(numbers, ".3f")]
    differences = "".join(f"- {name}: {value:.1e}\n" for name, value in results["cuts"].items())
    columns = "program | validation loss | training, s | / nanoGPT's | whole process, s | / nanoGPT's"
    return harness.page(
        "Tiny Shakespeare, character by character, beside nanoGPT",
        "shakespeare.py",
        about,
        f"{harness.table(columns, rows)}\n"
        f"2,000 steps of 12 blocks of 64. Validation loss over {about['characters']:,} characters. Medians of "
        f"{about['rounds']} rounds (smallest to largest).\n\n"
        f"The first {CUT_STEPS} steps of ours, cut in other ways; largest relative difference of a step's loss:\n\n"
        f"{differences}\n"
        f"nanoGPT {(about['nanogpt_commit'] or '?')[:10]}.\n",
    )


if __name__ == "__main__":
    main()
