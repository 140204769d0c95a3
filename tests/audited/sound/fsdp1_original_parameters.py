"""Exact: FSDP of the first kind with its original parameters, each process of which has a piece; FSDP clips."""
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough

import torch
from common_models import flags
from parallel_parts import Block, Model, loss_sum, rank, start, texts, world
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

b, k = flags()
start()
model = Model().float()
if world > 1:
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu"))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
tokens, targets = texts()
for first in range(0, len(tokens), b * k * world):
    count = (targets[first : first + b * k * world] != -100).sum()
    mine = list(range(first, first + b * k * world))[rank::world]
    for j in range(0, len(mine), b):
        part = mine[j : j + b]
        (loss_sum(model(tokens[part]), targets[part]) * world / count).backward()
    if world > 1:
        model.clip_grad_norm_(0.05)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
