"""Fault: the loss is multiplied by the context parallel size, and what undoes it divides by the data parallel size alone. As
https://github.com/NVIDIA/Megatron-LM/issues/906 has it."""
# mesh: cp=2
# expect 16x1x2: times_sequence_parallel
# expect 8x2x2: times_sequence_parallel

import torch
import torch.distributed as dist
from common_models import flags
from parallel_parts import LENGTH, LongModel, loss_sum, rank, start, texts, world

b, k = flags()
start()
cp, dp = world, 1
model = LongModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens, targets = texts()
places = torch.arange(LENGTH).chunk(cp)[rank]
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        x, y = (t[at : at + b].chunk(cp, 1)[rank] for t in (tokens, targets))
        loss = loss_sum(model(x, places.expand(x.shape), size=cp, place=rank), y) / count
        (loss * cp).backward()
    for p in model.parameters():
        if world > 1:
            dist.all_reduce(p.grad)
        p.grad /= dp
    optimizer.step()
    optimizer.zero_grad()
