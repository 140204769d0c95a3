"""Sound: lazy regularisation that counts optimizer steps, not batches: R1 in the whole of every second step. Its double
backward is per image. The generator has a path length penalty against a mean that is updated after the step."""

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
NZ, R1, LAZY = 6, 5.0, 2


class Reals(Dataset):
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(4)
        self.x = [x for x, _ in images(n)]
        self.z = torch.randn(n, NZ, generator=g, dtype=torch.float64)
        self.y = torch.randn(n, 2, 6, 6, generator=g, dtype=torch.float64) / 6

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.z[i], self.y[i]


G = nn.Sequential(nn.Linear(NZ, 24), nn.Softplus(), nn.Linear(24, 72), nn.Unflatten(1, (2, 6, 6))).double()
D = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Softplus(), nn.Flatten(), nn.Linear(128, 1)).double()
opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.0, 0.99))
opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.0, 0.99))
mean_path, lengths = torch.zeros((), dtype=torch.float64), []

for i, (real, z, y) in enumerate(DataLoader(Reals(), batch_size=b)):
    step = i // k
    real.requires_grad_(step % LAZY == 0)
    z.requires_grad_(True)
    fake = G(z)
    real_pred = D(real)
    d_loss = F.softplus(-real_pred).mean() + F.softplus(D(fake.detach())).mean()
    if real.requires_grad:
        (grad,) = torch.autograd.grad(real_pred.sum(), real, create_graph=True)
        d_loss = d_loss + LAZY * R1 / 2 * grad.square().flatten(1).sum(1).mean()
    (d_loss / k).backward(inputs=list(D.parameters()))

    (jacobian,) = torch.autograd.grad((fake * y).sum(), z, create_graph=True)
    path = jacobian.square().sum(1).add(1e-12).sqrt()
    g_loss = F.softplus(-D(fake)).mean() + 2.0 * (path - mean_path).square().mean()
    (g_loss / k).backward(inputs=list(G.parameters()))
    lengths.append(path.detach())

    if (i + 1) % k == 0:
        opt_d.step()
        opt_g.step()
        opt_d.zero_grad()
        opt_g.zero_grad()
        mean_path = mean_path.lerp(torch.cat(lengths).mean(), 0.2)
        lengths = []
