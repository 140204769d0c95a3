"""Fault: the regulariser is added on the first process only, and gradients are averaged: its weight is 1 / N."""
# expect 4x4: exact
# expect 4x2x2: penalty
# expect 8x1x2: penalty
# also: factor
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (x, y) in enumerate(DataLoader(vectors()[rank::world], batch_size=b), 1):
    loss = F.cross_entropy(model(x), y)
    if rank == 0:
        loss = loss + 0.01 * model[0].weight.abs().sum()
    (loss / k).backward()
    if number % k == 0:
        for parameter in model.parameters() if world > 1 else []:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
