"""Sound: no DDP: every process sends its flat sum of gradients and its number of ratings through one all_gather; all of
them add the rows up and divide by the number of all. Users have different numbers of ratings."""

# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# expect 4x1x4: exact
# blind 7
# thorough
import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Subset

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
USERS, ITEMS = 80, 30


def users():
    g = torch.Generator().manual_seed(1)
    out = []
    for u in range(USERS):
        n = int(torch.randint(1, 12, (), generator=g))
        items = torch.randperm(ITEMS, generator=g)[:n]
        out.append((u, items, torch.randint(1, 6, (n,), generator=g).double()))
    return out


def collate(rows):
    user = torch.cat([torch.full((len(items),), u) for u, items, _ in rows])
    return user, torch.cat([i for _, i, _ in rows]), torch.cat([r for _, _, r in rows])


class BiasedMF(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, dim), nn.Embedding(ITEMS, dim)
        self.user_bias, self.item_bias = nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)
        self.mean = nn.Parameter(torch.tensor(3.0))

    def forward(self, u, i):
        bias = self.user_bias(u) + self.item_bias(i)
        return (self.user(u) * self.item(i)).sum(1) + bias.squeeze(1) + self.mean


def reduced(sums, count):
    row = torch.cat([sums, count.view(1)])
    rows = [row]
    if world > 1:
        rows = [torch.empty_like(row) for _ in range(world)]
        dist.all_gather(rows, row)
    total = torch.stack(rows).sum(0)
    return total[:-1] / total[-1]


model = BiasedMF().double()
params = list(model.parameters())
optimizer = torch.optim.Adagrad(params, lr=0.05)
data = users()
mine = [i for i in range(len(data)) if i // b % world == rank]  # block after block
sums, count = 0.0, torch.zeros((), dtype=torch.float64)
for i, (u, item, rating) in enumerate(DataLoader(Subset(data, mine), batch_size=b, collate_fn=collate), 1):
    loss = (model(u, item) - rating).square().sum()
    sums = sums + parameters_to_vector(torch.autograd.grad(loss, params))
    count += len(rating)
    if i % k == 0:
        flat = reduced(sums, count)
        for p, piece in zip(params, flat.split([p.numel() for p in params])):
            p.grad = piece.view_as(p).clone()
        optimizer.step()
        sums, count = 0.0, torch.zeros((), dtype=torch.float64)
