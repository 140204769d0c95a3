"""Exact: a generator and a discriminator with an optimizer each, sums over the step's samples. The one's backward leaves
gradients in the other, which are emptied before they are used."""
# expect 4x4: exact
# expect 2x8: exact

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn

torch.manual_seed(0)
b, k = flags()
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 12)).double()
model = discriminator = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 1)).double()
first = torch.optim.Adam(generator.parameters(), lr=1e-3)
second = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
data = torch.stack([x for x, _ in vectors(77)])
noise = torch.randn(77, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
for start in range(0, 77, b * k):
    x, z = data[start : start + b * k], noise[start : start + b * k]
    second.zero_grad()
    for real, seed in zip(x.split(b), z.split(b), strict=True):
        fake = discriminator(generator(seed).detach())
        loss = F.softplus(-discriminator(real)).sum() + F.softplus(fake).sum()
        (loss / len(x)).backward()
    second.step()
    first.zero_grad()
    for seed in z.split(b):
        (F.softplus(-discriminator(generator(seed))).sum() / len(x)).backward()
    first.step()
