"""Fault: du/dt is read from t.grad after a backward of the network's output, and the traces which that leaves in the
weights are cleared by zero_grad, along with the gradients of the earlier micro-batches."""

# expect 4x4: emptied_between
# expect 8x2: emptied_between
# blind 7
# thorough
import warnings

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph")
torch.manual_seed(0)
b, k = flags()


class Oscillator(nn.Module):
    """du/dt = -lambda u + sin(3 t), u(0) = 1, with an unknown lambda: an inverse problem."""

    def __init__(self, width=20):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        self.rate = nn.Parameter(torch.tensor(0.5))

    def forward(self, t):
        return 1.0 + t * self.net(t)


def derivative(model, t):
    t = t.detach().requires_grad_(True)
    u = model(t)
    u.sum().backward(create_graph=True)
    du = t.grad
    model.zero_grad()  # that backward also reached the weights
    return u, du


def residual(model, t):
    u, du = derivative(model, t)
    return du + model.rate * u - torch.sin(3 * t)


def observed(t):
    return torch.exp(-0.8 * t) + 0.3 * t * torch.sin(3 * t)


times = torch.rand(96, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
model = Oscillator().double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for i, t in enumerate(DataLoader(times, batch_size=b)):
    physics = residual(model, t).square().mean()
    measured = (model(t) - observed(t)).square().mean()
    ((physics + 10 * measured) / k).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
