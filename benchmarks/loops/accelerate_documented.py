"""Accelerate's guide to gradient accumulation, "The finished code": prepare and accumulate."""

import torch
from accelerate import Accelerator
from tasks import collate, flags, task
from torch.utils.data import DataLoader

name, b, k = flags()
accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
model, samples = task(name)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(samples, batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
