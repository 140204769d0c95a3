"""Training speed beside what others use: real tokens (or images) per second of every program on every workload.

    make bench                                          # everything; hours on 2 cores
    python benchmarks/bench.py --only classifier --precisions bf16 --rounds 3
    python benchmarks/bench.py --only shakespeare --nanogpt CHECKOUT --shakespeare input.txt

Same model class, shape, samples, global batch, precision, learning rate, clipping and threads; every program as its users
run it (benchmarks/peers/, a file each), in a process of its own. The programs of a workload and a precision are started
together and run in turns (SIGSTOP, SIGCONT; see harness.py), so that a machine whose speed changes is the same for all.
Every program stamps the end of every optimizer step. After the first steps come the rounds: one turn for every program, long
enough for at least three whole steps of its own, in an order that rotates.

- Rate of a program in a round: tokens without padding (or images) of the steps that lie wholly inside its turn, per second.
- Ratio: ours / the other's in the same round; median, smallest and largest of the rounds.
- Memory: largest resident memory of the process that trains (VmHWM), all that came before the first step included.
- Time to a loss: seconds in which a program ran, in its turns, until the mean loss of 20 steps fell to a value that all
  reached. One run of one seed: a rough number.

What runs beside ours: transformers' Trainer, with random batches and with its two samplers that pad less; the loop of
Accelerate's documentation; Lightning; and the floor, which is the step of our own script without anything around it.

Results of workloads and precisions that are not run are kept from the old file.
"""

import argparse
import itertools
import json
import math
import re
import shutil
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

import clock
import harness
import torch
import workloads
from clock import Stamp
from harness import Program, peak_memory, running_time, spread, table
from images import write_photographs
from shakespeare import NANOGPT_FLAGS, prepare_nanogpt

from samestep.data.documents import load_rows
from samestep.models import pretrained as models
from samestep.recipe.catalog import load
from samestep.recipe.recipe import Recipe

WARM_UP, WHOLE_STEPS, WINDOW = 5, 3, 20
# Title -> file in peers/ and its last arguments.
PROGRAMS = {
    "ours": ("ours",),
    "Trainer": ("trainer", "random"),
    "Trainer, grouped": ("trainer", "group_by_length"),
    "Trainer, rebalanced": ("trainer", "batch_rebalance"),
    "Accelerate loop": ("accelerate_loop",),
    "Lightning": ("lightning_loop",),
    "nanoGPT": ("nanogpt",),
    "floor": ("floor",),
}
USUAL = ("ours", "Trainer", "Accelerate loop", "Lightning", "floor")
RAGGED = ("ours", "Trainer", "Trainer, grouped", "Trainer, rebalanced", "Accelerate loop", "Lightning", "floor")
ENDLESS = {
    "max_train_steps": 10**6,
    "lr_scheduler_type": "constant",
    "num_warmup_steps": 20,
    "validation_fraction": 0.0,
}
REMARKS = """\
- Programs: benchmarks/peers/. Every step is one micro-batch, as its users would take it where memory allows, but for
  "rebalanced". All read the loss of every step, which on a CPU is there.
- Trainer, grouped: group_by_length brings texts of like length together into a batch. That is another training: a batch is no
  random draw any more. Trainer, rebalanced: batch_rebalance sorts the samples of a random batch into micro-batches. With one
  process and no accumulation there is one micro-batch and nothing to sort, so here it has k = 4; BERT's heads ignore
  num_items_in_batch, so that its gradient is 4 times the batch's, which clipping and AdamW hide.
- Products: floating-point operations of transformers' BERT, if nothing is padded, over those of ours (workloads.products). A
  program that pads nothing, such as Trainer, grouped, is slower by that, and not by more, if its products run at our rate.
- Learning rate: the recipe's, constant after 20 steps of warm-up. Peers see the pairs and blocks of epoch 0 in every epoch,
  masked anew by transformers' collator.
- Attention of the peers: eager where it was the faster one of transformers' (bf16 at lengths up to 256), sdpa elsewhere.
- AdamW and SGD are fused, but for Lightning in bf16 with clipping: it refuses to clip the gradients of a fused optimizer.
- GPT-2: ours predicts all tokens of a block, from the next block's first one; transformers' loss all but the first.
- Floor: the micro-batches of our script, collated in advance, with its kernels and its cut; its memory holds the script's
  rehearsal.
- Not measured: Composer (mosaicml 0.32.1 needs torch below 2.7.1, and does not install beside torch 2.13).
"""


