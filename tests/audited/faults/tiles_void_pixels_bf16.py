"""Fault: each process divides by the labelled pixels of its own half of the step, and DDP averages the two means."""
# expect 4x4: exact
# expect 8x1x2: mean_of_means
# expect 4x2x2: mean_of_means
# size: 0.017
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

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
world = int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
VOID = 255

g = torch.Generator().manual_seed(13)
tiles = torch.randn(80, 4, 10, 10, generator=g)
land = torch.randint(4, (80, 10, 10), generator=g)
clouds = torch.rand(80, 1, 1, generator=g) * 0.35
land[torch.rand(80, 10, 10, generator=g) < clouds] = VOID
data = TensorDataset(tiles.to(dtype), land)

torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(4, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(),
    nn.Conv2d(12, 4, 1),
).to(dtype)  # fmt: skip
sampler = None
if world > 1:
    dist.init_process_group("gloo")
    net, sampler = DDP(net), DistributedSampler(data, shuffle=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True)


def windows(loader):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == k:
            yield window
            window = []


for window in windows(DataLoader(data, batch_size=b, sampler=sampler)):
    labelled = sum((y != VOID).sum() for _, y in window)
    for position, (x, y) in enumerate(window, 1):
        with nullcontext() if world == 1 or position == k else net.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=not FULL):
                logits = net(x)
            loss = F.cross_entropy(logits.to(dtype), y, ignore_index=VOID, reduction="sum") / labelled
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
