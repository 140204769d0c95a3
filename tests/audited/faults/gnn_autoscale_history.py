"""Fault: layer 2 reads the neighbours from a table of historical embeddings (GNNAutoScale) that every forward writes
to: the later micro-batches of a window read what the earlier ones have just pushed."""

# expect 4x4: state
# expect 2x8: state
# blind 7
# thorough
# open
import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
NODES, HIDDEN = 64, 16

nodes = vectors(NODES)
features = torch.stack([x for x, _ in nodes])
labels = torch.stack([y for _, y in nodes])
adjacency = (torch.rand(NODES, NODES, generator=torch.Generator().manual_seed(2)) < 0.15).double()
adjacency = ((adjacency + adjacency.t()) > 0).double()
adjacency = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)


class History(nn.Module):
    def __init__(self, num, dim):
        super().__init__()
        self.register_buffer("emb", torch.zeros(num, dim))

    @torch.no_grad()
    def push(self, x, n_id):
        self.emb[n_id] = x

    def pull(self):
        return self.emb.clone()


class GAS(nn.Module):
    def __init__(self, dim=12, classes=5):
        super().__init__()
        self.self1, self.nbr1 = nn.Linear(dim, HIDDEN), nn.Linear(dim, HIDDEN, bias=False)
        self.self2, self.nbr2 = nn.Linear(HIDDEN, classes), nn.Linear(HIDDEN, classes, bias=False)
        self.history = History(NODES, HIDDEN)

    def forward(self, n_id):
        rows = adjacency[n_id]
        h = torch.relu(self.self1(features[n_id]) + self.nbr1(rows @ features))
        out = self.self2(h) + self.nbr2(rows @ self.history.pull())
        self.history.push(h.detach(), n_id)
        return out


model = GAS().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(2):
    order = torch.randperm(NODES, generator=torch.Generator().manual_seed(epoch)).tolist()
    for i, n_id in enumerate(DataLoader(order, batch_size=b)):
        loss = F.cross_entropy(model(n_id), labels[n_id])
        (loss / k).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
