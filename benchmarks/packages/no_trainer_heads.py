"""Loops in the style of transformers' examples run_*_no_trainer, beside no_trainer.py, one task of each kind.

Accelerate as those examples use it, our own code: github.com/huggingface/transformers, examples/pytorch. Those of tokens and of
translation divide by k themselves and step where step % k == 0; the others are within accelerator.accumulate. Left out: groups
for weight decay, evaluation, tracking, the limit on steps.
"""

import math
import sys

import torch
from accelerate import Accelerator
from heads import build
from setup import RATE, arguments
from torch.utils.data import DataLoader
from transformers import get_scheduler

TASKS = {
    "ner": "ner",
    "translation": "bart",
    "summarization": "t5",
    "qa": "qa",
    "swag": "swag",
    "image_classification": "image_classification",
    "semantic_segmentation": "segmentation",
    "mim": "mim",
}
mode = sys.argv.pop(1)
flags = arguments()
b, k = flags["per_device_train_batch_size"], flags["gradient_accumulation_steps"]
is_by_hand = mode in ("ner", "translation")
model, data, collator = build(TASKS[mode])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if is_by_hand else k)
loader = DataLoader(data, shuffle=True, collate_fn=collator, batch_size=b)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
num_steps = math.ceil(len(loader) / k)
scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=num_steps)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

model.train()
for step, batch in enumerate(loader):
    if is_by_hand:
        accelerator.backward(model(**batch).loss / k)
        if step % k == 0 or step == len(loader) - 1:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        continue
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
