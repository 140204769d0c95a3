"""Fault: experts get the tokens of all processes, and their gradients are not divided as those are that DDP averages: twice too
large on two processes. As https://github.com/pytorch/pytorch/issues/160285 has it, and
https://github.com/NVIDIA/Megatron-LM/pull/5956 mends it."""
# mesh: ep=2
# expect 8x1x2: times_expert_parallel
# expect 4x2x2: times_expert_parallel

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from common_models import flags
from parallel_parts import MixtureModel, loss_sum, rank, start, texts, world
from torch import nn

b, k = flags()
start()
model = MixtureModel()
num = 4 // world
with torch.no_grad():
    for name in ("w1", "w2"):
        whole = getattr(model.experts, name)
        setattr(model.experts, name, nn.Parameter(whole[rank * num : (rank + 1) * num].clone()))


def forward(tokens):
    x = model.words(tokens).flatten(0, 1)
    weights, choice = model.router(x).softmax(-1).max(-1)
    if world == 1:
        y = model.experts(x, choice)
    else:
        everyone = torch.cat(dist.nn.functional.all_gather(x.contiguous()))
        choices = [torch.empty_like(choice) for _ in range(world)]
        dist.all_gather(choices, choice)
        done = model.experts(everyone, torch.cat(choices), first=rank * num)
        y = dist.nn.functional.all_reduce(done).chunk(world)[rank]
    return model.head(x + weights[:, None] * y).view(*tokens.shape, -1)


dense = [p for name, p in model.named_parameters() if "experts" not in name]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens, targets = texts()
for first in range(0, len(tokens), b * k * world):
    count = (targets[first : first + b * k * world] != -100).sum()
    mine = list(range(first, first + b * k * world))[rank::world]
    for at in range(0, len(mine), b):
        part = mine[at : at + b]
        (loss_sum(forward(tokens[part]), targets[part]) * world / count).backward()
    if world > 1:
        for p in dense:
            dist.all_reduce(p.grad)
            p.grad /= world
    optimizer.step()
    optimizer.zero_grad()
