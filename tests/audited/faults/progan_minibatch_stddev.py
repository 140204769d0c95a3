"""Fault: the discriminator appends the standard deviation over the minibatch (ProGAN) as one more feature map: it is
computed over however many images the micro-batch happens to have."""

# expect 4x4: mixed_samples
# expect 8x2: mixed_samples
# expect 2x8: mixed_samples
# blind 7
# thorough
# open
import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
b, k = flags()
NZ = 8


class Faces(Dataset):
    def __init__(self):
        self.images = images(64)
        self.latents = torch.randn(64, NZ, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i][0], self.latents[i]


class MinibatchStdDev(nn.Module):
    def forward(self, x):
        size = list(x.size())
        size[1] = 1
        mean = torch.std(x, dim=0).mean()
        return torch.cat((x, mean.repeat(size)), dim=1)


G = nn.Sequential(nn.Linear(NZ, 32), nn.LeakyReLU(0.2), nn.Linear(32, 72), nn.Unflatten(1, (2, 6, 6))).double()
D = nn.Sequential(
    nn.Conv2d(2, 8, 3, padding=1),
    nn.LeakyReLU(0.2),
    MinibatchStdDev(),
    nn.Conv2d(9, 8, 3),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(8 * 4 * 4, 1),
).double()
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.99))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.0, 0.99))

loader = DataLoader(Faces(), batch_size=b)
for i, (real, z) in enumerate(loader):
    fake = G(z)
    d_loss = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
    (d_loss / k).backward()
    g_loss = F.softplus(-D(fake)).mean()
    (g_loss / k).backward(inputs=list(G.parameters()))
    if (i + 1) % k == 0:
        opt_d.step()
        opt_g.step()
        opt_d.zero_grad()
        opt_g.zero_grad()
