"""Fault: each expert takes only capacity tokens of a micro-batch: whether a token is dropped depends on those
in front of it."""
# expect 4x4: mixed_samples
# expect 2x8: mixed_samples
# thorough
# blind 1

import math

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

b, k = flags()
torch.manual_seed(0)


class SwitchFFN(nn.Module):
    def __init__(self, dim=16, experts=4, capacity_factor=1.0):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim)) for _ in range(experts)
        )
        self.capacity_factor = capacity_factor

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, -2)
        gate, expert = self.router(x).softmax(-1).max(-1)
        capacity = math.ceil(self.capacity_factor * len(x) / len(self.experts))
        chosen = F.one_hot(expert, len(self.experts))
        place = (chosen.cumsum(0) * chosen).sum(-1)
        kept = place <= capacity
        out = torch.zeros_like(x)
        for number, ffn in enumerate(self.experts):
            rows = (kept & (expert == number)).nonzero().squeeze(1)
            out = out.index_add(0, rows, ffn(x[rows]) * gate[rows, None])
        return (x + out).view(shape)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.ffn, self.head = nn.Embedding(40, 16), SwitchFFN(), nn.Linear(16, 6)

    def forward(self, ids):
        return self.head(self.ffn(self.embed(ids)))


g = torch.Generator().manual_seed(2)
data = TensorDataset(torch.randint(40, (80, 10), generator=g), torch.randint(6, (80, 10), generator=g))
model = Tagger().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for number, (ids, tags) in enumerate(DataLoader(data, batch_size=b), 1):
    loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
    (loss / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
