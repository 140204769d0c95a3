"""Fault: ZeRO with a learning rate times the number of processes, although the batch of a step is the same
however many there are."""
# expect 4x4: exact
# expect 8x1x2: learning_rate
# expect 4x2x2: learning_rate
# blind 2
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import flags, mlp, vectors
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
data = vectors(80)
torch.manual_seed(0)
model, sampler = mlp(), None
if world > 1:
    dist.init_process_group("gloo")
    model, sampler = DDP(model), DistributedSampler(data, shuffle=False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3 * world)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
for i, (x, y) in enumerate(DataLoader(data, batch_size=b, sampler=sampler), 1):
    with nullcontext() if world == 1 or i % k == 0 else model.no_sync():
        (cross_entropy(model(x), y) / k).backward()
    if i % k == 0:
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
