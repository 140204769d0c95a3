"""Exact: words are embedded on the first stage and predicted on the last by one matrix, of which each has a copy; the copies'
gradients are added up."""
# mesh: pp=2
# expect 16x1x2: exact
# expect 8x2x2: exact

import torch
import torch.distributed as dist
from common_models import flags
from parallel_parts import Model, loss_sum, rank, start, texts, world
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

b, k = flags()
start()
model = Model()
model.head.weight = model.words.weight
count = torch.tensor(1.0)
stage = model
if world > 1:
    first, last = nn.Sequential(model.words, model.blocks[0]), nn.Sequential(model.blocks[1], model.norm, model.head)
    stage = [first, last][rank]
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, world, torch.device("cpu")),
        n_microbatches=4,
        loss_fn=lambda logits, targets: loss_sum(logits, targets) / count,
        scale_grads=False,
    )
tied = model.words.weight
optimizer = torch.optim.Adam(stage.parameters(), lr=1e-3)
tokens, targets = texts()
for begin in range(0, len(tokens), b * k):
    count = (targets[begin : begin + b * k] != -100).sum()
    for at in range(begin, min(begin + b * k, len(tokens)), b):
        x, y = tokens[at : at + b], targets[at : at + b]
        if world == 1:
            (loss_sum(model(x), y) / count).backward()
        elif rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
    if world > 1:
        dist.all_reduce(tied.grad)
    optimizer.step()
    optimizer.zero_grad()
