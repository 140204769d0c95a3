"""Fault: the loss is the mean over the nodes of a micro-batch of graphs, and these means are averaged over micro-batches
and processes, though graphs have different numbers of nodes."""

# expect 4x4: mean_of_means
# expect 8x1x2: mean_of_means
# expect 4x2x2: mean_of_means
# thorough
# blind 6
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def make_graphs(n=64):
    g = torch.Generator().manual_seed(3)
    out = []
    for _ in range(n):
        nodes = int(torch.randint(3, 15, (), generator=g))
        a = (torch.rand(nodes, nodes, generator=g) < 0.3).double().triu(1)
        x = torch.randn(nodes, 6, generator=g, dtype=torch.float64)
        out.append((x, a + a.t(), torch.randint(3, (nodes,), generator=g)))
    return out


def collate(graphs):
    xs, adj, ys = zip(*graphs)
    return torch.cat(xs), torch.block_diag(*adj), torch.cat(ys)


class GINConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.nn = nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o))

    def forward(self, x, adj):
        return self.nn((1 + self.eps) * x + adj @ x)


class GIN(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GINConv(6, 16), GINConv(16, 16)])
        self.head = nn.Linear(32, 3)

    def forward(self, x, adj):
        hs = []
        for conv in self.convs:
            x = conv(x, adj).relu()
            hs.append(x)
        return self.head(torch.cat(hs, 1))


def main():
    b, k = flags()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    model = GIN().double()
    if world > 1:
        dist.init_process_group("gloo")
        model = DDP(model)
    data = make_graphs()
    sampler = DistributedSampler(data, world, rank, shuffle=False)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for i, (x, adj, y) in enumerate(DataLoader(data, b, sampler=sampler, collate_fn=collate), 1):
        sync = i % k == 0
        with contextlib.nullcontext() if sync or world == 1 else model.no_sync():
            (F.cross_entropy(model(x, adj), y) / k).backward()
        if sync:
            opt.step()
            opt.zero_grad()
    if world > 1:
        dist.destroy_process_group()


main()
