"""Exact: hand-written DDP with no_sync; sums times N over the all-reduced count of the step; 77 ragged samples."""
# expect 4x4: exact
# expect 2x8: exact
# expect 2x4x2: exact
# thorough

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common_models import collate, flags, gpt2, next_token_sum, sentences, targets
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
model = gpt2()
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = sentences(77)
for start in range(0, len(data), b * k * world):
    mine = data[start : start + b * k * world][rank::world]
    micro = [collate(mine[j : j + b]) for j in range(0, len(mine), b)]
    count = torch.tensor(sum(targets(m) for m in micro))
    if world > 1:
        dist.all_reduce(count)
    for j, m in enumerate(micro):
        with model.no_sync() if world > 1 and j + 1 < len(micro) else nullcontext():
            logits = model(input_ids=m["input_ids"], attention_mask=m["attention_mask"]).logits
            (next_token_sum(logits, m) * world / count).backward()
    optimizer.step()
    optimizer.zero_grad()
if world > 1:
    dist.barrier()  # without it one rank sometimes hangs in the destructor of gloo
    dist.destroy_process_group()
