"""Fault: a home-made synchronized batch norm averages the processes' variances, which leaves out that their
means differ."""
# expect 8x1x2: batch_norm
# expect 4x4: batch_norm
# thorough
# also: mixed_samples, not_a_sum
# size: 0.023
# blind 2

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from common_models import flags, images
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
photos = images(80)


class SyncNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        if world > 1:
            mean, var = dnn.all_reduce(torch.stack([mean, var])) / world
        x = (x - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
        return x * self.weight[:, None, None] + self.bias[:, None, None]


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(2, 8, 3), SyncNorm(8), nn.ReLU(), nn.Conv2d(8, 8, 3), SyncNorm(8), nn.ReLU(), nn.Flatten(),
    nn.Linear(32, 5),
).double()  # fmt: skip
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for i, start in enumerate(range(rank * b, 80, b * world), 1):
    x, y = map(torch.stack, zip(*photos[start : start + b], strict=True))
    with nullcontext() if world == 1 or i % k == 0 else model.no_sync():
        (nn.functional.cross_entropy(model(x), y) / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
