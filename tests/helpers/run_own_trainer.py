"""Trainings by `ExactTrainer` on the processes that forked.Server starts: what each leaves, in RANK.pt."""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
)

from samestep import ExactTrainer, PackedLoss

SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
NUM_SAMPLES = 11


def bert(head: str, **more):
    config = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **{"num_labels": 3} | more)
    return getattr(transformers, head)(config)


def gpt2(**more):
    config = GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.update(more)
    return GPT2LMHeadModel(config)


def t5():
    config = T5Config(
        vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, pad_token_id=0
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def draw(kind: str, number: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(1, 4 + number * 5 % 8) * (number + 2) % 28 + 2
    labels = {
        "tokens": ids % 3,
        "words": ids.where(ids % 2 == number % 2, -100),
        "text": ids,
        "class": torch.tensor(number % 3),
        "number": torch.tensor(number / 4),
        "several": torch.arange(3) % (number % 2 + 1) * 1.0,
    }[kind]
    return {"input_ids": ids, "labels": labels, "next_sentence_label": torch.tensor(number % 2)}


def collate(samples):
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = [sample["labels"] for sample in samples]
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    is_ragged = labels[0].ndim and not labels[0].is_floating_point()
    batch["labels"] = pad_sequence(labels, True, -100) if is_ragged else torch.stack(labels)
    if "next_sentence_label" in samples[0]:
        batch["next_sentence_label"] = torch.stack([sample["next_sentence_label"] for sample in samples])
    return batch


HEADS = {
    "causal": (gpt2, "text"),
    "masked": (lambda: bert("BertForMaskedLM"), "words"),
    "seq2seq": (t5, "text"),
    "two terms": (lambda: bert("BertForPreTraining"), "words"),
    "tokens": (lambda: bert("BertForTokenClassification"), "tokens"),
    "classes": (lambda: bert("BertForSequenceClassification"), "class"),
    "regression": (lambda: bert("BertForSequenceClassification", num_labels=1), "number"),
    "several classes": (
        lambda: bert("BertForSequenceClassification", problem_type="multi_label_classification"),
        "several",
    ),
}


class Gradients(TrainerCallback):
    """Keeps the gradient of every step, before it is clipped or used."""

    def __init__(self):
        self.all = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        self.all.append(torch.cat([gradient.flatten() for gradient in whole]))


def make_arguments(folder, **more):
    """Make arguments of one epoch on a CPU, in the order of the samples."""
    options = {
        "num_train_epochs": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    return TrainingArguments(output_dir=str(folder), **options | more)


def evaluations(folder, head, sizes, **more):
    """Evaluate a model in batches of several sizes."""
    build, kind = HEADS[head]
    torch.manual_seed(0)
    model, data = build(), [draw(kind, number) for number in range(NUM_SAMPLES)]
    losses = []
    for size in sizes:
        arguments = make_arguments(folder, per_device_eval_batch_size=size, **more)
        losses.append(ExactTrainer(model, arguments, data_collator=collate, eval_dataset=data).evaluate()["eval_loss"])
    return losses


def weighted(model, batch):
    """Compute a cross entropy with class weights that are less than 1 together."""
    weight = torch.linspace(0.001, 0.01, 30)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    sums = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), weight, reduction="sum")
    return sums, count_weights(batch)


def count_weights(batch):
    labels = batch["labels"][:, 1:]
    return torch.linspace(0.001, 0.01, 30).double()[labels[labels != -100]].sum()


def first_gradients(folder, num_processes, **more):
    """Take a step of 8 samples and one of 3."""
    torch.manual_seed(0)
    gradients = Gradients()
    model = gpt2()
    options = {"loss": more.pop("loss", None), "targets": more.pop("targets", None)}
    if more.pop("packed", False):
        options["loss"] = PackedLoss(model)
    arguments = make_arguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=4 // num_processes, **more
    )
    data = [draw("text", number) for number in range(NUM_SAMPLES)]
    callbacks = [gradients]
    ExactTrainer(model, arguments, data_collator=collate, train_dataset=data, callbacks=callbacks, **options).train()
    assert len(gradients.all) == 2
    return torch.cat(gradients.all)


def main(folder: str) -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    own = Path(folder) / f"files{rank}"
    synchronised = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    results = {
        "step": first_gradients(own, size),
        "weights": first_gradients(own, size, loss=weighted, targets=count_weights),
        "weights without targets": first_gradients(own, size, loss=weighted),
        "synchronised": first_gradients(own, size, **synchronised),
        "not even": first_gradients(own, size, accelerator_config={"even_batches": False}),
        "packed": first_gradients(own, size, packed=True),
        "random": first_gradients(own, size, train_sampling_strategy="random"),
    }
    for head in HEADS:
        results[f"evaluation, {head}"] = torch.tensor(evaluations(own, head, (1, 2, 4, 11)))
    torch.save(results, Path(folder) / f"{rank}.pt")
    os._exit(0)
