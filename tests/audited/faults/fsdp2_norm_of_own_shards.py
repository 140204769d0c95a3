"""Fault: each process clips its shards by the norm of these shards alone. As https://github.com/areal-project/AReaL/issues/312 has it."""
# expect 8x1x2: norm_of_a_part
# expect 4x2x2: norm_of_a_part
# thorough

import torch
from common_models import flags
from parallel_parts import Model, loss_sum, rank, start, texts, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

b, k = flags()
start()
model = Model()
if world > 1:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens, targets = texts()
for first in range(0, len(tokens), b * k * world):
    count = (targets[first : first + b * k * world] != -100).sum()
    mine = list(range(first, first + b * k * world))[rank::world]
    for at in range(0, len(mine), b):
        part = mine[at : at + b]
        (loss_sum(model(tokens[part]), targets[part]) * world / count).backward()
    grads = [p.grad.to_local() if world > 1 else p.grad for p in model.parameters()]
    norm = torch.stack([g.norm() for g in grads]).norm()
    for g in grads:
        g.mul_((0.02 / (norm + 1e-6)).clamp(max=1.0))
    print({"grad_norm": norm.item()})
    optimizer.step()
    optimizer.zero_grad()
