"""Fault: a snapshot ensemble makes optimizer and cosine schedule anew in every cycle with T_max=len(loader),
counted in micro-batches, though the schedule ticks once per step: with k > 1 the rate hardly falls."""
# expect 4x4: learning_rate
# expect 8x1x2: exact
# expect 4x2x2: learning_rate
# thorough
# blind 1

import contextlib
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
b, k = flags()
torch.manual_seed(0)


def rotations(n=20):
    """Self-supervised: which of four rotations has the picture?"""
    picture = torch.randn(n, 1, 6, 6, generator=torch.Generator().manual_seed(23), dtype=torch.float64)
    picture = picture + torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]
    turned = torch.stack([picture.rot90(turn, (-2, -1)) for turn in range(4)], 1)
    return TensorDataset(turned.flatten(0, 1), torch.arange(4).repeat(n))


net = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 16), nn.Tanh(), nn.Linear(16, 4)
).double()
model = DistributedDataParallel(net) if world > 1 else net
data = rotations()
sampler = DistributedSampler(data, shuffle=True, seed=1) if world > 1 else None
if world == 1:  # the order of DistributedSampler on one process
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=1)
loader = DataLoader(data, batch_size=b, sampler=sampler)
snapshots = []
for cycle in range(3):
    sampler.set_epoch(cycle)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
    for i, (x, y) in enumerate(loader, 1):
        with contextlib.nullcontext() if world == 1 or i % k == 0 else model.no_sync():
            (F.cross_entropy(model(x), y) / k).backward()
        if i % k == 0:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    snapshots.append({"model": copy.deepcopy(net.state_dict()), "optimizer": optimizer})
