"""Fault: what the first stage passes on is detached, in the pipeline as on one process: both agree that half of the model gets no
gradient. As https://github.com/NVIDIA-NeMo/Automodel/pull/3701 has it, whose parity test had passed."""
# mesh: pp=2
# weights: equal
# expect 16x1x2: dead_part
# expect 8x2x2: dead_part

import torch
from common_models import flags
from parallel_parts import Model, loss_sum, rank, start, texts, world
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


class Frontend(nn.Module):
    """Words and a block, of which no gradient comes back."""

    def __init__(self, words, block):
        super().__init__()
        self.words, self.block = words, block

    def forward(self, tokens):
        x = self.words(tokens)
        return x + (self.block(x) - x).detach()


b, k = flags()
start()
model = Model()
first_stage = Frontend(model.words, model.blocks[0])
stages = [first_stage, nn.Sequential(model.blocks[1], model.norm, model.head)]
count = torch.tensor(1.0)
stage = nn.Sequential(*stages)
if world > 1:
    stage = stages[rank]
    made = PipelineStage(stage, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(
        made, n_microbatches=2, loss_fn=lambda logits, y: loss_sum(logits, y) / count, scale_grads=False
    )
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
tokens, targets = texts()
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        x, y = tokens[at : at + b], targets[at : at + b]
        if world == 1:
            (loss_sum(stage(x), y) / count).backward()
        elif rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
    optimizer.step()
    optimizer.zero_grad()
