"""Fault: the collate draws one set of negative items per micro-batch, shared by its rows: other micro-batches,
other negatives."""
# expect 4x4: random_collate
# expect 2x8: random_collate
# also: other_inputs
# blind 1

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
USERS, ITEMS, NEGATIVES = 25, 60, 12


def interactions(n=80):
    g = torch.Generator().manual_seed(9)
    return [(int(torch.randint(USERS, (), generator=g)), int(torch.randint(ITEMS, (), generator=g))) for _ in range(n)]


class WithNegatives:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows):
        users, items = torch.tensor(rows).unbind(1)
        return {"user": users, "item": items, "negatives": torch.randint(ITEMS, (NEGATIVES,), generator=self.generator)}


class TwoTower(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, dim), nn.Embedding(ITEMS, dim)
        self.user_tower = nn.Sequential(nn.Linear(dim, 16), nn.ReLU(), nn.Linear(16, dim))

    def forward(self, user, item, negatives):
        u = self.user_tower(self.users(user))
        positive = (u * self.items(item)).sum(-1, keepdim=True)
        scores = torch.cat([positive, u @ self.items(negatives).T], dim=1)
        return F.cross_entropy(scores, torch.zeros(len(user), dtype=torch.long))


model = TwoTower().double()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
loader = DataLoader(interactions(), batch_size=b, collate_fn=WithNegatives(12))
for epoch in range(2):
    for step, batch in enumerate(loader, 1):
        loss = model(**batch) / k
        loss.backward()
        if step % k == 0:
            optimizer.step()
            optimizer.zero_grad()
