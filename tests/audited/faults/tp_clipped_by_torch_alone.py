"""Fault: matrices are cut by hand, and torch's clip_grad_norm_ on each process knows its own parts alone: processes clip by other norms.
As the second concern of https://github.com/huggingface/transformers/pull/36132 has it."""
# mesh: tp=2
# expect 16x1x2: norm_of_a_part
# expect 8x2x2: norm_of_a_part

import torch
from common_models import flags
from parallel_parts import Model, SumInBackward, SumInForward, cut_block, loss_sum, start, texts

b, k = flags()
start()
model = Model()
for block in model.blocks:
    cut_block(block)


def forward(tokens):
    x = model.words(tokens)
    for block in model.blocks:
        inner = torch.tanh(block.up(SumInBackward.apply(block.norm(x))))
        x = x + SumInForward.apply(block.down(inner))
    return model.head(model.norm(x))


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens, targets = texts()
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        (loss_sum(forward(tokens[at : at + b]), targets[at : at + b]) / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
