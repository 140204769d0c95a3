"""Fault, on several processes only: DDP, and every process goes through all of the data."""
# expect 4x4: exact
# expect 8x1x2: not_sharded
# expect 4x2x2: not_sharded
# also: num_steps

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
b, k = flags()
world = int(os.environ.get("WORLD_SIZE", 1))
model = mlp()
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = (torch.stack(of) for of in zip(*vectors(80), strict=True))
for number, (xs, ys) in enumerate(zip(x.split(b), y.split(b), strict=True), 1):
    with nullcontext() if number % k == 0 or world == 1 else model.no_sync():
        (F.cross_entropy(model(xs), ys) / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
