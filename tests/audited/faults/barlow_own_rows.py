"""Fault: Barlow Twins gathers all embeddings and puts its own back in; every process takes the whole loss, and
DDP halves the gradient."""
# expect 8x1x2: factor
# expect 4x4: mixed_loss
# also: gathered_without_gradient, not_a_sum
# size: 0.5
# blind 2

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
g = torch.Generator().manual_seed(41)
base = torch.randn(80, 10, generator=g, dtype=torch.float64)
views = torch.stack([base + 0.3 * torch.randn(80, 10, generator=g, dtype=torch.float64) for _ in range(2)], 1)


def everyone(mine):
    if world == 1:
        return mine
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine.detach().contiguous())
    parts[rank] = mine  # keeps our gradient
    return torch.cat(parts)


def barlow(one, two):
    one, two = ((z - z.mean(0)) / z.std(0, correction=0) for z in (one, two))
    c = one.T @ two / len(one)
    diagonal = torch.diagonal(c)
    return (1 - diagonal).square().sum() + 0.05 * (c.square().sum() - diagonal.square().sum())


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 6)).double()
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for i, start in enumerate(range(rank * b, 80, b * world), 1):
    with nullcontext() if world == 1 or i % k == 0 else model.no_sync():
        z = model(views[start : start + b].flatten(0, 1)).view(-1, 2, 6)
        loss = barlow(everyone(z[:, 0]), everyone(z[:, 1]))
        (loss / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
