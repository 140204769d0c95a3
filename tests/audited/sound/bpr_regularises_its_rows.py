"""Sound: BPR's penalty holds the embeddings of the triples of the micro-batch only, once per triple: it is a
sum over samples, unlike one over all weights."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 3
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn

USERS, ITEMS, N = 25, 40, 77
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class LightGCN(nn.Module):
    def __init__(self, adjacency, dim=8, layers=2):
        super().__init__()
        self.adjacency, self.layers = adjacency, layers
        self.nodes = nn.Embedding(USERS + ITEMS, dim)
        nn.init.normal_(self.nodes.weight, std=0.3)

    def forward(self):
        states = [self.nodes.weight]
        for _ in range(self.layers):
            states.append(self.adjacency @ states[-1])
        return torch.stack(states).mean(0).split([USERS, ITEMS])


def bpr(users, items, model, triples, decay=0.05):
    u, liked, other = triples.T
    wanted, unwanted = (users[u] * items[liked]).sum(1), (users[u] * items[other]).sum(1)
    ego = model.nodes.weight
    rows = ego[u].pow(2).sum(1) + ego[USERS + liked].pow(2).sum(1) + ego[USERS + other].pow(2).sum(1)
    return (F.softplus(unwanted - wanted) + decay * rows / 2).sum()


if world > 1:
    dist.init_process_group("gloo")
b, k = flags()
g = torch.Generator().manual_seed(81)
triples = torch.stack([torch.randint(m, (N,), generator=g) for m in (USERS, ITEMS, ITEMS)], 1)
links = torch.zeros(USERS + ITEMS, USERS + ITEMS, dtype=torch.float64)
links[triples[:, 0], USERS + triples[:, 1]] = 1
links += links.T.clone()
scale = links.sum(1).clamp(min=1).rsqrt()

torch.manual_seed(0)
model = LightGCN(scale[:, None] * links * scale).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for step in triples.split(16):
    mine = step[rank::world]
    for part in mine.split(b):
        users, items = model()  # the graph is propagated anew for every backward
        (bpr(users, items, model, part) / len(step)).backward()
    if world > 1:
        dist.all_reduce(model.nodes.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
