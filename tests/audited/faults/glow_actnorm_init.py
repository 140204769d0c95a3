"""Fault: Glow's ActNorm sets its scale and shift from the statistics of the first micro-batch it sees, not of
the first global batch: the flow starts elsewhere for every cut."""
# expect 4x4: batch_norm
# expect 2x8: batch_norm
# thorough
# also: state, mixed_samples
# blind 1

import math

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

DIM = 6


class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift, self.log_scale = nn.Parameter(torch.zeros(DIM)), nn.Parameter(torch.zeros(DIM))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x):
        if self.training and not self.initialized:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.log_scale.copy_(-(x.std(0, correction=0) + 1e-2).log())
                self.initialized.fill_(True)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(DIM // 2, 16), nn.Tanh(), nn.Linear(16, DIM))

    def forward(self, x):
        a, c = x.chunk(2, 1)[:: -1 if self.flip else 1]
        log_scale, shift = self.net(a).chunk(2, 1)
        log_scale = torch.tanh(log_scale)
        return torch.cat([a, c * log_scale.exp() + shift], 1), log_scale.sum(1)


class Flow(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.steps = nn.ModuleList(layer for i in range(depth) for layer in (ActNorm(), Coupling(i % 2)))

    def forward(self, x):
        log_det = torch.zeros(len(x), dtype=x.dtype)
        for step in self.steps:
            x, extra = step(x)
            log_det = log_det + extra
        return 0.5 * x.square().sum(1) + 0.5 * DIM * math.log(2 * math.pi) - log_det


torch.manual_seed(0)
b, k = flags()
g = torch.Generator().manual_seed(4)
data = 3 + 2 * torch.randn(80, DIM, generator=g, dtype=torch.float64) @ torch.randn(
    DIM, DIM, generator=g, dtype=torch.float64
)
flow = Flow().double().train()
optimizer = torch.optim.SGD(flow.parameters(), lr=1e-3)
for i, x in enumerate(DataLoader(data, batch_size=b)):
    (flow(x).mean() / k).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
