"""Exact: Trainer's compute_loss_func sums over the words of ragged texts, and divides by num_items_in_batch.
The model is an own module without a loss; weights are float64, rare tags count more, and the count is that of all words."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind

import argparse
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

TAGS, WORDS = 5, 70
WEIGHTS = torch.tensor([0.5, 1.0, 1.0, 2.0, 4.0], dtype=torch.float64)


class Tagger(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=0)
        self.lstm = nn.LSTM(width, 16, batch_first=True)
        self.out = nn.Linear(16, TAGS)

    def forward(self, input_ids, labels=None):
        return {"logits": self.out(self.lstm(self.embed(input_ids))[0])}


def weighted_sum(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"].flatten(0, 1)
    total = F.cross_entropy(logits, labels.flatten(), WEIGHTS, ignore_index=-100, reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def texts(n=80):
    generator = torch.Generator().manual_seed(6)
    for length in torch.randint(1, 16, (n,), generator=generator).tolist():
        ids = torch.randint(1, WORDS, (length,), generator=generator)
        yield {"input_ids": ids, "labels": (ids + ids.cumsum(0)) % TAGS}


def collate(samples):
    return {
        "input_ids": pad_sequence([s["input_ids"] for s in samples], batch_first=True),
        "labels": pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=-100),
    }


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
layout = parser.parse_args()
torch.manual_seed(0)
model = Tagger().double()
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        output_dir=folder,
        num_train_epochs=2,
        learning_rate=0.01,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        max_grad_norm=1.0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="epoch",
        disable_tqdm=True,
        **vars(layout),
    )
    trainer = Trainer(
        model=model, args=args, train_dataset=list(texts()), data_collator=collate, compute_loss_func=weighted_sum
    )
    trainer.train()
