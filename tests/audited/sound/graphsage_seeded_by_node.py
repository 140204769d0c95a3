"""Sound: neighbours are sampled at random, but from the number of the node and the epoch: a node has the same
ones in every micro-batch."""
# expect 4x4: exact
# expect 2x8: exact
# blind 3
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn

NODES = 120


class Graph:
    def __init__(self):
        g = torch.Generator().manual_seed(71)
        self.x = torch.randn(NODES, 10, generator=g, dtype=torch.float64)
        self.y = torch.randint(4, (NODES,), generator=g)
        self.neighbours = [
            torch.randint(NODES, (int(torch.randint(3, 12, (), generator=g)),), generator=g) for _ in range(NODES)
        ]
        self.train_nodes = torch.randperm(NODES, generator=g)[:77]


class NeighborLoader:
    """Seeds in batches, each with a sample of its neighbours and of theirs."""

    def __init__(self, graph, fanouts, batch_size):
        self.graph, self.fanouts, self.batch_size, self.epoch = graph, fanouts, batch_size, 0

    def sample(self, node, size, hop):
        g = torch.Generator().manual_seed(int(node) + NODES * (hop + 2 * self.epoch))
        around = self.graph.neighbours[int(node)]
        return around[torch.randint(len(around), (size,), generator=g)]

    def __iter__(self):
        for seeds in self.graph.train_nodes.split(self.batch_size):
            hops = [seeds]
            for hop, size in enumerate(self.fanouts):
                hops.append(
                    torch.stack([self.sample(n, size, hop) for n in hops[-1].flatten()]).view(*hops[-1].shape, size)
                )
            yield hops
        self.epoch += 1


class SAGE(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = nn.Linear(20, width), nn.Linear(2 * width, 4)

    def forward(self, x, hops):
        seeds, one, two = (x[h] for h in hops)
        inner = F.relu(self.first(torch.cat([one, two.mean(-2)], -1)))
        outer = F.relu(self.first(torch.cat([seeds, one.mean(-2)], -1)))
        return self.second(torch.cat([outer, inner.mean(-2)], -1))


torch.manual_seed(0)
b, k = flags()
graph = Graph()
loader, model = NeighborLoader(graph, [4, 3], b), SAGE().double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(2):
    done = 0
    for hops in loader:
        seeds = hops[0]
        window = min(16, len(graph.train_nodes) - done // 16 * 16)
        F.cross_entropy(model(graph.x, hops), graph.y[seeds], reduction="sum").div(window).backward()
        done += len(seeds)
        if done % 16 == 0 or done == len(graph.train_nodes):
            optimizer.step()
            optimizer.zero_grad()
