"""Fault: the value net normalizes observations by running statistics that every forward updates (and DDP sends
those of rank 0)."""
# expect 4x4: state
# expect 8x1x2: state
# expect 4x2x2: state
# thorough
# also: batch_norm
# size: 0.33
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
g = torch.Generator().manual_seed(47)
observed = 2 + 3 * torch.randn(80, 8, generator=g, dtype=torch.float64)
returns = torch.randn(80, generator=g, dtype=torch.float64)


class Running(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("square", torch.ones(size))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.square.lerp_(x.square().mean(0), 0.1)
        deviation = (self.square - self.mean.square()).clamp(min=1e-2).sqrt()
        return ((x - self.mean) / deviation).clamp(-5, 5)


torch.manual_seed(0)
value = nn.Sequential(Running(8), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
if world > 1:
    dist.init_process_group("gloo")
    value = DDP(value)
optimizer = torch.optim.SGD(value.parameters(), lr=0.05)
for i, start in enumerate(range(rank * b, 80, b * world), 1):
    with nullcontext() if world == 1 or i % k == 0 else value.no_sync():
        error = value(observed[start : start + b]).squeeze(-1) - returns[start : start + b]
        (0.5 * error.square().mean() / k).backward()
    if i % k == 0:
        nn.utils.clip_grad_norm_(value.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
