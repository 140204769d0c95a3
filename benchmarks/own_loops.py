"""How fast a loop is with the exact step, beside the same loop before.

    make bench NAME=own_loops

Both compute the same batches: texts of one length, so that no cut saves padding. What an exact trainer measures before its
first step is in the epoch that warms up. Each is a process of one thread, and they take turns after each optimizer step, so
that a machine whose speed changes is the same for both. In each round both are started anew, for the same program is now and
then some percent slower all its life. What counts is the median of the epochs' ratios, in CPU seconds, which other work on the
machine disturbs little.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "CI": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

import harness
import torch
import trl
import trl_runs
from accelerate import Accelerator
from datasets import Dataset
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from samestep import ExactTrainer, exact, exact_steps, exact_windows

LENGTH, VOCAB, B, K, NUM_SAMPLES = 64, 2000, 4, 4, 128
STEPS = NUM_SAMPLES // (B * K)  # of an epoch
WARM_UP, EPOCHS = 1, 4  # of a round
TEXTS = list(torch.randint(1, VOCAB, (NUM_SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0)))
Makers: TypeAlias = list[Callable[[], Callable[[], None]]]


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


def make_arguments(config: type[TrainingArguments], **more: Any) -> Any:
    """Make the arguments of a trainer, of an epoch that saves and logs nothing."""
    return config(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=B,
        gradient_accumulation_steps=K,
        num_train_epochs=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **more,
    )


def bert(head: type[PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    return head(BertConfig(vocab_size=VOCAB, **sizes))


def trainer(kind: type[Trainer], build: Callable[[], Any], collate: Callable[[list], dict]) -> Callable[[], None]:
    """Make an epoch of a Trainer."""
    model = build()
    return kind(model, make_arguments(TrainingArguments), data_collator=collate, train_dataset=TEXTS).train


def tune_on_texts(change: Callable[[type], type]) -> Callable[[], None]:
    """Make an epoch of TRL's SFTTrainer, as `change` makes it."""
    data = Dataset.from_dict({"input_ids": [(text % 20 + 3).tolist() for text in TEXTS]})
    arguments, tokenizer = make_arguments(trl.SFTConfig), trl_runs.make_tokenizer()
    return change(trl.SFTTrainer)(gpt2(), arguments, train_dataset=data, processing_class=tokenizer).train


def tune_on_pairs(change: Callable[[type], type]) -> Callable[[], None]:
    """Make an epoch of TRL's DPOTrainer, as `change` makes it."""
    words = [[trl_runs.WORDS[int(token) % 20] for token in text] for text in TEXTS]
    rows = [{"prompt": row[:16], "chosen": row[16:40], "rejected": row[40:]} for row in words]
    data = Dataset.from_list([{key: " ".join(part) + " " for key, part in row.items()} for row in rows])
    arguments, tokenizer = make_arguments(trl.DPOConfig), trl_runs.make_tokenizer()
    more = {"ref_model": gpt2(), "train_dataset": data, "processing_class": tokenizer}
    return change(trl.DPOTrainer)(gpt2(), args=arguments, **more).train


def as_it_is(trainer: type) -> type:
    return trainer


