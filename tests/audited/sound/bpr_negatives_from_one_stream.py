"""Sound: the collate function draws negative items, but one row after the other from one stream, so that every sample gets the same ones however the samples are cut."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x2: exact
# blind 5
# thorough

import numpy as np
import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

USERS, ITEMS, NEGATIVES = 30, 64, 4


def interactions(n=77):
    rng = np.random.default_rng(71)
    return [(int(rng.integers(USERS)), int(rng.integers(ITEMS))) for _ in range(n)]


class NegativeSampler:
    def __init__(self, data, seed=0):
        self.seen = {user: {i for u, i in data if u == user} for user, _ in data}
        self.rng = np.random.default_rng(seed)

    def one(self, user):
        while True:
            item = int(self.rng.integers(ITEMS))
            if item not in self.seen[user]:
                return item

    def __call__(self, rows):
        users, items = zip(*rows)
        negatives = [[self.one(user) for _ in range(NEGATIVES)] for user in users]
        return torch.tensor(users), torch.tensor(items), torch.tensor(negatives)


class MatrixFactorization(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.user, self.item, self.bias = nn.Embedding(USERS, dim), nn.Embedding(ITEMS, dim), nn.Embedding(ITEMS, 1)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, users, items):
        return (self.user(users)[:, None] * self.item(items)).sum(-1) + self.bias(items).squeeze(-1)


def fit(model, loader, optimizer, accumulate):
    for i, (users, items, negatives) in enumerate(loader, 1):
        margin = model(users, items[:, None]) - model(users, negatives)
        (-F.logsigmoid(margin).mean(1).sum() / 16).backward()
        if i % accumulate == 0 or i == len(loader):
            optimizer.step()
            optimizer.zero_grad()


b, k = flags()
data = interactions()
torch.manual_seed(0)
model = MatrixFactorization().double()
loader = DataLoader(data, batch_size=b, collate_fn=NegativeSampler(data))
fit(model, loader, torch.optim.Adagrad(model.parameters(), lr=0.05), k)
