"""Fault: user and item tower take turns by the parity of the micro-batch index, which is odd at the end of
every window of an even k: the user tower is never stepped."""
# expect 4x4: parameters
# expect 2x8: parameters
# thorough
# also: num_steps, update, other_samples
# blind 1

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

USERS, ITEMS, DIM = 20, 25, 6


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(USERS, DIM), nn.Linear(DIM, DIM))
        self.item = nn.Sequential(nn.Embedding(ITEMS, DIM), nn.Linear(DIM, DIM))

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(-1)


def ratings(n=80):
    g = torch.Generator().manual_seed(29)
    users, items = torch.randint(USERS, (n,), generator=g), torch.randint(ITEMS, (n,), generator=g)
    taste = torch.randn(USERS, 3, generator=g, dtype=torch.float64)
    kind = torch.randn(ITEMS, 3, generator=g, dtype=torch.float64)
    return [(u, v, (taste[u] * kind[v]).sum()) for u, v in zip(users, items)]


torch.manual_seed(0)
b, k = flags()
model = Towers().double()
optimizers = [
    torch.optim.SGD(model.user.parameters(), lr=0.3),
    torch.optim.SGD(model.item.parameters(), lr=0.3),
]
loader = DataLoader(ratings(), batch_size=b)
batch_index = 0
for epoch in range(3):
    for user, item, rating in loader:
        loss = F.mse_loss(model(user, item), rating)
        (loss / k).backward()
        if (batch_index + 1) % k == 0:
            optimizers[batch_index % 2].step()  # alternating minimisation: one side at a time
            model.zero_grad()
        batch_index += 1
