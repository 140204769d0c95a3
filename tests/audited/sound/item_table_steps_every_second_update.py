"""Sound: a two-tower recommender with its own negatives for every query (log-q corrected). The towers step in every update, the
item table in every second one, by the mean of the gradients of both windows, through an optimizer of its own."""

# expect 4x4: exact
# expect 2x8: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset

ITEMS = 50


class Interactions(Dataset):
    def __init__(self, n=128, negatives=6):
        g = torch.Generator().manual_seed(1)
        self.popularity = torch.rand(ITEMS, generator=g, dtype=torch.float64) + 0.1
        self.popularity /= self.popularity.sum()
        self.user = torch.randn(n, 8, generator=g, dtype=torch.float64)
        self.positive = torch.multinomial(self.popularity, n, True, generator=g)
        self.negatives = torch.multinomial(self.popularity, n * negatives, True, generator=g).view(n, negatives)

    def __len__(self):
        return len(self.user)

    def __getitem__(self, i):
        return self.user[i], torch.cat([self.positive[i : i + 1], self.negatives[i]])


class TwoTower(nn.Module):
    def __init__(self, popularity, dim=16):
        super().__init__()
        self.items = nn.Embedding(ITEMS, dim)
        self.user_tower = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, dim))
        self.item_tower = nn.Linear(dim, dim)
        self.register_buffer("log_q", popularity.log())

    def forward(self, user, candidates):
        u = F.normalize(self.user_tower(user), dim=-1)
        v = F.normalize(self.item_tower(self.items(candidates)), dim=-1)
        return 5 * (v @ u[:, :, None]).squeeze(-1) - self.log_q[candidates]


class Recommender:
    def __init__(self, model, accumulate, item_period=2):
        self.model, self.accumulate, self.item_period = model, accumulate, item_period
        towers = [*model.user_tower.parameters(), *model.item_tower.parameters()]
        self.tower_optimizer = torch.optim.Adam(towers, lr=5e-3)
        self.item_optimizer = torch.optim.Adagrad(model.items.parameters(), lr=0.1)

    def fit(self, loader):
        updates = 0
        for i, (user, candidates) in enumerate(loader, 1):
            scores = self.model(user, candidates)
            target = torch.zeros(len(scores), dtype=torch.long)
            (F.cross_entropy(scores, target) / self.accumulate).backward()
            if i % self.accumulate:
                continue
            updates += 1
            self.tower_optimizer.step()
            self.tower_optimizer.zero_grad()
            if updates % self.item_period == 0:
                self.model.items.weight.grad /= self.item_period
                self.item_optimizer.step()
                self.item_optimizer.zero_grad()


if __name__ == "__main__":
    torch.manual_seed(0)
    b, k = flags()
    data = Interactions()
    Recommender(TwoTower(data.popularity).double(), k).fit(DataLoader(data, batch_size=b))
