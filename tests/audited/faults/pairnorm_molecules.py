"""Fault: PairNorm centres and scales the nodes of all graphs of the micro-batch together, though they are
separate molecules."""
# expect 4x4: mixed_samples
# expect 2x8: mixed_samples
# thorough
# also: batch_norm
# blind 3

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader


def molecules(n=80):
    g = torch.Generator().manual_seed(11)
    out = []
    for _ in range(n):
        atoms = int(torch.randint(4, 9, (), generator=g))
        chain = torch.stack([torch.arange(atoms - 1), torch.arange(1, atoms)])
        extra = torch.randint(atoms, (2, 3), generator=g)
        edges = torch.cat([chain, extra], 1)
        x = torch.randn(atoms, 6, generator=g, dtype=torch.float64)
        out.append((x, torch.cat([edges, edges.flip(0)], 1), torch.randint(3, (), generator=g)))
    return out


def to_batch(graphs):
    xs, edges, ys, owner, offset = [], [], [], [], 0
    for i, (x, e, y) in enumerate(graphs):
        xs.append(x), edges.append(e + offset), ys.append(y)
        owner.append(torch.full((len(x),), i))
        offset += len(x)
    return torch.cat(xs), torch.cat(edges, 1), torch.cat(owner), torch.stack(ys)


class PairNorm(nn.Module):
    def forward(self, x, eps=1e-5):
        x = x - x.mean(dim=0, keepdim=True)
        return x / (eps + x.pow(2).sum(-1).mean()).sqrt()


class GCN(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, width), nn.Linear(width, width)])
        self.norm, self.head = PairNorm(), nn.Linear(width, 3)

    def forward(self, x, edge_index, batch):
        for layer in self.layers:
            h = layer(x)
            degree = torch.ones(len(h), 1, dtype=h.dtype).index_add(
                0, edge_index[1], torch.ones(edge_index.shape[1], 1, dtype=h.dtype)
            )
            h = (h + torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])) / degree
            x = torch.tanh(self.norm(h) * 4)
        pooled = torch.zeros(int(batch.max()) + 1, x.shape[1], dtype=x.dtype).index_add(0, batch, x)
        return self.head(pooled)


torch.manual_seed(0)
b, k = flags()
model = GCN().double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(molecules(), batch_size=b, collate_fn=to_batch)
for step, (x, edge_index, batch, y) in enumerate(loader, 1):
    loss = F.cross_entropy(model(x, edge_index, batch), y) / k
    loss.backward()
    if step % k == 0:
        optimizer.step()
        optimizer.zero_grad()
