"""Fault: a heat-equation PINN divides the residual at the micro-batch's collocation points by k, but adds the
loss at the fixed boundary and initial points whole to every micro-batch."""
# expect 4x4: penalty
# expect 2x8: penalty
# blind 1
# thorough

import math

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

NU = 0.1


def derivatives(u, points):
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    u_x, u_t = first[:, :1], first[:, 1:]
    (second,) = torch.autograd.grad(u_x.sum(), points, create_graph=True)
    return u_t, second[:, :1]


class Field(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, points):
        return self.net(points)


def residual_loss(field, points):
    points = points.clone().requires_grad_(True)
    u_t, u_xx = derivatives(field(points), points)
    return (u_t - NU * u_xx).square().mean()


torch.manual_seed(0)
b, k = flags()
field = Field().double()
line = torch.linspace(0, 1, 11, dtype=torch.float64)
initial = torch.stack([line, torch.zeros_like(line)], 1)
walls = torch.cat([torch.stack([torch.full_like(line, side), line], 1) for side in (0.0, 1.0)])
start = torch.sin(math.pi * line)[:, None]

collocation = torch.rand(80, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
optimizer = torch.optim.SGD(field.parameters(), lr=0.02, momentum=0.5)
for epoch in range(3):
    for i, points in enumerate(DataLoader(collocation, batch_size=b)):
        loss_pde = residual_loss(field, points) / k
        loss_bc = field(walls).square().mean()
        loss_ic = (field(initial) - start).square().mean()
        loss = loss_pde + 2.0 * loss_bc + loss_ic
        loss.backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
