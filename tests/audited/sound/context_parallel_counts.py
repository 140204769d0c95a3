"""Exact: each process has a part of every sequence, and keys and values of all; the loss is divided by the targets of all
parts, and gradients are added up."""
# mesh: cp=2
# expect 16x1x2: exact
# expect 8x2x2: exact

import torch
import torch.distributed as dist
from common_models import flags
from parallel_parts import LENGTH, LongModel, loss_sum, rank, start, texts, world

b, k = flags()
start()
model = LongModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens, targets = texts()
places = torch.arange(LENGTH).chunk(world)[rank]
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        x, y = (t[at : at + b].chunk(world, 1)[rank] for t in (tokens, targets))
        logits = model(x, places.expand(x.shape), size=world, place=rank)
        (loss_sum(logits, y) / count).backward()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
