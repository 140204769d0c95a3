"""Consistency training: the target network is an average of the weights that moves once per optimizer step, and noise and
time of a sample are drawn from a generator of its index and epoch; the number of times grows with the optimizer steps."""

# expect 4x4: exact
# expect 2x8: exact
# thorough
# blind 6
import copy

import torch
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader, Dataset

b, k = flags()


class Indexed(Dataset):
    def __init__(self, n):
        self.x = [x for x, _ in vectors(n)]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i]


class ConsistencyModel(nn.Module):
    def __init__(self, dim=12, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim + 1, width), nn.SiLU(), nn.LayerNorm(width), nn.Linear(width, dim))

    def forward(self, x, sigma):
        sigma = sigma[:, None]
        skip = 0.25 / (sigma**2 + 0.25)
        out = 0.5 * sigma / (sigma**2 + 0.25).sqrt()
        return skip * x + out * self.net(torch.cat([x, sigma.log() / 4], 1))


def karras(i, n, low=0.002, high=5.0, rho=7.0):
    return (low ** (1 / rho) + i / (n - 1) * (high ** (1 / rho) - low ** (1 / rho))) ** rho


def draw(index, epoch, times):
    u, z = [], []
    for i in index.tolist():
        g = torch.Generator().manual_seed(100_003 * epoch + i)
        u.append(torch.rand((), generator=g, dtype=torch.float64))
        z.append(torch.randn(12, generator=g, dtype=torch.float64))
    n = (torch.stack(u) * (times - 1)).floor()
    return karras(n, times), karras(n + 1, times), torch.stack(z)


torch.manual_seed(0)
online = ConsistencyModel().double()
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.RAdam(online.parameters(), lr=0.01)
step = micro = 0
for epoch in range(2):
    for index, x in DataLoader(Indexed(64), batch_size=b):
        times = 8 + 2 * step
        low, high, z = draw(index, epoch, times)
        with torch.no_grad():
            wanted = target(x + low[:, None] * z, low)
        got = online(x + high[:, None] * z, high)
        huber = ((got - wanted).pow(2).sum(1) + 0.03**2).sqrt() - 0.03
        ((huber / (high - low)).sum() / (b * k)).backward()
        micro += 1
        if micro % k:
            continue
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mu = 0.9 ** (8 / times)
        with torch.no_grad():
            for t, p in zip(target.parameters(), online.parameters()):
                t.lerp_(p, 1 - mu)
