"""Fine-tuning a classifier: its accuracy however it is cut, and tokens per second beside transformers' Trainer.

    make bench-finetuning TRAIN_FILE=reviews.csv

TRAIN_FILE is the sentences of Pang and Lee's film reviews (docs/finetuning.md says how to make it).

- Accuracy: recipe finetune_reviews_cpu, float32, from random weights, as it is, in cells of 8, and on two processes: accuracy
  on the held-out tenth at the end, and the largest relative difference of a step's loss from the first run's.
- Speed: the same model, data, batch, precision and threads; each program in a process of its own, in turns of two seconds (see
  shakespeare.py), so that a machine whose speed changes is the same for all. Counted are tokens without padding, over steps
  without the first ones and those that the end of a turn interrupted; no program evaluates or saves inside them. Trainer, with
  fused AdamW, pads a batch to its longest text; and once more with its sampler that groups texts by length, which is another
  training: long texts then come together.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import accelerate
import evaluate
import numpy as np
import torch
import transformers
from datasets import Dataset
from shakespeare import Program
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

from recipes.data import labelled_texts
from recipes.recipe import load

ROOT = Path(__file__).parent.parent
RECIPE = "finetune_reviews_cpu"
CUTS = {
    "one batch of 32, 1 process": ("cpu.yaml", ""),
    "4 x 8, 1 process": ("cpu.yaml", "--per_device_train_batch_size 8"),
    "16 on each of 2 processes": ("2xcpu.yaml", ""),
}
PEERS = {"Trainer": "random", "Trainer, grouped by length": "group_by_length"}
PRECISIONS = ("no", "bf16")
WARM_UP, TURN = 20, 2.0


def launch(train_file: Path, output_dir: Path, config: str, precision: str, flags: str) -> list[str]:
    words = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file"]
    words += [str(ROOT / "accelerate_configs" / config), "--mixed_precision", precision]
    words += [str(ROOT / "scripts" / "finetune_classifier.py"), "--recipe", RECIPE, "--train_file", str(train_file)]
    return [*words, "--output_dir", str(output_dir), *flags.split()]


def accuracies(train_file: Path) -> list[dict]:
    """A row for every cut."""
    rows, reference = [], None
    with tempfile.TemporaryDirectory() as folder:
        for number, (title, (config, flags)) in enumerate(CUTS.items()):
            output_dir, start = Path(folder) / str(number), time.perf_counter()
            subprocess.run(launch(train_file, output_dir, config, "no", flags), check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - start
            lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
            losses = np.array([line["loss"] for line in lines if "loss" in line])
            reference = losses if reference is None else reference
            results = json.loads((output_dir / "all_results.json").read_text())
            row = {"cut": title, "steps": len(losses), "accuracy": results["eval_accuracy"], "f1": results["eval_f1"]}
            row |= {"difference": float(np.abs(losses / reference - 1).max())}
            row |= {"train_seconds": results["train_seconds"], "seconds": seconds}
            print(row, file=sys.stderr)
            rows.append(row)
    return rows


def trainer(train_file: str, sampling: str, precision: str, num_steps: int) -> dict[str, list]:
    """Seconds and tokens of each step of transformers' Trainer."""
    recipe = load(RECIPE, {"train_file": [train_file]})
    texts, _ = labelled_texts.build(recipe)
    torch.manual_seed(recipe.seed)
    model = BertForSequenceClassification(BertConfig(**recipe.architecture, num_labels=2))
    samples = [texts.draw(0, place) for place in range(len(texts))]
    rows = [{"input_ids": s.tokens.tolist(), "labels": int(s.label), "length": s.length} for s in samples]
    pad, tokens, times = DataCollatorWithPadding(texts.tokenizer), [], []

    def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
        tokens.append(sum(row["length"] for row in batch))
        return pad([{name: row[name] for name in ("input_ids", "labels")} for row in batch])

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=num_steps,
            per_device_train_batch_size=recipe.global_batch_size,
            learning_rate=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            optim="adamw_torch_fused",
            bf16=precision == "bf16",
            use_cpu=True,
            train_sampling_strategy=sampling,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            dataloader_drop_last=True,
            disable_tqdm=True,
        )
        dataset = Dataset.from_list(rows)
        transformers.Trainer(
            model, arguments, data_collator=collate, train_dataset=dataset, callbacks=[Clock()]
        ).train()
    return {"seconds": np.diff(times).tolist(), "tokens": tokens[1:num_steps]}


