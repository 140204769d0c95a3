"""Fault: the error at the held-out values is averaged over those of the micro-batch, and the micro-batches' means are
averaged, though series have very different numbers of held-out values."""

# expect 4x4: mean_of_means
# expect 2x8: mean_of_means
# expect 4x2x2: mean_of_means
# blind 7
# thorough
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
T, C = 24, 3


def air_quality(n=64):
    g = torch.Generator().manual_seed(1)
    out = []
    for _ in range(n):
        series = torch.randn(T, C, generator=g, dtype=torch.float64).cumsum(0)
        rate = 0.05 + 0.6 * torch.rand((), generator=g)
        held_out = torch.rand(T, C, generator=g) < rate
        held_out[0, 0] = True
        out.append({"series": series, "held_out": held_out.double()})
    return out


class Imputer(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.inp = nn.Linear(2 * C, dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, C)

    def forward(self, series, held_out):
        h = self.inp(torch.cat([series * (1 - held_out), held_out], dim=-1))
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        return self.out(h)


def masked_mae(pred, target, mask):
    return ((pred - target).abs() * mask).sum() / (mask.sum() + 1e-12)


model = Imputer().double()
if world > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = air_quality()
loader = DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False))
for i, batch in enumerate(loader):
    sync = (i + 1) % k == 0
    with nullcontext() if sync or world == 1 else model.no_sync():
        pred = model(batch["series"], batch["held_out"])
        (masked_mae(pred, batch["series"], batch["held_out"]) / k).backward()
    if sync:
        optimizer.step()
        optimizer.zero_grad()
