"""nanoGPT's loop: k batches are fetched for every step, and each loss is divided by k.

nanoGPT draws batches at random without an end. Here they come in the order of the samples, whole steps of them.
"""

import torch
from tasks import collate, flags, task
from torch.utils.data import DataLoader

name, b, k = flags()
model, samples = task(name)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = iter(DataLoader(samples, batch_size=b, collate_fn=collate))

for _ in range(len(samples) // (b * k)):
    for _micro_step in range(k):
        loss = model(**next(batches)).loss
        loss = loss / k
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
