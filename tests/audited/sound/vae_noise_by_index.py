"""Sound: a VAE draws each sample's noise from its index and the epoch, warms beta up by the step, and divides
sums by the number of samples of the window, the last one of 13 included."""
# expect 4x4: exact
# expect 2x8: exact
# blind 1
# thorough

from itertools import islice

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

LATENT = 3


class VAE(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(dim, 24), nn.Softplus(), nn.Linear(24, 2 * LATENT))
        self.decode = nn.Sequential(nn.Linear(LATENT, 24), nn.Softplus(), nn.Linear(24, dim))

    def forward(self, x, noise, beta):
        mean, log_variance = self.encode(x).chunk(2, -1)
        logits = self.decode(mean + (0.5 * log_variance).exp() * noise)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
        return reconstruction + beta * kl


def noise_for(indices, epoch):
    draws = []
    for index in indices.tolist():
        generator = torch.Generator().manual_seed(100_003 * epoch + index)
        draws.append(torch.randn(LATENT, generator=generator, dtype=torch.float64))
    return torch.stack(draws)


class Bits(torch.utils.data.Dataset):
    def __init__(self, n=77):
        g = torch.Generator().manual_seed(43)
        self.x = (torch.rand(n, 1, generator=g) + 0.3 * torch.randn(n, 16, generator=g) > 0.5).double()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i]


torch.manual_seed(0)
b, k = flags()
model = VAE().double()
optimizer = torch.optim.Adamax(model.parameters(), lr=5e-3)
updates = 0
for epoch in range(3):
    batches = iter(DataLoader(Bits(), batch_size=b))
    while window := list(islice(batches, k)):
        n = sum(len(x) for _, x in window)
        beta = min(1.0, (updates + 1) / 10)
        for indices, x in window:
            (model(x, noise_for(indices, epoch), beta) / n).backward()
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
