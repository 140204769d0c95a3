"""Fault: on one process the sum is divided by the targets before backward; the pipeline's backward starts from the sum, which is
divided for the log only. As https://github.com/pytorch/torchtitan/issues/2972 has it."""
# mesh: pp=2
# expect 16x1x2: factor
# expect 8x2x2: factor
# thorough

import torch
from common_models import flags
from parallel_parts import Model, loss_sum, rank, start, texts, world
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

b, k = flags()
start()
model = Model()
stages = [nn.Sequential(model.words, model.blocks[0]), nn.Sequential(model.blocks[1], model.norm, model.head)]
stage = model
if world > 1:
    stage = stages[rank]
    made = PipelineStage(stage, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(made, n_microbatches=2, loss_fn=loss_sum, scale_grads=False)
optimizer = torch.optim.Adam(stage.parameters(), lr=1e-3)
tokens, targets = texts(ragged=False)
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        x, y = tokens[at : at + b], targets[at : at + b]
        losses = []
        if world == 1:
            (loss_sum(model(x), y) / count).backward()
        elif rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
            print("loss", float(sum(losses) / count))
    optimizer.step()
    optimizer.zero_grad()
