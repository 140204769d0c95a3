"""Fault: BYOL's target network moves towards the online one after every micro-batch instead of after every
step; the loss is against its projections."""
# expect 4x4: average
# expect 8x1x2: exact
# expect 4x2x2: average
# thorough
# also: state
# blind 1

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mlp(inner, hidden, outer):
    return nn.Sequential(nn.Linear(inner, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, outer))


class BYOL(nn.Module):
    def __init__(self, dim=10):
        super().__init__()
        self.encoder = nn.Sequential(mlp(dim, 24, 16), mlp(16, 24, 8))
        self.predictor = mlp(8, 16, 8)

    def forward(self, views):
        return self.predictor(self.encoder(views))


@torch.no_grad()
def move(target, online, tau=0.9):
    for t, o in zip(target.parameters(), online.parameters()):
        t.lerp_(o, 1 - tau)


b, k = flags()
distributed = "RANK" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
if distributed:
    dist.init_process_group("gloo")
torch.manual_seed(0)
g = torch.Generator().manual_seed(8)
scene = torch.randn(80, 10, generator=g, dtype=torch.float64)
data = TensorDataset(scene + 0.3 * torch.randn(80, 10, generator=g), scene + 0.3 * torch.randn(80, 10, generator=g))

online = BYOL().double()
target = copy.deepcopy(online.encoder).requires_grad_(False)
model = DistributedDataParallel(online) if distributed else online
optimizer = torch.optim.SGD(online.parameters(), lr=0.3, momentum=0.9)
sampler = DistributedSampler(data, shuffle=False) if distributed else None
for epoch in range(2):
    for i, views in enumerate(DataLoader(data, batch_size=b, sampler=sampler)):
        last = (i + 1) % k == 0
        if distributed:
            model.require_backward_grad_sync = last
        predicted = F.normalize(model(torch.cat(views)), dim=-1)
        with torch.no_grad():
            wanted = F.normalize(target(torch.cat(views[::-1])), dim=-1)
        loss = 2 - 2 * (predicted * wanted).sum(-1).mean()
        (loss / k).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        move(target, online.encoder)
