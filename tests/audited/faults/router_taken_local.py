"""Fault: the router's weight, a DTensor that each process has whole, is taken as a local tensor, whose gradient of this process's
part of the sequence is never added up. As https://github.com/pytorch/torchtitan/pull/2388 has it."""
# expect 16x1x2: not_reduced
# expect 8x2x2: not_reduced
# thorough

import torch
from common_models import flags
from parallel_parts import MixtureModel, SumInBackward, loss_sum, rank, start, texts, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

b, k = flags()
start()
model = MixtureModel()
if world > 1:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model.router.weight = torch.nn.Parameter(distribute_tensor(model.router.weight.detach(), mesh, [Replicate()]))


def whole(p):
    return SumInBackward.apply(p)  # each process computes its part of the sequence


def forward(tokens):
    x = torch.nn.functional.embedding(tokens.chunk(world, 1)[rank], whole(model.words.weight))
    weight = model.router.weight
    weight = weight.to_local() if world > 1 else weight
    weights, choice = (x.flatten(0, 1) @ weight.T).softmax(-1).max(-1)
    flat, w1, w2 = x.flatten(0, 1), whole(model.experts.w1), whole(model.experts.w2)
    y = torch.stack([torch.tanh(flat @ w1[e]) @ w2[e] for e in range(4)], 1)[torch.arange(len(flat)), choice]
    return (flat + weights[:, None] * y).view(x.shape) @ whole(model.head.weight).T


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens, targets = texts()
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        mine = targets[at : at + b].chunk(world, 1)[rank]
        (loss_sum(forward(tokens[at : at + b]), mine) / count).backward()
    optimizer.step()
    optimizer.zero_grad()
