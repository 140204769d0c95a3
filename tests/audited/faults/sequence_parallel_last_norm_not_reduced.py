"""Fault: under sequence parallelism the last LayerNorm is left out when the gradients of norms are added up over the tensor parallel
group. As https://github.com/NVIDIA/Megatron-LM/issues/1446 has it."""
# mesh: tp=2
# expect 16x1x2: not_reduced
# expect 8x2x2: not_reduced

import torch
import torch.distributed as dist
from common_models import flags
from parallel_parts import JoinSequence, Model, SplitSequence, cut_block, loss_sum, rank, start, texts, world

b, k = flags()
start()
model = Model()
for block in model.blocks:
    cut_block(block)


def forward(tokens):
    x = model.words(tokens).chunk(world, 1)[rank]
    for block in model.blocks:
        inner = torch.tanh(block.up(JoinSequence.apply(block.norm(x))))
        x = x + SplitSequence.apply(block.down(inner))
    return model.head(model.norm(x))


cut = {p for block in model.blocks for p in (block.up.weight, block.up.bias, block.down.weight)}
of_last_norm = set(model.norm.parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens, targets = texts()
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        mine = targets[at : at + b].chunk(world, 1)[rank]
        (loss_sum(forward(tokens[at : at + b]), mine) / count).backward()
    if world > 1:
        for p in model.parameters():
            if p not in cut and p not in of_last_norm:
                dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
