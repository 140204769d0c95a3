"""Exact: a pipeline of two stages, GPipe, four micro-batches; sums over the count of the whole step."""
# mesh: pp=2
# expect 16x1x2: exact
# expect 8x2x2: exact

import torch
from common_models import flags
from parallel_parts import Model, loss_sum, rank, start, texts, world
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

b, k = flags()
start()
model = Model()
stages = [nn.Sequential(model.words, model.blocks[0]), nn.Sequential(model.blocks[1], model.norm, model.head)]
count = torch.tensor(1.0)
if world > 1:
    stage = stages[rank]
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, world, torch.device("cpu")),
        n_microbatches=4,
        loss_fn=lambda logits, targets: loss_sum(logits, targets) / count,
        scale_grads=False,
    )
else:
    stage = model
optimizer = torch.optim.Adam(stage.parameters(), lr=1e-3)
tokens, targets = texts()
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        x, y = tokens[at : at + b], targets[at : at + b]
        if world == 1:
            (loss_sum(model(x), y) / count).backward()
        elif rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
    optimizer.step()
    optimizer.zero_grad()
