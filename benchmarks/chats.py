"""Fine-tuning on ragged conversations: speed and memory beside TRL's trainers and transformers' Trainer.

    make bench NAME=chats                                # 15 minutes on 2 cores that nothing else uses
    python benchmarks/chats.py --only sft_512 --precisions no --rounds 2

A Llama with random weights learns drawn conversations (samestep/data/builtin/drawn_chats.py, level hard), joined to lengths
as ragged as those of real ones: the number of questions of a conversation is log-normal. All
programs train the same weights on the same
token ids, with the same trained tokens, global batch, precision, optimizer and threads, every one in a process of its own.
Those with padded rows take the samples of the same steps in the same order: it is checked that their first steps have the same
numbers of trained tokens, and the same first loss, as ours. Rows that are packed or grouped by length hold the same samples,
but others in each step.

The programs run in turns (SIGSTOP, SIGCONT; see harness.py), so that a machine whose speed changes is the same for all. In
every round each takes the same number of steps.

- Rate of a program in a round: trained ("supervised") tokens per second in which it ran.
- Ratio: ours / the other's in the same round; median, smallest and largest of the rounds.
- Memory: largest resident memory from the first step on, beyond what was resident when the model had been built: gradients,
  moments, activations, logits, buffers of kernels. At its first start on a machine our script rehearses samples of the
  greatest length, too; it is started twice here, and what is compared is the second start, which remembers what fits.

The floor is forward, backward and update of our own step without anything around it (benchmarks/peers/floor.py). What the
others are: benchmarks/peers/chat_trainers.py. A padded step is one micro-batch, or k of them.

Results of workloads and precisions that are not run are kept from the old file.
"""

import json
import os
import re
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

import chat_trainers
import clock
import harness
import numpy as np
import torch
from clock import Stamp
from harness import Program, peak_memory, running_time, spread, table

from samestep.data.builtin import drawn_chats
from samestep.recipe.catalog import load

WARM_UP, NUM_STEPS = 2, 4  # steps before the first round, and of each round
NUM_CHATS, SEED = 800, 0
MEDIAN_QUESTIONS, SIGMA, MOST_QUESTIONS = 4, 0.8, 32
MOST_LOAD = 1.0  # programs that ran in the minute before, in the mean, above which results say so
LOSS_TOLERANCE = {"no": 1e-4, "bf16": 1e-2}
# Title -> words of peers/chat_trainers.py after the precision.
PROGRAMS = {
    "ours": ("ours",),
    "floor": ("floor",),
    "TRL, padded": ("sft", "padded"),
    "TRL, padded, k = 4": ("sft", "padded", "4"),
    "TRL, packed": ("sft", "packed"),
    "TRL, padding-free": ("sft", "padding_free"),
    "Trainer": ("trainer", "padded"),
    "Trainer, grouped": ("trainer", "grouped"),
    "exact(Trainer)": ("exact", "padded"),
    "exact(Trainer), PackedLoss": ("exact", "rows"),
    "TRL DPO": ("dpo", "padded"),
}
OWN = ("ours", "floor")
OTHER_ORDER = ("TRL, packed", "Trainer, grouped")
SFT = (*OWN, "TRL, padded", "TRL, packed", "Trainer", "Trainer, grouped")
EXACT = ("exact(Trainer)", "exact(Trainer), PackedLoss")
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft")


class Workload(NamedTuple):
    """Which change of recipe sft_small_cpu is trained, and by whom.

    Attributes:
        values: of the recipe.
        programs: titles.
        precisions: of the launch.
    """

    values: dict[str, Any]
    programs: tuple[str, ...] = SFT
    precisions: tuple[str, ...] = ("no", "bf16")


SHAPE = {
    "extends": "sft_small_cpu",
    "train_file": ["WORK/chats.jsonl"],
    "dataset_name": None,
    "dataset_config_name": None,
    "validation_fraction": 0.0,
    "num_train_samples": None,
    "num_validation_samples": None,
    "max_seq_length": 1024,
    "max_position_embeddings": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "initializer_range": 0.02,
    "global_batch_size": 16,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "warmup_ratio": None,
    "num_warmup_steps": 0,
    "max_train_steps": 10**6,
}
LARGE = {"vocab_size": 32768}
DPO = {"train_file": ["WORK/pairs.jsonl"], "objective": "dpo", "train_on": "completions", "weight_decay": 0.0}
WORKLOADS = {
    "sft_512": Workload(SHAPE, (*SFT, "TRL, padded, k = 4", "TRL, padding-free", *EXACT)),
    "sft_32768": Workload(SHAPE | LARGE, (*SFT, *EXACT)),
    "lora_32768": Workload(
        SHAPE | LARGE | {"lora_rank": 16, "lora_alpha": 32}, (*OWN, "TRL, padded", "TRL, packed"), ("bf16",)
    ),
    "dpo_32768": Workload(SHAPE | LARGE | DPO, (*OWN, "TRL DPO"), ("bf16",)),
}


