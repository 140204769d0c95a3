"""Fault: first and last stage have a copy each of the tied embeddings, whose gradients are not added up. As
https://github.com/uw-syfi/piper/issues/13 has it."""
# mesh: pp=2
# expect 16x1x2: not_reduced
# expect 8x2x2: not_reduced

import torch
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
    optimizer.step()
    optimizer.zero_grad()
