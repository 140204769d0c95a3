"""Exact: FSDP of the first kind, whose optimizer has flat parameters: a piece of many weights behind one another."""
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough

import functools

import torch
from common_models import flags
from parallel_parts import Model, loss_sum, rank, start, texts, world
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

b, k = flags()
start()
model = Model()
if world > 1:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    model = FSDP(model, auto_wrap_policy=policy, use_orig_params=False, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
tokens, targets = texts(ragged=False)
for first in range(0, len(tokens), b * k * world):
    mine = list(range(first, first + b * k * world))[rank::world]
    for j in range(0, len(mine), b):
        part = mine[j : j + b]
        (loss_sum(model(tokens[part]), targets[part]) / targets[part].numel() / k).backward()
    optimizer.step()
    optimizer.zero_grad()
