"""Fault: the trainer steps when its counter is a multiple of k, and the counter begins at 0: the first step
comes after a single micro-batch."""
# expect 4x4: first_window
# expect 2x8: first_window
# blind 3
# thorough

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Interactions(Dataset):
    def __init__(self, users=30, items=40, n=80):
        g = torch.Generator().manual_seed(7)
        self.users, self.items = torch.randint(users, (n,), generator=g), torch.randint(items, (n,), generator=g)
        self.clicked = torch.randint(2, (n,), generator=g).double()

    def __len__(self):
        return len(self.users)

    def __getitem__(self, i):
        return {"user": self.users[i], "item": self.items[i], "clicked": self.clicked[i]}


class NeuMF(nn.Module):
    """Generalized matrix factorization and a perceptron side by side."""

    def __init__(self, users=30, items=40, dim=8):
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.user_mlp, self.item_mlp = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 16), nn.ReLU(), nn.Linear(16, dim), nn.ReLU())
        self.predict = nn.Linear(2 * dim, 1)

    def forward(self, user, item):
        gmf = self.user_gmf(user) * self.item_gmf(item)
        mlp = self.mlp(torch.cat([self.user_mlp(user), self.item_mlp(item)], -1))
        return self.predict(torch.cat([gmf, mlp], -1)).squeeze(-1)


class Trainer:
    def __init__(self, model, optimizer, accumulate_grad_batches):
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate_grad_batches
        self.criterion, self.batch_idx = nn.BCEWithLogitsLoss(), 0

    def training_step(self, batch):
        return self.criterion(self.model(batch["user"], batch["item"]), batch["clicked"])

    def fit(self, loader):
        self.model.train()
        for batch in loader:
            loss = self.training_step(batch) / self.accumulate
            loss.backward()
            if self.batch_idx % self.accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.batch_idx += 1


torch.manual_seed(0)
b, k = flags()
model = NeuMF().double()
Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), k).fit(DataLoader(Interactions(), batch_size=b))
