"""Fault: a pipeline's schedule divides all gradients by its micro-batches at its end, those of the schedules before it in the same
step again. As https://github.com/pytorch/torchtitan/issues/1733 has it."""
# mesh: pp=2
# expect 16x1x2: exact
# expect 8x2x2: changed_between

import torch
from common_models import flags
from parallel_parts import Model, loss_sum, rank, start, texts, world
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

b, k = flags()
start()
model = Model()
stages = [nn.Sequential(model.words, model.blocks[0]), nn.Sequential(model.blocks[1], model.norm, model.head)]


def mean_loss(logits, targets):
    return loss_sum(logits, targets) / targets.numel() / k


stage = model
if world > 1:
    stage = stages[rank]
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, world, torch.device("cpu")), n_microbatches=4, loss_fn=mean_loss
    )
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
tokens, targets = texts(ragged=False)
for first in range(0, len(tokens), b * k):
    for at in range(first, min(first + b * k, len(tokens)), b):
        x, y = tokens[at : at + b], targets[at : at + b]
        if world == 1:
            mean_loss(model(x), y).backward()
        elif rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
    optimizer.step()
    optimizer.zero_grad()
