"""Exact: every process has a list of its own, whose indices begin at 0 in each; DDP, equal counts; evaluation
in between."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
data = vectors(96)
train, held_out = data[:80], DataLoader(data[80:], batch_size=8)
loader = DataLoader(train[rank::world], batch_size=b)
model = mlp()
wrapped = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _epoch in range(2):
    for number, (x, y) in enumerate(loader, 1):
        is_last = number % k == 0
        with nullcontext() if is_last or world == 1 else wrapped.no_sync():
            (F.cross_entropy(wrapped(x), y) / k).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum() for x, y in held_out)
    model.train()
