"""Fault: texts stand side by side, as columns, and each process takes as many columns as its flag says, whatever their number."""
# expect 4x4: exact
# expect 8x1: batch_size
# expect 16x1x2: batch_size
# expect 4x4x2: batch_size

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn

torch.manual_seed(0)
b, k = flags()
n, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if n > 1:
    dist.init_process_group("gloo")
words = torch.randint(20, (64, 40), generator=torch.Generator().manual_seed(1))  # a column is a text
net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)).double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
columns = torch.arange(40)[rank::n]
for t in range(4):
    for q in range(k):
        chosen = columns[q * b : (q + 1) * b]
        block = words[t * 6 : t * 6 + 7, chosen]
        (F.cross_entropy(net(block[:-1]).flatten(0, 1), block[1:].flatten()) / k).backward()
    for p in net.parameters():
        if n > 1:
            dist.all_reduce(p.grad)
            p.grad /= n
    optimizer.step()
    optimizer.zero_grad()
