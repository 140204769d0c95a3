"""Exact: all processes have the same tokens and some of the experts; what these return is added up, and so is what their weights
pass back to the router."""
# mesh: ep=2
# expect 16x1x2: exact
# expect 8x2x2: exact
# thorough

import torch
from common_models import flags
from parallel_parts import MixtureModel, SumInBackward, SumInForward, loss_sum, rank, start, texts, world
from torch import nn

b, k = flags()
start()
model = MixtureModel()
num = 4 // world
with torch.no_grad():
    for name in ("w1", "w2"):
        whole = getattr(model.experts, name)
        setattr(model.experts, name, nn.Parameter(whole[rank * num : (rank + 1) * num].clone()))


def forward(tokens):
    x = model.words(tokens).flatten(0, 1)
    weights, choice = model.router(x).softmax(-1).max(-1)
    weights, inputs = SumInBackward.apply(weights), SumInBackward.apply(x)
    y = SumInForward.apply(weights[:, None] * model.experts(inputs, choice, first=rank * num))
    return model.head(x + y).view(*tokens.shape, -1)


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens, targets = texts()
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        (loss_sum(forward(tokens[at : at + b]), targets[at : at + b]) / count).backward()
    optimizer.step()
    optimizer.zero_grad()