# ---------------------------------------------------------------------------------------------------------------------
# Data


def join_chats(number: int) -> tuple[list[dict[str, str]], drawn_chats.Chat]:
    """Join drawn conversations to one with a log-normal number of questions.

    Returns:
        the turns before the last answer, and the conversation that ends with it.
    """
    rng = np.random.default_rng((SEED, number))
    num_questions = min(MOST_QUESTIONS, max(1, round(rng.lognormal(np.log(MEDIAN_QUESTIONS), SIGMA))))
    turns: list[dict[str, str]] = []
    for place in range(num_questions):
        chat = drawn_chats.draw_chat(SEED, "train", number * MOST_QUESTIONS + place, "hard")
        last = [turn for turn in chat.messages if turn["role"] == "user"][-1]
        if place == 0 and chat.messages[0]["role"] == "system":
            turns.append(chat.messages[0])
        turns.append(last)
        if place < num_questions - 1:
            turns.append({"role": "assistant", "content": chat.answer})
    return turns, chat


def write_data(work: Path, num_chats: int = NUM_CHATS) -> None:
    """Write conversations, and the same ones as pairs of a right and a wrong last answer."""
    with (work / "chats.jsonl").open("w", encoding="utf-8") as chats, (work / "pairs.jsonl").open("w") as pairs:
        for number in range(num_chats):
            turns, chat = join_chats(number)
            right, wrong = ([{"role": "assistant", "content": text}] for text in (chat.answer, chat.wrong))
            chats.write(json.dumps({"messages": turns + right}) + "\n")
            pairs.write(json.dumps({"prompt": turns, "chosen": right, "rejected": wrong}) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def start(title: str, folder: Path, precision: str, threads: int) -> Program:
    """Start a program that trains the workload of a folder; its stamps are in TITLE.stamps there."""
    file, words = (
        PEERS / "chat_trainers.py",
        [str(folder), str(folder / f"{title}.stamps"), precision, *PROGRAMS[title]],
    )
    if title in OWN:
        recipe = folder / "recipe.yaml"
        words += [str(ROOT / "scripts" / load(str(recipe)).parts.script), "--recipe", str(recipe)]
        words += ["--output_dir", str(folder / title), "--overwrite_output_dir", "--num_generations", "0"]
        config = "1xh200.yaml" if torch.cuda.is_available() else "cpu.yaml"
        return Program(
            [*harness.launch(file, precision, config), *words], folder.parent, folder / f"{title}.log", threads
        )
    return Program([sys.executable, str(file), *words], folder.parent, folder / f"{title}.log", threads)


def rates(stamps: list[Stamp], turns: list[tuple[float, float]], num_rounds: int) -> list[float]:
    """Compute the units per second of each round: of `NUM_STEPS` steps each, stops left out.

    >>> stamps = [Stamp(float(time), 10, 0.0) for time in (1, 2, 3, 4, 5, 6, 17, 18, 19)]
    >>> rates(stamps, [(0.0, 6.0), (16.0, 20.0)], 1)
    [10.0]
    """
    result = []
    for number in range(num_rounds):
        first = WARM_UP + number * NUM_STEPS
        begin, end = (running_time(turns, stamps[place - 1].time) for place in (first, first + NUM_STEPS))
        result.append(sum(stamp.units for stamp in stamps[first : first + NUM_STEPS]) / (end - begin))
    return result


def check_same(stamps: dict[str, list[Stamp]], expected: list[int], precision: str) -> None:
    """Check that the programs that take samples in our order have our first steps' trained tokens, and our first loss.

    Raises:
        SystemExit: one has others.
    """
    for title, series in stamps.items():
        if title in OTHER_ORDER:
            continue
        units = [stamp.units for stamp in series[: len(expected)]]
        if units != expected:
            sys.exit(f"{title} was trained on {units} tokens in its first steps, not on {expected}")
        distance = abs(series[0].loss / stamps["ours"][0].loss - 1)
        if title not in OWN and not distance <= LOSS_TOLERANCE[precision]:
            sys.exit(f"the first loss of {title} is {series[0].loss}, ours {stamps['ours'][0].loss}")


def measure(name: str, precision: str, titles: list[str], num_rounds: int, work: Path, threads: int) -> dict[str, Any]:
    """Measure a row of the results."""
    folder = harness.write_recipe(work / name, WORKLOADS[name].values)
    data = chat_trainers.prepare(folder)
    programs, files = {}, {title: folder / f"{title}.stamps" for title in titles}

    def run(title: str, num_steps: int) -> None:
        programs[title].run_until(lambda: len(clock.read(files[title])[1]) >= num_steps)

    def read_memory(title: str) -> float:
        base = int(Path(f"{files[title]}.base").read_text()) * 1024 / 1e9
        return peak_memory(clock.read(files[title])[0]) - base

    try:
        # At its first start our script measures its kernels, alone, and remembers them; stopped by turns it could not
        for title in ["ours", *titles]:
            if title in programs:
                first_memory = read_memory(title)
                programs[title].kill()
            files[title].unlink(missing_ok=True)
            programs[title] = start(title, folder, precision, threads)
            run(title, WARM_UP)
        for number in range(num_rounds):
            place = number % len(titles)
            for title in titles[place:] + titles[:place]:
                run(title, WARM_UP + (number + 1) * NUM_STEPS)
        stamps = {title: clock.read(files[title])[1] for title in titles}
        memory = {title: read_memory(title) for title in titles}
    finally:
        for program in programs.values():
            program.kill()
    check_same(stamps, data.pop("first_steps"), precision)
    return {
        "workload": name,
        "precision": precision,
        "data": data,
        "rates": {title: rates(stamps[title], programs[title].turns, num_rounds) for title in titles},
        "memory": memory,
        "first_memory": first_memory,
    }


def main() -> None:
    parser = harness.flags("chats", __doc__, rounds=3, only=WORKLOADS, precisions=True, threads=True)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS, help="beside ours")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that stopped programs do not stay behind
    rows = harness.read_other_rows(arguments.output, "rows", "workload", [])
    command = re.sub(r" --output \S+", "", shlex.join(["python", "benchmarks/chats.py", *sys.argv[1:]]))
    about = harness.about(command, PACKAGES, arguments.threads)
    origin = {"command": about["command"], "machine": harness.provenance(about), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        os.environ["HF_HOME"] = str(work / "home")  # nothing of earlier runs is remembered
        write_data(work)
        for name in arguments.only:
            for precision in (p for p in WORKLOADS[name].precisions if p in arguments.precisions):
                titles = [title for title in WORKLOADS[name].programs if title == "ours" or title in arguments.programs]
                row = measure(name, precision, titles, arguments.rounds, work, arguments.threads) | origin
                rows = [old for old in rows if (old["workload"], old["precision"]) != (name, precision)] + [row]
                rows.sort(key=lambda row: (list(WORKLOADS).index(row["workload"]), row["precision"] != "no"))
                results = {"rows": rows}
                harness.write(arguments.output, results, markdown(results), is_last=False)
                print(markdown({"rows": [row]}), file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# What is written


def markdown(results: dict) -> str:
    rows = results["rows"]
    peers = [title for title in PROGRAMS if title != "ours" and any(title in row["rates"] for row in rows)]
    speed, memory, data = [], [], []
    for row in rows:
        labels = [row["workload"], row["precision"]]
        ratios = {title: harness.ratios(row["rates"]["ours"], row["rates"][title]) for title in row["rates"]}
        cells = [spread(ratios[title], ".2f") if title in ratios else "-" for title in peers]
        speed.append([*labels, spread(row["rates"]["ours"], ",.0f"), *cells])
        own = row["memory"]["ours"]
        cells = [
            f"{row['memory'][title]:.2f} ({own / row['memory'][title]:.2f})" if title in ratios else "-"
            for title in peers
        ]
        memory.append([*labels, f"{row['first_memory']:.2f}", f"{own:.2f}", *cells])
        described = [row["workload"], _describe(row["data"])]
        data += [described] if described not in data else []
    heads = ["workload", "precision", "ours"]
    commands = "".join(dict.fromkeys(f"`{row['command']}`: {row['machine']}{_warn(row)}.\n" for row in rows))
    num_rounds = " or ".join(map(str, sorted({len(row["rates"]["ours"]) for row in rows})))
    return harness.page(
        "Fine-tuning on ragged conversations, beside other trainers",
        "chats.py",
        {"command": "make bench NAME=chats"},
        "Trained tokens per second; ours / the other's, above 1 where ours is faster. Medians (smallest to largest) of "
        f"{num_rounds} rounds.\n\n"
        f"{table([*heads, *(f'ours / {title}' for title in peers)], speed)}\n"
        "Memory from the first step on, beyond the built model's, GB (ours / the other's):\n\n"
        f"{table([*heads[:2], 'ours, first start', 'ours', *peers], memory)}\n"
        f"{table('workload | sequences', data)}\n{commands}",
    )


def _warn(row: dict[str, Any]) -> str:
    """Say so where other programs ran beside those that were measured."""
    return f"; UNDER LOAD, {row['load']:.0f} other programs ran: a first look" if row["load"] > MOST_LOAD else ""


def _describe(data: dict[str, Any]) -> str:
    low, middle, high, most = data["quantiles"]
    return (
        f"{data['samples']:,} samples; tokens of a sequence {data['mean_length']:.0f} in the mean, {middle} in the median, 5 % "
        f"below {low}, 5 % above {high}, at most {most}; {data['supervised']:.0%} of the tokens trained; {data['padding']:.0%} "
        f"padding in a batch of one padded table; tokenizer of {data['pieces']:,} entries"
    )


if __name__ == "__main__":
    main()
