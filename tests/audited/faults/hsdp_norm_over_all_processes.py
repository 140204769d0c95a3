"""Fault: under HSDP the squares of shards are added up over all processes, and not over those of one replica, so that the norm is
too large by the root of the replicas. As https://github.com/ByteDance-Seed/VeOmni/issues/184 has it."""
# expect 4x1x4: norm_counts_replicas
# expect 2x2x4: norm_counts_replicas
# thorough

import torch
import torch.distributed as dist
from common_models import flags
from parallel_parts import Model, loss_sum, start, texts, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

b, k = flags()
start()
model = Model()
if world > 1:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@torch.no_grad()
def clip(max_norm):
    grads = [p.grad.to_local() if world > 1 else p.grad for p in model.parameters()]
    total = torch.stack([g.norm() for g in grads]).pow(2).sum()
    if world > 1:
        dist.all_reduce(total)  # of the "fsdp group", which is replicas and shards
    total = total.sqrt()
    for g in grads:
        g.mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(*texts(ragged=False))
sampler = DistributedSampler(data, shuffle=False) if world > 1 else None
for number, (tokens, targets) in enumerate(DataLoader(data, b, sampler=sampler), 1):
    (loss_sum(model(tokens), targets) / targets.numel() / k).backward()
    if number % k == 0:
        clip(0.05)
        optimizer.step()
        optimizer.zero_grad()
