"""Fault: gradients of experts are divided by the processes that hold the same experts, and not by all that have samples. As
https://github.com/deepspeedai/DeepSpeed/pull/6546 has it."""
# mesh: edp=2,ep=2
# expect 4x1x4: times_expert_parallel
# expect 2x2x4: times_expert_parallel
# thorough

import torch
import torch.distributed as dist
from common_models import flags
from parallel_parts import AddUp, Gather, MixtureModel, loss_sum, rank, start, texts, world
from torch import nn

b, k = flags()
start()
model = MixtureModel()
ep = min(world, 2)
edp, place = world // ep, rank % ep
num = 4 // ep
groups = {}
if world > 1:
    groups["ep"], _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    groups["edp"], _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
with torch.no_grad():
    for name in ("w1", "w2"):
        whole = getattr(model.experts, name)
        setattr(model.experts, name, nn.Parameter(whole[place * num : (place + 1) * num].clone()))


def forward(tokens):
    x = model.words(tokens).flatten(0, 1)
    weights, choice = model.router(x).softmax(-1).max(-1)
    if world == 1:
        y = model.experts(x, choice)
    else:
        everyone = Gather.apply(x.contiguous(), groups["ep"], ep, place, 0)
        choices = [torch.empty_like(choice) for _ in range(ep)]
        dist.all_gather(choices, choice, group=groups["ep"])
        done = model.experts(everyone, torch.cat(choices), first=place * num)
        y = AddUp.apply(done, groups["ep"]).chunk(ep)[place]
    return model.head(x + weights[:, None] * y).view(*tokens.shape, -1)


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens, targets = texts()
for first in range(0, len(tokens), b * k * world):
    count = (targets[first : first + b * k * world] != -100).sum()
    mine = list(range(first, first + b * k * world))[rank::world]
    for at in range(0, len(mine), b):
        part = mine[at : at + b]
        (loss_sum(forward(tokens[part]), targets[part]) * world / count).backward()
    if world > 1:
        for name, p in model.named_parameters():
            group, size = (groups["edp"], edp) if "experts" in name else (None, world)
            dist.all_reduce(p.grad, group=group)
            p.grad /= size
    optimizer.step()
    optimizer.zero_grad()