# ---------------------------------------------------------------------------------------------------------------------
# Workloads


@dataclass(frozen=True)
class Workload:
    """Of which recipe it is a change, and who trains it.

    Attributes:
        values: what its recipe holds, with `extends`; WORK stands for the folder of `write_data`.
        programs: titles.
        precisions: of the launch.
        turn: least seconds of a turn.
        to_loss: whether the time to a loss is told.
        needs: flags without which it is left out.
    """

    values: dict[str, Any]
    programs: tuple[str, ...] = USUAL
    precisions: tuple[str, ...] = ("no", "bf16")
    turn: float = 3.0
    to_loss: bool = False
    needs: tuple[str, ...] = ()


BERT = {"extends": "bert_small_cpu", "num_hidden_layers": 4, "global_batch_size": 64}
RAGGED_BERT = BERT | {"short_seq_probability": 1.0}  # real documents, cut to all lengths
FULL_BERT = BERT | {"short_seq_probability": 0.0, "dataset_name": None, "train_file": ["WORK/joined.jsonl"]}
GPT2 = {"extends": "gpt2_124m", "dataset_name": "builtin/python_docs", "tokenizer_name": None}
RESNET = {"extends": "WORK/resnet18_photographs.yaml", "label_smoothing": 0.0, "num_train_samples": 128}
REVIEWS = {"extends": "finetune_reviews_cpu", "train_file": ["WORK/reviews.csv"]}
CHARACTERS = {"extends": "gpt2_shakespeare_char_cpu", "train_file": ["WORK/shakespeare.txt"]}
WORKLOADS = {
    "bert_ragged_8192": Workload(RAGGED_BERT | {"vocab_size": 8192}, RAGGED, turn=5.0, to_loss=True),
    "bert_ragged_30522": Workload(RAGGED_BERT | {"vocab_size": 30522}, RAGGED),
    "bert_full_8192": Workload(FULL_BERT | {"vocab_size": 8192}),
    "bert_full_30522": Workload(FULL_BERT | {"vocab_size": 30522}),
    "gpt2": Workload(GPT2 | {"block_size": 256, "global_batch_size": 4}),
    "classifier": Workload({"extends": "finetune_small_cpu"}, RAGGED, to_loss=True),
    "reviews": Workload(REVIEWS, RAGGED, turn=2.0, to_loss=True, needs=("reviews",)),
    "resnet18": Workload(RESNET),
    "shakespeare": Workload(CHARACTERS, ("ours", "nanoGPT", "floor"), ("no",), needs=("nanogpt", "shakespeare")),
}


def write_data(work: Path, arguments: argparse.Namespace) -> None:
    """Write the data of workloads that have to be made or copied."""
    documents = load_rows(train_file=None, dataset_name="builtin/python_docs").rows["text"]
    joined = ["\n".join(documents[start::8]) for start in range(8)]  # so long that only their ends are short samples
    lines = [json.dumps({"text": text}) + "\n" for text in joined]
    (work / "joined.jsonl").write_text("".join(lines), encoding="utf-8")
    write_photographs(work)
    if arguments.reviews:
        shutil.copy(arguments.reviews, work / "reviews.csv")
    if arguments.shakespeare and arguments.nanogpt:
        shutil.copy(arguments.shakespeare, work / "shakespeare.txt")
        prepare_nanogpt(arguments.nanogpt.resolve(), work, arguments.shakespeare.resolve())


def attention(recipe: Recipe, precision: str) -> str:
    """Name the kernel of transformers that is the faster one for the peers."""
    length = getattr(recipe, "block_size", None) or getattr(recipe, "max_seq_length", 0)
    return models.causal_attention(torch.device("cpu"), precision, length)


