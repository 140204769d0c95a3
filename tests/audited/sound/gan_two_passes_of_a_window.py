"""A conditional GAN: the critic has its pass over the window's micro-batches and its step, then the generator has its own; an image's
noise comes from its index and the turn. Gradients are asked for by autograd.grad, so that neither net gets those of the other."""
# expect 4x4: exact
# expect 2x8: exact
# thorough
# blind 6

import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader

NZ, CLASSES = 6, 5


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.label, self.film = nn.Embedding(CLASSES, NZ), nn.Linear(2 * NZ, 16)
        self.first, self.last = nn.Linear(NZ, 8 * 9), nn.ConvTranspose2d(8, 2, 4)

    def forward(self, z, y):
        scale, shift = self.film(torch.cat([z, self.label(y)], 1))[..., None, None].chunk(2, 1)
        h = self.first(z).view(-1, 8, 3, 3)
        return torch.tanh(self.last(F.leaky_relu(F.instance_norm(h) * (1 + scale) + shift, 0.2)))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 8, 3), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 3), nn.LeakyReLU(0.2))
        self.out, self.label = nn.Linear(8, 1), nn.Embedding(CLASSES, 8)

    def forward(self, x, y):
        h = self.body(x).sum((2, 3))
        return self.out(h).squeeze(1) + (h * self.label(y)).sum(1)


def noise(index, turn):
    draws = [
        torch.randn(NZ, generator=torch.Generator().manual_seed(2 * int(i) + turn), dtype=torch.float64) for i in index
    ]
    return torch.stack(draws)


def add(params, loss):
    for p, g in zip(params, torch.autograd.grad(loss, params)):
        p.grad = g if p.grad is None else p.grad + g


torch.manual_seed(0)
b, k = flags()
G, D = Generator().double(), Critic().double()
optG = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
optD = torch.optim.Adam(D.parameters(), lr=4e-3, betas=(0.0, 0.9))
pg, pd = list(G.parameters()), list(D.parameters())
window = []
for batch in DataLoader([(x.tanh(), y, i) for i, (x, y) in enumerate(images(72))], batch_size=b):
    window.append(batch)
    if len(window) < k and int(batch[2][-1]) != 71:
        continue
    n = sum(len(y) for _, y, _ in window)
    for x, y, index in window:
        with torch.no_grad():
            fake = G(noise(index, 0), y)
        real = x.clone().requires_grad_()
        score = D(real, y)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        loss = F.relu(1 - score).sum() + F.relu(1 + D(fake, y)).sum() + 0.5 * slope.pow(2).sum()
        add(pd, loss / n)
    optD.step()
    optD.zero_grad()
    for _, y, index in window:
        add(pg, -D(G(noise(index, 1), y), y).sum() / n)
    optG.step()
    optG.zero_grad()
    window = []
