"""Fault: 72 samples: in the last step one process has none left and only joins; DDP still divides by both, so
that this step is halved."""
# expect 4x4: exact
# expect 8x1x2: tail
# thorough
# also: factor, num_steps
# size: 0.5
# blind 2

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
g = torch.Generator().manual_seed(44)
wind, power = torch.randn(72, 6, generator=g, dtype=torch.float64), torch.rand(72, 1, generator=g, dtype=torch.float64)
mine = list(range(rank * b, 72, b * world))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ELU(), nn.Linear(32, 1)).double()
if world > 1:
    dist.init_process_group("gloo")
    model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Join([model]) if world > 1 else nullcontext():
    while mine:
        window, mine = mine[:k], mine[k:]
        for start in window:
            loss = nn.functional.mse_loss(model(wind[start : start + b]), power[start : start + b])
            (loss / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