def start(title: str, folder: Path, precision: str, threads: int) -> Program:
    """Start a program that trains the workload of a folder; its stamps are in TITLE.stamps there."""
    file, *last = PROGRAMS[title]
    recipe, words = load(str(folder / "recipe.yaml")), [sys.executable]
    stamps, work = folder / f"{title}.stamps", folder.parent
    if file in ("ours", "floor"):
        words = harness.launch(PEERS / f"{file}.py", precision)
        words += [str(stamps)]
        words += [str(ROOT / "scripts" / recipe.parts.script), "--recipe", str(folder / "recipe.yaml")]
        words += ["--output_dir", str(folder / title), "--overwrite_output_dir"]
    elif file == "nanogpt":
        words += [str(PEERS / "nanogpt.py"), str(stamps), str(recipe.global_batch_size * recipe.block_size), "train.py"]
        words += [*NANOGPT_FLAGS, "--max_iters=1000000", "--eval_interval=1000000"]
        return Program(words, work / "nanogpt", folder / f"{title}.log", threads)
    else:
        words += [str(PEERS / f"{file}.py"), str(folder), str(stamps), precision, attention(recipe, precision), *last]
    return Program(words, work, folder / f"{title}.log", threads)


# ---------------------------------------------------------------------------------------------------------------------
# Stamps and turns


Turn = tuple[float, float]


def inside(stamps: list[Stamp], turn: Turn) -> list[Stamp]:
    """Select the stamps of a turn: the step that ends with the first began before it, all others lie wholly inside."""
    return [stamp for stamp in stamps if turn[0] <= stamp.time <= turn[1]]


def rate(stamps: list[Stamp], turn: Turn) -> float:
    """Compute units per second of the steps wholly inside a turn."""
    first, *whole = inside(stamps, turn)
    return sum(stamp.units for stamp in whole) / (whole[-1].time - first.time)


def running_means(stamps: list[Stamp], window: int = WINDOW) -> list[float]:
    """Compute the mean loss of every `window` steps in a row."""
    losses = [stamp.loss for stamp in stamps]
    return [statistics.mean(losses[start : start + window]) for start in range(len(losses) - window + 1)]


def times_to_loss(
    stamps: dict[str, list[Stamp]], turns: dict[str, list[Turn]], window: int = WINDOW
) -> dict[str, Any] | None:
    """Find the loss that all programs reached, and when each did: its own seconds, seconds since its first step, its steps.

    None where a program has taken too few steps.
    """
    means = {title: running_means(series, window) for title, series in stamps.items()}
    if not all(means.values()):
        return None
    value = math.ceil(1000 * max(min(values) for values in means.values())) / 1000
    result: dict[str, Any] = {"loss": value, "programs": {}}
    for title, values in means.items():
        place = next(number for number, mean in enumerate(values) if mean <= value) + window - 1
        seconds, first = (running_time(turns[title], stamps[title][step].time) for step in (place, 0))
        result["programs"][title] = {"seconds": seconds, "training": seconds - first, "steps": place + 1}
    return result


def step_seconds(stamps: list[Stamp], turns: list[Turn]) -> float:
    """Compute median seconds of a step, stops left out, without the first step."""
    ends = [running_time(turns, stamp.time) for stamp in stamps]
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


# ---------------------------------------------------------------------------------------------------------------------
# The comparison


def read_choices(log: str) -> dict[str, str]:
    """Read the choices of `--speed auto` from a log, by their subject: kernels, micro-batches."""
    return dict(re.findall(r"(kernels|micro-batches): (.+?) \(--speed auto\)", log))


def take_turn(program: Program, stamps: Path, seconds: float) -> Turn:
    """Take a turn of that many seconds, longer if it does not hold enough whole steps."""
    program.turn(seconds)
    begin = program.turns[-1][0]
    while len(inside(clock.read(stamps)[1], (begin, math.inf))) <= WHOLE_STEPS:
        program.turn(seconds / 2)
    return begin, program.turns[-1][1]


