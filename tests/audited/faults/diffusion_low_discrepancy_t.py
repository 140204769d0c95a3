"""Fault: the diffusion times of a micro-batch are one random offset plus a grid of its own size (low-
discrepancy sampler), so other cuts train other times and noises."""
# expect 4x4: other_inputs
# expect 2x8: other_inputs
# also: dropout
# blind 1
# thorough

import math

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader


class Denoiser(nn.Module):
    def __init__(self, dim=8, width=32):
        super().__init__()
        self.register_buffer("frequencies", torch.arange(1, 5) * math.pi)
        self.first = nn.Linear(dim + 8, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, dim)

    def forward(self, x, t):
        phase = t[:, None] * self.frequencies
        h = torch.nn.functional.silu(self.first(torch.cat([x, phase.sin(), phase.cos()], 1)))
        return self.last(h + torch.nn.functional.silu(self.second(h)))


def low_discrepancy_times(n):
    """VDM, appendix I.1: lowers the variance of the bound."""
    return (torch.rand(1, dtype=torch.float64) + torch.arange(n, dtype=torch.float64) / n) % 1.0


def corrupt(x, t, noise):
    alpha = torch.cos(0.5 * math.pi * t)[:, None]
    return alpha * x + (1 - alpha**2).sqrt() * noise


torch.manual_seed(0)
b, k = flags()
g = torch.Generator().manual_seed(21)
data = torch.randn(80, 2, generator=g, dtype=torch.float64) @ torch.randn(2, 8, generator=g, dtype=torch.float64)
model = Denoiser().double()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(2):
    for i, x in enumerate(DataLoader(data, batch_size=b)):
        t = low_discrepancy_times(len(x))
        noise = torch.randn_like(x)
        loss = (model(corrupt(x, t, noise), t) - noise).square().mean()
        (loss / k).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
