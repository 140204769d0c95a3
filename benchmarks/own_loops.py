"""How fast a loop is with the exact step, beside the same loop before: python benchmarks/own_loops.py

Both compute the same batches: texts of one length, so that no cut saves padding. They take turns, round after round; what
counts is the median of the rounds' ratios, in CPU seconds of one thread, which other work on the machine disturbs little.
Writes results/own_loops.json and own_loops.md.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from samestep import ExactTrainer, exact_steps, exact_windows

OUTPUT = Path(__file__).parent / "results" / "own_loops"
LENGTH, VOCAB, B, K, NUM_SAMPLES = 64, 2000, 4, 4, 128
TEXTS = list(torch.randint(1, VOCAB, (NUM_SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0)))


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.stack(samples)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def pair(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    batch = collate(samples)
    labels = batch["labels"].masked_fill(batch["labels"] % 7 != 0, -100)
    return batch | {"labels": labels, "next_sentence_label": batch["input_ids"][:, 0] % 2}


def count(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4))


def accelerate_loop(kind: str) -> Callable[[], None]:
    """An epoch of Accelerate's documented loop, of exact_windows or of exact_steps."""
    accelerator = Accelerator(gradient_accumulation_steps=K if kind == "before" else 1)
    model = gpt2()
    loader = DataLoader(TEXTS, batch_size=B, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader)

    def micro_step(batch: dict[str, torch.Tensor], loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model(**batch).loss))
            optimizer.step()
            optimizer.zero_grad()

    def before() -> None:
        accelerator.gradient_accumulation_steps = K  # one state for all accelerators of a process
        for batch in loader:
            micro_step(batch, lambda mean: mean)
        accelerator.gradient_accumulation_steps = 1

    def after() -> None:
        for step in steps():
            for batch in step:
                micro_step(batch, lambda mean, step=step, batch=batch: step.loss(mean * count(batch)))

    def steps() -> Iterator:
        if kind == "exact_windows":
            return exact_windows(accelerator, loader, gradient_accumulation_steps=K, targets=count)
        sizes = {"global_batch_size": B * K, "per_device_batch_size": B}
        return iter(exact_steps(accelerator, TEXTS, collate, **sizes, targets=count))

    accelerator.gradient_accumulation_steps = 1
    return before if kind == "before" else after


def trainer(kind: type[Trainer]) -> Callable[[], None]:
    """An epoch of a Trainer, on BERT's two terms."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    model = BertForPreTraining(BertConfig(vocab_size=VOCAB, **sizes))
    arguments = TrainingArguments(
        output_dir="/tmp/own_loops",
        per_device_train_batch_size=B,
        gradient_accumulation_steps=K,
        num_train_epochs=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    return kind(model, arguments, data_collator=pair, train_dataset=TEXTS).train


CASES = {
    "exact_windows beside Accelerate's loop, GPT-2": lambda: (
        accelerate_loop("before"),
        accelerate_loop("exact_windows"),
    ),
    "exact_steps beside Accelerate's loop, GPT-2": lambda: (accelerate_loop("before"), accelerate_loop("exact_steps")),
    "ExactTrainer beside Trainer, BERT's two terms": lambda: (trainer(Trainer), trainer(ExactTrainer)),
}


def seconds(epoch: Callable[[], None]) -> float:
    started = time.process_time()
    epoch()
    return time.process_time() - started


def measure(before: Callable[[], None], after: Callable[[], None], num_rounds: int) -> dict:
    """Ratios before / after of the CPU seconds of an epoch: above 1, the exact loop is faster."""
    before(), after()
    ratios, times = [], []
    for number in range(num_rounds):
        pair = [seconds(epoch) for epoch in ((before, after) if number % 2 == 0 else (after, before))]
        pair = pair if number % 2 == 0 else pair[::-1]
        ratios.append(pair[0] / pair[1])
        times.append(pair)
    return {"ratio": statistics.median(ratios), "ratios": ratios, "seconds": times}


def markdown(found: dict) -> str:
    about = found["about"]
    lines = [
        "# Loops of one's own: what the exact step costs",
        "",
        "Generated by `python benchmarks/own_loops.py`.",
        "",
    ]
    lines += ["| loop | speed, of the loop before | rounds from | to |", "|---|---|---|---|"]
    for row in found["rows"]:
        low, high = min(row["ratios"]), max(row["ratios"])
        lines.append(f"| {row['name']} | {row['ratio']:.3f} | {low:.3f} | {high:.3f} |")
    lines += [
        "",
        f"CPU seconds before / after, 1 thread, {about['rounds']} rounds in turns, {about['date']}, load "
        f"{about['load']:.1f} on {about['cores']} cores; {about['versions']}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    rows, loads = [], []
    for name, build in CASES.items():
        rows.append({"name": name} | measure(*build(), flags.rounds))
        loads.append(os.getloadavg()[0])
        print(f"{name}: {rows[-1]['ratio']:.3f}", flush=True)
    about = {"rounds": flags.rounds, "date": time.strftime("%Y-%m-%d"), "load": statistics.median(loads)}
    about["cores"] = os.cpu_count()
    about["versions"] = f"torch {torch.__version__}, Python {platform.python_version()}"
    found = {"about": about, "rows": rows}
    flags.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    flags.output.with_suffix(".md").write_text(markdown(found), encoding="utf-8")


if __name__ == "__main__":
    main()