def measure(name: str, precision: str, titles: list[str], num_rounds: int, work: Path, threads: int) -> dict[str, Any]:
    """Measure a row of the results."""
    workload, folder = WORKLOADS[name], harness.write_recipe(work / name, WORKLOADS[name].values | ENDLESS)
    data = workloads.prepare(folder)
    programs, files = {}, {title: folder / f"{title}.stamps" for title in titles}
    try:
        # Alone, our script measures its kernels and remembers the fastest; stopped by turns it could not.
        for title in ["ours", *titles]:
            if title in programs:
                programs[title].kill()
            files[title].unlink(missing_ok=True)
            programs[title] = start(title, folder, precision, threads)
            programs[title].run_until(lambda file=files[title]: len(clock.read(file)[1]) > WARM_UP)
        step = {title: step_seconds(clock.read(files[title])[1], program.turns) for title, program in programs.items()}
        turn = {title: max(workload.turn, (WHOLE_STEPS + 2) * seconds) for title, seconds in step.items()}
        held: dict[str, list[Turn]] = {title: [] for title in titles}
        for number in range(num_rounds):
            place = number % len(titles)
            for title in titles[place:] + titles[:place]:
                held[title].append(take_turn(programs[title], files[title], turn[title]))
        processes, stamps = {}, {}
        for title in titles:
            processes[title], stamps[title] = clock.read(files[title])
        memory = {title: peak_memory(process) for title, process in processes.items()}
    finally:
        for program in programs.values():
            program.kill()
    row = {"workload": name, "precision": precision, "unit": load(str(folder / "recipe.yaml")).unit, "data": data}
    row |= {"turn": turn, "rates": {title: [rate(stamps[title], part) for part in held[title]] for title in titles}}
    row |= {"memory": memory, "to_loss": None, "chosen": read_choices(programs["ours"].log.read_text())}
    if workload.to_loss:
        learners = [title for title in titles if title != "floor"]
        turns = {title: programs[title].turns for title in learners}
        row["to_loss"] = times_to_loss({title: stamps[title] for title in learners}, turns)
    return row


def main() -> None:
    parser = harness.flags("bench", __doc__, rounds=9, precisions=True, threads=True)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, help="workloads [all whose files are given]")
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS, help="beside ours")
    parser.add_argument("--reviews", type=Path, help="labelled film reviews (docs/finetuning.md), for workload reviews")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of github.com/karpathy/nanoGPT, for shakespeare")
    parser.add_argument("--shakespeare", type=Path, help="tiny Shakespeare, for shakespeare")
    arguments = parser.parse_args()
    possible = [
        name for name, workload in WORKLOADS.items() if all(getattr(arguments, flag) for flag in workload.needs)
    ]
    names = arguments.only or possible
    if missing := set(names) - set(possible):
        parser.error("; ".join(f"{name} needs --{' and --'.join(WORKLOADS[name].needs)}" for name in sorted(missing)))
    paths = {flag: getattr(arguments, flag) for flag in ("reviews", "nanogpt", "shakespeare")}
    if missing := [
        f"--{flag} {path}: no such file or folder" for flag, path in paths.items() if path and not path.exists()
    ]:
        parser.error("; ".join(missing))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that stopped programs do not stay behind
    rows = harness.read_other_rows(arguments.output, "rows", "workload", [])
    words = ["python", "benchmarks/bench.py", *(Path(word).name for word in sys.argv[1:])]
    about = harness.about(" ".join(words), ("torch", "transformers", "accelerate", "lightning"), arguments.threads)
    origin = {"command": about["command"], "machine": harness.provenance(about)}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_data(work, arguments)
        for name in names:
            for precision in (p for p in WORKLOADS[name].precisions if p in arguments.precisions):
                titles = [title for title in WORKLOADS[name].programs if title == "ours" or title in arguments.programs]
                row = measure(name, precision, titles, arguments.rounds, work, arguments.threads)
                row |= origin
                rows = [old for old in rows if (old["workload"], old["precision"]) != (name, precision)] + [row]
                rows.sort(key=lambda row: (list(WORKLOADS).index(row["workload"]), row["precision"] != "no"))
                results = {"rows": rows}
                harness.write(arguments.output, results, markdown(results), is_last=False)
                draw(rows, arguments.output.with_suffix(".png"))
                print(markdown({"rows": [row]}), file=sys.stderr)
    print(markdown({"rows": rows}))


# ---------------------------------------------------------------------------------------------------------------------
# What is written


def ratios(row: dict[str, Any], title: str) -> list[float]:
    """Divide our rate by the other's, in each round."""
    return harness.ratios(row["rates"]["ours"], row["rates"][title])


def list_peers(rows: list[dict]) -> list[str]:
    """List the programs beside ours, in the order of `PROGRAMS`."""
    return [title for title in PROGRAMS if title != "ours" and any(title in row["rates"] for row in rows)]