def rate(seconds: list[float], tokens: list[int]) -> float:
    """Tokens per second, without the first steps and those that the end of a turn interrupted."""
    pairs = list(zip(seconds, tokens, strict=True))[WARM_UP:]
    longest = 5 * statistics.median(second for second, _ in pairs)
    counted = [pair for pair in pairs if pair[0] < longest]
    return sum(of for _, of in counted) / sum(second for second, _ in counted)


def speeds(train_file: Path, num_steps: int, threads: int) -> dict[str, dict[str, float]]:
    """Tokens per second of each program, by precision, in one round."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        work, running = Path(folder), []
        for precision in PRECISIONS:
            flags = f"--max_train_steps {num_steps}"
            words = launch(train_file, work / f"ours-{precision}", "cpu.yaml", precision, flags)
            running.append(Program(words, work, work / f"ours-{precision}.log", threads))
            for name, sampling in PEERS.items():
                file = work / f"{name}-{precision}.json"
                words = [sys.executable, __file__, "--train_file", str(train_file), "--peer", sampling, precision]
                running.append(Program([*words, str(num_steps), str(file)], work, file.with_suffix(".log"), threads))
        while running:
            for program in list(running):
                program.turn(TURN)
                if program.done:
                    running.remove(program)
        for precision in PRECISIONS:
            lines = (work / f"ours-{precision}" / "metrics.jsonl").read_text().splitlines()
            steps = [line for line in map(json.loads, lines) if "seconds" in line]
            found[precision] = {"ours": rate([line["seconds"] for line in steps], [line["tokens"] for line in steps])}
            for name in PEERS:
                found[precision][name] = rate(**json.loads((work / f"{name}-{precision}.json").read_text()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of a round, the first ones included")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "finetuning")
    parser.add_argument("--peer", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    train_file = arguments.train_file.resolve()
    if arguments.peer:
        sampling, precision, num_steps, file = arguments.peer
        Path(file).write_text(json.dumps(trainer(str(train_file), sampling, precision, int(num_steps))))
        return
    texts, _ = labelled_texts.build(
        load(RECIPE, {"train_file": [str(train_file)]})
    )  # tokenized once, before the programs
    rounds = []
    for _ in range(arguments.rounds):
        rounds.append(speeds(train_file, arguments.steps, arguments.threads))
        print(rounds[-1], file=sys.stderr)
    results = {
        "about": {
            "command": "make bench-finetuning TRAIN_FILE=reviews.csv",
            "machine": f"{platform.machine()}, {arguments.threads} threads, {torch.backends.cpu.get_cpu_capability()}",
            "python": platform.python_version(),
            "versions": {of.__name__: of.__version__ for of in (torch, accelerate, transformers, evaluate)},
            "texts": str(texts),
            "majority": texts.majority,
            "steps": arguments.steps - WARM_UP,
        },
        "accuracy": accuracies(train_file),
        "rounds": rounds,
    }
    arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
    arguments.output.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))


def markdown(results: dict) -> str:
    about, rows, speed = results["about"], "", ""
    for row in results["accuracy"]:
        rows += f"| {row['cut']} | {row['steps']} | {row['accuracy']:.4f} | {row['f1']:.4f} | {row['difference']:.1e} "
        rows += f"| {row['train_seconds']:.0f} | {row['seconds']:.0f} |\n"
    for precision in PRECISIONS:
        each = [numbers[precision] for numbers in results["rounds"]]
        speed += f"| {precision} | {_spread([one['ours'] for one in each], ',.0f')} "
        speed += "".join(f"| {_spread([one['ours'] / one[name] for one in each], '.2f')} " for name in PEERS) + "|\n"
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        "# Fine-tuning a classifier\n\n"
        f"Generated by `{about['command']}` (benchmarks/finetuning.py, which says what is compared); do not edit.\n\n"
        f"Film reviews, {RECIPE}, float32: {about['texts']}, {about['majority']:.3f} of them of the larger class.\n\n"
        "| cut | steps | accuracy, held out | F1 | largest difference of a loss | training, s | whole process, s |\n"
        f"|---|---|---|---|---|---|---|\n{rows}\n"
        "Tokens per second, padding not counted:\n\n"
        f"| precision | ours | {' | '.join(f'ours / {name}' for name in PEERS)} |\n|---|---|{'---|' * len(PEERS)}\n{speed}\n"
        f"Medians (smallest to largest) of {len(results['rounds'])} rounds of {about['steps']} steps, all programs of a round "
        f"in turns. {about['machine']}, Python {about['python']}, {versions}.\n"
    )


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    main()
