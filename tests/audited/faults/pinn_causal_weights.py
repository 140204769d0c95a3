"""Fault: the residual at a time is weighted by the residuals at the earlier times of the same micro-batch (causal
training), which are fewer in a smaller micro-batch."""

# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# thorough
# blind 6
import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NU, EPS = 0.05, 0.5


class BurgersNet(nn.Module):
    """u(t, x) with the initial condition -sin(pi x) built in."""

    def __init__(self, width=20):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, t, x):
        free = self.net(torch.stack([t, x], -1)).squeeze(-1)
        return -torch.sin(torch.pi * x) + t * (1 - x**2) * free


def d(u, v):
    return torch.autograd.grad(u.sum(), v, create_graph=True)[0]


def residual(model, t, x):
    t, x = t.requires_grad_(), x.requires_grad_()
    u = model(t, x)
    u_x = d(u, x)
    return d(u, t) + u * u_x - NU * d(u_x, x)


def causal_loss(r, t):
    order = t.detach().argsort()
    r2 = r[order] ** 2
    with torch.no_grad():
        earlier = torch.cat([r2.new_zeros(1), r2.cumsum(0)[:-1]])
        w = torch.exp(-EPS * earlier)
    return (w * r2).mean()


def main():
    b, k = flags()
    torch.manual_seed(0)
    model = BurgersNet().double()
    g = torch.Generator().manual_seed(11)
    points = torch.rand(96, 2, generator=g, dtype=torch.float64)
    data = TensorDataset(points[:, 0], 2 * points[:, 1] - 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for i, (t, x) in enumerate(DataLoader(data, batch_size=b), 1):
        loss = causal_loss(residual(model, t, x), t)
        (loss / k).backward()
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()


main()
