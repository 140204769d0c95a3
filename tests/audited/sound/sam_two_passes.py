"""Sound: SAM keeps the micro-batches of a window and goes over all of them twice: the ascent and the descent
are each taken from the gradient of the whole global batch."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 1
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class SAM:
    def __init__(self, parameters, base, rho=0.1):
        self.parameters, self.base, self.rho, self.back = list(parameters), base, rho, []

    @torch.no_grad()
    def climb(self):
        norm = torch.stack([p.grad.norm() for p in self.parameters]).norm()
        self.back = [p.detach().clone() for p in self.parameters]
        for p in self.parameters:
            p.add_(p.grad, alpha=float(self.rho / (norm + 1e-12)))
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, old in zip(self.parameters, self.back):
            p.copy_(old)
        self.base.step()
        self.base.zero_grad()


world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
b, k = flags()
net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6), nn.SiLU(), nn.Flatten(), nn.Linear(96, 5)).double()
model = DistributedDataParallel(net) if world > 1 else net
sam = SAM(net.parameters(), torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3))


def backward_over(window):
    for i, (x, y) in enumerate(window):
        with model.no_sync() if world > 1 and i + 1 < len(window) else contextlib.nullcontext():
            (F.cross_entropy(model(x), y) / k).backward()


data = images(80)
sampler = DistributedSampler(data, shuffle=False) if world > 1 else None
for epoch in range(2):
    window = []
    for batch in DataLoader(data, batch_size=b, sampler=sampler):
        window.append(batch)
        if len(window) == k:
            backward_over(window)
            sam.climb()
            backward_over(window)
            sam.descend()
            window.clear()
