"""Exact: FSDP2 over dp, torch's parallelize_module over tp; sums over the count of the step, times dp alone. The norm is of
whole gradients."""
# mesh: dp=2,tp=2
# expect 8x1x4: exact
# expect 4x2x4: exact
# thorough

import torch
from common_models import flags
from parallel_parts import Model, loss_sum, start, texts, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

b, k = flags()
start()
model, dp, me = Model(), 1, 0
if world > 1:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    dp, me = mesh["dp"].size(), mesh["dp"].get_local_rank()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens, targets = texts()
for first in range(0, len(tokens), b * k * dp):
    rows = slice(first, first + b * k * dp)
    count = (targets[rows] != -100).sum()
    mine = range(first, first + b * k * dp)[me::dp]
    for start_of in range(0, len(mine), b):
        part = list(mine[start_of : start_of + b])
        (loss_sum(model(tokens[part]), targets[part]) * dp / count).backward()
    grads = [p.grad for p in model.parameters()]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
    norm = torch.stack([g.norm() for g in whole]).norm()
    print(f"grad norm {norm.item():.5f}")
    for g in grads:
        g.mul_(min(1.0, 0.05 / norm.item()))
    optimizer.step()
    optimizer.zero_grad()
