"""Accumulation by hand as it is widely copied: loss / k, and a step after every k-th micro-batch."""

import torch
from tasks import collate, flags, task
from torch.utils.data import DataLoader

name, b, k = flags()
model, samples = task(name)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(samples, batch_size=b, collate_fn=collate)

for i, batch in enumerate(loader):
    loss = model(**batch).loss
    loss = loss / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
