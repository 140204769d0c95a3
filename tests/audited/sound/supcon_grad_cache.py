"""Sound: GradCache for a supervised contrastive loss: embeddings of all micro-batches and processes first, the
loss of all 16 together, then every micro-batch again with the gradient of its embeddings."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 1
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")


def gather(tensor):
    if world == 1:
        return tensor
    everyone = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(everyone, tensor)
    return torch.cat(everyone)


def supcon(embeddings, labels, temperature=0.3):
    z = F.normalize(embeddings, dim=1)
    itself = torch.eye(len(z), dtype=torch.bool)
    log_p = (z @ z.T / temperature).masked_fill(itself, -1e9).log_softmax(1)
    positive = (labels[:, None] == labels) & ~itself
    return -(log_p * positive).sum(1).div(positive.sum(1).clamp(min=1)).mean()


def cached_step(model, optimizer, window):
    with torch.no_grad():
        mine = torch.cat([model(x) for x, _ in window])
    everything = gather(mine).requires_grad_(True)
    supcon(everything, gather(torch.cat([y for _, y in window]))).backward()
    cache = everything.grad[rank * len(mine) : (rank + 1) * len(mine)].split([len(x) for x, _ in window])
    for (x, _), gradient in zip(window, cache):
        model(x).backward(gradient)
    if world > 1:  # the parts of the processes add up: a sum, no mean
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()


torch.manual_seed(0)
b, k = flags()
g = torch.Generator().manual_seed(67)
labels = torch.randint(4, (80,), generator=g)
centres = torch.randn(4, 10, generator=g, dtype=torch.float64)
points = centres[labels] + torch.randn(80, 10, generator=g, dtype=torch.float64)
mine = [(points[i], labels[i]) for i in range(rank, 80, world)]
model = nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 6)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for epoch in range(2):
    window = []
    for batch in DataLoader(mine, batch_size=b):
        window.append(batch)
        if len(window) == k:
            cached_step(model, optimizer, window)
            window = []
