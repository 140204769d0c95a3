"""Fault, on several processes only: every process clips its own gradient, by hand, before they are added up."""
# expect 4x4: exact
# expect 8x1x2: changed_between
# expect 4x2x2: changed_between
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, mlp, vectors

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = vectors(80)
for start in range(0, 80, b * k * world):
    mine = data[start : start + b * k * world][rank::world]
    for first in range(0, len(mine), b):
        x, y = (torch.stack(of) for of in zip(*mine[first : first + b], strict=True))
        (F.cross_entropy(model(x), y, reduction="sum") / 16).backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    for p in model.parameters():
        p.grad *= (0.2 / world / norm).clamp(max=1)
        if world > 1:
            dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
