"""Accelerate's example for samples of variable size, gradient_accumulation_for_autoregressive_models.py.

Its collate function shifts the labels, and the model shifts them once more. Left out: clipping, the schedule, the log.
"""

import contextlib
import math

import torch
from accelerate import Accelerator
from tasks import collate, flags, task
from torch.utils.data import DataLoader

name, b, k = flags()
accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
model, samples = task(name)


def collate_fn(examples):
    batch = collate(examples)
    if name == "gpt2":
        batch["labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return batch


optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(samples, batch_size=b, collate_fn=collate_fn)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

batches = iter(loader)
remainder = len(loader) % k or k
num_updates = math.ceil(len(loader) / k)
for update in range(num_updates):
    window = [next(batches) for _ in range(k if update != num_updates - 1 else remainder)]
    num_items_in_batch = sum((batch["labels"] != -100).sum() for batch in window)
    num_items_in_batch = accelerator.gather(num_items_in_batch).sum().item()
    for i, batch in enumerate(window):
        is_last = i == len(window) - 1
        with contextlib.nullcontext() if is_last or accelerator.num_processes == 1 else model.no_sync():
            loss = model(**batch, num_items_in_batch=num_items_in_batch).loss
            # Accelerate divides by k, DDP by the number of processes, the model already by num_items_in_batch.
            accelerator.backward(loss * k * accelerator.num_processes)
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
