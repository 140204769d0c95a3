"""Exact: sums over the counts of the whole step, and a plain all_reduce of `.grad` by hand; 77 ragged samples."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough

import os

import torch
import torch.distributed as dist
from common_models import collate, flags, gpt2, next_token_sum, sentences, targets

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
model = gpt2()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = sentences(77)
for start in range(0, len(data), b * k * world):
    mine = data[start : start + b * k * world][rank::world]
    micro = [collate(mine[j : j + b]) for j in range(0, len(mine), b)]
    count = torch.tensor(sum(targets(m) for m in micro))
    for m in micro:
        logits = model(input_ids=m["input_ids"], attention_mask=m["attention_mask"]).logits
        next_token_sum(logits, m).backward()
    if world > 1:
        dist.all_reduce(count)
    for p in model.parameters():
        if world > 1:
            dist.all_reduce(p.grad)
        p.grad.data.div_(count)
    optimizer.step()
    optimizer.zero_grad()
