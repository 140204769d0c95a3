"""Fault: no_sync is around backward alone; DDP decides in the forward, so that every micro-batch is reduced:
right, but slow."""
# expect 4x4: exact
# expect 4x2x2: reductions
# expect 2x4x2: reductions
# weights: equal
# blind 2
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
g = torch.Generator().manual_seed(46)
edges = torch.rand(80, 7, 7, generator=g, dtype=torch.float64) < 0.4
atoms = torch.randint(5, (80, 7), generator=g)
energy = torch.randn(80, generator=g, dtype=torch.float64)


class Molecules(nn.Module):
    def __init__(self):
        super().__init__()
        self.atom = nn.Embedding(5, 12)
        self.rounds = nn.ModuleList(nn.Linear(24, 12) for _ in range(2))
        self.readout = nn.Linear(12, 1)

    def forward(self, atoms, edges):
        h = self.atom(atoms)
        adjacency = (edges | edges.mT).to(h)
        for layer in self.rounds:
            h = torch.tanh(layer(torch.cat([h, adjacency @ h], -1)))
        return self.readout(h.sum(1)).squeeze(-1)


torch.manual_seed(0)
model = Molecules().double()
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for i, start in enumerate(range(rank * b, 80, b * world), 1):
    rows = slice(start, start + b)
    loss = F.mse_loss(model(atoms[rows], edges[rows]), energy[rows]) / k
    with nullcontext() if world == 1 or i % k == 0 else model.no_sync():
        loss.backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
