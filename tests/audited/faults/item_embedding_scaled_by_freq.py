"""Fault: nn.Embedding(scale_grad_by_freq=True) divides an item's gradient by how often it occurs in the micro-
batch: popular items move further the finer the batch is cut."""
# expect 4x4: not_a_sum
# expect 2x8: not_a_sum
# also: mixed_samples, mixed_loss, changed_between, gradient_hooks
# blind 1

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

ITEMS = 30


class NextItem(nn.Module):
    """Mean of the last clicked items, scored against all items."""

    def __init__(self, dim=12):
        super().__init__()
        self.items = nn.Embedding(ITEMS, dim, scale_grad_by_freq=True)
        self.project = nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, ITEMS))

    def forward(self, history):
        return self.project(self.items(history).mean(1))


def sessions(n=80, length=6):
    g = torch.Generator().manual_seed(14)
    popularity = 1.0 / torch.arange(1, ITEMS + 1)
    clicks = torch.multinomial(popularity.expand(n, -1), length + 1, replacement=True, generator=g)
    return [(row[:-1], row[-1]) for row in clicks]


torch.manual_seed(0)
b, k = flags()
model = NextItem().double()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
loader = DataLoader(sessions(), batch_size=b)
for epoch in range(2):
    for i, (history, following) in enumerate(loader):
        loss = F.cross_entropy(model(history), following) / k
        loss.backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