def answer(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    batch = collate(samples)
    places = batch.pop("labels")[:, :2] % LENGTH
    return batch | {"start_positions": places[:, 0], "end_positions": places[:, 1]}


def classify(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return (batch := collate(samples)) | {"labels": batch["labels"][:, 0] % 2}


def trainers(build: Callable[[], Any], collate: Callable[[list], dict]) -> Makers:
    return [partial(trainer, kind, build, collate) for kind in (Trainer, ExactTrainer)]


def bert_trainers(collate: Callable[[list], dict], head: type[PreTrainedModel]) -> Makers:
    return trainers(partial(bert, head), collate)


CASES: dict[str, Makers] = {
    f"{kind} beside Accelerate's loop, GPT-2": [partial(accelerate_loop, "before"), partial(accelerate_loop, kind)]
    for kind in ("exact_windows", "exact_steps")
} | {
    "ExactTrainer beside Trainer, BERT's two terms": bert_trainers(pair, BertForPreTraining),
    "ExactTrainer beside Trainer, BERT, classes": bert_trainers(classify, BertForSequenceClassification),
    "ExactTrainer beside Trainer, BERT, answers": bert_trainers(answer, BertForQuestionAnswering),
    "ExactTrainer beside Trainer, GPT-2": trainers(gpt2, collate),
    "exact(SFTTrainer) beside SFTTrainer, GPT-2": [partial(tune_on_texts, how) for how in (as_it_is, exact)],
    "exact(DPOTrainer) beside DPOTrainer, GPT-2": [partial(tune_on_pairs, how) for how in (as_it_is, exact)],
}
"""Name -> what makes an epoch of the loop before, and of the exact one."""


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def take_part(name: str, place: int, baton: Connection) -> None:
    """Train without an end, as the loop of a case at a place; run while this process has the baton, for a step.

    Each step sends its CPU seconds. What an epoch does before its first step is in that step's.
    """
    torch.set_num_threads(1)
    epoch, started = CASES[name][place](), [0.0]

    def hand_over(*_: Any) -> None:
        baton.send(time.process_time() - started[0])
        baton.recv()
        started[0] = time.process_time()

    register_optimizer_step_post_hook(hand_over)
    baton.recv()
    while True:
        epoch()


def measure(name: str) -> dict[str, list[float]]:
    """Measure the CPU seconds of the epochs of both loops of a case, which take turns after each step."""
    context, seconds = multiprocessing.get_context("spawn"), {"before": [], "after": []}
    ends = {side: context.Pipe() for side in seconds}
    programs = [
        context.Process(target=take_part, args=(name, place, theirs), daemon=True)
        for place, (_, theirs) in enumerate(ends.values())
    ]
    for program in programs:
        program.start()
    for _, theirs in ends.values():
        theirs.close()  # so that a program that has failed ends its pipe
    for _ in range((WARM_UP + EPOCHS) * STEPS):
        for side, (ours, _) in ends.items():
            ours.send("step")
            seconds[side].append(ours.recv())
    for program in programs:
        program.kill()
    first = WARM_UP * STEPS
    return {
        side: [sum(steps[place : place + STEPS]) for place in range(first, len(steps), STEPS)]
        for side, steps in seconds.items()
    }


def main() -> None:
    arguments = harness.flags("own_loops", __doc__, rounds=4, only=CASES).parse_args()
    rows = harness.read_other_rows(arguments.output, "rows", "loop", arguments.only)
    for name in arguments.only:
        rounds = [measure(name) for _ in range(arguments.rounds)]
        times = {side: [second for times in rounds for second in times[side]] for side in rounds[0]}
        ratios = [slow / fast for slow, fast in zip(times["before"], times["after"], strict=True)]
        rows.append({"loop": name, "seconds": times, "ratios": ratios})
    rows.sort(key=lambda row: list(CASES).index(row["loop"]))
    about = harness.about("make bench NAME=own_loops", ("torch", "transformers", "accelerate"), 1)
    results = {"about": about, "rows": rows}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict) -> str:
    rows = [[row["loop"], harness.spread(row["ratios"], ".3f")] for row in results["rows"]]
    num_epochs = len(results["rows"][0]["ratios"])
    return harness.page(
        "Loops of one's own: what the exact step costs",
        "own_loops.py",
        results["about"],
        f"{harness.table('loop | speed, of the loop before', rows)}\n"
        f"CPU seconds before / after of the same batches, 1 thread: median (smallest to largest) of {num_epochs} epochs of "
        f"{STEPS} steps, {EPOCHS} after each start, which took turns step by step. "
        "When both loops ran in one process, DPO's ratio was 1.02: why it is larger here is not known.\n",
    )


if __name__ == "__main__":
    main()
