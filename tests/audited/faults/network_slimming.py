"""Fault: the subgradient of the L1 norm of the channel scales (network slimming's updateBN) is added after every
backward, not once per step: the sparsity is k times as strong."""

# expect 4x4: penalty
# expect 2x8: penalty
# expect 4x2x2: penalty
# expect 8x1x2: exact
# also: changed_between
# blind 7
# thorough
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
SPARSITY = 1e-2


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).double()


def update_norms(model):
    for m in model.modules():
        if isinstance(m, nn.GroupNorm):
            m.weight.grad.data.add_(SPARSITY * torch.sign(m.weight.data))


def train(model, loader, optimizer):
    for i, (image, label) in enumerate(loader):
        last = (i + 1) % k == 0
        with nullcontext() if last or world == 1 else model.no_sync():
            loss = F.cross_entropy(model(image), label) / k
            loss.backward()
        update_norms(model)
        if last:
            optimizer.step()
            optimizer.zero_grad()


net = cnn()
if world > 1:
    net = DistributedDataParallel(net)
data = images(80)
loader = DataLoader(data, batch_size=b, sampler=DistributedSampler(data, world, rank, shuffle=False))
train(net, loader, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
