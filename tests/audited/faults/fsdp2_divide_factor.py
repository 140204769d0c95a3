"""Fault: FSDP2 with a gradient divide factor of 1 (a sum over processes), while every process takes the mean of
its own half."""
# expect 4x4: exact
# expect 8x1x2: factor
# expect 4x2x2: factor
# size: 1.0
# blind 2
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
g = torch.Generator().manual_seed(49)
genes, cell_type = torch.randn(80, 20, generator=g, dtype=torch.float64), torch.randint(6, (80,), generator=g)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 6)).double()
if world > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for i, start in enumerate(range(rank * b, 80, b * world), 1):
    if world > 1:
        model.set_requires_gradient_sync(i % k == 0)
    loss = F.cross_entropy(model(genes[start : start + b]), cell_type[start : start + b])
    (loss / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
