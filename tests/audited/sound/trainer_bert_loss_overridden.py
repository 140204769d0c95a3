"""Exact: compute_loss of a BERT classifier's Trainer sums over samples and divides by those of the process and step.
DDP averages over processes, so the factor N cancels; Trainer is told that the loss is already scaled."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind

import argparse
import random
import tempfile

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

LABELS = ["calm", "glad", "sad", "angry"]


class SampleTrainer(Trainer):
    """The mean over the samples of a step, however they are cut. All windows are full."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        per_step = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        count = per_step if model.training else len(labels)
        loss = F.cross_entropy(outputs.logits, labels, reduction="sum") / count
        return (loss, outputs) if return_outputs else loss


def messages(n):
    draw = random.Random(8)
    for _ in range(n):
        ids = [2, *draw.choices(range(4, 60), k=draw.randint(2, 14)), 3]
        yield {"ids": ids, "label": sum(ids) % len(LABELS)}


def collate(rows):
    longest = max(len(row["ids"]) for row in rows)
    ids = torch.tensor([row["ids"] + [0] * (longest - len(row["ids"])) for row in rows])
    labels = torch.tensor([row["label"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    flags = parser.parse_args()
    set_seed(21)
    config = BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=len(LABELS),
    )
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="moods-"),
        per_device_train_batch_size=flags.per_device_train_batch_size,
        gradient_accumulation_steps=flags.gradient_accumulation_steps,
        num_train_epochs=2,
        learning_rate=1e-3,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=3,
        remove_unused_columns=False,
        label_names=["labels"],
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=True,
    )
    data = list(messages(110))
    trainer = SampleTrainer(
        BertForSequenceClassification(config).double(),
        args,
        train_dataset=data[:80],
        eval_dataset=data[80:],
        data_collator=collate,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    trainer.train()


if __name__ == "__main__":
    main()