def markdown(results: dict) -> str:
    rows = results["rows"]
    peers, heads = list_peers(rows), ["workload", "precision"]
    speed, memory, choices, data, to_loss = [], [], [], [], []
    for row in rows:
        labels = [row["workload"], row["precision"]]
        cells = [spread(ratios(row, title), ".2f") if title in row["rates"] else "-" for title in peers]
        form = ",.0f" if max(row["rates"]["ours"]) >= 100 else ".1f"
        speed.append([*labels, f"{spread(row['rates']['ours'], form)} {row['unit']}s", *cells])
        cells = [f"{row['memory'][title]:.2f}" if title in row["memory"] else "-" for title in ("ours", *peers)]
        memory.append([*labels, *cells])
        if row.get("chosen"):
            choices.append([*labels, *(row["chosen"].get(part, "-") for part in ("kernels", "micro-batches"))])
        if row["to_loss"]:
            by_title = row["to_loss"]["programs"]
            cells = [_to_loss(by_title[title]) if title in by_title else "-" for title in ("ours", *peers)]
            to_loss.append([*labels, f"{row['to_loss']['loss']:.3f}", *cells])
        described = [row["workload"], _data(row["data"])]
        data += [described] if described not in data else []
    commands = dict.fromkeys(f"`{row['command']}`: {row['machine']}" for row in rows)
    num_rounds = " or ".join(map(str, sorted({len(row["rates"]["ours"]) for row in rows})))
    text = (
        "Tokens without padding, or images, per second; ours / the other's, above 1 where ours is faster. Medians (smallest to "
        f"largest) of {num_rounds} rounds.\n\n"
        f"{table([*heads, 'ours, per second', *(f'ours / {title}' for title in peers)], speed)}\n"
        "Largest resident memory of the process that trains, GB:\n\n"
        f"{table([*heads, 'ours', *peers], memory)}\n"
    )
    if to_loss:
        text += (
            f"Seconds until the mean loss of {WINDOW} steps fell to a value that all reached: from the start of the process "
            "(from its first step; steps). One run, one seed:\n\n"
            f"{table([*heads, 'loss', 'ours', *peers], to_loss)}\n"
        )
    if choices:
        choice_heads = [*heads, "kernels", "micro-batches, where smaller than what fits"]
        text += f"What `--speed auto` took, in the runs that recorded it:\n\n{table(choice_heads, choices)}\n"
    text += f"Data:\n\n{table('workload | samples', data)}\n{REMARKS}\n"
    text += "".join(f"{line}\n" for line in commands)
    return harness.page("Training speed beside other programs", "bench.py", {"command": "make bench"}, text)


def _to_loss(result: dict[str, float]) -> str:
    return f"{result['seconds']:.0f} ({result['training']:.0f}; {result['steps']})"


def _data(data: dict[str, Any]) -> str:
    if "mean_length" not in data:
        return f"{data['samples']:,}"
    return (
        f"{data['samples']:,} of {data['mean_length']:.0f} tokens in the mean, {data['longest']:.0%} of the greatest length, "
        f"{data['padding']:.0%} padding in a random batch; tokenizer of {data['pieces']:,} entries"
        + (
            f"; products of transformers' model without any padding / of ours: {data['products']:.2f}"
            if data["products"]
            else ""
        )
    )


def draw(rows: list[dict], file: Path) -> None:
    """Draw ratios as bars, a group per workload and precision, with their smallest and largest."""
    from matplotlib.figure import Figure

    peers = list_peers(rows)
    figure = Figure(figsize=(max(9, 1.1 * len(rows)), 5), dpi=120, layout="constrained")
    axes = figure.add_subplot(ylabel="real tokens (images) per second, ours / other")
    for number, title in enumerate(peers):
        places = [place for place, row in enumerate(rows) if title in row["rates"]]
        groups = [ratios(rows[place], title) for place in places]
        middle = [statistics.median(group) for group in groups]
        spread = [[m - min(group) for m, group in zip(middle, groups, strict=True)]]
        spread += [[max(group) - m for m, group in zip(middle, groups, strict=True)]]
        centres = [place + 0.8 * (number + 0.5) / len(peers) - 0.4 for place in places]
        axes.bar(centres, middle, 0.8 / len(peers), yerr=spread, label=title, error_kw={"lw": 0.8})
    axes.axhline(1, color="black", lw=0.8)
    names = [f"{row['workload']}\n{row['precision']}" for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=30, ha="right", fontsize=8)
    figure.legend(fontsize=8, ncols=len(peers), loc="outside upper center")
    figure.savefig(file)


if __name__ == "__main__":
    main()
