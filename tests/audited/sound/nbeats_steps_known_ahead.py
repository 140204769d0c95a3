"""N-BEATS: every series is scaled by its own past, the loss is a sum over a batch divided by the samples of its window
(the last one is smaller), and the one-cycle schedule counts optimizer steps, also of the window at the end of an epoch."""

# expect 4x4: exact
# expect 2x8: exact
# thorough
# blind 6
import math

import torch
from common_models import flags
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

PAST, AHEAD = 15, 5


def series(n=56):
    g = torch.Generator().manual_seed(9)
    t = torch.arange(PAST + AHEAD, dtype=torch.float64)
    a = torch.rand(n, 4, generator=g, dtype=torch.float64)
    y = 5 * a[:, :1] + 0.2 * a[:, 1:2] * t + torch.sin(t * (0.3 + a[:, 2:3]) + 6 * a[:, 3:])
    return TensorDataset(y[:, :PAST], y[:, PAST:])


class Block(nn.Module):
    def __init__(self, theta, basis):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(PAST, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.back, self.fore = nn.Linear(24, theta), nn.Linear(24, theta)
        self.register_buffer("b", basis(torch.arange(PAST) / PAST, theta))
        self.register_buffer("f", basis(torch.arange(AHEAD) / AHEAD, theta))

    def forward(self, x):
        h = self.fc(x)
        return self.back(h) @ self.b, self.fore(h) @ self.f


def trend(t, n):
    return torch.stack([t**i for i in range(n)])


def season(t, n):
    return torch.stack([torch.cos(math.pi * i * t) if i % 2 else torch.sin(math.pi * (i + 1) * t) for i in range(n)])


class NBeats(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(3, trend), Block(3, trend), Block(6, season)])

    def forward(self, x):
        scale = x.abs().mean(1, keepdim=True)
        rest, total = x / scale, 0
        for block in self.blocks:
            back, fore = block(rest)
            rest, total = rest - back, total + fore
        return total * scale


def mase(forecast, past, future):
    naive = (past[:, 1:] - past[:, :-1]).abs().mean(1)
    return (forecast - future).abs().mean(1) / naive


b, k = flags()
torch.manual_seed(0)
data, epochs = series(), 2
model = NBeats().double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
steps = epochs * math.ceil(len(data) / (b * k))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
loader = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), b, drop_last=False))
for _ in range(epochs):
    seen = 0
    for i, (past, future) in enumerate(loader):
        window = min(b * k, len(data) - i // k * b * k)
        (mase(model(past), past, future).sum() / window).backward()
        seen += len(past)
        if seen == window:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen = 0
