"""Exact: one matrix for queries, keys and values, of whose rows each process takes those of its heads, in three places; biases begin
with zeros, and stages of two norms with ones."""
# mesh: tp=2
# expect 16x1x2: exact
# expect 8x2x2: exact

import torch
from common_models import flags
from parallel_parts import VOCAB, WIDTH, SumInBackward, SumInForward, loss_sum, rank, start, texts, world
from torch import nn

HEADS, SIZE = 4, WIDTH // 4
b, k = flags()
start()
words, norm, fused = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
out, last, head = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
model = nn.ModuleList([words, norm, fused, out, last, head]).double()
for layer in (fused, head):
    nn.init.zeros_(layer.bias)
mine = torch.arange(HEADS).chunk(world)[rank]
columns = torch.cat([torch.arange(h * SIZE, (h + 1) * SIZE) for h in mine.tolist()])
rows = torch.cat([columns + WIDTH * part for part in range(3)])
with torch.no_grad():
    fused.weight, fused.bias = nn.Parameter(fused.weight[rows].clone()), nn.Parameter(fused.bias[rows].clone())
    out.weight = nn.Parameter(out.weight[:, columns].clone())


def forward(tokens):
    x = words(tokens)
    q, k_, v = (
        t.unflatten(-1, (len(mine), SIZE)).transpose(1, 2) for t in fused(SumInBackward.apply(norm(x))).chunk(3, -1)
    )
    y = nn.functional.scaled_dot_product_attention(q, k_, v, is_causal=True)
    return head(last(x + SumInForward.apply(out(y.transpose(1, 2).flatten(2)))))


optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
tokens, targets = texts()
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        (loss_sum(forward(tokens[at : at + b]), targets[at : at + b]) / count).backward()
    optimizer.step()
    optimizer.zero_grad()
