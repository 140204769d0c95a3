"""Sound: a diffusion model with self-conditioning: time, noise and the coin that decides about the first pass (without
gradient) come from index and epoch; weights by min-SNR; the EMA that makes the first pass follows once per step."""

# expect 4x4: exact
# expect 8x2: exact
# expect 2x8: exact
# blind 7
# thorough
import copy
import math

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
b, k = flags()
BITS = 12


class Bits(Dataset):
    def __init__(self, n=48):
        g = torch.Generator().manual_seed(1)
        self.x = torch.randint(2, (n, BITS), generator=g).double() * 2 - 1
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * 7919 + i)
        t = 0.02 + 0.96 * torch.rand((), generator=g, dtype=torch.float64)
        coin = torch.rand((), generator=g) < 0.5
        return self.x[i], t, torch.randn(BITS, generator=g, dtype=torch.float64), coin


class Denoiser(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.inp = nn.Linear(2 * BITS + 2, dim)
        self.mid = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.out = nn.Linear(dim, BITS)

    def forward(self, z, t, condition):
        angle = t[:, None] * math.pi
        h = torch.tanh(self.inp(torch.cat([z, condition, angle.sin(), angle.cos()], dim=1)))
        return self.out(h + self.mid(h))


model = Denoiser().double()
ema = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
data, micro = Bits(), 0
for data.epoch in range(2):
    order = torch.Generator().manual_seed(data.epoch)
    for x, t, eps, coin in DataLoader(data, batch_size=b, shuffle=True, generator=order):
        alpha, sigma = torch.cos(0.5 * math.pi * t)[:, None], torch.sin(0.5 * math.pi * t)[:, None]
        z = alpha * x + sigma * eps
        condition = torch.zeros_like(x)
        if coin.any():
            condition[coin] = ema(z[coin], t[coin], condition[coin])
        weight = (alpha / sigma).square().clamp(max=5.0).squeeze(1)
        loss = (weight * (model(z, t, condition) - x).square().mean(1)).mean()
        (loss / k).backward()
        micro += 1
        if micro % k == 0:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for slow, fast in zip(ema.parameters(), model.parameters()):
                    slow.lerp_(fast, 0.1)
