"""Link prediction in graphs of different sizes: sums of losses are added up, and the gradient is divided after the window
by the number of edges of all micro-batches and processes, which travels in the same reduction; the tail is a step too."""

# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind 6
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

b, k = flags()
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def make_graphs(n=72):
    g = torch.Generator().manual_seed(4)
    out = []
    for _ in range(n):
        nodes = int(torch.randint(3, 12, (), generator=g))
        a = (torch.rand(nodes, nodes, generator=g) < 0.4).double().triu(1)
        pairs = torch.combinations(torch.arange(nodes))
        pairs = pairs[torch.rand(len(pairs), generator=g) < 0.7]
        out.append((torch.randn(nodes, 5, generator=g, dtype=torch.float64), a + a.t(), pairs))
    return out


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(5, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, adj, pairs):
        adj = adj + torch.eye(len(adj), dtype=adj.dtype)
        d = adj.sum(1).rsqrt()
        adj = d[:, None] * adj * d
        z = adj @ self.l2((adj @ self.l1(x)).relu())
        return self.scale * (z[pairs[:, 0]] * z[pairs[:, 1]]).sum(-1)


def disjoint_union(graphs):
    xs, adjs, pairs, at = [], [], [], 0
    for x, a, p in graphs:
        xs.append(x), adjs.append(a), pairs.append(p + at)
        at += len(x)
    return torch.cat(xs), torch.block_diag(*adjs), torch.cat(pairs)


if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = GCN().double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
params = list(model.parameters())
graphs = make_graphs()
for start in range(0, len(graphs), b * k * world):
    mine = graphs[start : start + b * k * world][rank::world]
    edges = torch.zeros((), dtype=torch.float64)
    for m in range(0, len(mine), b):
        x, adj, pairs = disjoint_union(mine[m : m + b])
        logits = model(x, adj, pairs)
        F.binary_cross_entropy_with_logits(logits, adj[pairs[:, 0], pairs[:, 1]], reduction="sum").backward()
        edges += len(pairs)
    tensors = [p.grad for p in params] + [edges]
    flat = _flatten_dense_tensors(tensors)
    if world > 1:
        dist.all_reduce(flat)
    *grads, edges = _unflatten_dense_tensors(flat, tensors)
    for p, g in zip(params, grads):
        p.grad.copy_(g / edges)
    optimizer.step()
    optimizer.zero_grad()
