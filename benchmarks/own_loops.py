"""How fast a loop is with the exact step, beside the same loop before.

    make bench NAME=own_loops

Both compute the same batches: texts of one length, so that no cut saves padding. They take turns, round after round; what
counts is the median of the rounds' ratios, in CPU seconds of one thread, which other work on the machine disturbs little.
"""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}

import harness
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from samestep import ExactTrainer, exact_steps, exact_windows

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
    """Make an epoch of Accelerate's documented loop, of exact_windows or of exact_steps."""
    accelerator = Accelerator(gradient_accumulation_steps=K if kind == "before" else 1)
    model = gpt2()
    loader = DataLoader(TEXTS, batch_size=B, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader)

    def micro_step(batch: dict[str, torch.Tensor], loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model(**batch).loss))
            optimizer.step()
            optimizer.zero_grad()

    def plain_epoch() -> None:
        accelerator.gradient_accumulation_steps = K  # one state for all accelerators of a process
        for batch in loader:
            micro_step(batch, lambda mean: mean)
        accelerator.gradient_accumulation_steps = 1

    def exact_epoch() -> None:
        for step in steps():
            for batch in step:
                micro_step(batch, lambda mean, step=step, batch=batch: step.loss(mean * count(batch)))

    def steps() -> Iterator:
        if kind == "exact_windows":
            return iter(exact_windows(accelerator, loader, gradient_accumulation_steps=K, targets=count))
        sizes = {"global_batch_size": B * K, "per_device_batch_size": B}
        return iter(exact_steps(accelerator, TEXTS, collate, **sizes, targets=count))

    accelerator.gradient_accumulation_steps = 1
    return plain_epoch if kind == "before" else exact_epoch


def trainer(kind: type[Trainer]) -> Callable[[], None]:
    """Make an epoch of a Trainer, on BERT's two terms."""
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


def cpu_seconds(epoch: Callable[[], None]) -> float:
    started = time.process_time()
    epoch()
    return time.process_time() - started


def main() -> None:
    arguments = harness.flags("own_loops", __doc__, rounds=9, only=CASES).parse_args()
    torch.set_num_threads(1)
    rows = harness.read_other_rows(arguments.output, "rows", "loop", arguments.only)
    for name in arguments.only:
        plain, exact = CASES[name]()
        calls = {"before": partial(cpu_seconds, plain), "after": partial(cpu_seconds, exact)}
        times = harness.in_turns(calls, arguments.rounds, warm_up=1)
        ratios = [slow / fast for slow, fast in zip(times["before"], times["after"], strict=True)]
        rows.append({"loop": name, "seconds": times, "ratios": ratios})
    rows.sort(key=lambda row: list(CASES).index(row["loop"]))
    about = harness.about("make bench NAME=own_loops", ("torch", "transformers", "accelerate"), 1)
    results = {"about": about, "rows": rows}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict) -> str:
    rows = [[row["loop"], harness.spread(row["ratios"], ".3f")] for row in results["rows"]]
    num_rounds = len(results["rows"][0]["ratios"])
    return harness.page(
        "Loops of one's own: what the exact step costs",
        "own_loops.py",
        results["about"],
        f"{harness.table('loop | speed, of the loop before', rows)}\n"
        f"CPU seconds before / after of the same batches, 1 thread: median (smallest to largest) of {num_rounds} rounds, in "
        "turns.\n",
    )


if __name__ == "__main__":
    main()
