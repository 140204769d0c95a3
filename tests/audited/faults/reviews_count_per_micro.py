"""Fault: the valid answers are all-reduced for every micro-batch by itself instead of for the window: a mean of
k means."""
# expect 8x1x2: exact
# expect 4x4: mean_of_means
# expect 4x2x2: mean_of_means
# size: 0.21
# blind 2
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

world = int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
g = torch.Generator().manual_seed(42)
answers = torch.randint(3, (80, 12), generator=g)
answers[torch.rand(80, 12, generator=g) < torch.rand(80, 1, generator=g)] = -1  # not answered
survey = TensorDataset(torch.randn(80, 7, generator=g, dtype=torch.float64), answers)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 24), nn.SiLU(), nn.Linear(24, 36), nn.Unflatten(1, (12, 3))).double()
sampler = None
if world > 1:
    dist.init_process_group("gloo")
    model, sampler = DDP(model), DistributedSampler(survey, shuffle=False)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for i, (x, y) in enumerate(DataLoader(survey, batch_size=b, sampler=sampler), 1):
    given = (y >= 0).sum()
    if world > 1:
        dist.all_reduce(given)
    with nullcontext() if world == 1 or i % k == 0 else model.no_sync():
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum")
        (total * world / given.clamp(min=1) / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
