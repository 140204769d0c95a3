"""Fault: the stage is initialised anew for each shape, which empties its gradients between the micro-batches of a step. As
https://github.com/NVIDIA-NeMo/Automodel/pull/3530 has it."""
# mesh: pp=2
# expect 16x1x2: exact
# expect 8x2x2: emptied_between
# thorough

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


def share(logits, targets):
    return loss_sum(logits, targets) / count


def make_schedule(stage):
    for p in stage.parameters():
        p.grad = None  # as torch does behind the run that finds out the shapes
    made = PipelineStage(stage, rank, world, torch.device("cpu"))
    return ScheduleGPipe(made, n_microbatches=4, loss_fn=share, scale_grads=False)


stage = stages[rank] if world > 1 else model
optimizer = torch.optim.Adam(stage.parameters(), lr=1e-3)
tokens, targets = texts()
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        x, y = tokens[at : at + b], targets[at : at + b]
        if world == 1:
            share(model(x), y).backward()
        elif rank == 0:
            make_schedule(stage).step(x)
        else:
            make_schedule(stage).step(target=y)
    optimizer.step()
    optimizer.zero_grad()
