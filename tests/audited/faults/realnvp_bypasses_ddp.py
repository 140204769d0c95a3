"""Fault: the flow's log_prob is called on model.module, not through DDP's forward: DDP never reduces the
gradients, and each process goes its own way."""
# expect 4x4: exact
# expect 8x1x2: not_reduced
# expect 4x2x2: not_reduced
# blind 3
# thorough

import math
import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Coupling(nn.Module):
    def __init__(self, dim, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        self.net = nn.Sequential(nn.Linear(dim, 24), nn.Tanh(), nn.Linear(24, 2 * dim))

    def forward(self, x):
        scale, shift = self.net(x * self.mask).chunk(2, -1)
        scale = torch.tanh(scale) * (1 - self.mask)
        return x * scale.exp() + shift * (1 - self.mask), scale.sum(-1)


class RealNVP(nn.Module):
    def __init__(self, dim=4, depth=4):
        super().__init__()
        masks = [(torch.arange(dim) + i) % 2 for i in range(depth)]
        self.layers = nn.ModuleList([Coupling(dim, mask.double()) for mask in masks])

    def forward(self, x):
        log_det = x.new_zeros(len(x))
        for layer in self.layers:
            x, part = layer(x)
            log_det = log_det + part
        return x, log_det

    def log_prob(self, x):
        z, log_det = self(x)
        return -0.5 * (z**2).sum(-1) - 0.5 * z.shape[1] * math.log(2 * math.pi) + log_det


rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
if world > 1:
    dist.init_process_group("gloo", rank=rank, world_size=world)
g = torch.Generator().manual_seed(9)
angle = torch.rand(80, 1, generator=g, dtype=torch.float64) * 2 * math.pi
points = torch.cat([angle.cos(), angle.sin(), angle.cos() ** 2, angle / 6], 1)
points += 0.1 * torch.randn(80, 4, generator=g, dtype=torch.float64)

torch.manual_seed(0)
flow = RealNVP().double()
if world > 1:
    flow = DDP(flow)
optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
loader = DataLoader(points, batch_size=b, sampler=DistributedSampler(points, world, rank, shuffle=False))
for i, x in enumerate(loader):
    density = flow.module if world > 1 else flow
    loss = -density.log_prob(x).mean() / k
    loss.backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
