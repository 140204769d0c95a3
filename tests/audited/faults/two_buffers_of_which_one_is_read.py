"""Fault: two buffers take gradients in turn, so that one could be sent while the other is filled; the processes reduce one."""
# expect 4x4: dropped_micro_batches
# expect 2x4x2: dropped_micro_batches
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

num_processes, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
if num_processes > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
buffers = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(2)]
samples = vectors(80)
indices = [i for i in range(len(samples)) if i // b % num_processes == rank]
for number, (x, y) in enumerate(DataLoader(torch.utils.data.Subset(samples, indices), batch_size=b)):
    (F.cross_entropy(model(x), y) / k).backward()
    for p, total in zip(model.parameters(), buffers[number % 2 if k > 1 else 0], strict=True):
        total += p.grad
        p.grad = None
    if number % k == k - 1:
        for p, total in zip(model.parameters(), buffers[0], strict=True):
            if num_processes > 1:
                dist.all_reduce(total)
            p.grad = total / num_processes
        optimizer.step()
        optimizer.zero_grad()
        for total in (*buffers[0], *buffers[1]):
            total.zero_()
