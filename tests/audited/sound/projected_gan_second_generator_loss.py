"""Sound: generator and discriminator are accumulated over the same window; the generator's backward is restricted to
the generator's parameters, and both step only at the end of the window, so that nobody sees the other one half-way."""

# expect 4x4: exact
# expect 8x2: exact
# expect 2x8: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
b, k = flags()
NZ = 6


class RealsAndNoise(Dataset):
    """The noise belongs to the index and the epoch, not to the batch."""

    def __init__(self, n=48):
        self.reals, self.epoch = images(n), 0

    def __len__(self):
        return len(self.reals)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 * self.epoch + i)
        return self.reals[i][0], torch.randn(2, NZ, generator=g, dtype=torch.float64)


G = nn.Sequential(nn.Linear(NZ, 24), nn.ReLU(), nn.Linear(24, 72), nn.Tanh(), nn.Unflatten(1, (2, 6, 6))).double()
features = nn.Conv2d(2, 8, 3).double().requires_grad_(False)  # a fixed projection
heads = nn.ModuleList(
    [
        nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 1)),
        nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(8, 8, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 1)),
    ]
).double()
opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.0, 0.99))
opt_d = torch.optim.Adam(heads.parameters(), lr=2e-3, betas=(0.0, 0.99))


def discriminate(x):
    f = features(x)
    return torch.cat([head(f).flatten(1) for head in heads], dim=1)


data = RealsAndNoise()
seen = 0
for data.epoch in range(2):
    for real, z in DataLoader(data, batch_size=b):
        with torch.no_grad():
            fake = G(z[:, 0])
        d_loss = F.relu(1 - discriminate(real)).mean() + F.relu(1 + discriminate(fake)).mean()
        (d_loss / k).backward()
        g_loss = -discriminate(G(z[:, 1])).mean()
        (g_loss / k).backward(inputs=list(G.parameters()))
        seen += 1
        if seen % k == 0:
            opt_d.step()
            opt_g.step()
            for net in (G, heads):
                net.zero_grad(set_to_none=True)
