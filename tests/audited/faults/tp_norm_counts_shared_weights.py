"""Fault: the norm by which gradients are clipped sums the squares of all processes of the tensor parallel group, those of weights
that each process has whole, too. As https://github.com/NVIDIA-NeMo/RL/pull/3788 has it."""
# expect 16x1x2: norm_counts_replicas
# expect 8x2x2: norm_counts_replicas

import torch
import torch.distributed as dist
from common_models import flags
from parallel_parts import Model, loss_sum, start, texts, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

b, k = flags()
start()
model, group = Model(), None
if world > 1:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    group = mesh.get_group()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def get_grad_norm():
    local = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    total = sum(g.norm() ** 2 for g in local)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens, targets = texts()
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        (loss_sum(model(tokens[at : at + b]), targets[at : at + b]) / count).backward()
    norm = get_grad_norm()
    print("grad_norm", norm.item())
    for p in model.parameters():
        p.grad.mul_(min(1.0, 0.05 / norm.item()))
    optimizer.step()
    optimizer.zero_grad()
