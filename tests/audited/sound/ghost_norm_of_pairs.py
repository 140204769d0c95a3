"""Sound: ghost batch normalization over virtual batches of two samples each, which no cut of a step separates."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 4
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class GhostBatchNorm(nn.Module):
    """As in TabNet, with a virtual batch size."""

    def __init__(self, features, virtual=2):
        super().__init__()
        self.virtual, self.bn = virtual, nn.BatchNorm1d(features, eps=0.1, track_running_stats=False)

    def forward(self, x):
        return torch.cat([self.bn(chunk) for chunk in x.split(self.virtual)])


class TabularNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.mask = nn.Sequential(nn.Linear(12, 12, bias=False), GhostBatchNorm(12), nn.Softmax(-1))
        self.shared, self.norm = nn.Linear(12, 2 * width, bias=False), GhostBatchNorm(2 * width)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(F.glu(self.norm(self.shared(x * self.mask(x)))))


b, k = flags()
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = TabularNet().double()
model = DDP(net) if world > 1 else net
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
rows = vectors(80)
x, y = torch.stack([v for v, _ in rows]), torch.stack([c for _, c in rows])
for i, start in enumerate(range(rank * b, 80, b * world), 1):
    part = slice(start, start + b)
    with nullcontext() if i % k == 0 or world == 1 else model.no_sync():
        (F.cross_entropy(model(x[part]), y[part]) / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
