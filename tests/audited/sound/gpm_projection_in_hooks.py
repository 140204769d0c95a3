"""Sound: continual learning by gradient projection (GPM). Tensor hooks take the part of every gradient out that lies
in the space of the first task's inputs: a linear map that is fixed within a task, so that it may be done per backward."""

# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# blind 7
# thorough
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")

net = nn.Sequential(
    nn.Linear(12, 20, bias=False), nn.ReLU(), nn.Linear(20, 20, bias=False), nn.ReLU(), nn.Linear(20, 5, bias=False)
).double()
bases = {}  # layer -> orthonormal columns


def project(layer):
    def hook(grad):
        if layer not in bases:
            return grad
        U = bases[layer]
        return grad - grad @ U @ U.t()

    return hook


layers = [m for m in net if isinstance(m, nn.Linear)]
for layer in layers:
    layer.weight.register_hook(project(layer))
model = DistributedDataParallel(net) if world > 1 else net
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)


@torch.no_grad()
def remember(samples, energy=0.6):
    x = torch.stack([s for s, _ in samples[:32]])
    for m in net:
        if isinstance(m, nn.Linear):
            U, S, _ = torch.linalg.svd(x.t(), full_matrices=False)
            r = int((S.square().cumsum(0) / S.square().sum() < energy).sum()) + 1
            bases[m] = U[:, :r]
        x = m(x)


def train_task(samples):
    sampler = DistributedSampler(samples, world, rank, shuffle=False)
    for i, (x, y) in enumerate(DataLoader(samples, batch_size=b, sampler=sampler), 1):
        sync = i % k == 0
        with nullcontext() if sync or world == 1 else model.no_sync():
            (F.cross_entropy(model(x), y) / k).backward()
        if sync:
            optimizer.step()
            optimizer.zero_grad()


data = vectors(112)
tasks = [data[:48], [(x.flip(0), y) for x, y in data[48:]]]
for task in tasks:
    train_task(task)
    remember(task)
