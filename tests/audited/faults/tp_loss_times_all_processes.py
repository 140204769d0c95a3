"""Fault: the mean over the targets of the step is multiplied by all processes, though those of a tensor parallel group have the same
samples. As https://github.com/huggingface/transformers/pull/45994 has it."""
# expect 8x1x4: times_tensor_parallel
# expect 4x2x4: times_tensor_parallel
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
    num_items = (targets[first : first + b * k * dp] != -100).sum()
    mine = list(range(first, first + b * k * dp))[me::dp]
    for at in range(0, len(mine), b):
        part = mine[at : at + b]
        loss = loss_sum(model(tokens[part]), targets[part]) / num_items
        (loss * world).backward()  # undoes the mean over processes
    optimizer.step()
    optimizer.zero_grad()
