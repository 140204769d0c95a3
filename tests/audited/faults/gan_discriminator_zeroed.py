"""Fault: the discriminator's gradient is zeroed in every micro-batch to get rid of what the generator's
backward left there, and with it goes that of the micro-batches before."""
# expect 4x4: emptied_between
# expect 2x8: emptied_between
# blind 1
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset

Z = 4


class Ring(Dataset):
    """Points of a noisy ring, each with a latent of its own."""

    def __init__(self, n=80):
        g = torch.Generator().manual_seed(11)
        angle = 6.283 * torch.rand(n, generator=g, dtype=torch.float64)
        self.real = torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(n, 2, generator=g)
        self.latent = torch.randn(n, Z, generator=g, dtype=torch.float64)

    def __len__(self):
        return len(self.real)

    def __getitem__(self, i):
        return self.real[i], self.latent[i]


torch.manual_seed(0)
b, k = flags()
G = nn.Sequential(nn.Linear(Z, 24), nn.LeakyReLU(0.2), nn.Linear(24, 2)).double()
D = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1)).double()
opt_g = torch.optim.SGD(G.parameters(), lr=0.1)
opt_d = torch.optim.SGD(D.parameters(), lr=0.2)
loader = DataLoader(Ring(), batch_size=b, drop_last=True)

for epoch in range(3):
    for i, (real, z) in enumerate(loader):
        fake = G(z)

        # generator: non-saturating loss
        g_loss = F.softplus(-D(fake)).mean()
        (g_loss / k).backward()

        # discriminator: the generator's loss has gone through D, so clean up first
        opt_d.zero_grad()
        d_loss = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
        (d_loss / k).backward()

        if (i + 1) % k == 0:
            opt_d.step()
            opt_g.step()
            opt_g.zero_grad()
