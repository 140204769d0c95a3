"""Exact: HSDP, two replicas of two shards; torch clips, and the whole norm is printed."""
# expect 4x1x4: exact
# expect 2x2x4: exact
# thorough

import torch
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(*texts(ragged=False))
sampler = DistributedSampler(data, shuffle=False) if world > 1 else None
for number, (tokens, targets) in enumerate(DataLoader(data, b, sampler=sampler), 1):
    (loss_sum(model(tokens), targets) / targets.numel() / k).backward()
    if number % k == 0:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        print(f"step {number // k}: norm {norm.item():.4f}")
        optimizer.step()
        optimizer.zero_grad()
